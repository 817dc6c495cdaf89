"""Completions of a store for tests."""

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recjax.experience.group import Completion, Grade, Group, Row
from recjax.experience.records import Record
from recjax.models.sampling import Sampling
from recjax.store.store import Change, Store

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


def experts(length: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays that a sampler could have recorded for each token."""
    generator = np.random.default_rng(seed)
    return {
        "experts": generator.integers(0, 8, (length, 2, 3)).astype(np.int16),
        "kept_bits": generator.integers(0, 256, (length, 2)).astype(np.uint8),
        "weight": generator.normal(size=length).astype(np.float32),
    }


def text_row(number: int, group: int = 0, **changes) -> Record:
    """Another model's completion: texts and a reward."""
    columns = {"id": f"text {number}", "group_id": f"group {group}", "source": "other", "completion": f"{number}"}
    return of_columns(**columns | {"time": TIME, "prompt": "question", "reward": 1.0} | changes)


class Columns(NamedTuple):
    """A completion with its group, by column; tokens are those of its only row, None without one."""

    id: str
    group_id: str
    source: str
    completion: str
    time: datetime
    prompt: Any = None
    messages: Any = None
    answer: Any = None
    tokenizer: Any = None
    prompt_tokens: Any = None
    completion_tokens: Any = None
    completion_mask: Any = None
    behavior_logprobs: Any = None
    reward: Any = None
    reward_parts: Any = None
    accurate: Any = None
    truncated: Any = False
    policy_version: Any = None
    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    min_p: Any = 0.0
    metadata: Any = None
    rows: Any = None
    version_runs: Any = ()
    turns: Any = ()
    turn_rewards: Any = ()
    recorded: Any = {}

    @property
    def sampling(self) -> Sampling:
        """The distribution that sampled the tokens."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def record(self) -> Record:
        """The completion as a store takes it."""
        return of_columns(**self._asdict())


def columns_of(record: Record) -> Columns:
    """The columns of a completion; several rows are in the column `rows` alone."""
    group, one = record.group, record.completion
    is_text, grade = isinstance(group.prompt, str), one.grade or Grade(None)
    names = ("completion_tokens", "completion_mask", "behavior_logprobs", "recorded")
    tokens = dict(zip(names, one.rows[0][1:], strict=True)) if len(one.rows) == 1 else {}
    return Columns(
        one.id,
        group.id,
        one.source,
        one.text,
        record.time,
        prompt=group.prompt if is_text else None,
        messages=None if is_text else group.prompt,
        answer=group.answer,
        tokenizer=record.tokenizer,
        prompt_tokens=group.prompt_tokens if len(group.prompt_tokens) else None,
        **tokens,
        reward=grade.reward,
        reward_parts=grade.reward_parts,
        accurate=grade.accurate,
        truncated=one.truncated,
        policy_version=one.policy_version,
        **(one.sampling._asdict() if one.sampling else {"min_p": None}),
        metadata=one.metadata,
        rows=one.rows if len(one.rows) > 1 else None,
        version_runs=one.version_runs,
        turns=one.turns,
        turn_rewards=grade.turns,
    )


def read_columns(place) -> list[Columns]:
    """All completions of a store, by column."""
    return list(map(columns_of, read(place)))


def append_columns(place, rows) -> None:
    """Adds completions by column."""
    append(place, [row.record for row in rows])


def of_columns(**columns) -> Record:
    """A completion from values by column."""
    given = Columns(**columns)
    prompt_tokens = np.zeros(0, np.int32) if given.prompt_tokens is None else given.prompt_tokens
    rows = given.rows
    if rows is None and given.completion_tokens is not None:
        tokens = given.completion_tokens, given.completion_mask, given.behavior_logprobs
        rows = (Row(prompt_tokens, *tokens, given.recorded),)
    sampling = (given.temperature, given.top_k, given.top_p, given.min_p)
    has_grade = given.reward is not None or given.reward_parts
    one = Completion(
        id=given.id,
        source=given.source,
        text=given.completion,
        rows=rows or (),
        sampling=None if None in sampling else Sampling(*sampling),
        policy_version=given.policy_version,
        truncated=given.truncated,
        grade=Grade(given.reward, given.reward_parts, given.accurate, turns=given.turn_rewards) if has_grade else None,
        version_runs=given.version_runs,
        turns=given.turns,
        metadata=given.metadata or {},
    )
    prompt = given.prompt if given.messages is None else given.messages
    group = Group(given.group_id, prompt_tokens, (one,), prompt, given.answer)
    return Record(group, given.time, given.tokenizer if one.rows or len(prompt_tokens) else None)


def same(ours, theirs) -> bool:
    """Whether two values are equal to the bit, types of arrays among it; the number of a record does not count."""
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        return ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()
    if isinstance(ours, Record) and isinstance(theirs, Record):
        ours, theirs = ours._replace(number=0), theirs._replace(number=0)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return type(ours) is type(theirs) and ours == theirs


def append(place, records) -> None:
    """Adds completions to a store, which it creates if there is none."""
    with Store(place, create=True) as store:
        store.append(records)


def read(place) -> list[Record]:
    """All completions of a store."""
    with Store(place) as store:
        return list(store.records())


def make_every_kind_of_page(path: Path) -> None:
    """A store of SQLite with rows, turns and rewards of two servers and graders, indexes of two levels, free pages."""
    with Store(path, create=True) as store:
        store.append([make_row(number, group=number // 4, length=9) for number in range(400)])
        store.add_rewards({number: (Grade(number / 7), None) for number in range(1, 400, 2)}, "another")
        for server in ("", "b"):
            turns = [(f"s{number % 3}", f"turn {number} " * 9) for number in range(9)]
            store.change([Change(turns=turns)], server)
        store.change([Change(ended=["s1"])], "b")
        store.delete([*range(341, 401)])


def grouped(store, *graders) -> str:
    """All columns of a store's groups, and of their rewards by some graders."""
    last = store.last()
    rewards = [store.group_rewards(last, grader).tolist() for grader in graders or ["given"]]
    return repr([store.groups(last, "digest of a vocabulary", 99), rewards])


def everything_in(path: Path) -> list:
    """All answers of a store; lookups ask for the ids and groups of `make_every_kind_of_page`, and for others."""
    with Store(path) as store:
        store.check_indexes()
        return [
            store.last(),
            list(map(repr, store.records(others=True))),
            grouped(store, "given", "another"),
            store.numbers("id", [f"row {number}" for number in range(400)]),
            store.numbers("id"),
            store.numbers("group_id", [f"group {number}" for number in range(99)]),
            store.rewards(range(1, 341), "another"),
            store.new_rewards(0, store.last()),
            [store.turns(server) for server in ("", "b")],
            store.older_than(TIME),
        ]


def flipped_bits(path: Path, pages: list[list[int]], seed: int, read: Any = everything_in) -> Iterator[tuple[int, str]]:
    """Flips a bit in one page of each list; yields the page from 1, and "reported", "harmless" or "SILENT"."""
    generator, content, expected = np.random.default_rng(seed), path.read_bytes(), read(path)
    path.with_name(f"{path.name}-last").unlink(missing_ok=True)
    for chosen in pages:
        page, bit = int(generator.choice(chosen)), int(generator.integers(8))
        begin = 4096 * (page - 1)
        # Half of the flips are in bytes that are not 0, as much of a page may be unused.
        used = [place for place in range(begin, begin + 4096) if content[place] or generator.integers(9) == 0]
        place = int(generator.choice(used))
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        for file in path.parent.glob(f"{path.name}-*"):
            file.unlink()
        outcome = "reported"
        with contextlib.suppress(ValueError):
            outcome = "harmless" if read(path) == expected else "SILENT"
        yield page, outcome
    path.write_bytes(content)
