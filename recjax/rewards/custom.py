"""Custom rewards: a user's function of a batch, sync or async; errors name the function and the completion."""

import asyncio
import contextvars
import dataclasses
import functools
import inspect
import itertools
import logging
import math
import sys
import time
import traceback
import types
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recjax.algorithms.options import described
from recjax.errors import UserError
from recjax.rewards.reward import MOST_REWARD, SCORE, Reward, check_part_names
from recjax.runtime.event_loop import run_to_end
from recjax.runtime.files import UNREADABLE
from recjax.runtime.workers import Workers

if TYPE_CHECKING:
    from recjax.tasks.problems import Problem

logger = logging.getLogger(__name__)

# seconds before an async reward is retried; doubled for each further retry
FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0


class Answered(NamedTuple):
    """A completion to grade: its prompt as the model saw it, its text, and the problem's answer and columns.

    length: number of tokens.
    opening: thinking tag that the prompt leaves open, or an empty string; None: detect it at the prompt's end.
    task: name of the problem's task in a mixture.
    id: id of the completion, for errors.
    chat: messages of the prompt; None: the prompt is a text.
    """

    prompt: str
    completion: str
    answer: str
    columns: Mapping[str, Any]
    length: int
    opening: str | None = None
    task: str = ""
    id: str = ""
    chat: Sequence[Mapping[str, str]] | None = None

    @classmethod
    def to(
        cls,
        problem: "Problem",
        prompt: str,
        completion: str,
        length: int,
        id: str,
        opening: str | None = None,
    ) -> "Answered":
        """A completion of a problem; the fields describe further arguments."""
        chat = None
        if not isinstance(problem.prompt, str):
            chat = problem.prompt
        return cls(
            prompt,
            completion,
            problem.answer,
            problem.columns,
            length,
            opening=opening,
            task=problem.task,
            id=id,
            chat=chat,
        )


LISTS = ("prompts", "completions", "answers", "columns")  # lists by position, in this order


class _Form(NamedTuple):
    """The form of a call of a user's function.

    by_position: parameters that get LISTS; empty: all lists are by name, as for TRL's rewards.
    by_name: parameters that get a list by name; True for parameters without a default.
    takes_rest: True if the function also gets all other lists, as `**columns`.
    """

    by_position: list[str]
    by_name: dict[str, bool]
    takes_rest: bool


def _form(reward: Reward) -> _Form:
    """The form of call that the function's parameters ask for.

    The lists are LISTS, the problems' columns, and the answers once more under the name of their column. A parameter
    with a list's name gets only that list, also if it stands at the position of a different list.
    """
    try:
        parameters = inspect.signature(reward.function).parameters.values()
    except (TypeError, ValueError):  # Some functions of C have no signature.
        return _Form(list(LISTS[:3]), {}, False)
    ordered = []
    named = {}
    with_default = set()
    takes_rest = False
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            ordered.append(parameter.name)
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            named[parameter.name] = parameter
        if parameter.default is not parameter.empty and parameter.default is not None:
            with_default.add(parameter.name)
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_rest = True
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        ordered += LISTS[len(ordered) :]
    list_names = {*LISTS, *(reward.columns or ()), reward.answer}
    by_position = []
    for position, name in zip(LISTS, ordered, strict=False):
        own_names = {position}
        if position == "answers":
            own_names.add(str(reward.answer))
        names_other_list = name in list_names and name not in own_names
        # A parameter such as threshold=0.5 at the position of the columns keeps its default.
        keeps_default = position == "columns" and name in with_default and name not in own_names
        if names_other_list or keeps_default:
            break
        by_position.append(name)
    # score(prompts, completions, answers, **columns) has recjax's signature.
    has_trl_signature = takes_rest and by_position[:1] == ["prompts"] and by_position[2:3] != ["answers"]
    if "completions" in named and (has_trl_signature or len(by_position) < 3):
        by_position = []
    by_name = {}
    for name, parameter in named.items():
        if name not in by_position:
            by_name[name] = parameter.default is parameter.empty
    return _Form(by_position, by_name, takes_rest)


def needs_answers(reward: Reward) -> bool:
    """True if the reward cannot grade a problem without an answer."""
    if reward.per_row or reward.reads_chats:
        return reward.per_row
    for single in reward.functions.values():
        form = _form(single)
        # `check_signature` refuses fewer lists by position.
        if len(form.by_position) > 2 or form.by_name.get("answers") or form.by_name.get(str(reward.answer)):
            return True
    return False


