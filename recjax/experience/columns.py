"""The columns of a completion: their names, the values that each one takes, and their order in stores and exports."""

import json
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import pydantic
from typing_extensions import TypedDict

from recjax.rewards.reward import MOST_REWARD

LARGEST_INT32 = 2**31 - 1  # the largest token id, policy version and top_k

# --- The types of values. A bool is not a number, and a text with half a character is not a text.

_Text = Annotated[str, pydantic.Field(strict=True, min_length=1)]
_MaybeEmpty = Annotated[str, pydantic.Field(strict=True, min_length=0)]
_Flag = Annotated[bool, pydantic.Field(strict=True)]
_Whole = Annotated[int, pydantic.Field(strict=True, ge=0, le=LARGEST_INT32)]
_Reward = Annotated[float, pydantic.Field(strict=True, ge=-MOST_REWARD, le=MOST_REWARD)]
_Parts = Annotated[dict[_Text, _Reward], pydantic.Field(min_length=1)]
_Temperature = Annotated[float, pydantic.Field(strict=True, ge=0, allow_inf_nan=False)]
_Positive = Annotated[float, pydantic.Field(strict=True, gt=0, le=1)]
_Fraction = Annotated[float, pydantic.Field(strict=True, ge=0, le=1)]


@pydantic.with_config(extra="allow")
class _Message(TypedDict):
    role: _Text
    content: _MaybeEmpty


# One encoder for all values: json.dumps would make a new one for each.
encode_json = json.JSONEncoder(ensure_ascii=False).encode


def _json_object(value: Any) -> Any:
    """Refuses values that are not a JSON object."""
    if value == {}:
        return value
    if not isinstance(value, dict):
        raise ValueError
    try:
        encode_json(value).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError from error
    return value


def _row_lengths(values: list) -> list:
    """Refuses a list that is not the prompt's length followed by two lengths for each row."""
    if not values or isinstance(values[0], tuple):
        raise ValueError
    for lengths in values[1:]:
        if not isinstance(lengths, tuple):
            raise ValueError
    return values


# --- The columns.


class Column(NamedTuple):
    """A column of a completion.

    name: the name in the store, in exports and in error messages.
    kind: how stores and exports keep the values, see `store.KINDS` and `exchange.KINDS`; `[]` for lists.
    meaning: the description in docs/store_format.md; empty for derived columns.
    value_type: type of the values for pydantic; None for derived columns.
    takes: the values in words.
    remedy: what to do about another value.
    element: the elements of a list in words.
    is_nullable: True if null is a value.
    """

    name: str
    kind: str
    meaning: str = ""
    value_type: Any = None
    takes: str = ""
    remedy: str = ""
    element: str = ""
    is_nullable: bool = False


_A_TEXT = "text that is not empty"
_A_TOKEN = f"a token id, a whole number from 0 to {LARGEST_INT32}"
_A_REWARD = "a finite number from -1e9 to 1e9"
_PROMPT = "the prompt as plain text, or a chat as JSON; one is null"
_TOKENS = "int32, little-endian; completions include the end token; empty if not known"
_SAMPLING = "the sampling distribution; null: not known"
_PARTS_OF_TURNS = (
    "JSON, or null: policy versions within the completion; the row and the end of each turn of an [agent](agents.md)"
)

