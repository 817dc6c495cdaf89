"""Equality of expressions by their values at random points, exact or to many digits.

Expressions that differ at one point are not equal. Differences are relative to the magnitude of the values. Values are
real numbers: an even root or a logarithm of a negative number is undefined, and points with an undefined side are
skipped. Expressions that contain i, or are real at too few points, are compared as complex numbers.

Some nodes have borders, at which a value jumps, bends or ends: bars, roots, logarithms, floors, maxima. Expressions
with such nodes are tested at more points: on both sides of the borders and beyond them, and at whole numbers for
letters that count.
"""

import functools
import itertools
import math
import operator
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import mpmath

from recjax.grading.syntax import CAPITAL, MARKED, Node, contains, difference, names, walk

_DIGITS = 50  # The first comparison has this precision.
_MORE_DIGITS = 150  # The second comparison, at two points, has this precision.
_MANY_DIGITS = 1500  # The second comparison has this precision if one side is a constant.
_APPROXIMATE = 1e-10  # relative error of infinite sums, integrals and limits
_NO_FACTORS = (0, mpmath.inf, -mpmath.inf)
_LARGEST_BITS = 25_000
_MANY_TERMS = 300
_AGREEMENTS = 4
_FEW_POINTS = 14
_MOST_POINTS = 300  # Points are tested until _AGREEMENTS of them define both expressions.
_ONE_SIDED = 3  # points at which only the side with bars, or only the side without them, is defined
_MOST_BORDERS = 8  # Points lie around this number of borders.
_MOST_TERMS = 3000  # A sum or product has at most this number of terms.
_LARGEST = 50_000  # largest integer whose factorial is computed exactly
_LONGEST_BITS = 5000  # _MANY_DIGITS have about this number of bits.
_PRIME = 2**127 - 1
# Exceptions of mpmath if a function has no value, or cannot take a matrix.
_WITHOUT_VALUE = (ArithmeticError, ValueError, TypeError, AttributeError, IndexError, MemoryError)
_WITHOUT_VALUE += (mpmath.libmp.NoConvergence,)
_CONSTANTS = {r"\pi": lambda: mpmath.mp.pi, "e": lambda: mpmath.mp.e, r"\infty": lambda: mpmath.mp.inf}
# Vectors are skew-symmetric matrices A, B: their cross product is AB - BA, their dot product -tr(AB) / 2. Of the unit
# vectors, these are the parts above the diagonal.
UNIT_VECTORS = {
    r"\hat{i}": [[0, 0, 0], [0, 0, -1], [0, 0, 0]],
    r"\hat{j}": [[0, 0, 1], [0, 0, 0], [0, 0, 0]],
    r"\hat{k}": [[0, -1, 0], [0, 0, 0], [0, 0, 0]],
}
_COUNTS = {"floor", "ceil", "factorial", "factorial2", "binomial", "gcd", "lcm", r"\bmod"}
_BORDERED = set("abs norm sign floor ceil binomial gcd lcm ln log lg lb log_".split()) | {r"\bmod"}
_BORDERED |= set("arcsin arccos arcsec arccsc arccosh arcsech arctanh arccoth".split())
# Letters that are lengths, masses or speeds in formulas of several letters with roots: c in the root of 1-v²/c².
_POSITIVE = {*"cdghklmrCDEGHLMNPRSTVW", r"\lambda", r"\mu", r"\rho", r"\sigma", r"\omega", r"\ell", r"\hbar"}
_CONJUGATES = {"z": r"\overline{z}", "w": r"\overline{w}"}
_COMPARISONS = {"<": operator.lt, ">": operator.gt, r"\le": operator.le, r"\ge": operator.ge}
_COMPARISONS |= {"=": operator.eq, r"\neq": operator.ne}
_UNORDERED = {r"\cup", r"\cap", r"\wedge", r"\vee", "set", "max", "min", "gcd", "lcm"}


def equal(a: Node, b: Node) -> bool:
    """True if two expressions are equal at all tested points at which both are defined."""
    is_complex = contains((a, b), "i", r"\text{i}", "cis") or _have_complex_letters(a, b)
    if not is_complex:
        verdict = _equal(a, b, is_complex=False)
        if verdict is not None:
            return verdict
    return bool(_equal(a, b, is_complex=True))


def _have_complex_letters(a: Node, b: Node) -> bool:
    """True if the only unknowns are z and w, with bars or parts as complex numbers have them."""
    unknown = names(a) | names(b)
    if not unknown or not unknown.issubset({*_CONJUGATES, *_CONJUGATES.values()}):
        return False
    return contains((a, b), "abs", "re", "im", "arg", *_CONJUGATES.values())