def with_columns(reward: Reward, *splits: Sequence["Problem"]) -> Reward:
    """The reward with the columns of all problems.

    Args:
        splits: train and held-out problems; each list that is not empty must have the columns that the function needs.
    Raises:
        UserError: see `check_signature`; or a column that a parameter names has a cell that cannot be read.
    """
    if reward.per_row:
        return reward
    for problems in filter(None, splits):
        for single in _knowing_columns(reward, problems).functions.values():
            check_signature(single)
            named = _form(single).by_name
            for problem, name in itertools.product(problems, named):
                cell = problem.columns.get(name)
                if isinstance(cell, dict) and cell.keys() == {UNREADABLE}:
                    raise UserError(problem=cell[UNREADABLE], remedy=f"task.reward = {reward.name!r} reads this column")
    return _knowing_columns(reward, list(itertools.chain(*splits)))


def _knowing_columns(reward: Reward, rows: Sequence["Problem | Answered"]) -> Reward:
    """The reward with the columns of the rows, and without an answer column if no row has an answer."""
    columns = {}
    for row in rows:
        columns |= dict.fromkeys(row.columns)
    answer = None
    if any(row.answer for row in rows):
        answer = reward.answer
    return reward._replace(columns=tuple(columns), answer=answer)


def check_signature(reward: Reward, rows: str = "no problem has") -> None:
    """Refuses a function that recjax cannot call with the columns that the reward knows.

    Args:
        rows: rows without other columns, for error messages.
    Raises:
        UserError: with the signatures that recjax calls, or the parameter that names no column.
    """
    form = _form(reward)
    _, named = _arguments(reward, [])
    missing = [name for name, is_required in form.by_name.items() if is_required and name not in named]
    takes_completions_by_name = not form.by_position and "completions" in form.by_name
    if len(form.by_position) < 3 and not takes_completions_by_name:
        problem = (
            "; write score(prompts, completions, answers), score(prompts, completions, answers, columns) or, as for"
            " TRL, score(completions, **columns)"
        )
    elif missing:
        assert reward.columns is not None
        known = ["prompts", "completions"]
        if reward.answer:
            known += ["answers", reward.answer]
        known += reward.columns
        problem = (
            f", but {rows} a column {missing[0]!r}; it can take {', '.join(dict.fromkeys(known))}: rename the"
            " parameter, give it a default, or add the column to the problems"
        )
    else:
        return
    raise UserError(
        "task.reward", f"the function takes {inspect.signature(reward.function)}{problem}", value=reward.name
    )


def custom_parts(reward: Reward, rows: Sequence[Answered]) -> dict[str, np.ndarray]:
    """Calls the user's function on a batch and checks the named parts that it returns.

    recjax calls function(prompts, completions, answers) with equally long lists of strings; prompts are as the model
    saw them. A function with a fourth parameter also gets a dict that maps the name of every other column to its list
    of values, None in rows without this column. A parameter with the name of a column gets this column. The function
    returns a number from −MOST_REWARD to MOST_REWARD for each completion, or a dict that maps names of parts to such
    lists. None instead of a number: the part does not apply to the completion and adds nothing to its reward. None in
    all parts, apart from parts of weight 0, leaves the completion without a reward, as in TRL. The function may be
    `async def`; recjax then awaits it once for the batch.

    A list of functions gives the parts of all; a function that returns numbers gives a part with its name.

    A function with TRL's signature, such as `(completions, **columns)`, gets the lists by name: prompts, completions,
    answers under the name of their column, and the other columns. As in TRL, the prompt of a chat is its messages, and
    its completion is a list with one message.

    Returns:
        The values of each part; NaN stands for None.
    Raises:
        UserError: the function raised, would end the program, or returned the wrong number of values or an invalid
            value. The message names the function and the completion.
    """
    if reward.columns is None:
        reward = _knowing_columns(reward, rows)
    parts = {}
    for name, single in reward.functions.items():
        returned = _result(single, rows)
        if not isinstance(returned, Mapping):
            returned = {name: returned}
        check_part_names(returned, f"reward function {reward.name}")
        twice = parts.keys() & returned.keys()
        if twice:
            raise UserError(
                f"reward functions {reward.name}", f"two return the part {min(twice)!r}", "rename it in one"
            )
        parts |= {part_name: _checked(single, part_name, values, rows) for part_name, values in returned.items()}
    return parts


