"""Sessions: the turns of an agent that a server samples, which become one completion."""

import time
from typing import Any, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from recjax.agents.trajectory import Trajectory
from recjax.experience.group import Completion, Grade, Group, Row, Turn, runs_of
from recjax.experience.recorded import join_recorded
from recjax.experience.records import PROMPT_LEFT_OUT, Record
from recjax.models.sampling import Sampling
from recjax.rollout.requests import Sampled
from recjax.store.store import TURNS


class Session:
    """The turns of one agent: one trajectory with one reward.

    Attributes:
        name: id of the completion.
        turns: turns in the order of recording, each as a separate completion.
        trajectory: trajectory of the turns; prompts that continue it keep its tokens.
        rewards: rewards of turns, by the turn's number from 0.
        changed: time of the last turn or reward, by time.monotonic.
        may_have_ended: True if the database did not say whether it wrote the end of the session.
    """

    may_have_ended = False

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase):
        """Creates an empty session.

        Args:
            name: name in its URL.
        """
        self.name = session_row(name)
        self.changed = time.monotonic()
        self.turns: list[Record] = []
        self.rewards: dict[int, float] = {}
        self.trajectory = Trajectory(tokenizer)

    @property
    def sampling(self) -> Sampling | None:
        """The distribution of all its turns; None before the first turn."""
        if not self.turns:
            return None
        return self.turns[0].completion.sampling

    def add(self, turn: Record, text: str | None) -> None:
        """Adds a recorded turn.

        Args:
            text: the turn's prompt as the model read it; None: the prompt was not recorded.
        """
        self.turns.append(turn)
        self.changed = time.monotonic()
        if len(turn.group.prompt_tokens):
            self.trajectory.add(turn.group.prompt_tokens, _sampled(turn.completion), text)

    def turn_of(self, row: str) -> int | None:
        """The number of the turn with an id; None if the session has no such turn."""
        for index, turn in enumerate(self.turns):
            if turn.completion.id == row:
                return index
        return None

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """The reward of each turn; empty if no turn has one."""
        if not self.rewards:
            return ()
        return tuple(self.rewards.get(turn, 0.0) for turn in range(len(self.turns)))

    def record(self, prompts: bool, grade: Grade | None, comment: str | None = None) -> Record:
        """The session as a completion.

        Args:
            prompts: True to include prompts.
            grade: the grade of the session; None: it has no reward.
            comment: the client's comment on the reward.
        """
        first = self.turns[0]
        turns = [turn.completion for turn in self.turns]
        if prompts and all(len(turn.group.prompt_tokens) for turn in self.turns):
            rows = self.trajectory.rows
            version_runs = self.trajectory.version_runs
            ends = self.trajectory.ends
        else:
            # Without prompts, the sampled tokens of all turns make up one row.
            first = without_prompt(first)
            sampled = list(map(_sampled, turns))
            tokens = np.concatenate([turn.tokens for turn in sampled])
            logprobs = np.concatenate([turn.logprobs for turn in sampled])
            recorded = join_recorded((turn.recorded, len(turn.tokens)) for turn in sampled)
            rows = (Row(tokens[:0], tokens, np.ones(len(tokens), bool), logprobs, recorded),)
            version_runs = runs_of(np.concatenate([turn.versions for turn in sampled]))
            ends = [(0, int(end)) for end in np.cumsum([len(turn.tokens) for turn in sampled])]
        # For each key, the value of the first request that has the key.
        metadata: dict[str, Any] = {}
        for turn in reversed(turns):
            metadata |= turn.metadata
        metadata["requests"] = list(dict.fromkeys(turn.metadata["request"] for turn in turns))
        del metadata["request"]
        if comment is not None:
            metadata["comment"] = comment
        completion = turns[-1]._replace(
            id=self.name,
            rows=rows,
            policy_version=min(cast(int, turn.policy_version) for turn in turns),
            grade=grade,
            version_runs=version_runs,
            turns=tuple(Turn(row, end) for row, end in ends),
            metadata=metadata,
        )
        # Until the reward of the session arrives, the rewards of the turns belong to another grader.
        rewards = self.turn_rewards
        others = {}
        if grade is None and rewards:
            others[TURNS] = (Grade(sum(rewards), turns=rewards), None)
        return first._replace(group=first.group._replace(id=self.name, completions=(completion,)), others=others)


def _sampled(turn: Completion) -> Sampled:
    """The tokens of a turn as the engine sampled them."""
    (row,) = turn.rows
    runs = turn.version_runs
    if not runs:
        assert turn.policy_version is not None
        runs = ((turn.policy_version, len(row.tokens)),)
    versions = np.repeat(*np.array(runs, np.int32).T)
    assert row.behavior_logprobs is not None
    return Sampled(row.tokens, row.behavior_logprobs, versions, turn.truncated, row.recorded)


def without_prompt(record: Record) -> Record:
    """A copy of a completion without its prompt."""
    nothing = record.group.prompt_tokens[:0]
    completion = record.completion
    completion = completion._replace(rows=tuple(row._replace(prompt_tokens=nothing) for row in completion.rows))
    return record._replace(group=Group(record.group.id, nothing, (completion,), PROMPT_LEFT_OUT))


def session_row(name: str) -> str:
    """The id of a session's completion and group."""
    return f"session/{name}"