def _equal(a: Node, b: Node, is_complex: bool) -> bool | None:
    """`equal` with real or complex arithmetic; None if too few tested points define both expressions."""
    unknown = names(a) | names(b)
    agreed = 0
    one_sided = 0
    only_one_has_bars = contains(a, "abs") is not contains(b, "abs")
    matrices = ordered(a, b)
    if not matrices:
        matrices = dict.fromkeys(_unordered_matrices(a, b), False)
    evaluation = _Evaluation({}, is_complex)
    value_a = None
    value_b = None
    points = _Points(a, b, matrices, is_complex)
    second_digits = _MORE_DIGITS if names(a) and names(b) else _MANY_DIGITS
    for tested, point in enumerate(points, start=1):
        precisions = [_DIGITS]
        if agreed < 2:
            precisions.append(second_digits)
        for digits in precisions:
            with mpmath.workdps(digits):
                evaluation = _Evaluation(point, is_complex)
                value_a = evaluation.defined(a)
                value_b = evaluation.defined(b)
                if value_a is None or value_b is None:
                    if value_a is not value_b:  # One side has a value.
                        one_sided += 1
                        if contains(b, "cases") and (value_b is None or contains(a, "cases")):
                            return False  # A case is missing.
                    break
                is_final = digits != _DIGITS or evaluation.is_slow
                if not evaluation.close(value_a, value_b, is_final):
                    return False
                if evaluation.is_slow:
                    break
        if only_one_has_bars and not is_complex and one_sided == _ONE_SIDED:
            return False  # ln x does not equal ln|x|.
        if value_a is not None and value_b is not None:
            agreed += 1
        if agreed >= _AGREEMENTS and (evaluation.is_slow or tested >= points.least):
            break
        if evaluation.is_slow and tested >= _FEW_POINTS:
            break
    needed = _AGREEMENTS if unknown else 1
    if agreed >= needed:
        return True
    if agreed and is_complex:
        return False
    return None


def _unordered_matrices(a: Node, b: Node) -> set[str]:
    """The unknowns that are matrices although no product shows it.

    These are all capitals and transposed names; without a transpose, several capitals, if one has an inverse.
    """
    unknown = names(a) | names(b)
    capitals = {name for name in unknown if CAPITAL.match(name)}
    transposed = [node for node in walk((a, b)) if node.kind == "call" and node.args[0] == "transpose"]
    if transposed:
        return capitals.union(*map(names, transposed))
    if contains((a, b), "^-1") and capitals == unknown and len(capitals) != 1:
        return capitals
    return set()


def ordered(a: Node, b: Node) -> dict[str, bool]:
    """The unknowns that stand for matrices because the order of their products matters; True for vectors.

    These are marked letters, and capitals that both expressions multiply by a cross, or that one expression multiplies
    in both orders (AB and BA).
    """
    marked = {name for name in names(a) | names(b) if MARKED.match(name)}
    crossed_in_a = [node for node in walk(a) if node.args[0] in ("cross", "dot")]
    crossed_in_b = [node for node in walk(b) if node.args[0] in ("cross", "dot")]
    matrices = set(marked)
    if len(marked) == 1 and not crossed_in_a and not crossed_in_b and marked.isdisjoint(UNIT_VECTORS):
        matrices = set()
    factors = _swapped_factors(a) | _swapped_factors(b)
    if crossed_in_a and crossed_in_b:
        factors |= names((*crossed_in_a, *crossed_in_b))
    matrices.update(name for name in factors if CAPITAL.match(name))
    has_vectors = contains((a, b), "cross", "dot", "abs", "norm", *UNIT_VECTORS) and not contains((a, b), "transpose")
    return {name: name in marked and has_vectors for name in matrices}


def _swapped_factors(tree: Node) -> set[str]:
    """The unknowns of factors that an expression multiplies in both orders, as in AB - BA."""
    pairs = set()
    for node in walk(tree):
        if node.kind == "mul":
            pairs.update(itertools.pairwise(node.args))
    swapped = set()
    for first, second in pairs:
        if first != second and (second, first) in pairs:
            swapped |= names((first, second))
    return swapped


