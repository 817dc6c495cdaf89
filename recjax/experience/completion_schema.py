"""The schema of a completion: its columns, the values that each column takes, and the check of many completions.

Every door uses it: the store, imports, exports, `recjax.feedback` and the server. So a mistake has the same text at
every door, apart from the name of the place: key, value, problem and remedy.
"""

import bisect
import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import numpy as np
import pydantic
from typing_extensions import TypedDict

from recjax.errors import UserError
from recjax.experience.group import Completion
from recjax.models.sampling import Sampling
from recjax.rewards.reward import MOST_REWARD

_MOST = 2**31 - 1  # the largest token id, policy version and top_k
_ROUNDING = 1e-5  # nats by which a recorded log-prob may exceed 0

# --- The types of values. Python's bools are no numbers, and texts with half a character are no texts.

_Text = Annotated[str, pydantic.Field(strict=True, min_length=1)]
_MaybeEmpty = Annotated[str, pydantic.Field(strict=True, min_length=0)]
_Flag = Annotated[bool, pydantic.Field(strict=True)]
_Whole = Annotated[int, pydantic.Field(strict=True, ge=0, le=_MOST)]
_Reward = Annotated[float, pydantic.Field(strict=True, ge=-MOST_REWARD, le=MOST_REWARD)]
_Parts = Annotated[dict[_Text, _Reward], pydantic.Field(min_length=1)]
_Temperature = Annotated[float, pydantic.Field(strict=True, ge=0, allow_inf_nan=False)]
_Positive = Annotated[float, pydantic.Field(strict=True, gt=0, le=1)]
_Fraction = Annotated[float, pydantic.Field(strict=True, ge=0, le=1)]


@pydantic.with_config(extra="allow")
class _Message(TypedDict):
    role: _Text
    content: _MaybeEmpty


encode_json = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps would make an encoder for every value


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
    """Refuses lists without the prompt's length, and rows without two lengths."""
    if not values or isinstance(values[0], tuple) or not all(isinstance(value, tuple) for value in values[1:]):
        raise ValueError
    return values


# --- The columns.


class Column(NamedTuple):
    """A column of a completion.

    name: the name in the store, in exports and in error messages.
    kind: how stores and exports keep the values, see `store.KINDS` and `exchange.KINDS`; `[]` for lists.
    meaning: the description in docs/store_format.md; empty for derived columns.
    accepts: type of the values for pydantic; None for derived columns.
    takes: the values in words.
    remedy: what to do about another value.
    each: the elements of a value in words.
    is_nullable: True if null is a value.
    """

    name: str
    kind: str
    meaning: str = ""
    accepts: Any = None
    takes: str = ""
    remedy: str = ""
    each: str = ""
    is_nullable: bool = False


_A_TEXT = "text that is not empty"
_A_TOKEN = f"a token id, a whole number from 0 to {_MOST}"
_A_REWARD = "a finite number from -1e9 to 1e9"
_PROMPT = "the prompt as plain text, or a chat as JSON; one is null"
_TOKENS = "int32, little-endian; completions include the end token; empty if not known"
_SAMPLING = "the sampling distribution; null: not known"
_PARTS_OF_TURNS = (
    "JSON, or null: policy versions within the completion; the row and the end of each turn of an [agent](agents.md)"
)

