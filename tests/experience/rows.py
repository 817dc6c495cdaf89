"""Rows of experience for tests."""

from datetime import UTC, datetime

import numpy as np

from recjax.experience.store import Experience

TIME = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


def make_row(number: int, group: int = 0, length: int = 3, **changes) -> Experience:
    """A scored row with tokens and log-probs, drawn from its number."""
    generator = np.random.default_rng(number)
    row = Experience(
        id=f"row {number}",
        group_id=f"group {group}",
        source="test",
        completion="x" * length,
        time=TIME,
        prompt=f"question {group}",
        answer="x",
        tokenizer="t",
        prompt_tokens=np.arange(1, 3 + group % 3, dtype=np.int32),
        completion_tokens=generator.integers(1, 11, length).astype(np.int32),
        completion_mask=np.ones(length, bool),
        behavior_logprobs=-generator.exponential(size=length).astype(np.float32),
        reward=float(number % 3),
        reward_parts={"correct": float(number % 2), "format": 0.1},
        accurate=bool(number % 2),
        policy_version=number % 5,
        temperature=0.9,
        top_k=0,
        top_p=1.0,
    )
    return row._replace(**changes)


def text_row(number: int, group: int = 0, **changes) -> Experience:
    """Another model's row: texts and a reward."""
    row = Experience(f"text {number}", f"group {group}", "other", f"{number}", TIME, prompt="question", reward=1.0)
    return row._replace(**changes)


def same(ours: Experience, theirs: Experience) -> bool:
    """Whether two rows are equal to the bit, types of arrays among it."""

    def equal(a, b):
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            return a.dtype == b.dtype and a.tobytes() == b.tobytes()
        return type(a) is type(b) and a == b

    return all(map(equal, ours, theirs))
