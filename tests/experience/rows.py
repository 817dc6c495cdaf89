"""Completions of a store for tests."""

from datetime import UTC, datetime

import numpy as np

from recjax.experience.group import Completion, Grade, Group, Row
from recjax.experience.store import Record, Store
from recjax.models.sampling import Sampling

TIME = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


def make_row(number: int, group: int = 0, length: int = 3, **changes) -> Record:
    """A scored completion with tokens and log-probs, drawn from its number; changes are by column."""
    generator = np.random.default_rng(number)
    columns = {
        "id": f"row {number}",
        "group_id": f"group {group}",
        "source": "test",
        "completion": "x" * length,
        "time": TIME,
        "prompt": f"question {group}",
        "answer": "x",
        "tokenizer": "t",
        "prompt_tokens": np.arange(1, 3 + group % 3, dtype=np.int32),
        "completion_tokens": generator.integers(1, 11, length).astype(np.int32),
        "completion_mask": np.ones(length, bool),
        "behavior_logprobs": -generator.exponential(size=length).astype(np.float32),
        "reward": float(number % 3),
        "reward_parts": {"correct": float(number % 2), "format": 0.1},
        "accurate": bool(number % 2),
        "truncated": False,
        "policy_version": number % 5,
        "temperature": 0.9,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "metadata": {},
    }
    return of_columns(**columns | changes)


def text_row(number: int, group: int = 0, **changes) -> Record:
    """Another model's completion: texts and a reward."""
    columns = {"id": f"text {number}", "group_id": f"group {group}", "source": "other", "completion": f"{number}"}
    return of_columns(**columns | {"time": TIME, "prompt": "question", "reward": 1.0} | changes)


def of_columns(
    id,
    group_id,
    source,
    completion,
    time,
    prompt=None,
    messages=None,
    answer=None,
    tokenizer=None,
    prompt_tokens=None,
    completion_tokens=None,
    completion_mask=None,
    behavior_logprobs=None,
    reward=None,
    reward_parts=None,
    accurate=None,
    truncated=False,
    policy_version=None,
    temperature=None,
    top_k=None,
    top_p=None,
    min_p=0.0,
    metadata=None,
    rows=None,
    version_runs=(),
    turns=(),
) -> Record:
    """A completion from values by column."""
    prompt_tokens = np.zeros(0, np.int32) if prompt_tokens is None else prompt_tokens
    if rows is None and completion_tokens is not None:
        rows = (Row(prompt_tokens, completion_tokens, completion_mask, behavior_logprobs),)
    sampling = (temperature, top_k, top_p, min_p)
    one = Completion(
        id=id,
        source=source,
        text=completion,
        rows=rows or (),
        sampling=None if None in sampling else Sampling(*sampling),
        policy_version=policy_version,
        truncated=truncated,
        grade=None if reward is None and not reward_parts else Grade(reward, reward_parts, accurate),
        version_runs=version_runs,
        turns=turns,
        metadata=metadata or {},
    )
    group = Group(group_id, prompt_tokens, (one,), prompt if messages is None else messages, answer)
    return Record(group, time, tokenizer if one.rows or len(prompt_tokens) else None)


def same(ours, theirs) -> bool:
    """Whether two values are equal to the bit, types of arrays among it; the number of a record does not count."""
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        return ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()
    if isinstance(ours, Record) and isinstance(theirs, Record):
        ours, theirs = ours._replace(number=0), theirs._replace(number=0)
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return type(ours) is type(theirs) and ours == theirs


def append(place, records, **options) -> None:
    """Adds completions to a store, which it creates if there is none."""
    with Store(place, create=True) as store:
        store.append(records, **options)


def read(place) -> list[Record]:
    """All completions of a store."""
    with Store(place) as store:
        return list(store.records())