# In the order of exports and docs/store_format.md.
_COLUMNS = (
    Column("number", "int64", "place in order of arrival, from 1"),
    Column("id", "text", "unique name", _Text, _A_TEXT, "give every completion an id of its own"),
    Column(
        "group_id",
        "text",
        "completions whose rewards are compared",
        _Text,
        _A_TEXT,
        "give every completion the id of its group",
    ),
    Column(
        "source",
        "text",
        "`initial`, or the name of a run, a file or `--source`",
        _Text,
        _A_TEXT,
        "name the model or program that wrote the completion",
    ),
    Column("prompt", "text", _PROMPT, _Text, f"{_A_TEXT}, or a list of messages", "give one of prompt and messages"),
    Column(
        "messages",
        "messages",
        _PROMPT,
        Annotated[list[_Message], pydantic.Field(min_length=1)],
        "a list of one message or more, each with role and content",
        "give both as text",
        each="role and content",
    ),
    Column(
        "completion",
        "text",
        "text without the end token",
        _MaybeEmpty,
        "text",
        "give the reply as text, which may be empty",
    ),
    Column(
        "answer",
        "text",
        "reference answer, or null",
        _MaybeEmpty,
        "text, or null",
        "write the answer as text",
        is_nullable=True,
    ),
    Column(
        "tokenizer",
        "text",
        "digest of the tokens' vocabulary; null without tokens",
        _Text,
        f"{_A_TEXT}, or null",
        "name the tokens' vocabulary",
        is_nullable=True,
    ),
    Column(
        "prompt_tokens",
        "int32[]",
        _TOKENS,
        list[_Whole],
        "a list of token ids",
        "give ids of the tokenizer's vocabulary",
        each=_A_TOKEN,
    ),
    Column(
        "completion_tokens",
        "int32[]",
        _TOKENS,
        list[_Whole],
        "a list of token ids",
        "give ids of the tokenizer's vocabulary",
        each=_A_TOKEN,
    ),
    Column(
        "completion_mask",
        "bool[]",
        "a byte for each token: 1 if the policy sampled it, else 0",
        list[_Flag],
        "a list of true and false",
        "give true for each token that the policy sampled, and false for others",
        each="true or false",
    ),
    Column(
        "behavior_logprobs",
        "float32[]",
        "float32, little-endian, or null: log-probability of each token, in nats, under the distribution that sampled"
        " it",
        list[Annotated[float, pydantic.Field(strict=True)]],
        "a list of numbers, or null",
        "give the log-probabilities of the sampled tokens in nats, or null if they are not known",
        each="a log-probability, a finite number of at most 0",
        is_nullable=True,
    ),
    Column(
        "reward",
        "float64",
        "",
        _Reward,
        _A_REWARD,
        "write a number without quotes, and scale or clip larger rewards",
        is_nullable=True,
    ),
    Column(
        "reward_parts",
        "parts",
        "",
        _Parts,
        "numbers by name, at least one",
        "name each part and give its number, or give no parts",
        each=_A_REWARD,
        is_nullable=True,
    ),
    Column(
        "accurate",
        "bool",
        "",
        _Flag,
        "true or false, or null",
        "give null if it is not known whether the answer is right",
        is_nullable=True,
    ),
    Column(
        "truncated",
        "bool",
        "true if cut off",
        _Flag,
        "true or false",
        "give true if the completion reached its token limit",
    ),
    Column(
        "policy_version",
        "int32",
        "optimizer updates of the sampling weights; null: another model",
        _Whole,
        f"a whole number from 0 to {_MOST}, or null",
        "give the number of optimizer updates, or null for another model",
        is_nullable=True,
    ),
    Column(
        "temperature",
        "float64",
        _SAMPLING,
        _Temperature,
        "a finite number, 0 or more",
        "give the temperature that sampled the tokens",
        is_nullable=True,
    ),
    Column(
        "top_k",
        "int32",
        _SAMPLING,
        _Whole,
        f"a whole number from 0 (all tokens) to {_MOST}",
        "give the top_k that sampled the tokens",
        is_nullable=True,
    ),
    Column(
        "top_p",
        "float64",
        _SAMPLING,
        _Positive,
        "a number above 0 and at most 1",
        "give the top_p that sampled the tokens",
        is_nullable=True,
    ),
    Column(
        "min_p",
        "float64",
        _SAMPLING,
        _Fraction,
        "a number from 0 to 1",
        "give the min_p that sampled the tokens",
        is_nullable=True,
    ),
    Column(
        "time",
        "time",
        "sampling or import, in seconds since 1970",
        pydantic.InstanceOf[datetime],
        "a date and time",
        "give the time of sampling or import",
    ),
    Column(
        "metadata",
        "json",
        "a JSON object, or null: from the [server](serving.md), or a chat's"
        " [variables](tasks.md#variables-of-chat-templates) under `chat_template`. Runs that follow the store read"
        " `run`",
        Annotated[Any, pydantic.AfterValidator(_json_object)],
        "a JSON object",
        "convert its values to JSON's types",
        is_nullable=True,
    ),
    Column(
        "token_versions",
        "json",
        _PARTS_OF_TURNS,
        list[tuple[_Whole, _Whole]],
        "pairs of a policy version and a number of sampled tokens",
        "give pairs whose numbers add up to the sampled tokens, or null",
        is_nullable=True,
    ),
    Column(
        "turns",
        "json",
        _PARTS_OF_TURNS,
        list[tuple[_Whole, _Whole]],
        "pairs of a row's index and the end of sampled tokens in it",
        "give a pair for each turn, or null",
        is_nullable=True,
    ),
    Column(
        "turn_rewards",
        "float64[]",
        "",
        list[_Reward],
        "a list of numbers, one for each turn",
        "give a number for each turn, or none",
        each=_A_REWARD,
        is_nullable=True,
    ),
    Column(
        "row_lengths",
        "json",
        "JSON, or null: lengths, if there are several rows, or one has another prompt than its group",
        Annotated[list[_Whole | tuple[_Whole | None, _Whole]], pydantic.AfterValidator(_row_lengths)],
        "the prompt's length, and for each row the length of its own prompt, or null, and its length",
        "export the store again",
        is_nullable=True,
    ),
    Column(
        "other_rewards",
        "json",
        "",
        dict[_Text, tuple[_Reward | None, _Parts | None, _Flag | None, str | None, list[_Reward], str | None]],
        "rewards by grader: reward, parts, accurate, failure, turns and comment",
        "export the store again",
        is_nullable=True,
    ),
    Column("recorded", "bytes", "other arrays (`.npz`, zlib), or null"),
    Column("prompt_key", "int64"),
    Column("problem_key", "int64"),
    Column("prompt_length", "int32"),
    Column("completion_length", "int32"),
    Column("row_length", "int32"),
    Column("largest_token", "int32"),
    Column("is_plain", "bool"),
    Column("has_logprobs", "bool"),
)
COLUMNS: Mapping[str, Column] = MappingProxyType({column.name: column for column in _COLUMNS})
# The columns of a row in a store, whose checksum covers them in this order. SQLite reads the first columns of a long
# row without the others, so the columns that `Store.groups` reads are first.
STORED = (
    *("number", "id", "group_id", "source", "tokenizer", "prompt_key", "problem_key"),
    *("prompt_length", "completion_length", "row_length", "largest_token", "is_plain", "has_logprobs"),
    *("temperature", "top_k", "top_p", "min_p", "truncated", "policy_version", "time"),
    *("prompt", "messages", "completion", "answer", "metadata", "token_versions", "turns", "row_lengths"),
    *("prompt_tokens", "completion_tokens", "completion_mask", "behavior_logprobs", "recorded"),
)
DERIVED = tuple(column.name for column in _COLUMNS if not column.meaning and column.accepts is None)
EXPORTED = tuple(column.name for column in _COLUMNS if column.name not in ("number", *DERIVED))
DTYPES = MappingProxyType({"int32[]": "<i4", "bool[]": "bool", "float32[]": "<f4"})  # arrays by kind, as in a store

