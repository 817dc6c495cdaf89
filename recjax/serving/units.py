"""Rows that enter a store together: the completions of a prompt, or the trajectory of a session."""

import json
import time
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from recjax.experience.group import Completion, Group, Row, runs_of
from recjax.experience.rows import rows_of
from recjax.experience.store import PROMPT_LEFT_OUT, Experience
from recjax.models.sampling import Sampling
from recjax.rollout.trajectory import Trajectory
from recjax.serving.served import Feedback, Served


class StoreUnit:
    """Future rows of the store; the journal holds them until the store does.

    Attributes:
        name: name of their group.
        served: completions in the order of recording.
        given: feedback by row id; a session has a single row id, for its trajectory.
        lines: lines of the journal.
        changed: time of the last record, by time.monotonic.
    """

    def __init__(self, name: str, prompts: bool):
        """Creates an empty unit.

        Args:
            prompts: True if rows include prompts.
        """
        self.name, self.changed, self._prompts = name, time.monotonic(), prompts
        self.served: list[Served] = []
        self.given: dict[str, Feedback] = {}
        self.lines: list[bytes] = []

    @property
    def row_ids(self) -> list[str]:
        """The ids of rows that take feedback."""
        return [name for one in self.served for name in one.rows]

    @property
    def is_rewarded(self) -> bool:
        """True if every row has its reward."""
        return bool(self.served) and all(name in self.given for name in self.row_ids)

    @property
    def has_prompts(self) -> bool:
        """True if its rows include prompts."""
        return self._prompts and all(len(one.prompt_tokens) for one in self.served)

    def add(self, served: Served) -> None:
        """Adds recorded completions."""
        self.served.append(served)
        self.changed = time.monotonic()

    def rows(self, source: str) -> list[Experience]:
        """Converts to rows of a store, in their order there."""
        first = self.served[0]
        prompt = (first.messages or first.text if self.has_prompts else None) or PROMPT_LEFT_OUT
        completions = tuple(map(self._graded, self._completions(source)))
        group = Group(self.name, first.prompt_tokens, completions, prompt)
        rows = rows_of([group], first.tokenizer, first.time)
        return rows if self.has_prompts else [row._replace(prompt_tokens=None) for row in rows]

    def _graded(self, completion: Completion) -> Completion:
        """Adds the metadata and the feedback, if there is any, to a completion."""
        metadata, given = self.metadata(), self.given.get(completion.id)
        if given is None:
            return completion._replace(metadata=metadata)
        said = {} if given.comment is None else {"comment": given.comment}
        return completion._replace(grade=given.grade, metadata=metadata | said)

    def metadata(self) -> dict[str, Any]:
        """Metadata for all its rows."""
        return {"request": self.served[0].reply} | self.served[0].metadata

    def _completions(self, source: str) -> tuple[Completion, ...]:
        return tuple(
            Completion(
                id=name,
                source=source,
                text=text,
                rows=(Row(served.prompt_tokens, one.tokens, np.ones(len(one.tokens), bool), one.logprobs),),
                sampling=served.sampling,
                policy_version=int(one.versions.min()),
                truncated=one.truncated,
                version_runs=runs_of(one.versions),
            )
            for served in self.served
            for name, text, one in zip(served.rows, served.texts, served.sampled, strict=True)
        )


class Session(StoreUnit):
    """The turns of one agent: one trajectory with one reward.

    Attributes:
        trajectory: trajectory of the turns; prompts that continue it keep its tokens.
    """

    def __init__(self, name: str, prompts: bool, tokenizer: PreTrainedTokenizerBase):
        """Creates an empty session.

        Args:
            name: name in its URL.
            prompts: True if rows include prompts.
        """
        super().__init__(session_row(name), prompts)
        self.trajectory = Trajectory(tokenizer)

    @property
    def row_ids(self) -> list[str]:
        """The id of the trajectory's row."""
        return [self.name]

    @property
    def sampling(self) -> Sampling | None:
        """The distribution of all its turns; None before the first turn."""
        return self.served[0].sampling if self.served else None

    def add(self, served: Served) -> None:
        """Adds recorded turns."""
        super().add(served)
        if len(served.prompt_tokens):
            for one in served.sampled:
                self.trajectory.add(served.prompt_tokens, one, served.text)

    def said(self, reply: str, index: int) -> str | None:
        """The text of a choice in one of its replies; None if the reply or choice does not exist."""
        texts = [one.texts[index] for one in self.served if one.reply == reply and index < len(one.texts)]
        return texts[0] if texts else None

    def metadata(self) -> dict[str, Any]:
        """Metadata for all its rows; for each key, the value of the first request that has the key."""
        found: dict[str, Any] = {"requests": list(dict.fromkeys(one.reply for one in self.served))}
        for served in reversed(self.served):
            found |= served.metadata
        return found

    def _completions(self, source: str) -> tuple[Completion, ...]:
        turns = [one for served in self.served for one in served.sampled]
        rows, version_runs = self.trajectory.rows, self.trajectory.version_runs
        if not self.has_prompts:
            version_runs = runs_of(np.concatenate([turn.versions for turn in turns]))
            tokens, logprobs = (np.concatenate([turn[column] for turn in turns]) for column in range(2))
            rows = (Row(tokens[:0], tokens, np.ones(len(tokens), bool), logprobs),)
        return (
            Completion(
                id=self.name,
                source=source,
                text=self.served[-1].texts[-1],
                rows=rows,
                sampling=self.sampling,
                policy_version=min(int(one.versions.min()) for one in turns),
                truncated=turns[-1].truncated,
                version_runs=version_runs,
            ),
        )


def session_row(name: str) -> str:
    """The id of a session's first row, and of its group."""
    return f"session/{name}"


def feedback_of(row: Experience) -> Feedback | None:
    """The feedback in a row of a store; None without a reward."""
    if row.reward is None:
        return None
    comment = json.loads(row.metadata or "{}").get("comment")
    return Feedback(row.reward, row.reward_parts, row.accurate, comment)