def ratio(a: Node, b: Node) -> int | None:
    """The sign of a / b if a / b is constant and not 0; None otherwise, and for expressions without unknowns."""
    quotients = []
    with mpmath.workdps(_DIGITS):
        points = _Points(a, b, {}, is_complex=False)
        for tested, point in enumerate(points, start=1):
            evaluation = _Evaluation(point, contains((a, b), "i"))
            numerator = evaluation.defined(a)
            denominator = evaluation.defined(b)
            if numerator is None or denominator is None or denominator == 0:
                continue
            if isinstance(numerator, Fraction) and isinstance(denominator, Fraction):
                quotients.append(numerator / denominator)
            elif _is_long(numerator) or _is_long(denominator):
                continue
            else:
                quotients.append(floating(numerator) / floating(denominator))
            if not evaluation.close(quotients[0], quotients[-1], is_final=True) or quotients[0] in _NO_FACTORS:
                return None
            if tested >= points.least and len(quotients) >= _AGREEMENTS:
                break
    if len(quotients) < _AGREEMENTS:
        return None
    return 1 if quotients[0].real > 0 else -1


def is_ending_decimal(node: Node) -> bool:
    """True if a constant is a whole number or an ending decimal."""
    with mpmath.workdps(_DIGITS):
        value = _Evaluation({}, is_complex=False).defined(node)
    if not isinstance(value, Fraction):
        return False
    return pow(10, value.denominator.bit_length(), value.denominator) == 0


def decimal(node: Node) -> Fraction | None:
    """A constant's value, computed with 50 digits; None if it has no value or is not a real number."""
    with mpmath.workdps(_DIGITS):
        value = _Evaluation({}, False).defined(node)
        if value is None or isinstance(value, Fraction):
            return value
        if not isinstance(value, mpmath.mpf) or not mpmath.isfinite(value):
            return None
        return Fraction(str(mpmath.nstr(value, 45)))


# --- Points.


class _Points:
    """Points, as values of the unknowns of two expressions.

    The first points are positive, of both signs, small and large, fractions and whole numbers. If the expressions have
    borders, the next points lie around and beyond these borders. The last points are for expressions that most points
    leave undefined: `least` points are enough for all other expressions.
    """

    def __init__(self, a: Node, b: Node, matrices: Mapping[str, bool], is_complex: bool):
        nodes = list(walk((a, b)))
        self.trees = (a, b)
        self.unknown = sorted(names(a) | names(b))
        self.matrices = matrices
        self.counting = set().union(*map(_counted, nodes))
        self.positive = set()
        self.complex = set()
        if is_complex and _have_complex_letters(a, b):
            self.complex = set(_CONJUGATES)
        if contains((a, b), "sum", "product", "factorial", "factorial2", "binomial", "gcd", "lcm"):
            self.positive |= self.counting  # A sum without terms is 0, but its closed form may differ.
        self.least = _FEW_POINTS if self.unknown else 1
        self.most = _MOST_POINTS if self.unknown else 1
        borders = []
        for node in nodes:
            borders.extend(border for border in _borders(node) if not names(border).isdisjoint(self.unknown))
        if not borders:
            return
        has_steps = contains((a, b), "floor", "ceil", r"\bmod", "cases")
        self.around = {}
        for name in self.unknown:
            self.around[name] = _around_borders(name, borders, name in self.counting, has_steps)
        self.least += max(map(len, self.around.values())) * min(2, len(self.unknown))
        if len(self.unknown) > 1 and not matrices and not is_complex:
            self._find_positive()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(self.most):
            point = {name: self._value(name, index) for name in self.unknown}
            for name in self.complex:
                draw = random.Random(f"{name} {index}")
                point[name] = mpmath.mpc(draw.uniform(-9, 9), draw.uniform(-9, 9))
                point[_CONJUGATES[name]] = point[name].conjugate()
            yield point

    def _find_positive(self) -> None:
        """Finds unknowns that are positive by what they stand for.

        h and g are positive in the root of 2h/g: if only one of them is negative, the root is undefined.
        """
        positive = set(self.unknown)
        for name in self.unknown:
            for index in range(_FEW_POINTS):
                point = {other: abs(self._value(other, index)) for other in self.unknown}
                evaluation = _Evaluation(point | {name: -point[name]}, is_complex=False)
                is_defined = any(evaluation.defined(tree) is not None for tree in self.trees)
                if is_defined or evaluation.is_slow:
                    positive.remove(name)
                    break
        if not {"x", "y", "z"}.intersection(self.unknown) and not contains(self.trees, "abs", "sign", "max", "min"):
            positive |= {name for name in self.unknown if name.partition("_")[0] in _POSITIVE}
        self.positive |= positive

    def _value(self, name: str, index: int) -> Any:
        counts = name in self.counting
        draw = random.Random(zlib.crc32(f"{name} {index}".encode()))
        if name in self.matrices:
            if name in UNIT_VECTORS:
                matrix = mpmath.matrix(UNIT_VECTORS[name])
            else:
                matrix = mpmath.matrix(3, 3)
                for row, column in itertools.product(range(3), range(3)):
                    matrix[row, column] = draw.randrange(-9, 10)
            is_vector = self.matrices[name]
            if is_vector:
                return matrix - matrix.T
            return matrix
        if index < _FEW_POINTS:
            value = _first_value(name, index, counts)
        elif index < self.least:
            values = self.around[name]
            value = values[(index - _FEW_POINTS) % len(values)]
        elif counts:
            value = Fraction(draw.randrange(1, 50))
        else:  # The unknowns of one point have different magnitudes.
            value = Fraction(2 * draw.randrange(1, 512) + 1, draw.choice((64, 1024, 4096, 32768, -512)))
        if name in self.positive:
            if value == 0:
                return Fraction(1)
            return abs(value)
        return value


