"""Request bodies of OpenAI's API, vLLM's API and recjax' own: every key with the values it takes."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, cast

import numpy as np
import pydantic
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

from recjax.algorithms.options import did_you_mean
from recjax.config.fields import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, checked, wrong_with_variables
from recjax.errors import UserError
from recjax.experience.completion_checks import field
from recjax.experience.group import Grade
from recjax.models.sampling import Sampling
from recjax.serving.refusals import Refused
from recjax.store.feedback import whole_grade
from recjax.tasks.problems import checked_message

_VERSION = re.compile(r"([\w.-]{1,100}-)?\d{1,9}", re.ASCII)
MOST_CHOICES = 128
MOST_STOPS = 16
MOST_STOP_CHARACTERS = 256
MOST_TOOLS = 128
MOST_PARTS = 64  # a reward has at most so many
_UNSUPPORTED = "; other values are not supported"


class Body(pydantic.BaseModel):
    """An object of a request. The description of a key is the values that it takes, in words."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        """A null value counts as a missing key."""
        if not isinstance(values, Mapping):
            return values
        return {name: value for name, value in values.items() if value is not None}


T = TypeVar("T", bound=Body)


def read_body(kind: type[T], values: Any) -> T:
    """Parses a body.

    Raises:
        Refused: the body is not an object, or a key is invalid.
    """
    if not isinstance(values, Mapping):
        shown = f"a {type(values).__name__}"
        if values is None:
            shown = "null"
        raise Refused(400, f"the body is {shown}; send a JSON object")
    try:
        return kind.model_validate(values)
    except pydantic.ValidationError as error:
        # Unknown keys come last, so that the reply names an invalid value first.
        first = min(error.errors(), key=lambda details: details["type"] == "extra_forbidden")
    # An invalid key inside an object is refused by its own name, with the values that the object's class gives it.
    path = list(first["loc"])
    while len(path) > 1 and path[0] in kind.model_fields:
        inner = kind.model_fields[path[0]].annotation
        if not (isinstance(inner, type) and issubclass(inner, Body)):
            break
        kind = cast(type[T], inner)
        values = values[path[0]]
        path = path[1:]
    name = str(path[0])
    if first["type"] == "extra_forbidden":
        supported = [key for key in kind.model_fields if not taken_values(kind, key).endswith(_UNSUPPORTED)]
        keys = ", ".join(supported)
        problem = f"{name!r:.100} is not supported; remove it"
        nearest = did_you_mean(name, supported)
        if nearest:
            raise Refused(400, f"{problem}{nearest} This request takes {keys}", param=name)
        raise Refused(400, f"{problem}; this request takes {keys}", param=name)
    takes = taken_values(kind, name)
    if first["type"] == "missing":
        raise Refused(400, f"{name} is missing; it takes {takes}", param=name)
    cause = first.get("ctx", {}).get("error", "")
    if isinstance(cause, UserError) and cause.where:
        raise Refused(400, str(cause), param=name)
    problem = str(cause)
    if not problem:
        problem = f"takes {takes}"
    raise Refused(400, f"{name} = {values[name]!r:.100}: {problem}", param=name)


class Takes(NamedTuple):
    """An annotation of a key: the values that it takes beyond its type, in words, and a check that is true for them."""

    words: str
    check: Callable[[Any], Any] = lambda value: True

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> CoreSchema:
        """Lets pydantic validate values by `check`."""
        return no_info_after_validator_function(self._validated, handler(source))

    def _validated(self, value: Any) -> Any:
        if not self.check(value):
            raise ValueError
        return value


def taken_values(kind: type[Body], name: str) -> str:
    """The values that a key takes, in words."""
    field_info = kind.model_fields[name]
    for annotation in field_info.metadata:
        if isinstance(annotation, Takes):
            return annotation.words
    return str(field_info.description)


def whole_number(low: int, high: int) -> Takes:
    """A whole number."""
    return Takes(f"a whole number from {low} to {high}", lambda value: low <= value <= high)


def finite_number(words: str, check: Callable[[float], bool]) -> Takes:
    """A finite number."""
    return Takes(words, lambda value: math.isfinite(value) and check(value))


def text_of_length(longest: int) -> Takes:
    """Text of at most `longest` characters."""
    return Takes(f"text of at most {longest} characters", lambda value: len(value) <= longest)


def neutral(*values: Any) -> Takes:
    """A key that recjax does not support: only values without effect."""
    shown = "only null"
    if values:
        shown = " or ".join(map(repr, values))
    return Takes(f"{shown}{_UNSUPPORTED}", lambda value: value in values)


_FLAG = Takes("true or false")
_TOKEN_LIMIT = whole_number(1, 2**31 - 1)
Flag = Annotated[bool, _FLAG]
OptionalFlag = Annotated[bool | None, _FLAG]
TokenLimit = Annotated[int, _TOKEN_LIMIT]
OptionalTokenLimit = Annotated[int | None, _TOKEN_LIMIT]


Stop = Annotated[str, pydantic.Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]


def _are_token_ids(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(type(token) is int and 0 <= token < 2**31 for token in value)


def _is_call(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("function"), Mapping)


def _is_tool(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("type") != "function":
        return False
    function = value.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: Flag = False
    continuous_usage_stats: Flag = False


class SampledBody(Body):
    """Keys about the sampling of completions."""

    temperature: Annotated[
        float,
        finite_number(
            f"0, for the most likely tokens, or {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}",
            lambda value: value == 0 or LOWEST_TEMPERATURE <= value <= HIGHEST_TEMPERATURE,
        ),
    ] = 1.0
    top_p: Annotated[float, finite_number("a number above 0 and at most 1", lambda value: 0 < value <= 1)] = 1.0
    top_k: Annotated[int, whole_number(-1, 2**31 - 1)] = 0
    min_p: Annotated[float, finite_number("a number from 0 to 1", lambda value: 0 <= value <= 1)] = 0.0
    n: Annotated[int, whole_number(1, MOST_CHOICES)] = 1
    stop: Annotated[
        Stop | Annotated[list[Stop], pydantic.Field(max_length=MOST_STOPS)],
        Takes(
            f"text, or a list of at most {MOST_STOPS}, of 1 to {MOST_STOP_CHARACTERS} characters each",
        ),
    ] = []
    seed: Annotated[int | None, whole_number(-(2**63), 2**63 - 1)] = None
    presence_penalty: Annotated[Any, neutral(0)] = None
    frequency_penalty: Annotated[Any, neutral(0)] = None
    repetition_penalty: Annotated[Any, neutral(1)] = None
    logit_bias: Annotated[Any, neutral({})] = None
    service_tier: Annotated[Any, neutral("auto", "default")] = None

    if TYPE_CHECKING:  # each kind of body declares these
        max_tokens: Any
        logprobs: Any

    def sampling(self) -> Sampling:
        """The sampling distribution."""
        if self.temperature == 0:
            return Sampling(0.0)  # top_k, top_p and min_p always keep the most likely token
        return Sampling(self.temperature, max(self.top_k, 0), self.top_p, self.min_p)

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end a completion."""
        if isinstance(self.stop, str):
            return (self.stop,)
        return tuple(self.stop)

    @property
    def limit(self) -> int | None:
        """Limit on a completion's tokens; None: as many as fit."""
        return self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """True if the reply has log-probs; 0 most likely tokens also requests the sampled tokens' log-probs."""
        return self.logprobs is not None and self.logprobs is not False