def _result(reward: Reward, rows: Sequence[Answered]) -> Any:
    """The result of a function; an error names the function and the completion."""
    lists, named = _arguments(reward, rows)
    passed_completions = named.get("completions", ())
    _watch_raises()
    completions = [row.completion for row in rows]
    graded_frame = _GradedFrame(set(map(id, [*passed_completions, *completions])))
    token = _current_frame.set(graded_frame)
    try:
        return _call(reward, lists, named)
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # The last two would end more than the batch.
        is_from_recjax = str(getattr(reward.function, "__module__", "")).startswith("recjax.tasks.")
        if is_from_recjax and not isinstance(error, UserError):
            raise
        row_index = _graded_row(error, rows, passed_completions, graded_frame)
        if row_index is None:
            where = f"in a batch of {len(rows)} completions, of which the first is {_described_row(rows, 0)}"
        else:
            where = f"while it graded {_described_row(rows, row_index)}"
        raise UserError(problem=f"reward function {reward.name} failed with {described(error)}\n  {where}") from error
    finally:
        _current_frame.reset(token)


def remote_parts(reward: Reward, rows: Sequence[Answered]) -> dict[str, list[float]]:
    """Runs in a worker that holds the reward's function: `custom_parts` as plain values."""
    parts = custom_parts(reward._replace(function=Workers.held), rows)
    return {name: values.tolist() for name, values in parts.items()}


@dataclasses.dataclass
class _GradedFrame:
    """The innermost frame with a completion that the last error passed.

    completion_ids: `id` of each completion of the batch.
    error: the error; None if no error has passed such a frame.
    variable_ids: `id` of each value in the frame's variables.
    """

    completion_ids: set[int]
    error: BaseException | None = None
    variable_ids: set[int] = dataclasses.field(default_factory=set)


# A context variable, because an async reward runs in the thread of an event loop.
_current_frame: contextvars.ContextVar[_GradedFrame | None] = contextvars.ContextVar("current_frame", default=None)


@functools.cache  # A second change of the events would change all compiled code again.
def _watch_raises() -> None:
    """Makes Python call `_keep_variables` when a function raises, from Python 3.12 on.

    There, a comprehension is no frame of its own, and the function has lost its variables when the error arrives here.
    """
    monitoring: Any = getattr(sys, "monitoring", None)
    if not monitoring:
        return
    # Python reserves the tool numbers 0, 1, 2 and 5 for debuggers, profilers and the like.
    free = [number for number in (4, 3) if monitoring.get_tool(number) is None]
    if free:
        monitoring.use_tool_id(free[0], "recjax")
        monitoring.register_callback(free[0], monitoring.events.RAISE, _keep_variables)
        monitoring.set_events(free[0], monitoring.events.RAISE)


def _keep_variables(code: types.CodeType, offset: int, error: BaseException) -> None:
    """Keeps the variables of the first frame with a completion; Python calls it in each frame that an error passes.

    The first frame that an error passes is the innermost.
    """
    graded_frame = _current_frame.get()
    if graded_frame is None or graded_frame.error is error:
        return
    frame: Any = sys._getframe()
    while frame.f_code is not code:
        frame = frame.f_back
    variable_ids = {id(value) for value in frame.f_locals.values()}
    if not variable_ids.isdisjoint(graded_frame.completion_ids):
        graded_frame.error = error
        graded_frame.variable_ids = variable_ids


def _described_row(rows: Sequence[Answered], index: int) -> str:
    if not rows:
        return "none"
    row = rows[index]
    shown = f"completion {row.completion!r:.200} (row {index}, answer {row.answer!r:.200})"
    return f"{shown}, id {row.id!r}, of the prompt {row.prompt!r:.200}"