def _borders(node: Node) -> list[Node]:
    """The expressions whose sign, or whose integer part, decides how a node is computed."""
    if node.kind == "pow":
        base, power = node.args
        is_whole = power.kind == "number" and power.args[0].denominator == 1
        return [] if is_whole else [base]
    if node.kind == "cases":
        differences = []
        for _, condition in node.args:
            if condition.kind == "relation":
                _, sides = condition.args
                differences.extend(difference(*pair) for pair in itertools.pairwise(sides))
        return differences
    if node.kind != "call":
        return []
    name, *arguments = node.args
    if name not in ("max", "min") and name not in _BORDERED:
        return []
    differences = [difference(*pair) for pair in itertools.combinations(arguments[:4], 2)]
    if name in ("max", "min"):
        return differences
    return arguments + differences


def _counted(node: Node) -> set[str]:
    """The unknowns that a node makes integers: n in n! and in the floor of n/2, but not x in the floor of x."""
    if node.kind in ("sum", "product"):
        return names(node.args[1:3])
    if node.kind == "pow" and node.args[0].kind == "number" and node.args[0].args[0] < 0:
        return names(node.args[1])
    if node.kind != "call" or node.args[0] not in _COUNTS:
        return set()
    if node.args[0] in ("floor", "ceil"):
        parts = set()
        for index in range(_FEW_POINTS):
            point = {name: _first_value(name, index, counts=True) for name in names(node)}
            value = _Evaluation(point, is_complex=False).defined(node.args[1])
            if isinstance(value, Fraction | mpmath.mpf):
                parts.add(mpmath.nstr(floating(value) % 1, 10))
        if len(parts) < 2:
            return set()
    return names(node)


def _around_borders(name: str, borders: list[Node], counts: bool, has_steps: bool) -> list[Fraction]:
    """Values of an unknown on both sides of borders and beyond all of them, in a random order.

    Borders are the zeros of linear expressions, and the constants of all expressions.
    """
    zeros = []
    for border in borders:
        if names(border) == {name}:
            at_0 = _Evaluation({name: Fraction(0)}, False).defined(border)
            at_1 = _Evaluation({name: Fraction(1)}, False).defined(border)
            if isinstance(at_0, Fraction) and isinstance(at_1, Fraction) and at_0 != at_1:
                zeros.append(at_0 / (at_0 - at_1))
    numbers = {abs(node.args[0]) for node in walk(tuple(borders)) if node.kind == "number"}
    constants = sorted(numbers, reverse=True)
    edges = zeros + constants + [-constant for constant in constants]
    edges = list(dict.fromkeys(edges))[:_MOST_BORDERS]
    largest = 1 + max(map(abs, edges), default=Fraction(0))
    draw = random.Random(name)
    # Distances between 0 and 1, whose odd numerators keep the values off whole numbers.
    distances = [Fraction(2 * draw.randrange(512) + 1, 1024) for _ in range(16)]
    beyond = [largest * (1 + 16 * distance) for distance in distances[:3]]
    values = _with_negatives(beyond)
    if counts:
        values = [Fraction(round(value)) for value in values]
        values += map(Fraction, range(-5, 25))
        for edge, times in itertools.product(edges, (1, 2, 3)):
            multiple = times * math.floor(edge)
            values += [Fraction(multiple - 1), Fraction(multiple), Fraction(multiple + 1)]
    else:
        values += _with_negatives([4 * distance for distance in distances[3:8]])
        near_edges = _with_negatives([distances[8], distances[9] / 128])
        for edge in edges:
            values += [edge + distance for distance in near_edges]
        if has_steps:
            values += edges
            values += map(Fraction, range(-4, 5))
    draw.shuffle(values)
    return values


