"""Served completions as records of a store, and sessions, whose turns become one completion."""

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from recjax.experience.feedback import whole_grade
from recjax.experience.group import Completion, Grade, Group, Row, Turn, join_recorded, runs_of
from recjax.experience.store import PROMPT_LEFT_OUT, TURNS, Record
from recjax.models.sampling import Sampling
from recjax.rollout.requests import Sampled
from recjax.rollout.trajectory import Trajectory
from recjax.serving.served import Feedback, Served


def served_records(served: Served, source: str) -> list[Record]:
    """The completions of one prompt, without rewards."""
    completions = tuple(
        Completion(
            id=name,
            source=source,
            text=text,
            rows=(Row(served.prompt_tokens, *one.row_columns),),
            sampling=served.sampling,
            policy_version=int(one.versions.min()),
            truncated=one.truncated,
            version_runs=runs_of(one.versions),
            metadata={"request": served.reply} | served.metadata,
        )
        for name, text, one in zip(served.rows, served.texts, served.sampled, strict=True)
    )
    return [_record(served.id, one, served, served) for one in completions]


class Session:
    """The turns of one agent: one trajectory with one reward.

    Attributes:
        name: id of its completion.
        served: turns in the order of recording.
        trajectory: trajectory of the turns; prompts that continue it keep its tokens.
        rewards: rewards of turns, by the turn's number from 0.
        changed: time of the last turn or reward, by time.monotonic.
    """

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase):
        """Creates an empty session.

        Args:
            name: name in its URL.
        """
        self.name, self.changed = session_row(name), time.monotonic()
        self.served: list[Served] = []
        self.rewards: dict[int, float] = {}
        self.trajectory = Trajectory(tokenizer)

    @property
    def sampling(self) -> Sampling | None:
        """The distribution of all its turns; None before the first turn."""
        return self.served[0].sampling if self.served else None

    def add(self, served: Served) -> None:
        """Adds recorded turns."""
        self.served.append(served)
        self.changed = time.monotonic()
        if len(served.prompt_tokens):
            for one in served.sampled:
                self.trajectory.add(served.prompt_tokens, one, served.text)

    def said(self, reply: str, index: int) -> str | None:
        """The text of a choice in one of its replies; None if the reply or choice does not exist."""
        texts = [one.texts[index] for one in self.served if one.reply == reply and index < len(one.texts)]
        return texts[0] if texts else None

    @property
    def turns(self) -> list[Sampled]:
        """The turns in the order of recording."""
        return [one for served in self.served for one in served.sampled]

    def turn_of(self, reply: str, index: int) -> int | None:
        """The number of the turn that is a choice of a reply; None if the reply has no such choice."""
        places = [(one.reply, choice) for one in self.served for choice in range(len(one.texts))]
        return places.index((reply, index)) if (reply, index) in places else None

    def grade(self, given: Feedback) -> Grade:
        """The grade of the session with the reward at its end.

        Raises:
            ValueError: see `whole_grade`.
        """
        return whole_grade(*given[:4], len(self.turns), self.turn_rewards)

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """The reward of each turn; empty if no turn has one."""
        return tuple(self.rewards.get(turn, 0.0) for turn in range(len(self.turns))) if self.rewards else ()

    def record(self, source: str, prompts: bool, given: Feedback | None) -> Record:
        """The session as a completion.

        Args:
            prompts: True to include prompts.
            given: the reward at the end and its comment; None: no reward.
        """
        turns = self.turns
        has_prompts = prompts and all(len(one.prompt_tokens) for one in self.served)
        rows, version_runs, ends = self.trajectory.rows, self.trajectory.version_runs, self.trajectory.ends
        if not has_prompts:
            version_runs = runs_of(np.concatenate([turn.versions for turn in turns]))
            tokens, mask, logprobs = (
                np.concatenate([turn.row_columns[column] for turn in turns]) for column in range(3)
            )
            recorded = join_recorded((turn.recorded, len(turn.tokens)) for turn in turns)
            rows = (Row(tokens[:0], tokens, mask, logprobs, recorded),)
            ends = [(0, int(end)) for end in np.cumsum([len(turn.tokens) for turn in turns])]
        # For each key, the value of the first request that has the key.
        metadata: dict[str, Any] = {"requests": list(dict.fromkeys(one.reply for one in self.served))}
        for served in reversed(self.served):
            metadata |= served.metadata
        metadata |= {"comment": given.comment} if given and given.comment is not None else {}
        completion = Completion(
            id=self.name,
            source=source,
            text=self.served[-1].texts[-1],
            rows=rows,
            sampling=self.sampling,
            policy_version=min(int(one.versions.min()) for one in turns),
            truncated=turns[-1].truncated,
            grade=given and self.grade(given),
            version_runs=version_runs,
            turns=tuple(Turn(*end) for end in ends),
            metadata=metadata,
        )
        first, rewards = self.served[0], self.turn_rewards
        record = _record(self.name, completion, first, first if has_prompts else first.without_prompt())
        # Until the reward of the session arrives, the rewards of the turns belong to another grader.
        waits = given is None and rewards
        return record._replace(others={TURNS: (Grade(sum(rewards), turns=rewards), None)} if waits else {})


def _record(group: str, completion: Completion, served: Served, asked: Served) -> Record:
    prompt = asked.messages or asked.text or PROMPT_LEFT_OUT
    group = Group(group, asked.prompt_tokens, (completion,), prompt)
    return Record(group, served.time, served.tokenizer)


def session_row(name: str) -> str:
    """The id of a session's completion, and of its group."""
    return f"session/{name}"


def session_turns(served: Sequence[Served]) -> list[tuple[str, str]]:
    """The turns of a session as a store keeps them while the session is open."""
    return [(one.session, json.dumps(one.to_json(), ensure_ascii=False, allow_nan=False)) for one in served]


def turn_reward(session: str, turn: int, reward: float) -> tuple[str, str]:
    """The reward of a turn as a store keeps it while the session is open."""
    return session, json.dumps({"turn": turn, "reward": reward})
