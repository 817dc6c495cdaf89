"""One axis of the equation: a function with its options.

The functions of an axis are plain functions of arrays, and read different arrays. `Axis` gives all of them one form,
`axis(tokens, rows)`, and checks the results of a user's own function.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from recjax.algorithms.options import described
from recjax.algorithms.reading import WHOLE_BATCH, names_read, parameters
from recjax.algorithms.values import Rows, Tokens
from recjax.errors import UserError

Options = tuple[tuple[str, Any], ...]
# Number of rows and of tokens in the arrays that a user's function is checked with.
ROWS = 4
TIME = 3


@dataclasses.dataclass(frozen=True)
class Axis:
    """A function of an axis with its options. Instances are hashable, so jit takes them as static arguments.

    function: reads the values that its positional parameters name.
    options: pairs of option and value; other options have the defaults of the signature.
    users: name of the axis if the function is a user's own, whose results are checked; empty for recjax's functions.
    """

    function: Callable[..., Any]
    options: Options = ()
    users: str = ""

    def __call__(self, tokens: Tokens, rows: Rows) -> Any:
        """Calls the function with the values that it reads.

        Raises:
            UserError: a value that the function reads is None; or a user's function raises an error, or returns an
                array of a shape or dtype that its axis does not take.
        """
        values = {}
        for name in self.reads:
            container: Tokens | Rows = rows
            if name in Tokens._fields:
                container = tokens
            values[name] = getattr(container, name)
        if not self.users:
            return self.apply(**values)
        try:
            result = self.apply(**values)
        except UserError:
            raise
        except Exception as error:
            problem = f"{self.title} fails with {described(error, traced=True)}"
            raise UserError(f"algorithm.{self.users}", problem) from error
        return _checked_result(self, result, tokens)

    def apply(self, **values: Any) -> Any:
        """Calls the function with values by the names of its positional parameters.

        Raises:
            UserError: a value is None, and the parameter's default is not.
        """
        for name, value in values.items():
            if value is None and parameters(self.function)[name].default is not None:
                remedy = "pass it, or choose another function for this axis"
                if "coefficient" in parameters(self.function):
                    remedy = "pass it, or set its coefficient to 0"
                raise UserError(name, f"{self.title} reads it", remedy, None)
        return self.bound()(*(values[name] for name in self.reads))

    def bound(self) -> Callable[..., Any]:
        """The function with its options bound, for callers that pass arrays by position."""
        return functools.partial(self.function, **dict(self.options))

    @property
    def title(self) -> str:
        """The function's name in messages."""
        return getattr(self.function, "__name__", repr(self.function))

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the values that the function reads."""
        return names_read(self.function)

    @property
    def reads_whole_batch(self) -> bool:
        """True if the function reads a value that only the complete batch has."""
        return not WHOLE_BATCH.keys().isdisjoint(self.reads)

    def option(self, name: str) -> Any:
        """The value of an option; None if it is not set."""
        return dict(self.options).get(name)

    def with_options(self, values: dict[str, Any]) -> "Axis":
        """The same function with other values of some options, which may be arguments of a compiled program."""
        options = dict(self.options) | values
        return dataclasses.replace(self, options=tuple(options.items()))


@functools.cache  # A config is built several times, and its functions are traced once.
def check_users_function(axis: Axis, key: str, name: Any) -> None:
    """Runs a user's function on the shapes of small arrays, so that its mistakes are found before work starts.

    Args:
        key: key of the function in a config, such as "clip.name".
        name: name of the function in the config, or the function itself.

    Raises:
        UserError: the function raises an error, or returns an array of a shape or dtype that the axis does not take.

    Examples:
        >>> def bounded(ratio, *, cap=3.0):
        ...     return jnp.minimum(ratio, cap)
        ...
        >>> check_users_function(Axis(bounded, users="weight"), "weight.name", "mine:bounded")  # accepted
    """

    def called() -> Any:
        return axis(*_small_values(axis))

    # Traced, not run: a config is read before a device cluster is set up, and an array would claim the local devices.
    try:
        jax.eval_shape(called)
    except UserError as error:
        raise UserError(key, error.problem, error.remedy, value=name) from error


def takes_arrays(axis: Axis, options: tuple[str, ...]) -> bool:
    """True if a user's function also runs with values of these options that are arguments of a compiled program.

    The function may refuse such values in any way, for example in `if cap > 1`. It has already run with numbers.

    Examples:
        >>> def branching(ratio, *, cap=3.0):
        ...     return jnp.minimum(ratio, cap) if cap > 1 else ratio
        ...
        >>> takes_arrays(Axis(branching, (("cap", 2.0),), users="weight"), ("cap",))
        False
    """

    def called(value: jax.Array) -> Any:
        changed = axis.with_options(dict.fromkeys(options, value))
        return changed(*_small_values(axis))

    try:
        jax.eval_shape(called, 1.0)
    except Exception:
        return False
    return True


def _small_values(axis: Axis) -> tuple[Tokens, Rows]:
    """All values that functions of the axis may read, for ROWS completions of TIME tokens."""
    row = jnp.zeros(ROWS)
    row_number = jnp.zeros(ROWS, int)
    row_mask = jnp.zeros(ROWS, bool)
    token = jnp.zeros((ROWS, TIME))
    advantages = row
    if not axis.reads_whole_batch:
        advantages = row[:, None]
    tokens = Tokens(
        completion_mask=jnp.zeros((ROWS, TIME), bool),
        logprobs=token,
        behavior_logprobs=token,
        proximal_logprobs=token,
        reference_logprobs=token,
        teacher_logprobs=token,
        anchor_logprobs=token,
        log_ratio=token,
        ratio=token,
        advantages=advantages,
        entropy=token,
        per_token=token,
        token_turns=jnp.zeros((ROWS, TIME), int),
        scored_logprobs=token,
        scored_log_ratio=token,
        scored_entropy=token,
        scored_reference_kl=token,
    )
    rows = Rows(
        foreign=row_mask,
        effective_share=row,
        kept=row_mask,
        rewards=row,
        group_ids=row_number,
        lengths=row_number,
        reward_parts={"part": row},
        part_weights={"part": row},
        turn_rewards=token,
        key=jax.random.key(0),
    )
    return tokens, rows


def _checked_result(axis: Axis, result: Any, tokens: Tokens) -> Any:
    """Checks the shape and the dtype of the result of a user's function; returns it as arrays."""
    if axis.users == "reduction":
        return _checked_sum_and_count(axis, result)
    result = _as_array(axis, result)
    if tokens.completion_mask is None:
        return result  # `losses.row_terms` without a mask, whose number of tokens is unknown
    batch, time = tokens.completion_mask.shape
    sizes = {"[batch]": (batch,), "[batch, time]": (batch, time), "[batch, 1]": (batch, 1)}
    is_mask = axis.users in ("selection", "clip", "mask")
    if axis.users == "selection":
        allowed = ["[batch]"]
    elif axis.users == "advantage" or (axis.users == "weight" and axis.reads_whole_batch):
        allowed = ["[batch]", "[batch, time]"]
    elif axis.users in ("anchor", "objective") or (is_mask and axis.reads_whole_batch):
        allowed = ["[batch, time]"]
    else:
        allowed = ["[batch, time]", "[batch, 1]"]
    if is_mask:
        kind = "true and false"
        is_kind = result.dtype == bool
    else:
        kind = "numbers"
        is_kind = _has_numbers(result)
    if is_kind and any(result.shape == sizes[shape] for shape in allowed):
        return result
    found = "a scalar"
    if result.ndim:
        names = {time: "time", batch: "batch"}
        shape = ", ".join(names.get(size, str(size)) for size in result.shape)
        found = f"an array of shape [{shape}]"
    raise UserError(
        "",
        f"must return {' or '.join(allowed)} of {kind}, and returns {found} and dtype {result.dtype}{_place(axis)}",
        "a result for each row or token does not depend on the split into micro-batches",
    )


