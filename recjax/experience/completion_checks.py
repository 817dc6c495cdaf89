"""Checks the values of one column, and many completions together, against the columns' types and rules.

The store, imports, exports, `recjax.feedback` and the server all use these checks. So a mistake has the same text
everywhere, apart from the name of the place: key, value, problem and remedy.
"""

import bisect
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import numpy as np
import pydantic

from recjax.errors import UserError
from recjax.experience.columns import COLUMNS, DTYPES, LARGEST_INT32, Column
from recjax.experience.group import Completion
from recjax.models.sampling import Sampling

_ROUNDING = 1e-5  # nats by which a recorded log-prob may exceed 0
# Problems and remedies that several callers name.
ID_IS_TAKEN = "is the id of an earlier completion"
NO_TOKENS = "has no tokens"
GIVE_TOKENS = "give at least one token for each prompt and completion"

# --- One value.


def check_value(name: str, value: Any, where: str) -> Any:
    """Checks a value other than null, and returns it; in a column of floats, a whole number becomes a float.

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
        raise _value_error(COLUMNS[name], where, value, error) from None


def to_array(name: str, values: Any, where: str) -> np.ndarray:
    """Checks the type of a column's list and converts the list to an array; an array of the right type stays as it is.

    Args:
        where: place and key of the list, for the error.
    Raises:
        UserError: not a list, or one with an element of another type.
    """
    kind = COLUMNS[name].kind
    elements = _ELEMENTS[kind]
    if hasattr(values, "__array__"):
        array = np.asarray(values)
        has_right_type = array.dtype.kind in elements.numpy_kinds or array.size == 0
        if array.ndim == 1 and has_right_type:
            return array
        values = array.tolist()
    elif isinstance(values, list) and set(map(type, values)) <= elements.types:
        with contextlib.suppress(OverflowError), np.errstate(over="ignore"):
            return np.array(values, DTYPES[kind])
    # Only pydantic knows which element is wrong, and it takes more time.
    return np.array(check_value(name, values, where), DTYPES[kind])


class _Elements(NamedTuple):
    """The elements that a column of lists takes: types in a list, and kinds of an array's dtype."""

    types: set[type]
    numpy_kinds: str


_ELEMENTS = {
    "int32[]": _Elements(types={int}, numpy_kinds="iu"),
    "bool[]": _Elements(types={bool}, numpy_kinds="b"),
    "float32[]": _Elements(types={int, float}, numpy_kinds="fiu"),
}


def field(name: str) -> tuple[Any, ...]:
    """Metadata that makes a pydantic field take the values of a column, with their description.

    For a wrong value, the context of pydantic's error has a `UserError`.
    """
    check = pydantic.AfterValidator(lambda value: check_value(name, value, name))
    return check, pydantic.Field(description=COLUMNS[name].takes)


@functools.cache
def _values_type(name: str, is_nullable: bool) -> pydantic.TypeAdapter:
    """The type of a list that has a column's value for each completion."""
    value_type = COLUMNS[name].value_type
    if is_nullable:
        value_type = value_type | None
    return pydantic.TypeAdapter(Annotated[list[value_type], pydantic.FailFast()])


def _value_error(column: Column, where: str, value: Any, error: pydantic.ValidationError) -> UserError:
    """Converts pydantic's error about a list of values to the error about one value of the list."""
    first = error.errors(include_url=False)[0]
    path = first["loc"][1:]
    # For an error about a dictionary's name, pydantic's path ends with this word.
    is_about_name = path[-1:] == ("[key]",)
    if is_about_name or column.kind == "json":
        # The column's description does not name the parts of JSON, so the error is about the complete value.
        path = ()
    elif first["type"] == "missing":
        path = path[:-1]
    if path:
        value = first["input"]
    return _element_error(column, where, path, value)


def _element_error(column: Column, where: str, path: Sequence[int | str], value: Any) -> UserError:
    """The error about an element of a column's value; without a path, about the value itself.

    Args:
        where: place and key of the column's value.
        path: indices and names that lead from the column's value to the element.
        value: the element.
    """
    takes = column.takes
    if path and column.element:
        takes = column.element
    for step in path:
        if isinstance(step, str):
            where = f"{where}.{step}"
        else:
            where = f"{where}[{step}]"
    return UserError(where, f"takes {takes}", column.remedy, value)


# --- Many completions.


