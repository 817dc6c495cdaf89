"""Units after a number: a table of units, and parsing of a text into a unit, a power of units, or a rate."""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import NamedTuple


class Unit(NamedTuple):
    """`factor` × the product of `dimensions`, sorted pairs of base unit and power.

    `offset` is added before the factor, for temperatures. Empty dimensions: a unit without meaning, such as "units".
    """

    factor: Fraction
    dimensions: tuple[tuple[str, int], ...]
    offset: Fraction = Fraction(0)


# Rows of a table are names in the singular and, unless the unit is a base unit, its size in units of earlier rows.
# Units with SI prefixes; the first name is a symbol.
_SI = """
m meter metre; g gram gramme; s second; A ampere amp; K kelvin; mol mole; cd candela; Hz hertz = 1 /s
N newton = 1 kg m/s^2; Pa pascal = 1 N/m^2; J joule = 1 N m; W watt = 1 J/s; C coulomb = 1 s*A; V volt = 1 W/A
F farad = 1 C/V; Ω ohm = 1 V/A; S siemens = 1 /Ω; Wb weber = 1 V s; T tesla = 1 Wb/m^2; H henry = 1 Wb/A
sr steradian; lm lumen = 1 cd sr; lx lux = 1 cd/m^2; Bq becquerel = 1 /s; Gy gray = 1 J/kg; Sv sievert = 1 J/kg
L liter litre = 0.001 m^3; l liter litre = 0.001 m^3; M molar = 1 mol/L; Wh watt-hour watthour = 3600 J
eV electronvolt electron-volt = 1.602176634e-19 J; Ah ampere-hour amp-hour = 3600 C; bar bar = 100000 Pa
cal calorie cals; b bit; B byte = 8 b; Ci curie = 3.7e10 Bq; dyn dyne = 1e-5 N; erg erg = 1e-7 J
G gauss = 1e-4 T
"""
_OTHER = """
in inch = 0.0254 m; ft foot feet = 0.3048 m; yd yard = 0.9144 m; mi mile = 1609.344 m; nautical-mile nmi = 1852 m
light-year lightyear ly = 9460730472580800 m; parsec pc = 30856775814913673 m; furlong = 201.168 m; micron = 1e-6 m
astronomical-unit au = 149597870700 m; å angstrom ångström = 1e-10 m; acre = 4046.8564224 m^2; ha hectare = 10000 m^2
cc = 1e-6 m^3; gal gallon = 3.785411784 L; qt quart = 0.946352946 L; pt pint = 0.473176473 L; cup = 0.2365882365 L
tbsp tablespoon = 14.78676478125 mL; tsp teaspoon = 4.92892159375 mL; ounce oz floz = 29.5735295625 mL
bushel = 35.23907016688 L; barrel bbl = 158.987294928 L; sec secs = 1 s; min mins minute = 60 s
h hr hrs hour = 3600 s; day = 86400 s; week wk = 604800 s; fortnight = 1209600 s; month; yr yrs year = 12 month
decade = 120 month; century = 1200 month; kilo = 1000 g; t ton tonne = 1000 kg; lb lbs pound = 453.59237 g
oz ounce = 28.349523125 g; stone = 6350.29318 g; carat ct = 0.2 g; amu dalton = 1/602214076000000000000000 g
degree ° deg; radian rad; turn revolution rotation rev; db decibel; ppm; ppb = 0.001 ppm; pixel px; baud
percent %; dollar $ buck usd us$; ¢ cent penny = 1/100 dollar; nickel = 1/20 dollar; dime = 1/10 dollar
quarter = 1/4 dollar; € euro eur; gbp £ pound; pence = 1/100 gbp; ¥ yen jpy; yuan rmb cny; ₹ rupee rs inr; won krw
peso mxn; ruble rouble rub; franc chf; atm atmosphere = 101325 Pa; torr mmhg mm-hg = 133.322387415 Pa
psi = 6894.757293168 Pa; hp horsepower = 745.69987158227022 W; btu = 1055.05585262 J; Nm = 1 J
knot kn kt = 463/900 m/s
"""
_PREFIXES = {
    **{"n": ("nano", -9), "μ": ("micro", -6), "m": ("milli", -3), "c": ("centi", -2), "d": ("deci", -1)},
    **{"": ("", 0), "h": ("hecto", 2), "k": ("kilo", 3), "M": ("mega", 6), "G": ("giga", 9), "T": ("tera", 12)},
    "p": ("pico", -12),
}
_UNPREFIXED = {
    "pm",
    "cd",
    "G",
    "M",
    "Gy",
    "mb",
    "Mb",
    "B",
    "b",
    "dB",
    "hl",
    "cal",
}  # These symbols usually have a different meaning.
# Countable nouns of answers, in the singular; other forms of a noun follow a slash. An answer with a noun outside the
# list is wrong, so the list may grow; uncountable words ("more", "left", "wrong") must not be added.
_NOUNS = """
adult animal answer ant apartment apple arrangement article atom bag ball balloon banana barrel basket battery bead
beat bean bear bed bee beetle bicycle/bike bill bird block boat book bookmark bottle bow bowl bowler box boy branch
brick brother brownie bucket bug building bulb burrito bus bush button cabbage cake calf/calves camera can candle
candy cannon car card carrot case castle cat cave chair chapter chef cherry chick chicken child/children chip
chocolate choice church citizen city class client clip clown coach coat coin colony color/colour column combination
committee computer container cookie copy corner country cow crab cracker crate crayon crew crow cube cupcake customer
cycle deer desk diagonal digit dinner dish divisor dog doll donut/doughnut door dot dragon dragonfly dress drink drop
duck eagle edge egg element elephant employee engineer envelope episode eraser error event face factor family fan farm
farmer feather fence field file finger fish flag flavor/flavour floor flower fly folder fork fox friend frog fruit
function gallery game garden gem ghost gift girl glass goal goat goldfish goose/geese grade grape group guest guitar
hamburger/burger hand handshake hat head hen horse hot-dog hotel house idea inhabitant instrument integer interval
island item jacket jar jelly-bean journey judge kid kite kitten knife/knives ladder lady lake lamp lap laptop lawn
layer leaf/leave/leaves leg lemon lesson letter lime line lion loaf/loave/loaves lobster locker log lollipop machine
magazine man/men mango/mangoe map marble mark marker match matchstick meal medal member message mistake monkey
mountain mouse/mice movie muffin mug nail necklace neighbor/neighbour newspaper notebook number nurse nut object
octopus officer onion orange outcome outfit oyster pack package packet page painting palm pancake panda paper parent
participant partition passenger pastry path patient peach peanut pear pen pencil penguin people/person permutation
petal phone photo picture pie piece pig pill pillow pilot pineapple pitcher pizza place plane plant plate player plum
point pole policeman/policemen polygon post poster pot potato/potatoe prime prize problem pumpkin pupil puppy puzzle
quail question rabbit racket raisin rat rectangle referee resident ribbon rider ring road robin robot rock room root
rose row runner sailor salesman/salesmen sandwich school scientist scout sculpture seat seed sentence sequence sheep
shelf/shelve/shelves shell ship shirt shoe shop shot shrimp side singer sister skirt slice slot snail snake sock
soldier solution song spider spoon spot square squirrel stair stamp star statue step stick sticker stone store story
strawberry street string student subset suit sweet swimmer table tail tank task teacher team tent term test ticket
tiger tile time tomato/tomatoe tourist tower town toy track train tree triangle trip trout truck tulip turkey turn
turtle tutor unicorn uniform value van variable vase vegetable vehicle vertex/vertice/vertices video village villager
visitor volunteer vote voter vowel wagon wall watch water-bottle watermelon way whale wheel window wolf/wolve/wolves
woman/women word worker worm wrestler yacht zebra
"""
# Chinese units, and Chinese measure words, which have no meaning for the comparison.
_CHINESE = """
米=m 厘米=cm 毫米=mm 千米=km 公里=km 分米=dm 克=g 千克=kg 公斤=kg 吨=t 秒=s 分钟=min 小时=h 天=day 年=year 岁=year
升=L 毫升=mL 元=yuan 度=degree 平方米=m^2 平方厘米=cm^2 立方米=m^3 立方厘米=cm^3 分=minute
"""
_PHRASES = """
mph=mile per hour;mpg=mile per gallon;kph=km/h;kmh=km/h;kmph=km/h;fps=foot per second;rpm=revolution per minute
years old=year;year old=year;months old=month;percentage points=percent;percentage point=percent;per cent=percent
fl oz=floz;fluid ounces=floz;us dollars=dollar;hot dogs=hot-dog;jelly beans=jelly-bean
"""
_REPLACED = dict(pair.split("=") for pair in [*_CHINESE.split(), *re.split(r"[;\n]", _PHRASES.strip())])
_REPLACED |= dict.fromkeys("个只人次种张本支条辆棵件名位块台枚颗组对步页倍头根座间", "units")
_TEMPERATURE = re.compile(r"(?:degrees? )?(celsius|fahrenheit)|° ?([cf])", re.I)
_TEMPERATURES = {
    "c": Unit(Fraction(1), (("temperature", 1),)),
    "f": Unit(Fraction(5, 9), (("temperature", 1),), Fraction(-32)),
}
NOTHING = Unit(Fraction(1), ())  # The word "units" has no meaning.
_NAMELESS = re.compile(r"(?:square |sq\.? |cubic |cu\.? )?units?(?: ?(?:\^ ?\{?[1-4]\}?|squared|cubed))?", re.I)
_FACTOR = re.compile(
    r"(?P<before>(?:square|sq\.?|cubic|cu\.?)\s+)?(?P<name>[a-zωΩμåÅ$€£¥₹¢°%\u4e00-\u9fff][a-zωΩμö$-]*)\.?"
    r"(?:\s*(?:\^\s*\{?(?P<power>-?[1-4])\}?|(?P<after>squared|cubed)))?",
    re.I,
)
_BETWEEN = re.compile(r"\s*(?P<over>/|\bper\b|\ban?\b|\beach\b)\s*|\s*(?:\*|\\cdot|\\times|·|-)\s*|\s+(?!\()", re.I)
_BEFORE = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3, "cu.": 3, "squared": 2, "cubed": 3}
# All other single letters are variables; these are units only after a space or within \text.
BARE_LETTERS = set("mgshlL$%°€£¥₹¢")