# --- One value.


def check_value(name: str, value: Any, where: str) -> Any:
    """Checks a value of a column, except null; returns it, with whole numbers as floats where a column has floats.

    Args:
        where: place and key of the value, for the error.
    Raises:
        UserError: the column does not take the value.
    """
    if isinstance(value, np.generic):
        value = value.item()
    try:
        return _values_type(name, False).validate_python([value])[0]
    except pydantic.ValidationError as error:
        raise _mistake(COLUMNS[name], where, value, error) from None


def to_array(name: str, values: Any, where: str) -> np.ndarray:
    """The list of a column as an array; arrays of the right type remain as they are.

    Args:
        where: place and key of the list, for the error.
    Raises:
        UserError: not a list, or one with an element of another type.
    """
    kind = COLUMNS[name].kind
    types, kinds = _ELEMENTS[kind]
    if hasattr(values, "__array__"):
        array = np.asarray(values)
        if array.ndim == 1 and (array.dtype.kind in kinds or not len(array)):
            return array
        values = array.tolist()
    elif isinstance(values, list) and {*map(type, values)} <= types:
        with contextlib.suppress(OverflowError), np.errstate(over="ignore"):
            return np.array(values, DTYPES[kind])
    return np.array(check_value(name, values, where), DTYPES[kind])