def _with_negatives(values: list[Fraction]) -> list[Fraction]:
    return values + [-value for value in values]


def _first_value(name: str, index: int, counts: bool) -> Fraction:
    """A value of a kind that depends on the index: positive, of both signs, small, large, or an integer."""
    draw = random.Random(zlib.crc32(f"{name} {index}".encode()))
    if counts:
        return Fraction(1 + random.Random(name).sample(range(_FEW_POINTS), _FEW_POINTS)[index])
    odd = 2 * draw.randrange(1, 512) + 1  # With an even denominator, the value is no odd root as an exponent.
    sign = draw.choice((-1, 1))
    fractions = [Fraction(odd, 256), Fraction(odd, 1024), Fraction(sign * odd, 1024), Fraction(odd, 32)]
    # The kinds of the _FEW_POINTS first values: the fractions twice, then integers.
    integers = [draw.randrange(1, most) for most in (12, 12, 7, 5)]
    integers += [draw.choice((-1, 1)) * draw.randrange(1, 9) for _ in range(2)]
    values = fractions + fractions + integers
    return Fraction(values[index])


# --- Functions.


class Undefined(ArithmeticError):
    """An expression has no value at a point, or its value is too large to compute."""


class _Long(NamedTuple):
    """A rational number with too many digits to keep: rounded, and modulo a prime, by which n and n + 1 differ."""

    rounded: Any
    residue: int


def _residue(value: "Fraction | _Long") -> int:
    if isinstance(value, _Long):
        return value.residue
    return value.numerator * pow(value.denominator, -1, _PRIME) % _PRIME


def floating(value: Any) -> Any:
    """A fraction as mpmath's number with the current precision; other values unchanged.

    Raises:
        Undefined: the number has more digits than the most precise comparison; sums to infinity round all numbers.
    """
    if _is_long(value) and mpmath.mp.dps >= _DIGITS:
        raise Undefined
    return _rounded(value)


def _is_long(value: Any) -> bool:
    if isinstance(value, Fraction):
        return _bits(value) > _LONGEST_BITS
    return isinstance(value, _Long)


def _rounded(value: Any) -> Any:
    if isinstance(value, Fraction):
        return _leading(value.numerator) / _leading(value.denominator)
    if isinstance(value, _Long):
        return value.rounded
    return value


def _leading(value: int) -> Any:
    """An integer cut to its leading bits, twice the current precision, as mpmath is slow at reading long integers."""
    dropped_bits = max(0, value.bit_length() - 2 * mpmath.mp.prec)
    return mpmath.ldexp(mpmath.mpf(value >> dropped_bits), dropped_bits)


def _whole(value: Fraction) -> int:
    if value.denominator != 1:
        raise Undefined
    return int(value)


def _factorial(value: Any) -> Any:
    if isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= _LARGEST:
        return Fraction(math.factorial(int(value)))
    if not abs(value) < _LARGEST:  # The value is too large, or is not a number.
        raise Undefined
    return mpmath.factorial(floating(value))


def _double_factorial(value: Any) -> Fraction:
    if not 0 <= value <= _MOST_TERMS:
        raise Undefined
    return Fraction(math.prod(range(_whole(value), 0, -2)))


def _binomial(n: Any, k: Any) -> Any:
    if _is_natural(n) and _is_natural(k):
        if max(0, min(k, n - k)) * _bits(n) >= 8 * _LARGEST:
            raise Undefined
        return Fraction(math.comb(int(n), int(k)))
    return mpmath.binomial(floating(n), floating(k))


def _is_natural(value: Any) -> bool:
    return isinstance(value, Fraction) and value.denominator == 1 and value >= 0


def _dot(a: Any, b: Any) -> Any:
    return sum((a * b)[axis, axis] for axis in range(3)) / -2


def _magnitude(value: Any) -> Any:
    if isinstance(value, mpmath.matrix):
        return mpmath.sqrt(_dot(value, value))
    return abs(value)


def _norm(value: Any) -> Any:
    if not isinstance(value, mpmath.matrix):
        raise Undefined
    return _magnitude(value)


