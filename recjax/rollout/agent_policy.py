"""What an agent holds of the policy: it asks for replies, and all that it was told becomes its trajectory."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt32

from recjax.hub.chat_rendering import ChatRenderer
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import check_embedded
from recjax.models.sampling import Sampling
from recjax.rollout.live import LiveEngine
from recjax.rollout.requests import Request
from recjax.rollout.stops import up_to_stop
from recjax.rollout.trajectory import Trajectory
from recjax.tasks.grading.reward import MOST_REWARD


class ContextFull(Exception):
    """The prompt leaves no room for a reply in `rollout.max_context_tokens`."""


class TurnsSpent(Exception):
    """The agent has had its `task.agent_turns`."""


class InvalidReward(ValueError):
    """A turn's reward that is no finite number."""


class Reply(NamedTuple):
    """What the policy said.

    text: without the token, or the stop string, that ended it.
    raw: as it was written, with that; a prompt that goes on from prompt + raw keeps the tokens.
    prompt_tokens, tokens: what it followed, and what was sampled, the token that ended it among that.
    truncated: it ran into a limit and did not end.
    turn: its number among the replies of its agent, from 0, in the order in which they came.
    """

    text: str
    raw: str
    prompt_tokens: Int[np.ndarray, " prompt_time"]
    tokens: Int[np.ndarray, " time"]
    truncated: bool
    turn: int

    @property
    def message(self) -> dict[str, str]:
        """As the assistant's, to go on with: messages.append(reply.message)."""
        return {"role": "assistant", "content": self.text}


class Limits(NamedTuple):
    """Of one agent: tokens of a reply, tokens of a prompt and its reply, replies."""

    reply: int
    context: int
    turns: int


class AgentPolicy:
    """The policy, as one agent has it. Replies may be asked for one after another, or several at a time."""

    def __init__(
        self,
        live: LiveEngine,
        policy: Policy,
        chats: ChatRenderer,
        sampling: Sampling,
        limits: Limits,
        key: Callable[[int], UInt32[np.ndarray, " words"]],
        at_work: Callable[[bool], None],
        template: Mapping[str, Any] = MappingProxyType({}),
    ):
        """Takes what it samples with.

        Args:
            chats: renders messages.
            key: of a turn, by its number from 0.
            at_work: is told True when the agent begins to wait for the policy, and False when it has its reply.
            template: variables of the chat template that the problem has, `tools` among them.
        """
        self._template = template
        self._live, self._policy, self._chats, self._sampling = live, policy, chats, sampling
        self._limits, self._key, self._at_work, self._asked = limits, key, at_work, 0
        self.trajectory, self.last_text = Trajectory(policy.tokenizer), ""
        self.rewards: dict[int, float] = {}  # by turn
        self._waiting: set[asyncio.Task] = set()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> Reply:
        """The reply to messages, put through the model's chat template.

        Args:
            messages: each with role and content, as the template takes them.
            tools: JSON schemas of functions that the template tells the model of; None: the problem's, if it has any.
            max_tokens: of the reply; None, or more: rollout.max_completion_tokens.
            stop: strings that end the reply, which is without them.
            chat_template_kwargs: variables of the template, before the problem's and those of the config.
        Raises:
            ValueError: messages that the template refuses, or a model without one.
            ContextFull: no room is left for a reply.
            TurnsSpent: too many replies.
        """
        variables = [{**self._template, **chat_template_kwargs}]
        text = self._chats.render([messages], tools, variables)[0]
        return await self.complete(text, max_tokens=max_tokens, stop=stop, rendered=True)

    async def complete(
        self,
        prompt: str | Sequence[int | np.integer] | np.ndarray,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        rendered: bool = False,
    ) -> Reply:
        """The completion of a text, or of token ids.

        Where the prompt goes on from an earlier one and its reply, the tokens of these are kept as they were sampled.

        Args:
            max_tokens: as of `chat`.
            stop: likewise.
            rendered: the text comes from a chat template, so it gets no begin-of-sequence token.
        Raises:
            ValueError: a prompt that the tokenizer does not know, or a token that the model has no embedding of.
            ContextFull: no room is left for a completion.
            TurnsSpent: too many completions.
        """
        stop = [stop] if isinstance(stop, str) else list(stop)
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens = {max_tokens}: takes 1 or more, or None for rollout.max_completion_tokens")
        text = prompt if isinstance(prompt, str) else None
        ids = self.trajectory.tokens_of(text, rendered) if text is not None else np.asarray(prompt, np.int32)
        check_embedded(self._policy.tokenizer, ids, self._policy.vocabulary, "the prompt")
        room = self._limits.context - len(ids)
        if room < 1:
            raise ContextFull(
                f"the prompt has {len(ids)} tokens of rollout.max_context_tokens = {self._limits.context}"
            )
        if self._asked == self._limits.turns:
            raise TurnsSpent(f"task.agent_turns = {self._limits.turns}")
        turn, self._asked = self._asked, self._asked + 1
        limit = min(room, self._limits.reply, max_tokens or self._limits.reply)
        self._at_work(True)
        task = asyncio.current_task()
        self._waiting.add(task)
        try:
            sampled = await self._live.sample(Request(ids, self._key(turn), limit, self._sampling))
        finally:
            self._waiting.discard(task)
            self._at_work(False)
        sampled, said, _ = up_to_stop(sampled, stop, self._policy.tokenizer, ids)
        raw = self.trajectory.add(ids, sampled, text)
        self.last_text = said
        return Reply(said, raw, ids, sampled.tokens, sampled.truncated, len(self.trajectory.turns) - 1)

    def stop(self) -> None:
        """Cancels what still waits for a reply: its slot is free in the next round, and nothing more is added."""
        for task in self._waiting:
            task.cancel()

    def reward(self, value: float, reply: Reply | None = None) -> None:
        """Gives a reply a reward, which adds to what the agent returns; several for one reply add up.

        Args:
            reply: None: the one that came last.
        Raises:
            InvalidReward: no finite number of at most MOST_REWARD either way.
            ValueError: there is no reply yet.
        """
        try:
            sound = abs(float(value)) <= MOST_REWARD
        except (TypeError, ValueError, OverflowError):
            sound = False
        if not sound:
            raise InvalidReward(f"policy.reward({value!r:.200}): takes a finite number of at most {MOST_REWARD:g}")
        if not self.trajectory.turns:
            raise ValueError(f"policy.reward({value!r}): there is no reply yet; ask the policy first")
        turn = len(self.trajectory.turns) - 1 if reply is None else reply.turn
        self.rewards[turn] = self.rewards.get(turn, 0.0) + float(value)

    @property
    def rewarded(self) -> float | None:
        """The sum of the rewards of turns, in their order; None where there are none."""
        return sum(self.rewards[turn] for turn in sorted(self.rewards)) if self.rewards else None