@functools.cache
def _tables() -> tuple[dict[str, tuple[Unit, ...]], dict[str, tuple[Unit, ...]]]:
    """The units that each name can mean. The first table is case-sensitive; names in the second are lowercase.

    The second table has only the symbols that are often written in lowercase, such as kwh and mhz.
    """
    table: dict[str, tuple[Unit, ...]] = {}

    def add(unit: Unit, names: Iterable[str]) -> None:
        for name in names:
            forms = {name}
            if len(name) > 2 or name == "lb":
                stem = re.sub(r"(?<=[^aeiou])y$", "ie", name)
                stem = re.sub(r"(?<=[sxz])$|(?<=[cs]h)$", "e", stem)
                forms |= {f"{name}s", f"{stem}s"}
            for form in forms:
                readings = table.get(form, ())
                if unit not in readings:
                    table[form] = (*readings, unit)

    rows = [(True, row) for row in re.split(r"[;\n]", _SI.strip())]
    rows += [(False, row) for row in re.split(r"[;\n]", _OTHER.strip())]
    rows += [(False, noun.replace("/", " ")) for noun in _NOUNS.split()]
    for has_prefixes, row in rows:
        names, _, definition = row.partition("=")
        symbol, *others = names.split()
        size, _, base = definition.strip().partition(" ")
        unit = Unit(Fraction(1), ((symbol, 1),))
        if base:
            unit = _product(Unit(Fraction(size), ()), _parsed(base, table.get)[0])
        if not has_prefixes:
            add(unit, [symbol, *others])
            continue
        for short, (long, exponent) in _PREFIXES.items():
            scaled = unit._replace(factor=unit.factor * Fraction(10) ** exponent)
            if not short or short + symbol not in _UNPREFIXED:
                table[short + symbol] = (scaled,)
            add(scaled, (long + name for name in others))
    lowercase: dict[str, tuple[Unit, ...]] = {}
    for name, readings in table.items():
        lower = name.casefold()
        has_prefix = len(name) > 1 and name[0] in "HkMGcem"
        if name == lower or has_prefix or name[1:] in ("L", "B"):
            lowercase[lower] = lowercase.get(lower, ()) + readings
    return table, lowercase