def _cross(a: Any, b: Any) -> Any:
    if isinstance(a, mpmath.matrix):
        return a * b - b * a
    return a * b


def _exponential(value: Any) -> Any:
    if not abs(value) < 10**12:  # The value is too large, or is not a number.
        raise Undefined
    return mpmath.exp(value)


def _logarithm(value: Any, base: Any = None) -> Any:
    if value == 0 or base == 0:
        raise Undefined
    if base is None:
        return mpmath.log(value)
    return mpmath.log(value) / mpmath.log(base)


_CIRCULAR = "sin cos tan sec csc cot".split()
_HYPERBOLIC = "sinh cosh tanh sech csch coth".split()
# These functions take fractions, and are exact then. FUNCTIONS take mpmath's numbers.
_EXACT: dict[str, Callable] = {
    "factorial": _factorial,
    "binomial": _binomial,
    "factorial2": _double_factorial,
    "abs": _magnitude,
    "^-1": lambda value: value**-1,
    r"\bmod": lambda value, modulus: value - modulus * (value / modulus).__floor__(),
    "max": max,
    "min": min,
    "floor": lambda value: Fraction(value.__floor__()),
    "ceil": lambda value: Fraction(value.__ceil__()),
    "gcd": lambda *values: Fraction(math.gcd(*map(_whole, values))),
    "lcm": lambda *values: Fraction(math.lcm(*map(_whole, values))),
}
FUNCTIONS: dict[str, Callable] = {
    **_EXACT,
    # A logarithm of 8 to base 2 may be a little less than 3.
    "floor": lambda value: mpmath.floor(value + mpmath.mpf(10) ** (10 - mpmath.mp.dps)),
    "ceil": lambda value: mpmath.ceil(value - mpmath.mpf(10) ** (10 - mpmath.mp.dps)),
    r"\Gamma()": mpmath.gamma,
    **{name: getattr(mpmath, name) for name in "sign erf re im arg det".split() + _CIRCULAR + _HYPERBOLIC},
    **{f"arc{name}": getattr(mpmath, f"a{name}") for name in [*_CIRCULAR, *_HYPERBOLIC]},
    "log": lambda value, base=10: _logarithm(value, base),
    "lg": lambda value: _logarithm(value, 10),
    "lb": lambda value: _logarithm(value, 2),
    "ln": _logarithm,
    "log_": _logarithm,
    "dot": _dot,
    "cross": _cross,
    "norm": _norm,
    "exp": _exponential,
    "cis": lambda value: mpmath.cos(value) + mpmath.mpc(0, 1) * mpmath.sin(value),
}


# --- Evaluation.


def _exactly(operation: Callable) -> Callable:
    """Makes an operation exact on two fractions, and modulo a prime once the exact fractions become long."""

    def apply(a: Any, b: Any) -> Any:
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            value = operation(a, b)
            if _bits(value) < _LARGEST_BITS:
                return value
            return _Long(_rounded(value), _residue(value))
        if isinstance(a, Fraction | _Long) and isinstance(b, Fraction | _Long):
            return _Long(operation(_rounded(a), _rounded(b)), operation(_residue(a), _residue(b)) % _PRIME)
        return operation(floating(a), floating(b))

    return apply


_added = _exactly(operator.add)
_multiplied = _exactly(operator.mul)