def _checked_sum_and_count(axis: Axis, result: Any) -> tuple[jax.Array, jax.Array]:
    """Checks that a user's reduction returns two scalars; returns them as arrays."""
    if isinstance(result, tuple | list) and len(result) == 2:
        total, count = (_as_array(axis, number) for number in result)
        if all(number.ndim == 0 and _has_numbers(number) for number in (total, count)):
            return total, count
        found = f"shapes {total.shape}, {count.shape} and dtypes {total.dtype}, {count.dtype}"
    else:
        found = f"shape {_as_array(axis, result).shape}"
    raise UserError("", f"must return a sum and a count, two scalars, and returns {found}{_place(axis)}")


def _as_array(axis: Axis, result: Any) -> jax.Array:
    """The result of a user's function, which may also be a NumPy array or a list, as an array."""
    try:
        return jnp.asarray(result)
    except (TypeError, ValueError) as error:
        raise UserError("", f"must return an array, and returns {result!r:.80}{_place(axis)}") from error


def _has_numbers(result: jax.Array) -> bool:
    return result.dtype != bool and jnp.isrealobj(result)


def _place(axis: Axis) -> str:
    """The file and line of a user's function, for messages; empty if they are unknown."""
    function = axis.function
    if isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)  # jit and other decorators
    if not inspect.isroutine(function):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return f" ({code.co_filename}:{code.co_firstlineno})"