@functools.lru_cache(maxsize=4096)
def units(text: str) -> tuple[Unit, ...]:
    r"""The units that a text can mean: several if it is ambiguous ("pounds"), none if it is not a known unit.

    Args:
        text: name of a unit, without \text around words: "cm^2", "square feet", "miles per hour", "m/s".
    """
    text = re.sub(r"(?<=\() | (?=\))", "", " ".join(text.split())).rstrip(".")
    text = re.sub(r"\b(light|nautical|astronomical) (?=year|mile|unit)", r"\1-", text, flags=re.I)
    text = _REPLACED.get(text.casefold(), text)
    temperature = _TEMPERATURE.fullmatch(text)
    if temperature:
        scale = temperature[1] or temperature[2]
        return (_TEMPERATURES[scale[0].casefold()],)
    if _NAMELESS.fullmatch(text):
        return (NOTHING,)
    exact, lowercase = _tables()
    return _parsed(text, lambda name: exact.get(name) or lowercase.get(name.casefold()))


def _parsed(text: str, find: Callable[[str], tuple[Unit, ...] | None]) -> tuple[Unit, ...]:
    """Reads a product of units; `find` returns the readings of one name."""
    readings = (NOTHING,)
    position = 0
    sign = 1
    is_in_parentheses = False
    leading = re.match(r"(?:/|(?:per|an?|each)\b)\s*", text, re.I)
    if leading:
        # In "$5 per hour" the dollar precedes the number, so the remaining text starts with "per".
        position = leading.end()
        sign = -1
    while True:
        factor = None
        known = None
        for end in (len(text), text.find("-", position)):  # kilowatt-hours has its own row, but N-m has not
            factor = _FACTOR.match(text, position, end)
            if factor:
                known = find(factor["name"])
            if known:
                break
        if not factor or not known:
            return ()
        power_word = factor["before"] or factor["after"] or ""
        power = _BEFORE.get(power_word.strip().casefold(), 1)
        power *= int(factor["power"] or 1) * sign
        readings = tuple(_product(first, second, power) for first, second in itertools.product(readings, known))
        position = factor.end()
        if is_in_parentheses and text[position : position + 1] == ")":
            position = position + 1
            is_in_parentheses = False
            sign = 1
        if position == len(text):
            return () if is_in_parentheses else readings
        between = _BETWEEN.match(text, position)
        if not between or not between.group():
            return ()
        position = between.end()
        if between["over"]:
            sign = -1
        if text[position : position + 1] == "(" and not is_in_parentheses:
            position = position + 1
            is_in_parentheses = True


def _product(a: Unit, b: Unit, power: int = 1) -> Unit:
    powers = Counter(dict(a.dimensions))
    powers.update({base: count * power for base, count in b.dimensions})
    dimensions = sorted((base, count) for base, count in powers.items() if count)
    return Unit(a.factor * b.factor**power, tuple(dimensions))