# By kind of a column: types of a list's elements, and kinds of NumPy's types.
_ELEMENTS = {"int32[]": ({int}, "iu"), "bool[]": ({bool}, "b"), "float32[]": ({int, float}, "fiu")}


def field(name: str) -> tuple[Any, ...]:
    """What an annotation of a pydantic model says of a key with the values of a column.

    The error of a wrong value is a `UserError` in the context of pydantic's error.
    """
    check = pydantic.AfterValidator(lambda value: check_value(name, value, name))
    return check, pydantic.Field(description=COLUMNS[name].takes)


@functools.cache
def _values_type(name: str, is_nullable: bool) -> pydantic.TypeAdapter:
    """The type of a list with a value of each completion."""
    accepts = COLUMNS[name].accepts
    if is_nullable:
        accepts = accepts | None
    return pydantic.TypeAdapter(Annotated[list[accepts], pydantic.FailFast()])


def _mistake(column: Column, where: str, value: Any, error: pydantic.ValidationError) -> UserError:
    """The error about a value for the error of the type of its list."""
    first = error.errors(include_url=False)[0]
    path = first["loc"][1:]
    if path[-1:] == ("[key]",) or column.kind == "json":
        path = ()  # the place of a name, or within types that the text does not describe
    elif first["type"] == "missing":
        path = path[:-1]
    if path:
        value = first["input"]
    return _wrong(column, where, path, value)


def _wrong(column: Column, where: str, path: Sequence[int | str], value: Any) -> UserError:
    """The error about a value of a column, or about an element of it, which a path of indices and names leads to."""
    steps = [f".{step}" if isinstance(step, str) else f"[{step}]" for step in path]
    takes = column.takes
    if path and column.each:
        takes = column.each
    return UserError(where + "".join(steps), f"takes {takes}", column.remedy, value)


# --- Many completions.


