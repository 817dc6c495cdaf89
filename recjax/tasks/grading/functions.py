"""Values of mathematical functions: exact if all arguments are fractions and EXACT has the function, else by mpmath."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath

MOST_TERMS = 3000  # in a sum or product
_LARGEST = 20_000  # largest integer whose factorial is computed exactly


class Undefined(ArithmeticError):
    """An expression has no value at a point, or its value is too large to compute."""


def floating(value: Any) -> Any:
    if isinstance(value, Fraction):
        return _leading(value.numerator) / _leading(value.denominator)
    return value


def _leading(value: int) -> Any:
    """An integer cut to its leading bits, twice the current precision, as mpmath is slow at reading long integers."""
    rest = max(0, value.bit_length() - 2 * mpmath.mp.prec)
    return mpmath.ldexp(mpmath.mpf(value >> rest), rest)


def undefined(*values: Any) -> Any:
    raise Undefined


def _factorial(value: Any) -> Any:
    if isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= _LARGEST:
        return Fraction(math.factorial(int(value)))
    return mpmath.factorial(floating(value)) if abs(value) < 10**8 else undefined()


def _double_factorial(value: Fraction) -> Fraction:
    if not 0 <= value <= MOST_TERMS:
        raise Undefined
    return Fraction(math.prod(range(_integer(value) % 2 or 2, int(value) + 1, 2)))


def _binomial(n: Any, k: Any) -> Any:
    if all(isinstance(each, Fraction) and each.denominator == 1 and 0 <= each <= _LARGEST for each in (n, k)):
        return Fraction(math.comb(int(n), int(k)))
    return mpmath.binomial(floating(n), floating(k))


def _logarithm(value: Any, base: Any = None) -> Any:
    if value == 0 or base == 0:
        raise Undefined
    return mpmath.log(value) if base is None else mpmath.log(value) / mpmath.log(base)


def _circular(function: Callable) -> Callable:
    def at(value: Any) -> Any:
        if abs(value) > mpmath.mpf(10) ** 30:
            raise Undefined("too large for its digits")
        with mpmath.workdps(mpmath.mp.dps + 35):
            result = function(value)
        return +result

    return at


def _integer(value: Fraction) -> int:
    return int(value) if value.denominator == 1 else undefined()


EXACT: dict[str, Callable] = {
    "factorial": _factorial,
    "factorial2": _double_factorial,
    "binomial": _binomial,
    "abs": abs,
    "floor": lambda value: Fraction(value.__floor__()),
    "ceil": lambda value: Fraction(value.__ceil__()),
    "max": max,
    "min": min,
    "gcd": lambda *values: Fraction(math.gcd(*map(_integer, values))),
    "lcm": lambda *values: Fraction(math.lcm(*map(_integer, values))),
    "sign": lambda value: Fraction((value > 0) - (value < 0)),
}
_CIRCULAR, _HYPERBOLIC = "sin cos tan sec csc cot".split(), "sinh cosh tanh sech csch coth".split()
FUNCTIONS: dict[str, Callable] = {
    **dict.fromkeys(("factorial2", "gcd", "lcm", "norm"), undefined),
    **{"factorial": _factorial, "binomial": _binomial, "abs": abs, "max": max, "min": min},
    **{
        name: getattr(mpmath, name) for name in ["sign", "floor", "ceil", "erf", "re", "im", "arg", "det", *_HYPERBOLIC]
    },
    **{f"arc{name}": getattr(mpmath, f"a{name}") for name in [*_CIRCULAR, *_HYPERBOLIC]},
    **{name: _circular(getattr(mpmath, name)) for name in _CIRCULAR},
    **{"log": lambda value, base=10: _logarithm(value, base), "lg": lambda value: _logarithm(value, 10)},
    **{"lb": lambda value: _logarithm(value, 2), "ln": _logarithm, "log_": _logarithm},
    "exp": lambda value: mpmath.exp(value) if abs(value) < 10**12 else undefined(),
    "cis": lambda value: mpmath.cos(value) + mpmath.mpc(0, 1) * mpmath.sin(value),
}
