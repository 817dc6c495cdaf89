"""The policy as an agent uses it: the agent requests replies, and recjax records them as its trajectory."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt32

from recjax.agents.agent_server import AgentServer
from recjax.agents.trajectory import Trajectory, prompt_opening, up_to_stop
from recjax.config import Config
from recjax.errors import UserError, shown
from recjax.grading.thinking import after_thoughts, whole_reply
from recjax.hub.chat_rendering import TURN_SECONDS, render_chats
from recjax.hub.policy import Policy
from recjax.hub.tokenizers import check_embedded
from recjax.models.sampling import Sampling
from recjax.rewards.reward import MOST_REWARD
from recjax.rollout.live import LiveEngine
from recjax.rollout.requests import Request
from recjax.tasks.problems import checked_messages


class ContextFull(Exception):
    """The prompt leaves no tokens for a reply in `rollout.max_context_tokens`."""

    failure = "context"


class TurnsSpent(Exception):
    """The agent has used all replies that `task.agent_turns` allows."""

    failure = "turns"


class InvalidReward(ValueError):
    """The reward of a reply is not a finite number of at most MOST_REWARD in absolute value."""

    failure = "invalid"


class Reply(NamedTuple):
    """A reply of the policy.

    text: text without the token or the stop string that ended the reply.
    raw: text with that token or stop string; a later prompt that begins with prompt + raw keeps the sampled tokens.
    prompt_tokens, tokens: tokens of the prompt, and the sampled tokens, including the token that ended the reply.
    truncated: True if the reply reached a limit before it ended.
    turn: number of the reply among its agent's replies, from 0, in order of arrival.
    answer: `text` after the reply's thoughts; empty if the reply ends inside them.
    """

    text: str
    raw: str
    prompt_tokens: Int[np.ndarray, " prompt_time"]
    tokens: Int[np.ndarray, " time"]
    truncated: bool
    turn: int
    answer: str

    @property
    def message(self) -> dict[str, str]:
        """The reply as an assistant message, to continue the chat: messages.append(reply.message)."""
        return {"role": "assistant", "content": self.text}


def is_reward(value: Any) -> bool:
    """True for a finite number of at most MOST_REWARD in absolute value; a text is no number."""
    try:
        if isinstance(value, str | bytes):
            return False
        return bool(abs(float(value)) <= MOST_REWARD)
    except Exception:  # an agent may return any object, whose conversion may raise anything
        return False


def token_ids(prompt: Any) -> Int[np.ndarray, " prompt_time"]:
    """The token ids of a prompt that is no text.

    Args:
        prompt: sequence or one-dimensional array of whole numbers.
    Raises:
        UserError: the prompt has another form.
    """
    remedy = "give a text or a one-dimensional sequence of token ids"
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        raise UserError("policy.complete", "the prompt is a list of messages", "call policy.chat")
    try:
        ids = np.asarray(prompt)
    except Exception as error:
        raise UserError("policy.complete", f"the prompt is no array of token ids ({error})", remedy) from error
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(
            "policy.complete",
            f"the prompt is {shown(prompt, 80)}, an array of shape {ids.shape} and dtype {ids.dtype}",
            remedy,
        )
    return ids


class Seats:
    """The seats of an agent, which gets this object instead of a policy if `task.seats` has any; and its time limit.

    Attributes:
        players: the seats by name.
        timeout: the time limit, whose clock stands still while tasks wait for replies in any seat.
    """

    def __init__(self, server: AgentServer | None = None):
        """Has no seats and no time limit yet.

        Args:
            server: server for agents with clients of their own; None: a server of these seats alone.
        """
        if server is None:
            server = AgentServer()
        self.server = server
        self.players: dict[str, AgentPolicy | Script] = {}
        self.timeout: asyncio.Timeout | None = None
        self._left = 0.0
        self._waiting: set[asyncio.Task] = set()
        self._ended = False

    def seat(self, name: str) -> "AgentPolicy | Script":
        """Returns a seat, which has the methods of a policy; its replies are a trajectory of its own.

        Raises:
            UserError: `task.seats` has no such seat.
        """
        if name not in self.players:
            known = "no seats"
            names = [player for player in self.players if player]
            if names:
                known = ", ".join(names)
            raise UserError(f"policy.seat({name!r})", f"task.seats has {known}", f"add {name} there")
        return self.players[name]

    def __getattr__(self, name: str) -> Any:
        """Refuses the use of the policy without a seat, with the remedy."""
        raise AttributeError(f"policy.{name}: the agent has seats; call policy.seat(name).{name}")

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """A context in which the current task waits for a reply.

        Raises:
            asyncio.CancelledError: the agent has ended or reached its time limit.
        """
        assert self.timeout is not None
        if self._ended or self.timeout.expired():
            raise asyncio.CancelledError("this agent has ended or reached its time limit")
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        if not self._waiting:
            deadline = self.timeout.when()
            assert deadline is not None
            self._left = deadline - loop.time()
            self.timeout.reschedule(None)
        self._waiting.add(task)
        try:
            yield
        finally:
            self._waiting.discard(task)
            if not self._waiting and not self._ended:
                self.timeout.reschedule(loop.time() + self._left)

    def end(self) -> None:
        """Cancels waiting requests: the next engine step frees their slots, and the trajectories get no more turns."""
        self._ended = True
        for task in self._waiting:
            task.cancel()


class AgentPolicy:
    """The policy for one seat of an agent. The agent may request replies one after another or concurrently."""

    def __init__(
        self,
        live: LiveEngine,
        policy: Policy,
        sampling: Sampling,
        config: Config,
        keys: UInt32[np.ndarray, "turns words"],
        template: Mapping[str, Any] = MappingProxyType({}),
        seats: Seats | None = None,
    ):
        """Stores the engine and everything that sampling needs.

        Args:
            config: limits of replies, of prompts with their replies, and of the number of replies.
            keys: key data of each turn.
            template: variables that the problem gives the chat template, including `tools`.
            seats: all seats of the agent; None: this seat is the only one.
        """
        self._live = live
        self._policy = policy
        self._sampling = sampling
        self._config = config
        self._keys = keys
        self._template = template
        self._asked = 0  # replies requested so far
        self.trajectory = Trajectory(policy.tokenizer)
        self.last_text = ""
        self.rewards: dict[int, float] = {}  # by turn
        if seats is None:
            seats = Seats()
        self.seats = seats
        self.seat = self.seats.seat
        self.relayed: Exception | None = None  # failure that an agent's own client got as an HTTP error
        self._endpoint: tuple[str, str] | None = None

    @property
    def base_url(self) -> str:
        """The base URL for an OpenAI client of the agent, whose requests are replies of this policy, see `chat`."""
        return self._address()[0]

    @property
    def api_key(self) -> str:
        """The key for `base_url`, which only this agent has."""
        return self._address()[1]

    def _address(self) -> tuple[str, str]:
        if self._endpoint is None:
            self._endpoint = self.seats.server.address(self)
        return self._endpoint

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] | str | None = (),
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> Reply:
        """Returns the reply to messages, which the model's chat template renders.

        Args:
            messages: messages with role and content, in OpenAI's format.
            tools: JSON schemas of functions that the template shows to the model; None: the problem's tools, if any.
            max_tokens: limit on the reply; None or a larger number: rollout.max_completion_tokens.
            stop: strings that end the reply, or one string, or None; `text` does not include them.
            chat_template_kwargs: variables of the template; they override the problem's and the config's.
        Raises:
            UserError: an argument has another form, the template refuses the messages or lacks a variable, or the
                model has no template.
            ContextFull: the prompt leaves no tokens for a reply.
            TurnsSpent: the agent has had all its replies.
        """
        tokenizer = self._policy.tokenizer
        read = checked_messages(messages, "policy.chat: messages")
        variables = [{**self._template, **chat_template_kwargs}]
        (text,) = render_chats(tokenizer, [read], TURN_SECONDS, tools=tools, variables=variables)
        return await self.complete(text, max_tokens=max_tokens, stop=stop, rendered=True)

    async def complete(
        self,
        prompt: str | Sequence[int | np.integer] | np.ndarray,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] | str | None = (),
        rendered: bool = False,
    ) -> Reply:
        """Returns the completion of a text or of token ids.

        If the prompt begins with an earlier prompt and its reply, their tokens are kept as sampled.

        Args:
            max_tokens: limit on the completion, see `chat`.
            stop: strings that end the completion, see `chat`.
            rendered: True if the text comes from a chat template; it then gets no begin-of-sequence token.
        Raises:
            UserError: an argument has another form, the tokenizer does not know the prompt, the model has no embedding
                for a token, or a stop string is empty.
            ContextFull: the prompt leaves no tokens for a completion.
            TurnsSpent: the agent has had all its completions.
        """
        if stop is None:
            stop = []
        elif isinstance(stop, str):
            stop = [stop]
        else:
            stop = list(stop)
        if "" in stop:
            raise UserError("stop", "an empty string would end every reply", "remove it", value=stop)
        if max_tokens is not None and (not isinstance(max_tokens, int | np.integer) or max_tokens < 1):
            raise UserError(
                "max_tokens", "takes a whole number from 1, or None for rollout.max_completion_tokens", value=max_tokens
            )
        if isinstance(prompt, str):
            text = prompt
            ids = self.trajectory.tokens_of(text, rendered)
        else:
            text = None
            ids = token_ids(prompt)
        check_embedded(self._policy.tokenizer, ids, self._policy.vocabulary, "the prompt")
        ids = ids.astype(np.int32)
        context = self._config.rollout.max_context_tokens
        turns = self._config.task.agent_turns
        assert context is not None
        longest = min(context - len(ids), self._config.rollout.max_completion_tokens)
        if longest < 1:
            raise ContextFull(f"the prompt has {len(ids)} tokens of rollout.max_context_tokens = {context}")
        if self._asked == turns:
            raise TurnsSpent(f"task.agent_turns = {turns}")
        turn = self._asked
        self._asked += 1
        limit = longest
        if max_tokens is not None:
            limit = min(longest, max_tokens)
        with self.seats.standing_still():
            sampled = await self._live.sample(Request(ids, self._keys[turn], limit, self._sampling))
        sampled, reply_text, _ = up_to_stop(sampled, stop, self._policy.tokenizer, ids)
        raw = self.trajectory.add(ids, sampled, text)
        self.last_text = reply_text
        opening = prompt_opening(self._policy.tokenizer, tuple(ids.tolist()))
        return Reply(
            text=reply_text,
            raw=raw,
            prompt_tokens=ids,
            tokens=sampled.tokens,
            truncated=sampled.truncated,
            turn=len(self.trajectory.turns) - 1,
            answer=after_thoughts(whole_reply(opening, reply_text)),
        )

    def reward(self, value: float, reply: Reply | None = None) -> None:
        """Gives a reply a reward, which is added to the agent's return value; several rewards of one reply add up.

        Args:
            reply: reply to reward; None: the latest one.
        Raises:
            InvalidReward: the value is not a finite number of at most MOST_REWARD in absolute value.
            UserError: the policy has not replied yet.
        """
        if not is_reward(value):
            raise InvalidReward(f"policy.reward({shown(value)}): takes a finite number of at most {MOST_REWARD:g}")
        if not self.trajectory.turns:
            raise UserError(f"policy.reward({value!r})", "the policy has not replied yet", "call policy.chat first")
        turn = len(self.trajectory.turns) - 1
        if reply is not None:
            turn = reply.turn
        self.rewards[turn] = self.rewards.get(turn, 0.0) + float(value)

    @property
    def rewarded(self) -> float | None:
        """The sum of all rewards of turns, in order of the turns; None if the agent gave no reward."""
        if not self.rewards:
            return None
        return sum(self.rewards[turn] for turn in sorted(self.rewards))


class Script:
    """A seat that a function plays: `function(prompt, generator)` returns a reply, which is not recorded."""

    def __init__(self, function: Callable, keys: UInt32[np.ndarray, "turns words"]):
        """Stores the function and the key data of each turn, which seeds its `random.Random` generator."""
        self._function = function
        self._keys = keys
        self._asked = 0
        self.relayed = None  # see AgentPolicy; a script has no address

    async def complete(self, prompt: Any, **options: Any) -> Reply:
        """Returns the function's reply to a prompt or to messages, without tokens; ignores options of sampling.

        Raises:
            TurnsSpent: the agent has had all its replies.
            TypeError: the function returned no text.
        """
        turn = self._asked
        self._asked += 1
        if turn == len(self._keys):
            raise TurnsSpent(f"task.agent_turns = {turn}")
        text = self._function(prompt, random.Random(self._keys[turn].tobytes()))
        if not isinstance(text, str):
            raise TypeError(f"the script {self._function.__name__} returned {shown(text)}; return a text")
        no_tokens = np.zeros(0, np.int32)
        return Reply(
            text=text,
            raw=text,
            prompt_tokens=no_tokens,
            tokens=no_tokens,
            truncated=False,
            turn=turn,
            answer=after_thoughts(text),
        )

    chat = complete

    def reward(self, value: float, reply: Reply | None = None) -> None:
        """Does nothing, because scripts are not trained."""