class _Evaluation:
    """Evaluation at one point; a value is a Fraction if exact, else mpmath's real or complex number or matrix."""

    def __init__(self, point: Mapping[str, Any], is_complex: bool):
        self.point = dict(point)
        self.is_complex = is_complex
        self.largest = mpmath.mpf(0)
        self.approximate = False
        self.terms = 0

    def close(self, a: Any, b: Any, is_final: bool) -> bool:
        """True if two values are equal within the current precision.

        Terms that cancel leave noise in proportion to their size. A final comparison allows only for small noise.
        """
        if isinstance(a, Fraction) and isinstance(b, Fraction) and not self.approximate:
            return a == b
        if _is_long(a) or _is_long(b):
            if not isinstance(a, Fraction | _Long) or not isinstance(b, Fraction | _Long):
                return False
            return _residue(a) == _residue(b)
        if isinstance(a, mpmath.matrix) and isinstance(b, mpmath.matrix):
            if (a.rows, a.cols) != (b.rows, b.cols):
                return False
            return all(self.close(x, y, is_final) for x, y in zip(a, b, strict=True))
        if isinstance(a, mpmath.matrix) or isinstance(b, mpmath.matrix):
            return False
        a = floating(a)
        b = floating(b)
        if a == b or mpmath.isinf(a) or mpmath.isinf(b):
            return a == b
        relative = _APPROXIMATE if self.approximate else mpmath.mpf(10) ** (15 - mpmath.mp.dps)
        noise = self.largest * mpmath.mpf(10) ** (10 - mpmath.mp.dps)
        if is_final and noise > mpmath.mpf(10) ** (-mpmath.mp.dps / 2):
            noise = mpmath.mpf(0)
        return abs(a - b) <= max(relative * max(abs(a), abs(b)), noise)

    @property
    def is_slow(self) -> bool:
        """True if evaluation is slow, so that few points must suffice."""
        return self.approximate or self.terms > _MANY_TERMS

    def defined(self, node: Node) -> Any:
        """A node's value; None if it is undefined."""
        try:
            value = self.value(node)
        except _WITHOUT_VALUE:
            return None
        if isinstance(value, mpmath.mpf | mpmath.mpc) and mpmath.isnan(value):
            return None
        return value

    def value(self, node: Node) -> Any:
        """A node's value.

        Raises:
            ArithmeticError, ValueError, TypeError: the value is undefined.
        """
        if node.kind == "number":
            return node.args[0]
        if node.kind == "name":
            (name,) = node.args
            if name in self.point:
                return self.point[name]
            if name == "i" and self.is_complex:
                return mpmath.mpc(0, 1)
            if name not in _CONSTANTS:
                raise Undefined
            return +_CONSTANTS[name]()
        if node.kind == "mul":
            return functools.reduce(_multiplied, map(self.value, node.args))
        if node.kind == "add":
            return self._add(*map(self.value, node.args))
        if node.kind == "pow":
            return self._pow(*map(self.value, node.args))
        if node.kind == "matrix":
            rows = []
            for row in node.args:
                rows.append([floating(self.value(entry)) for entry in row])
            return mpmath.matrix(rows)
        if node.kind == "cases":
            return self._case_value(node.args)
        if node.kind == "relation":
            return self._opaque(node.args[0], [self.value(side) for side in node.args[1]])
        if node.kind == "call":
            name, *arguments = node.args
            return self._call(name, [self.value(argument) for argument in arguments])
        return self._over(node.kind, *node.args)

    def _call(self, name: str, values: list[Any]) -> Any:
        """The value of a function, which is unknown if FUNCTIONS has no such name."""
        if name == "transpose" and isinstance(values[0], mpmath.matrix):
            return values[0].T
        if name not in FUNCTIONS:
            return self._opaque(name, values)
        if name in _EXACT and all(isinstance(value, Fraction) for value in values):
            return _EXACT[name](*values)
        values = [floating(value) for value in values]
        more_digits = 0
        if name in _CIRCULAR:
            if abs(values[0]) > mpmath.mpf(10) ** 30:
                raise Undefined("too large for its digits")
            more_digits = 35
        with mpmath.workdps(mpmath.mp.dps + more_digits):
            value = FUNCTIONS[name](*values)
        if name in _CIRCULAR:
            value = +value  # Unary plus rounds to the current precision.
        if isinstance(value, mpmath.mpc) and not self.is_complex:
            raise Undefined
        return value

    def _case_value(self, cases: tuple[tuple[Node, Node], ...]) -> Any:
        """The value of the case that holds; undefined if none holds, or if several hold and differ."""
        values = []
        for case, condition in cases:
            if condition.kind == "relation":
                operators, sides = condition.args
                pairs = itertools.pairwise(map(self.value, sides))
                holds = all(_COMPARISONS[mark](*pair) for mark, pair in zip(operators, pairs, strict=True))
            else:  # The last case is for all other points.
                holds = not values
            if holds:
                values.append(self.value(case))
        if not values or not all(self.close(values[0], value, is_final=True) for value in values):
            raise Undefined
        return values[0]

    def _add(self, *terms: Any) -> Any:
        if len({isinstance(term, mpmath.matrix) for term in terms}) > 1:
            raise Undefined("a matrix and a number")
        total = functools.reduce(_added, terms)
        if not isinstance(total, Fraction | _Long | mpmath.matrix):
            sizes = [abs(floating(term)) for term in terms]
            for size in sizes:
                if mpmath.isfinite(size):
                    self.largest = max(self.largest, size)
        return total

    def _pow(self, base: Any, power: Any) -> Any:
        if isinstance(base, mpmath.matrix):
            if power != int(power) or abs(power) >= 20:
                raise Undefined
            return base ** int(power)
        if base == 0 and not power.real > 0:
            raise Undefined
        rounded = _rounded(base)
        if base != 0 and abs(power) * (abs(mpmath.mag(rounded)) + 1) > 10**12:
            if self.approximate and power * mpmath.log(abs(rounded)) < 0:
                return mpmath.mpf(0)
            raise Undefined("too large")
        if isinstance(power, Fraction) and power.denominator == 1:
            if isinstance(base, Fraction) and abs(power) * _bits(base) < _LARGEST_BITS:
                return base**power.numerator
            if isinstance(base, Fraction | _Long):
                return _Long(mpmath.power(rounded, power.numerator), pow(_residue(base), power.numerator, _PRIME))
            return mpmath.power(base, power.numerator)
        if base.real < 0 and not self.is_complex:
            if not isinstance(power, Fraction) or power.denominator % 2 == 0:
                raise Undefined
            return (-1) ** power.numerator * mpmath.power(floating(-base), floating(power))
        return mpmath.power(floating(base), floating(power))

    def _opaque(self, name: Any, values: list[Any]) -> Fraction:
        """A pseudo-random number that stands for an unknown function's value; equal for equal arguments."""
        texts = []
        for value in values:
            if isinstance(value, Fraction) and _bits(value) > 80:
                texts.append(str(value))
            else:
                texts.append(str(mpmath.nstr(floating(value), 25)))
        if name in _UNORDERED:
            texts.sort()
        draw = random.Random(zlib.crc32(f"{name} {texts}".encode()))
        return Fraction(draw.randrange(10**20, 2 * 10**20), 10**20)

    def _over(self, kind: str, name: str, lower: Node, upper: Node | None, body: Node) -> Any:
        """A sum, product, integral or limit over a variable."""
        low = self.value(lower)
        high = None
        if upper is not None:
            high = self.value(upper)
        has_unknowns = any(_depends_on_unknown(name, node) for node in walk(body))
        before = self.point.get(name)
        try:
            if has_unknowns:
                self.point[name] = Fraction(random.Random(name).randrange(10**9), 10**9)
                upper_value = 0 if high is None else high
                return self._opaque((kind, name), [low, upper_value, self.value(body)])

            def inside(value: Any) -> Any:
                self.point[name] = value
                return self.value(body)

            return self._computed(kind, inside, low, high)
        finally:
            self.point.pop(name, None)
            if before is not None:
                self.point[name] = before

    def _computed(self, kind: str, inside: Callable[[Any], Any], low: Any, high: Any) -> Any:
        """A finite sum or product exactly; numerically, one with infinitely many terms, an integral or a limit."""
        if kind in ("sum", "product") and isinstance(low, Fraction) and isinstance(high, Fraction):
            if low.denominator != 1 or high.denominator != 1 or high < low - 1:
                raise Undefined
            self.terms += int(high - low) + 1
            if self.terms > _MOST_TERMS:
                raise Undefined("too many terms")
            total: Any = Fraction(kind == "product")
            for index in range(int(low), int(high) + 1):
                term = inside(Fraction(index))
                if kind == "sum":
                    total = self._add(total, term)
                else:
                    total = _multiplied(total, term)
            return total
        self.approximate = True
        with mpmath.workdps(20):

            def at(value: Any) -> Any:
                if kind in ("sum", "product"):
                    value = Fraction(int(value))
                return floating(inside(value))

            low = floating(low)
            if high is not None:
                high = floating(high)
            if kind == "integral":
                result, error = mpmath.quad(at, [low, high], error=True)
                if error > _APPROXIMATE * abs(result) and mpmath.isfinite(low) and mpmath.isfinite(high):
                    # An integrand such as |x-1| needs several parts.
                    result, error = mpmath.quad(at, mpmath.linspace(low, high, 13), error=True)
                if not error <= _APPROXIMATE * abs(result):
                    raise Undefined
                return result
            if kind == "limit":
                return mpmath.limit(at, low)
            if kind == "sum":
                return mpmath.nsum(at, [low, high])
            return mpmath.nprod(at, [low, high])


def _depends_on_unknown(variable: str, node: Node) -> bool:
    """True for unknown functions, and for names with the variable as index, such as a_k."""
    if node.kind == "call":
        return node.args[0] not in FUNCTIONS
    if node.kind == "name":
        return variable in node.args[0].partition("_")[2]
    return False


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