def _is_small_metadata(value: Mapping[str, str]) -> bool:
    if len(value) > 16:
        return False
    return all(len(name) <= 64 and len(text) <= 512 for name, text in value.items())


class ReplyBody(Body):
    """Keys about the reply as a whole."""

    model: Annotated[str | None, text_of_length(1024)] = None
    stream: Flag = False
    stream_options: StreamOptions = pydantic.Field(StreamOptions(), description="an object")
    return_token_ids: Flag = False
    user: Annotated[str | None, text_of_length(512)] = None
    safety_identifier: Annotated[str | None, text_of_length(512)] = None
    prompt_cache_key: Annotated[str | None, text_of_length(512)] = None
    metadata: Annotated[
        dict[str, str],
        Takes(
            "an object of at most 16 texts of at most 512 characters, with keys of at most 64",
            _is_small_metadata,
        ),
    ] = {}

    @property
    def sampled(self) -> SampledBody:
        """The keys about sampling."""
        return cast(SampledBody, self)

    @property
    def count(self) -> int:
        """Number of completions."""
        return self.sampled.n

    @property
    def functions(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call."""
        return None

    @property
    def wants_ids(self) -> bool:
        """True if the reply has token ids."""
        return self.return_token_ids

    @pydantic.field_validator("stream_options")
    @classmethod
    def _check_stream_options(cls, options: StreamOptions, info: Any) -> StreamOptions:
        if not info.data.get("stream"):
            raise UserError("", "takes effect only with stream = true; remove it, or set stream")
        return options

    @property
    def recorded(self) -> dict[str, Any]:
        """Values that the client wants recorded."""
        recorded: dict[str, Any] = {}
        if self.metadata:
            recorded["metadata"] = self.metadata
        if self.user:
            recorded["user"] = self.user
        return recorded


class Chat(ReplyBody, SampledBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[list, Takes("a list of messages", bool)]
    tools: Annotated[
        list, Takes(f"a list of at most {MOST_TOOLS} functions, {{'type': 'function', 'function': {{'name': …}}}}")
    ] = []
    tool_choice: Annotated[str, Takes("'auto' or 'none'", lambda value: value in ("auto", "none"))] = "auto"
    chat_template_kwargs: Annotated[Any, checked(wrong_with_variables), pydantic.Field(description="variables")] = {}
    max_completion_tokens: OptionalTokenLimit = None
    max_tokens: OptionalTokenLimit = None
    logprobs: Flag = False
    top_logprobs: Annotated[Any, neutral(0)] = None
    response_format: Annotated[Any, neutral({"type": "text"})] = None
    parallel_tool_calls: Annotated[Any, neutral(True)] = None
    store: OptionalFlag = None  # with a recorder, false is refused

    @pydantic.field_validator("messages")
    @classmethod
    def _read_messages(cls, messages: list) -> list[dict[str, Any]]:
        """The keys that chat templates read, with content as one text."""
        chat = []
        for number, message in enumerate(messages):
            message = checked_message(message, f"message {number}")
            calls = message.get("tool_calls") or []
            if not isinstance(calls, list) or not all(map(_is_call, calls)):
                raise UserError("", f"message {number}: tool_calls = {calls!r:.100}: takes a list of calls")
            read: dict[str, Any] = {}
            for key in ("role", "content", "name", "tool_call_id"):
                if isinstance(message.get(key), str):
                    read[key] = message[key]
            if calls:
                read["tool_calls"] = calls
            chat.append(read)
        return chat

    @pydantic.field_validator("tools")
    @classmethod
    def _check_tools(cls, tools: list) -> list:
        if len(tools) > MOST_TOOLS or not all(map(_is_tool, tools)):
            raise ValueError
        return tools

    @property
    def functions(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call."""
        if self.tool_choice == "none" or not self.tools:
            return None
        return self.tools

    @property
    def limit(self) -> int | None:
        """Limit on a completion's tokens; None: as many as fit."""
        return self.max_completion_tokens or self.max_tokens


class Text(ReplyBody, SampledBody):
    """The body of /v1/completions."""

    prompt: Annotated[
        Any, Takes("text, token ids, or a list of such", lambda value: isinstance(value, str | list) and bool(value))
    ]
    max_tokens: TokenLimit = 16
    # The engine does not report the most likely tokens, so 1 gives the same reply as 0.
    logprobs: Annotated[int | None, whole_number(0, 1)] = None
    echo: Annotated[Any, neutral(False)] = None
    suffix: Annotated[Any, neutral("")] = None
    best_of: Annotated[Any, neutral(1)] = None

    @pydantic.field_validator("prompt")
    @classmethod
    def _check_prompts(cls, value: str | list) -> list[str | list[int]]:
        if isinstance(value, str) or isinstance(value[0], int):
            prompts: list[Any] = [value]
        else:
            prompts = value
        if len(prompts) > MOST_CHOICES:
            raise UserError("", f"{len(prompts)} prompts at once; give {MOST_CHOICES} at most")
        for prompt in prompts:
            is_text = isinstance(prompt, str) and prompt != ""
            if not is_text and not _are_token_ids(prompt):
                raise UserError("", f"{prompt!r:.100} takes token ids, at least one")
        return prompts

    @property
    def count(self) -> int:
        """Number of completions."""
        return len(self.prompt) * self.n

    @property
    def prompts(self) -> list[str | np.ndarray]:
        """Texts, or token ids."""
        prompts = []
        for prompt in self.prompt:
            if not isinstance(prompt, str):
                prompt = np.array(prompt, np.int32)
            prompts.append(prompt)
        return prompts


class Parameters(SampledBody):
    """`sampling_params` of /inference/v1/generate."""

    max_tokens: TokenLimit = 16
    logprobs: Annotated[int | None, whole_number(0, 1)] = None
    detokenize: Annotated[Any, neutral(True)] = None
    skip_special_tokens: Annotated[Any, neutral(True, False)] = None
    ignore_eos: Annotated[Any, neutral(False)] = None
    min_tokens: Annotated[Any, neutral(0)] = None


class Generate(ReplyBody):
    """The body of vLLM's /inference/v1/generate: tokens in, tokens out."""

    token_ids: Annotated[Any, Takes("token ids, at least one", _are_token_ids)]
    sampling_params: Parameters = pydantic.Field(Parameters(), description="an object")
    stream: Annotated[Any, neutral(False)] = False
    request_id: Annotated[str | None, text_of_length(256)] = None
    priority: Annotated[Any, neutral(0)] = None
    features: Annotated[Any, neutral()] = None
    cache_salt: Annotated[Any, neutral()] = None
    kv_transfer_params: Annotated[Any, neutral()] = None

    @property
    def sampled(self) -> SampledBody:
        """The keys about sampling."""
        return self.sampling_params

    @property
    def prompts(self) -> list[np.ndarray]:
        """The token ids of the only prompt."""
        return [np.array(self.token_ids, np.int32)]

    @property
    def wants_ids(self) -> bool:
        """True; the reply has no text."""
        return True


class PushedWeights(Body):
    """The body of SGLang's /update_weights_from_disk: a folder with new weights."""

    model_path: Annotated[str, text_of_length(4096)]
    weight_version: Annotated[str, Takes("text that ends with a version, such as run-12", _VERSION.fullmatch)]
    load_format: Annotated[Any, neutral("auto")] = None
    abort_all_requests: Annotated[Any, neutral(False)] = False
    flush_cache: Annotated[Any, neutral(True)] = True


def _few_parts(parts: dict[str, float]) -> dict[str, float]:
    """Refuses more parts than a client may send."""
    if len(parts) > MOST_PARTS:
        raise UserError("reward_parts", f"has {len(parts)} parts", f"send at most {MOST_PARTS}")
    return parts


class RewardBody(Body):
    """Keys of a reward."""

    reward: Annotated[Any, *field("reward")] = None
    reward_parts: Annotated[Any, *field("reward_parts"), pydantic.AfterValidator(_few_parts)] = None
    accurate: Annotated[Any, *field("accurate")] = None
    turn_rewards: Annotated[Any, *field("turn_rewards")] = None
    comment: Annotated[str | None, text_of_length(10_000)] = None

    def grade(self, turns: int, known_rewards: Sequence[float]) -> Grade:
        """The grade of a completion.

        Args:
            turns: number of turns in the completion.
            known_rewards: reward of each turn that the turns have; empty if they have none.
        Raises:
            Refused: the reward is missing, or contradicts the turns or their rewards.
        """
        try:
            return whole_grade(
                reward=self.reward,
                parts=self.reward_parts,
                accurate=self.accurate,
                turn_rewards=self.turn_rewards,
                turns=turns,
                known=known_rewards,
            )
        except UserError as error:
            key = re.split(r"\W", error.where)[0]  # without the path to an element of the value
            raise Refused(400, str(error), param=key) from error

    def turn_reward(self) -> float:
        """The reward of a single turn.

        Raises:
            Refused: the body has no reward, or more than one.
        """
        if self.reward is None:
            takes = taken_values(RewardBody, "reward")
            raise Refused(400, f"reward is missing; it takes {takes}", param="reward")
        for name in ("reward_parts", "accurate", "turn_rewards", "comment"):
            if getattr(self, name) is not None:
                raise Refused(400, f"{name} is not read for a turn; send it with the session's reward", param=name)
        return self.reward


class SessionReward(RewardBody):
    """The body of a session's reward or of a turn's reward."""

    turn: Annotated[int | None, whole_number(0, 2**31 - 1)] = None


class CompletionReward(RewardBody):
    """The body of a completion's reward."""

    id: Annotated[str, text_of_length(512)]
    index: Annotated[int | None, whole_number(0, 2**31 - 1)] = None