def _graded_row(
    error: BaseException, rows: Sequence[Answered], passed_completions: Sequence[Any], graded_frame: _GradedFrame
) -> int | None:
    """The row that a function graded when it raised: the completion that a variable of the innermost frame holds.

    Args:
        passed_completions: the completions as the function got them, if they are not the texts.
    """
    if not passed_completions:
        passed_completions = [row.completion for row in rows]
    if graded_frame.error is error:
        ids_by_frame = [graded_frame.variable_ids]
    else:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        ids_by_frame = [set(map(id, frame.f_locals.values())) for frame in reversed(frames)]
    for variable_ids in ids_by_frame:
        best_index = None
        best_matches = -1
        for index, (row, passed) in enumerate(zip(rows, passed_completions, strict=True)):
            if id(row.completion) not in variable_ids and id(passed) not in variable_ids:
                continue
            # Short completions may be one object in several rows. Answer and prompt tell these rows apart.
            matches = (id(row.answer) in variable_ids) + (id(row.prompt) in variable_ids)
            if matches > best_matches:
                best_index = index
                best_matches = matches
        if best_index is not None:
            return best_index
    return None


def known_parts(reward: Reward, row: Answered) -> dict[str, np.ndarray]:
    """The parts that a user's function returns for one row, to know their names.

    Raises:
        UserError: see `custom_parts`.
    """
    try:
        return custom_parts(reward, [row])
    except UserError as error:
        reason = "it was asked about an empty completion, to know the names of its parts"
        raise UserError(problem=f"{error}\n  ({reason})") from error


def _arguments(reward: Reward, rows: Sequence[Answered]) -> tuple[list, dict[str, list]]:
    """The positional and the named arguments of a call."""
    form = _form(reward)
    prompts: list[Any] = [row.prompt for row in rows]
    completions = [row.completion for row in rows]
    answers = [row.answer for row in rows]
    assert reward.columns is not None
    columns = {}
    for name in reward.columns:
        columns[name] = [row.columns.get(name) for row in rows]
    if reward.reads_chats or not form.by_position:
        prompts = [row.chat or row.prompt for row in rows]
    lists = [prompts, completions, answers, columns][: len(form.by_position)]
    named: dict[str, list] = dict(columns)
    if not form.by_position:
        replies: list[Any] = []
        for row in rows:
            if row.chat:
                replies.append([{"role": "assistant", "content": row.completion}])
            else:
                replies.append(row.completion)
        named["prompts"] = prompts
        named["completions"] = replies
    if reward.answer:
        named["answers"] = answers
        named[reward.answer] = answers
    if form.takes_rest:
        passed_names = named.keys() - form.by_position
    else:
        passed_names = form.by_name.keys()
    return lists, {name: values for name, values in named.items() if name in passed_names}


def _call(reward: Reward, lists: Sequence[list | dict], named: Mapping[str, list]) -> Any:
    """The function's result; a failed call is retried `reward.retries` times, after longer and longer waits."""

    async def awaited(result: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(reward.seconds):
                return await result
        except TimeoutError as error:
            if reward.seconds is None:
                raise
            raise TimeoutError(f"no reward within task.reward_seconds = {reward.seconds:g}") from error

    for retry in itertools.count():
        try:
            result = reward.function(*lists, **named)
            if inspect.isawaitable(result):
                result = awaited(result)
            return run_to_end(result)
        except Exception as error:
            if retry == reward.retries:
                raise
            wait = min(FIRST_WAIT * 2**retry, LONGEST_WAIT)
            words = described(error).splitlines()[0]
            logger.warning("reward %s failed with %s; it is asked again in %g s", reward.name, words, wait)
            time.sleep(wait)


def _checked(reward: Reward, part_name: str, values: Any, rows: Sequence[Answered]) -> np.ndarray:
    """The values of a part, as numbers; refuses values that are no rewards of the rows."""
    name = f"reward function {reward.name}"
    if part_name not in (SCORE, reward.name):
        name += f", part {part_name!r},"
    try:
        values = list(values)
        if any(isinstance(value, str | bytes) for value in values):  # A text of digits would be a list of rewards.
            raise TypeError("a text is no number")
        numbers = [math.nan if value is None else float(value) for value in values]
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(
            problem=f"{name} returned {values!r:.200}: {error}", remedy="return a number or None per completion"
        ) from error
    if len(numbers) != len(rows):
        raise UserError(problem=f"{name} returned {len(numbers)} rewards for {len(rows)} completions")
    for index, value in enumerate(numbers):
        if not (abs(value) <= MOST_REWARD or values[index] is None):
            raise UserError(
                problem=f"{name} returned {value} for {_described_row(rows, index)}",
                remedy=f"rewards are finite and at most {MOST_REWARD:g} either way, so scale or bound it there",
            )
    return np.array(numbers)