# The columns in the order of exports and docs/store_format.md. Exports have all of these columns except `number`.
_GIVEN = (
    Column(
        name="number",
        kind="int64",
        meaning="place in order of arrival, from 1",
    ),
    Column(
        name="id",
        kind="text",
        meaning="unique name",
        value_type=_Text,
        takes=_A_TEXT,
        remedy="give every completion an id of its own",
    ),
    Column(
        name="group_id",
        kind="text",
        meaning="completions whose rewards are compared",
        value_type=_Text,
        takes=_A_TEXT,
        remedy="give every completion the id of its group",
    ),
    Column(
        name="source",
        kind="text",
        meaning="`initial`, or the name of a run, a file or `--source`",
        value_type=_Text,
        takes=_A_TEXT,
        remedy="name the model or program that wrote the completion",
    ),
    Column(
        name="prompt",
        kind="text",
        meaning=_PROMPT,
        value_type=_Text,
        takes=f"{_A_TEXT}, or a list of messages",
        remedy="give one of prompt and messages",
    ),
    Column(
        name="messages",
        kind="messages",
        meaning=_PROMPT,
        value_type=Annotated[list[_Message], pydantic.Field(min_length=1)],
        takes="a list of one message or more, each with role and content",
        remedy="give both as text",
        element="role and content",
    ),
    Column(
        name="completion",
        kind="text",
        meaning="text without the end token",
        value_type=_MaybeEmpty,
        takes="text",
        remedy="give the reply as text, which may be empty",
    ),
    Column(
        name="answer",
        kind="text",
        meaning="reference answer, or null",
        value_type=_MaybeEmpty,
        takes="text, or null",
        remedy="write the answer as text",
        is_nullable=True,
    ),
    Column(
        name="tokenizer",
        kind="text",
        meaning="digest of the tokens' vocabulary; null without tokens",
        value_type=_Text,
        takes=f"{_A_TEXT}, or null",
        remedy="name the tokens' vocabulary",
        is_nullable=True,
    ),
    Column(
        name="prompt_tokens",
        kind="int32[]",
        meaning=_TOKENS,
        value_type=list[_Whole],
        takes="a list of token ids",
        remedy="give ids of the tokenizer's vocabulary",
        element=_A_TOKEN,
    ),
    Column(
        name="completion_tokens",
        kind="int32[]",
        meaning=_TOKENS,
        value_type=list[_Whole],
        takes="a list of token ids",
        remedy="give ids of the tokenizer's vocabulary",
        element=_A_TOKEN,
    ),
    Column(
        name="completion_mask",
        kind="bool[]",
        meaning="a byte for each token: 1 if the policy sampled it, else 0",
        value_type=list[_Flag],
        takes="a list of true and false",
        remedy="give true for each token that the policy sampled, and false for others",
        element="true or false",
    ),
    Column(
        name="behavior_logprobs",
        kind="float32[]",
        meaning=(
            "float32, little-endian, or null: log-probability of each token, in nats, under the distribution that"
            " sampled it"
        ),
        value_type=list[Annotated[float, pydantic.Field(strict=True)]],
        takes="a list of numbers, or null",
        remedy="give the log-probabilities of the sampled tokens in nats, or null if they are not known",
        element="a log-probability, a finite number of at most 0",
        is_nullable=True,
    ),
    Column(
        name="reward",
        kind="float64",
        value_type=_Reward,
        takes=_A_REWARD,
        remedy="write a number without quotes, and scale or clip larger rewards",
        is_nullable=True,
    ),
    Column(
        name="reward_parts",
        kind="parts",
        value_type=_Parts,
        takes="numbers by name, at least one",
        remedy="name each part and give its number, or give no parts",
        element=_A_REWARD,
        is_nullable=True,
    ),
    Column(
        name="accurate",
        kind="bool",
        value_type=_Flag,
        takes="true or false, or null",
        remedy="give null if it is not known whether the answer is right",
        is_nullable=True,
    ),
    Column(
        name="truncated",
        kind="bool",
        meaning="true if cut off",
        value_type=_Flag,
        takes="true or false",
        remedy="give true if the completion reached its token limit",
    ),
    Column(
        name="policy_version",
        kind="int32",
        meaning="optimizer updates of the sampling weights; null: another model",
        value_type=_Whole,
        takes=f"a whole number from 0 to {LARGEST_INT32}, or null",
        remedy="give the number of optimizer updates, or null for another model",
        is_nullable=True,
    ),
    Column(
        name="temperature",
        kind="float64",
        meaning=_SAMPLING,
        value_type=_Temperature,
        takes="a finite number, 0 or more",
        remedy="give the temperature that sampled the tokens",
        is_nullable=True,
    ),
    Column(
        name="top_k",
        kind="int32",
        meaning=_SAMPLING,
        value_type=_Whole,
        takes=f"a whole number from 0 (all tokens) to {LARGEST_INT32}",
        remedy="give the top_k that sampled the tokens",
        is_nullable=True,
    ),
    Column(
        name="top_p",
        kind="float64",
        meaning=_SAMPLING,
        value_type=_Positive,
        takes="a number above 0 and at most 1",
        remedy="give the top_p that sampled the tokens",
        is_nullable=True,
    ),
    Column(
        name="min_p",
        kind="float64",
        meaning=_SAMPLING,
        value_type=_Fraction,
        takes="a number from 0 to 1",
        remedy="give the min_p that sampled the tokens",
        is_nullable=True,
    ),
    Column(
        name="time",
        kind="time",
        meaning="sampling or import, in seconds since 1970",
        value_type=pydantic.InstanceOf[datetime],
        takes="a date and time",
        remedy="give the time of sampling or import",
    ),
    Column(
        name="metadata",
        kind="json",
        meaning="a JSON object, or null: from the [server](serving.md), or a chat's"
        " [variables](tasks.md#variables-of-chat-templates) under `chat_template`. Runs that follow the store read"
        " `run`",
        value_type=Annotated[Any, pydantic.AfterValidator(_json_object)],
        takes="a JSON object",
        remedy="convert its values to JSON's types",
        is_nullable=True,
    ),
    Column(
        name="token_versions",
        kind="json",
        meaning=_PARTS_OF_TURNS,
        value_type=list[tuple[_Whole, _Whole]],
        takes="pairs of a policy version and a number of sampled tokens",
        remedy="give pairs whose numbers add up to the sampled tokens, or null",
        is_nullable=True,
    ),
    Column(
        name="turns",
        kind="json",
        meaning=_PARTS_OF_TURNS,
        value_type=list[tuple[_Whole, _Whole]],
        takes="pairs of a row's index and the end of sampled tokens in it",
        remedy="give a pair for each turn, or null",
        is_nullable=True,
    ),
    Column(
        name="turn_rewards",
        kind="float64[]",
        value_type=list[_Reward],
        takes="a list of numbers, one for each turn",
        remedy="give a number for each turn, or none",
        element=_A_REWARD,
        is_nullable=True,
    ),
    Column(
        name="row_lengths",
        kind="json",
        meaning="JSON, or null: lengths, if there are several rows, or one has another prompt than its group",
        value_type=Annotated[list[_Whole | tuple[_Whole | None, _Whole]], pydantic.AfterValidator(_row_lengths)],
        takes="the prompt's length, and for each row the length of its own prompt, or null, and its length",
        remedy="export the store again",
        is_nullable=True,
    ),
    Column(
        name="other_rewards",
        kind="json",
        value_type=dict[
            _Text, tuple[_Reward | None, _Parts | None, _Flag | None, str | None, list[_Reward], str | None]
        ],
        takes="rewards by grader: reward, parts, accurate, failure, turns and comment",
        remedy="export the store again",
        is_nullable=True,
    ),
    Column(
        name="recorded",
        kind="bytes",
        meaning="other arrays (`.npz`, zlib), or null",
    ),
)
# A store computes these columns from the others, to find and select completions without reading their tokens.
_DERIVED = (
    Column(name="prompt_key", kind="int64"),
    Column(name="problem_key", kind="int64"),
    Column(name="prompt_length", kind="int32"),
    Column(name="completion_length", kind="int32"),
    Column(name="row_length", kind="int32"),
    Column(name="largest_token", kind="int32"),
    Column(name="is_plain", kind="bool"),
    Column(name="has_logprobs", kind="bool"),
)

COLUMNS: Mapping[str, Column] = MappingProxyType({column.name: column for column in _GIVEN + _DERIVED})
EXPORTED = tuple(column.name for column in _GIVEN if column.name != "number")
DERIVED = tuple(column.name for column in _DERIVED)
# The columns of a row in a store. The row's checksum covers them in this order. SQLite can read the first columns of a
# long row without the later ones, so the columns that `Store.groups` reads come first.
STORED = (
    "number",
    "id",
    "group_id",
    "source",
    "tokenizer",
    "prompt_key",
    "problem_key",
    "prompt_length",
    "completion_length",
    "row_length",
    "largest_token",
    "is_plain",
    "has_logprobs",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "truncated",
    "policy_version",
    "time",
    "prompt",
    "messages",
    "completion",
    "answer",
    "metadata",
    "token_versions",
    "turns",
    "row_lengths",
    "prompt_tokens",
    "completion_tokens",
    "completion_mask",
    "behavior_logprobs",
    "recorded",
)
# The element types of the arrays that a store keeps as bytes, by kind of the column.
DTYPES = MappingProxyType({"int32[]": "<i4", "bool[]": "bool", "float32[]": "<f4"})