class RowArrays(NamedTuple):
    """The arrays of token sequences, an element for each sequence; log-probs are None if they are not known."""

    tokens: list[np.ndarray]
    masks: list[np.ndarray]
    logprobs: list[np.ndarray | None]


class Check:
    """Finds the first of many completions that breaks a rule.

    Once a completion breaks a rule, later checks see only the completions before it. So a check may rely on all earlier
    checks.

    Several methods take the values of some completions and `owners`, the completion's index for each value in ascending
    order. After an error there are fewer checked values than owners, so `zip` is not strict.

    Args:
        count: number of completions.
        place: function from a completion's index to its name in error messages.
        names: names of columns in error messages, where they differ from the schema's.
    """

    def __init__(self, count: int, place: Callable[[int], str], names: Mapping[str, str] = MappingProxyType({})):
        self.count = count  # The completions before this index have kept all rules.
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

    def _valid(self, owners: Sequence[int]) -> int:
        """The number of owners, from the first one, that have kept all rules."""
        return bisect.bisect_left(owners, self.count)

    def _where(self, index: int, name: str) -> str:
        return f"{self._place(index)}: {self._names.get(name, name)}"

    def plain(
        self, name: str, values: Sequence[Any], owners: Sequence[int] | None = None, is_nullable: bool | None = None
    ) -> None:
        """Checks a column without arrays.

        Args:
            values: a value for each of `owners`.
            owners: None for all completions.
            is_nullable: True if null is a value; None: as in the schema.
        """
        column = COLUMNS[name]
        if owners is None:
            owners = range(len(values))
        values = list(values[: self._valid(owners)])
        if column.kind in ("bool", "int32"):
            # Pydantic takes NumPy's floats, but not its other types.
            for position, value in enumerate(values):
                if isinstance(value, np.generic):
                    values[position] = value.item()
        if is_nullable is None:
            is_nullable = column.is_nullable
        try:
            _values_type(name, is_nullable).validate_python(values)
        except pydantic.ValidationError as error:
            position = int(error.errors(include_url=False)[0]["loc"][0])
            owner = owners[position]
            self._keep(owner, _value_error(column, self._where(owner, name), values[position], error))

    def unique(self, ids: Sequence[Any]) -> None:
        """Refuses an id that an earlier completion has."""
        seen = set()
        for index, name in enumerate(ids[: self.count]):
            if name in seen:
                self.refuse(index, "id", name, ID_IS_TAKEN, COLUMNS["id"].remedy)
                return
            seen.add(name)

    def rows(
        self, owners: Sequence[int], tokens: Sequence[Any], masks: Sequence[Any], logprobs: Sequence[Any]
    ) -> RowArrays:
        """Checks the arrays of token sequences.

        Args:
            tokens, masks: arrays or lists of each sequence.
            logprobs: arrays or lists, or None.
        Returns:
            The arrays. If a completion has broken a rule, only arrays of earlier completions.
        """
        tokens = self._tokens("completion_tokens", owners, tokens)
        for owner, sequence in zip(owners, tokens, strict=False):
            if not len(sequence):
                self.refuse(owner, "completion_tokens", [], NO_TOKENS, GIVE_TOKENS)
                break
        masks = self._arrays("completion_mask", owners, masks)
        self._check_lengths("completion_mask", owners, masks, tokens)
        self._check_sampled(owners, masks)
        known = [index for index, values in enumerate(logprobs[: self._valid(owners)]) if values is not None]
        known_logprobs = self._logprobs(
            owners=[owners[index] for index in known],
            logprobs=[logprobs[index] for index in known],
            masks=[masks[index] for index in known],
        )
        arrays: list[np.ndarray | None] = [None] * len(tokens)
        for index, values in zip(known, known_logprobs, strict=False):
            arrays[index] = values
        return RowArrays(tokens, masks, arrays)

    def _check_sampled(self, owners: Sequence[int], masks: Sequence[np.ndarray]) -> None:
        """Refuses a mask without a sampled token."""
        count = self._valid(owners)
        if not count:
            return
        lengths = np.array([len(mask) for mask in masks[:count]])
        starts = lengths.cumsum() - lengths
        has_sampled = np.logical_or.reduceat(np.concatenate(masks[:count]), starts)
        if not has_sampled.all():
            row = int(np.argmin(has_sampled))
            problem = "is false everywhere, and the policy must have sampled a token"
            self.refuse(owners[row], "completion_mask", masks[row].tolist(), problem, COLUMNS["completion_mask"].remedy)

    def _logprobs(
        self, owners: Sequence[int], logprobs: Sequence[Any], masks: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Checks log-probs and returns their arrays; values at tokens that were not sampled may be anything."""
        arrays = self._arrays("behavior_logprobs", owners, logprobs)
        self._check_lengths("behavior_logprobs", owners, arrays, masks)
        count = self._valid(owners)
        if count:
            with np.errstate(over="ignore"):  # -1e300 becomes -inf
                values = np.concatenate(arrays[:count]).astype(np.float32)
            is_sampled = np.concatenate(masks[:count])
            are_valid = ~is_sampled | (np.isfinite(values) & (values <= _ROUNDING))
            self._check_elements("behavior_logprobs", owners, arrays, are_valid)
        return arrays

    def prompts(self, owners: Sequence[int], prompts: Sequence[Any]) -> list[np.ndarray]:
        """Checks the tokens of prompts, which are empty if they are not known; returns their arrays like `rows`."""
        return self._tokens("prompt_tokens", owners, prompts)

    def _tokens(self, name: str, owners: Sequence[int], tokens: Sequence[Any]) -> list[np.ndarray]:
        arrays = self._arrays(name, owners, tokens)
        if arrays:
            values = np.concatenate(arrays)
            are_valid = (values >= 0) & (values <= LARGEST_INT32)
            self._check_elements(name, owners, arrays, are_valid)
        return arrays

    def _arrays(self, name: str, owners: Sequence[int], values: Sequence[Any]) -> list[np.ndarray]:
        """The arrays of a column, for completions that have kept all rules."""
        values = list(values[: self._valid(owners)])
        # Most batches have only arrays of the right type, and these arrays have only a few different dtypes.
        kinds = _ELEMENTS[COLUMNS[name].kind].numpy_kinds
        if all(type(array) is np.ndarray and array.ndim == 1 for array in values):
            dtypes = {array.dtype for array in values}
            if all(dtype.kind in kinds for dtype in dtypes):
                return values
        arrays = []
        for owner, array in zip(owners, values, strict=False):
            try:
                arrays.append(to_array(name, array, self._where(owner, name)))
            except UserError as error:
                self._keep(owner, error)
                break
        return arrays

    def _check_lengths(
        self, name: str, owners: Sequence[int], arrays: Sequence[np.ndarray], tokens: Sequence[np.ndarray]
    ) -> None:
        """Refuses arrays that do not have a value for each token."""
        for owner, array, sequence in zip(owners, arrays, tokens, strict=False):
            if len(array) != len(sequence):
                problem = f"has {len(array)} values for {len(sequence)} tokens of the completion"
                self.refuse(owner, name, array.tolist(), problem, "give one for each token")
                return

    def _check_elements(
        self, name: str, owners: Sequence[int], arrays: Sequence[np.ndarray], are_valid: np.ndarray
    ) -> None:
        """Refuses the first invalid element.

        Args:
            are_valid: True for each valid element, in one array for the elements of all arrays end to end.
        """
        if are_valid.all():
            return
        position = int(np.argmin(are_valid))
        row = 0
        while position >= len(arrays[row]):
            position -= len(arrays[row])
            row += 1
        value = arrays[row][position].item()
        owner = owners[row]
        # A store keeps all sequences of a completion end to end, so the error's index counts from the first of them.
        first = bisect.bisect_left(owners, owner)
        index = position + sum(len(array) for array in arrays[first:row])
        self._keep(owner, _element_error(COLUMNS[name], self._where(owner, name), [index], value))


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
    """The values by index, without a value that is the same object as an earlier one."""
    firsts: dict[int, int] = {}
    for index, value in enumerate(values):
        firsts.setdefault(id(value), index)
    return {index: values[index] for index in firsts.values()}


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
        values = [getattr(sampling, name) for sampling in known.values()]
        check.plain(name, values, list(known), is_nullable=False)


def _check_grades(check: Check, completions: Sequence[Completion]) -> None:
    owners = [index for index, completion in enumerate(completions) if completion.grade is not None]
    grades = [completions[index].known_grade for index in owners]
    check.plain("reward", [grade.reward for grade in grades], owners)
    check.plain("reward_parts", [grade.reward_parts for grade in grades], owners)
    check.plain("accurate", [grade.accurate for grade in grades], owners)
    turn_rewards = {index: grade.turns for index, grade in zip(owners, grades, strict=True) if grade.turns}
    check.plain("turn_rewards", list(turn_rewards.values()), list(turn_rewards))
    for index, grade in zip(owners, grades, strict=True):
        if index >= check.count:
            return
        turns = len(completions[index].turns)
        if not turns:
            turns = 1  # a completion without recorded turns is a single turn
        if grade.reward is None and grade.reward_parts:
            problem = "has reward parts, but the reward is null"
            check.refuse(index, "reward_parts", grade.reward_parts, problem, "give the reward as well, or no parts")
        elif grade.turns and len(grade.turns) != turns:
            problem = wrong_turn_count(len(grade.turns), turns)
            check.refuse(index, "turn_rewards", list(grade.turns), problem, COLUMNS["turn_rewards"].remedy)


def wrong_turn_count(rewards: int, turns: int) -> str:
    """The problem if the number of turn rewards is not the number of turns."""
    return f"has {rewards} values for {turns} turns of the completion"


def _check_tokens(check: Check, records: Sequence[Any], completions: Sequence[Completion]) -> None:
    """Checks prompts and rows; completions of a group share the object of its prompt, which is checked once."""
    prompts: dict[int, Any] = {}
    prompt_owners: dict[int, int] = {}
    rows = []
    owners = []
    for index in range(check.count):
        completion = completions[index]
        prompt_tokens = [records[index].group.prompt_tokens]
        prompt_tokens += [row.prompt_tokens for row in completion.rows]
        for tokens in prompt_tokens:
            if id(tokens) not in prompts:
                prompts[id(tokens)] = tokens
                prompt_owners[id(tokens)] = index
        rows += completion.rows
        owners += [index] * len(completion.rows)
    check.prompts(list(prompt_owners.values()), list(prompts.values()))
    for index in range(check.count):
        record = records[index]
        has_tokens = len(completions[index].rows) > 0 or len(record.group.prompt_tokens) > 0
        if record.tokenizer is None and has_tokens:
            problem = "is null, and the completion has tokens"
            check.refuse(index, "tokenizer", None, problem, COLUMNS["tokenizer"].remedy)
            break
    check.rows(
        owners,
        tokens=[row.tokens for row in rows],
        masks=[row.mask for row in rows],
        logprobs=[row.behavior_logprobs for row in rows],
    )
    for index, row in zip(owners, rows, strict=True):
        if index >= check.count:
            return
        for name, values in row.recorded.items():
            is_valid = isinstance(values, np.ndarray) and values.dtype.kind in "biuf" and len(values) == len(row.tokens)
            if not is_valid:
                problem = f"takes an array of numbers with an element for each of {len(row.tokens)} tokens"
                check.refuse(index, f"recorded {name}", values, problem, "remove it, or record every token")
                return


def _check_turns(check: Check, completions: Sequence[Completion]) -> None:
    """Checks that version runs count all sampled tokens, and that turns end at sampled tokens."""
    versions = {}
    turns = {}
    for index, completion in enumerate(completions):
        if completion.version_runs:
            versions[index] = [list(run) for run in completion.version_runs]
        if completion.turns:
            turns[index] = [list(turn) for turn in completion.turns]
    check.plain("token_versions", list(versions.values()), list(versions))
    check.plain("turns", list(turns.values()), list(turns))
    for index in sorted(versions.keys() | turns.keys()):
        if index >= check.count:
            return
        completion = completions[index]
        counted = sum(tokens for _, tokens in completion.version_runs)
        if completion.version_runs and counted != completion.sampled_tokens:
            problem = f"counts {counted} tokens, and the policy sampled {completion.sampled_tokens}"
            check.refuse(index, "token_versions", versions[index], problem, COLUMNS["token_versions"].remedy)
            return
        if not all(_ends_at_sampled_token(completion, row, end) for row, end in completion.turns):
            problem = "has a pair that is not the index of a row and the end of sampled tokens in it"
            check.refuse(index, "turns", turns[index], problem, COLUMNS["turns"].remedy)
            return


def _ends_at_sampled_token(completion: Completion, row: int, end: int) -> bool:
    if row >= len(completion.rows):
        return False
    mask = completion.rows[row].mask
    if not 0 < end <= len(mask):
        return False
    return bool(mask[end - 1])