class Check:
    """Finds the first completion of a batch that breaks a rule.

    Once a completion breaks a rule, later checks see only the completions before it. So a check may rely on all earlier
    checks.

    Args:
        count: number of completions.
        place: function from a completion's index to its name in error messages.
        names: names of columns in error messages, where they differ from the schema's.
    """

    def __init__(self, count: int, place: Callable[[int], str], names: Mapping[str, str] = MappingProxyType({})):
        self.count = count  # completions that have kept all rules
        self._place = place
        self._names = names
        self._error: UserError | None = None

    def finish(self) -> None:
        """Raises the error of the first completion that broke a rule.

        Raises:
            UserError: with place, column, value, problem and remedy.
        """
        if self._error is not None:
            raise self._error

    def refuse(self, index: int, name: str, value: Any, problem: str, remedy: str) -> None:
        """Keeps the error about a completion."""
        self._keep(index, UserError(self._where(index, name), problem, remedy, value))

    def _keep(self, index: int, error: UserError) -> None:
        if index < self.count:
            self.count = index
            self._error = error

    def _where(self, index: int, name: str) -> str:
        return f"{self._place(index)}: {self._names.get(name, name)}"

    def plain(
        self, name: str, values: Sequence[Any], owners: Sequence[int] | None = None, is_nullable: bool | None = None
    ) -> None:
        """Checks a column without arrays.

        Args:
            values: a value for each completion, or for each of `owners`.
            owners: indices of completions, in ascending order; None: all.
            is_nullable: True if null is a value; None: as in the schema.
        """
        column = COLUMNS[name]
        if owners is None:
            owners = range(len(values))
        values = list(values[: bisect.bisect_left(owners, self.count)])
        if column.kind in ("bool", "int32"):  # pydantic takes NumPy's floats, but not its other types
            values = [value.item() if isinstance(value, np.generic) else value for value in values]
        if is_nullable is None:
            is_nullable = column.is_nullable
        try:
            _values_type(name, is_nullable).validate_python(values)
        except pydantic.ValidationError as error:
            place = int(error.errors(include_url=False)[0]["loc"][0])
            where = self._where(owners[place], name)
            self._keep(owners[place], _mistake(column, where, values[place], error))

    def unique(self, ids: Sequence[Any]) -> None:
        """Refuses an id that an earlier completion has."""
        seen = set()
        for index, name in enumerate(ids[: self.count]):
            if name in seen:
                self.refuse(index, "id", name, TAKEN, COLUMNS["id"].remedy)
                return
            seen.add(name)

    def rows(
        self,
        owners: Sequence[int],
        tokens: Sequence[Any],
        masks: Sequence[Any],
        logprobs: Sequence[Any],
    ) -> None:
        """Checks the arrays of token sequences.

        Args:
            owners: index of each sequence's completion, in ascending order.
            tokens, masks: arrays or lists of each sequence.
            logprobs: arrays or lists, or None.
        """
        tokens = self._tokens("completion_tokens", owners, tokens)
        for owner, sequence in zip(owners, tokens, strict=False):
            if not len(sequence):
                self.refuse(owner, "completion_tokens", [], *EMPTY)
                break
        masks = self._arrays("completion_mask", owners, masks)
        self._lengths("completion_mask", owners, masks, tokens)
        count = bisect.bisect_left(owners, self.count)
        if not count:
            return
        starts = np.cumsum([0, *map(len, masks[: count - 1])])
        has_sampled = np.logical_or.reduceat(np.concatenate(masks[:count]), starts)
        if not has_sampled.all():
            row = int(np.argmin(has_sampled))
            problem = "is false everywhere, and the policy must have sampled a token"
            self.refuse(owners[row], "completion_mask", masks[row].tolist(), problem, COLUMNS["completion_mask"].remedy)
        known = [index for index, values in enumerate(logprobs[:count]) if values is not None]
        self._logprobs(
            [owners[index] for index in known],
            [logprobs[index] for index in known],
            [masks[index] for index in known],
        )

    def _logprobs(self, owners: Sequence[int], logprobs: Sequence[Any], masks: Sequence[np.ndarray]) -> None:
        """Checks log-probs; values at tokens that were not sampled are ignored."""
        logprobs = self._arrays("behavior_logprobs", owners, logprobs)
        self._lengths("behavior_logprobs", owners, logprobs, masks)
        count = bisect.bisect_left(owners, self.count)
        if not count:
            return
        with np.errstate(over="ignore"):  # -1e300 becomes -inf
            values = np.concatenate(logprobs[:count]).astype(np.float32)
        is_sampled = np.concatenate(masks[:count])
        self._elements("behavior_logprobs", owners, logprobs, ~is_sampled | np.isfinite(values) & (values <= _ROUNDING))

    def prompts(self, owners: Sequence[int], prompts: Sequence[Any]) -> None:
        """Checks the tokens of prompts, which are empty if they are not known."""
        self._tokens("prompt_tokens", owners, prompts)

    def _tokens(self, name: str, owners: Sequence[int], tokens: Sequence[Any]) -> list[np.ndarray]:
        tokens = self._arrays(name, owners, tokens)
        if tokens:
            values = np.concatenate(tokens)
            self._elements(name, owners, tokens, (values >= 0) & (values <= _MOST))
        return tokens

    def _arrays(self, name: str, owners: Sequence[int], values: Sequence[Any]) -> list[np.ndarray]:
        """The arrays of a column, for completions that have kept all rules."""
        values = list(values[: bisect.bisect_left(owners, self.count)])
        _, kinds = _ELEMENTS[COLUMNS[name].kind]
        forms: set[tuple[type, Any, Any]] = {
            (type(array), getattr(array, "dtype", None), getattr(array, "ndim", None)) for array in values
        }
        if all(kind is np.ndarray and dtype.kind in kinds and dimensions == 1 for kind, dtype, dimensions in forms):
            return values
        arrays = []
        for owner, array in zip(owners, values, strict=False):
            try:
                arrays.append(to_array(name, array, self._where(owner, name)))
            except UserError as error:
                self._keep(owner, error)
                break
        return arrays

    def _lengths(
        self, name: str, owners: Sequence[int], arrays: Sequence[np.ndarray], tokens: Sequence[np.ndarray]
    ) -> None:
        """Refuses arrays that do not have a value for each token."""
        for owner, array, sequence in zip(owners, arrays, tokens, strict=False):
            if len(array) != len(sequence):
                problem = f"has {len(array)} values for {len(sequence)} tokens of the completion"
                self.refuse(owner, name, array.tolist(), problem, "give one for each token")
                return

    def _elements(self, name: str, owners: Sequence[int], arrays: Sequence[np.ndarray], are_valid: np.ndarray) -> None:
        """Refuses an element of the arrays, whose validity is in one array for all end to end."""
        if are_valid.all():
            return
        position = int(np.argmin(are_valid))
        row = 0
        while position >= len(arrays[row]):
            position -= len(arrays[row])
            row += 1
        value = arrays[row][position].item()
        # The index counts the tokens of all sequences of the completion, as the store keeps them.
        first = bisect.bisect_left(owners, owners[row])
        index = position + sum(map(len, arrays[first:row]))
        where = self._where(owners[row], name)
        self._keep(owners[row], _wrong(COLUMNS[name], where, [index], value))


