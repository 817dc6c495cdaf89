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
    if value.denominator != 1 or not 0 <= value <= MOST_TERMS:
        raise Undefined
    return Fraction(math.prod(range(int(value) % 2 or 2, int(value) + 1, 2)))


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


def _exponential(value: Any) -> Any:
    return mpmath.exp(value) if abs(value) < 10**12 else undefined()


def _whole(function: Callable) -> Callable:
    def of(*values: Fraction) -> Fraction:
        if any(value.denominator != 1 for value in values):
            raise Undefined
        result = int(values[0])
        for value in values[1:]:
            result = function(result, int(value))
        return Fraction(result)

    return of


EXACT: dict[str, Callable] = {
    "factorial": _factorial,
    "factorial2": _double_factorial,
    "binomial": _binomial,
    "abs": abs,
    "floor": lambda value: Fraction(value.__floor__()),
    "ceil": lambda value: Fraction(value.__ceil__()),
    "max": max,
    "min": min,
    "gcd": _whole(math.gcd),
    "lcm": _whole(math.lcm),
    "sign": lambda value: Fraction((value > 0) - (value < 0)),
}
FUNCTIONS: dict[str, Callable] = {
    **dict.fromkeys(("factorial2", "gcd", "lcm"), undefined),
    **{"factorial": _factorial, "binomial": _binomial, "abs": abs, "max": max, "min": min, "sign": mpmath.sign},
    **{"floor": mpmath.floor, "ceil": mpmath.ceil, "exp": _exponential, "ln": _logarithm, "log_": _logarithm},
    **{"log": lambda value, base=10: _logarithm(value, base), "lg": lambda value: _logarithm(value, 10)},
    **{"lb": lambda value: _logarithm(value, 2), "norm": lambda value: undefined(), "erf": mpmath.erf},
    **{"re": mpmath.re, "im": mpmath.im, "arg": mpmath.arg, "det": lambda value: mpmath.det(value)},
    **{name: _circular(getattr(mpmath, name)) for name in "sin cos tan sec csc cot".split()},
    **{name: getattr(mpmath, name) for name in "sinh cosh tanh sech csch coth".split()},
    **{f"arc{name}": getattr(mpmath, f"a{name}") for name in "sin cos tan sec csc cot".split()},
    **{f"arc{name}": getattr(mpmath, f"a{name}") for name in "sinh cosh tanh sech csch coth".split()},
    "cis": lambda value: mpmath.cos(value) + mpmath.mpc(0, 1) * mpmath.sin(value),
}