# Problems and remedies that several doors name.
TAKEN = "is the id of an earlier completion"
EMPTY = ("has no tokens", "give at least one token for each prompt and completion")


def check_records(
    records: Sequence[Any], place: Callable[[int], str], names: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raises an error if a completion breaks a rule.

    Args:
        records: completions as `records.Record`.
        place: function from a record's index to its name in error messages.
        names: names of columns in error messages, where they differ from the schema's.
    Raises:
        UserError: the first bad record, with place, column, value, problem and remedy; or there are no records.
    """
    if not records:
        raise UserError("", "there are no rows to append", "give at least one")
    check = Check(len(records), place, names)
    completions = [record.group.completions[0] for record in records]
    groups = [record.group for record in records]
    check.plain("id", [completion.id for completion in completions])
    check.unique([completion.id for completion in completions])
    check.plain("group_id", [group.id for group in groups])
    check.plain("source", [completion.source for completion in completions])
    check.plain("completion", [completion.text for completion in completions])
    check.plain("time", [record.time for record in records])
    check.plain("tokenizer", [record.tokenizer for record in records])
    check.plain("answer", [group.answer for group in groups])
    check.plain("truncated", [completion.truncated for completion in completions])
    check.plain("policy_version", [completion.policy_version for completion in completions])
    check.plain("metadata", [completion.metadata for completion in completions])
    _check_shared(check, [group.prompt for group in groups], [completion.sampling for completion in completions])
    _check_grades(check, completions)
    _check_tokens(check, records, completions)
    _check_turns(check, completions)
    check.finish()


def _first_uses(values: Sequence[Any]) -> dict[int, Any]:
    """The values by index, without those that are the same object as an earlier one."""
    firsts = {id(value): index for index, value in zip(range(len(values) - 1, -1, -1), reversed(values), strict=True)}
    return {index: values[index] for index in sorted(firsts.values())}


def _check_shared(check: Check, prompts: Sequence[Any], samplings: Sequence[Sampling | None]) -> None:
    """Checks prompts and distributions, which many completions share, once each."""
    texts = {}
    chats = {}
    for index, prompt in _first_uses(prompts).items():
        if prompt is None or isinstance(prompt, str):
            texts[index] = prompt
        else:
            chats[index] = prompt
    check.plain("prompt", list(texts.values()), list(texts))
    check.plain("messages", list(chats.values()), list(chats))
    known = {index: sampling for index, sampling in _first_uses(samplings).items() if sampling is not None}
    for name in Sampling._fields:
        check.plain(name, [getattr(sampling, name) for sampling in known.values()], list(known), is_nullable=False)


def _check_grades(check: Check, completions: Sequence[Completion]) -> None:
    owners = [index for index, completion in enumerate(completions) if completion.grade is not None]
    grades = [completions[index].known_grade for index in owners]
    check.plain("reward", [grade.reward for grade in grades], owners)
    check.plain("reward_parts", [grade.reward_parts for grade in grades], owners)
    check.plain("accurate", [grade.accurate for grade in grades], owners)
    turns = {index: grade.turns for index, grade in zip(owners, grades, strict=True) if grade.turns}
    check.plain("turn_rewards", list(turns.values()), list(turns))
    for index, grade in zip(owners, grades, strict=True):
        if index >= check.count:
            return
        if grade.reward is None and grade.reward_parts:
            problem = "has reward parts, but the reward is null"
            check.refuse(index, "reward_parts", grade.reward_parts, problem, "give the reward as well, or no parts")
        elif grade.turns and len(grade.turns) != (len(completions[index].turns) or 1):
            check.refuse(index, "turn_rewards", list(grade.turns), *uneven(grade.turns, len(completions[index].turns)))


def uneven(rewards: Sequence[float], turns: int) -> tuple[str, str]:
    """The problem and the remedy of a number of rewards that is not the number of turns, or 1 without turns."""
    return f"has {len(rewards)} values for {turns or 1} turns of the completion", COLUMNS["turn_rewards"].remedy


def _check_tokens(check: Check, records: Sequence[Any], completions: Sequence[Completion]) -> None:
    prompts = {}
    owners = []
    rows = []
    for index, (record, completion) in enumerate(zip(records, completions, strict=True)):
        if index >= check.count:
            break
        prompts.setdefault(id(record.group.prompt_tokens), (index, record.group.prompt_tokens))
        for row in completion.rows:
            prompts.setdefault(id(row.prompt_tokens), (index, row.prompt_tokens))
            owners.append(index)
            rows.append(row)
    check.prompts([index for index, _ in prompts.values()], [tokens for _, tokens in prompts.values()])
    for index, (record, completion) in enumerate(zip(records, completions, strict=True)):
        if index >= check.count:
            break
        if record.tokenizer is None and (completion.rows or len(record.group.prompt_tokens)):
            check.refuse(
                index, "tokenizer", None, "is null, and the completion has tokens", COLUMNS["tokenizer"].remedy
            )
    check.rows(
        owners,
        [row.tokens for row in rows],
        [row.mask for row in rows],
        [row.behavior_logprobs for row in rows],
    )
    for index, row in zip(owners, rows, strict=True):
        if index >= check.count:
            return
        for name, values in row.recorded.items():
            if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf" or len(values) != len(row.tokens):
                problem = f"takes an array of numbers with an element for each of {len(row.tokens)} tokens"
                check.refuse(index, f"recorded {name}", values, problem, "remove it, or record every token")
                return


def _check_turns(check: Check, completions: Sequence[Completion]) -> None:
    versions = {index: list(map(list, one.version_runs)) for index, one in enumerate(completions) if one.version_runs}
    check.plain("token_versions", list(versions.values()), list(versions))
    turns = {index: list(map(list, one.turns)) for index, one in enumerate(completions) if one.turns}
    check.plain("turns", list(turns.values()), list(turns))
    for index in sorted({*versions, *turns}):
        if index >= check.count:
            return
        completion = completions[index]
        counted = sum(count for _, count in completion.version_runs)
        if completion.version_runs and counted != completion.sampled_tokens:
            problem = f"counts {counted} tokens, and the policy sampled {completion.sampled_tokens}"
            check.refuse(index, "token_versions", versions[index], problem, COLUMNS["token_versions"].remedy)
            return
        for row, end in completion.turns:
            is_within = row < len(completion.rows) and 0 < end <= len(completion.rows[row].tokens)
            if not is_within or not completion.rows[row].mask[end - 1]:
                problem = "has a pair that is not the index of a row and the end of sampled tokens in it"
                check.refuse(index, "turns", turns[index], problem, COLUMNS["turns"].remedy)
                return
