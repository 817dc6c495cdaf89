"""Units after a number: a table of units, and parsing of a text into a unit, a power of units, or a rate."""

import functools
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple


class Unit(NamedTuple):
    """`factor` × the product of `dimensions`, sorted pairs of base unit and power.

    `offset` is added before the factor, for temperatures. Empty dimensions: a unit without meaning, such as "units".
    """

    factor: Fraction
    dimensions: tuple[tuple[str, int], ...]
    offset: Fraction = Fraction(0)


# Names in the singular, separated by spaces; size in the base unit; base unit; power.
_ROWS: list[tuple[str, str, str, int]] = [
    ("in inch inche", "0.0254", "length", 1),
    ("ft foot feet", "0.3048", "length", 1),
    ("yd yard", "0.9144", "length", 1),
    ("mi mile", "1609.344", "length", 1),
    ("nautical-mile nmi", "1852", "length", 1),
    ("light-year lightyear ly", "9460730472580800", "length", 1),
    ("parsec pc", "30856775814913673", "length", 1),
    ("astronomical-unit au", "149597870700", "length", 1),
    ("å angstrom ångström", "1/10000000000", "length", 1),
    ("micron", "1/1000000", "length", 1),
    ("furlong", "201.168", "length", 1),
    ("acre", "4046.8564224", "length", 2),
    ("ha hectare", "10000", "length", 2),
    ("cc", "1/1000000", "length", 3),
    ("gal gallon", "0.003785411784", "length", 3),
    ("qt quart", "0.000946352946", "length", 3),
    ("pt pint", "0.000473176473", "length", 3),
    ("cup", "0.0002365882365", "length", 3),
    ("tbsp tablespoon", "0.00001478676478125", "length", 3),
    ("tsp teaspoon", "0.00000492892159375", "length", 3),
    ("ounce oz floz", "0.0000295735295625", "length", 3),
    ("bushel", "0.03523907016688", "length", 3),
    ("barrel bbl", "0.158987294928", "length", 3),
    ("sec secs", "1", "time", 1),
    ("min mins minute", "60", "time", 1),
    ("h hr hrs hour", "3600", "time", 1),
    ("day", "86400", "time", 1),
    ("week wk", "604800", "time", 1),
    ("fortnight", "1209600", "time", 1),
    ("month", "1", "month", 1),
    ("yr yrs year", "12", "month", 1),
    ("decade", "120", "month", 1),
    ("century centurie", "1200", "month", 1),
    ("kilo", "1000", "mass", 1),
    ("t ton tonne", "1000000", "mass", 1),
    ("lb lbs pound", "453.59237", "mass", 1),
    ("oz ounce", "28.349523125", "mass", 1),
    ("stone", "6350.29318", "mass", 1),
    ("carat ct", "0.2", "mass", 1),
    ("amu dalton", "1/602214076000000000000000", "mass", 1),
    ("° deg degree", "1", "angle", 1),
    ("$ dollar buck usd us$", "1", "dollar", 1),
    ("¢ cent penny pennie", "1/100", "dollar", 1),
    ("nickel", "1/20", "dollar", 1),
    ("dime", "1/10", "dollar", 1),
    ("quarter", "1/4", "dollar", 1),
    ("€ euro eur", "1", "euro", 1),
    ("£ pound gbp", "1", "pound sterling", 1),
    ("pence", "1/100", "pound sterling", 1),
    ("¥ yen jpy", "1", "yen", 1),
    ("yuan rmb cny", "1", "yuan", 1),
    ("₹ rupee rs inr", "1", "rupee", 1),
    ("won krw", "1", "won", 1),
    ("peso mxn", "1", "peso", 1),
    ("ruble rouble rub", "1", "ruble", 1),
    ("franc chf", "1", "franc", 1),
    ("% percent", "1", "percent", 1),
    ("rad radian", "1", "radian", 1),
    ("sr steradian", "1", "steradian", 1),
    ("bit", "1", "bit", 1),
    ("byte", "8", "bit", 1),
    ("cal calorie", "1", "calorie", 1),
    ("revolution rotation rev", "1", "turn", 1),
    ("db decibel", "1", "decibel", 1),
    ("ppm", "1/1000000", "part", 1),
    ("ppb", "1/1000000000", "part", 1),
    ("pixel px", "1", "pixel", 1),
    ("baud", "1", "baud", 1),
    ("candela", "1", "candela", 1),
]
# Units with SI prefixes: symbol, names, factor, and powers of length, mass, time, current and other base units.
_SI = """
m meter,metre 1 length
g gram,gramme 1 mass
s second 1 time
A ampere,amp 1 current
K kelvin 1 kelvin
mol mole 1 mole
cd candela 1 candela
Hz hertz 1 time^-1
N newton 1000 mass,length,time^-2
Pa pascal 1000 mass,length^-1,time^-2
J joule 1000 mass,length^2,time^-2
W watt 1000 mass,length^2,time^-3
C coulomb 1 current,time
V volt 1000 mass,length^2,time^-3,current^-1
F farad 1/1000 mass^-1,length^-2,time^4,current^2
Ω ohm 1000 mass,length^2,time^-3,current^-2
S siemens 1/1000 mass^-1,length^-2,time^3,current^2
Wb weber 1000 mass,length^2,time^-2,current^-1
T tesla 1000 mass,time^-2,current^-1
H henry,henrie 1000 mass,length^2,time^-2,current^-2
lm lumen 1 candela,steradian
lx lux 1 candela,length^-2
Bq becquerel 1 time^-1
Gy gray 1 length^2,time^-2
Sv sievert 1 length^2,time^-2
L liter,litre 1/1000 length^3
l liter,litre 1/1000 length^3
M molar 1000 mole,length^-3
eV electronvolt,electron-volt 1602176634/10000000000000000000000000 mass,length^2,time^-2
Wh watt-hour,watthour 3600000 mass,length^2,time^-2
Ah ampere-hour,amp-hour 3600 current,time
bar bar 100000000 mass,length^-1,time^-2
cal calorie 1 calorie
b bit 1 bit
B byte 8 bit
Ci curie 37000000000 time^-1
dyn dyne 1/100 mass,length,time^-2
erg erg 1/10000 mass,length^2,time^-2
G gauss 1/10 mass,time^-2,current^-1
"""
_PREFIXES = {
    **{"n": ("nano", -9), "μ": ("micro", -6), "m": ("milli", -3), "c": ("centi", -2), "d": ("deci", -1)},
    **{"": ("", 0), "h": ("hecto", 2), "k": ("kilo", 3), "M": ("mega", 6), "G": ("giga", 9), "T": ("tera", 12)},
    "p": ("pico", -12),
}
_UNPREFIXED = {"pm", "cd", "G", "M", "Gy", "mb", "Mb", "B", "b", "dB", "hl", "cal"}  # usual with another meaning
_PRESSURE = ("mass", "length^-1", "time^-2")
_COMPOUND = [  # names, factor, powers
    ("atm atmosphere", "101325000", _PRESSURE),
    ("torr mmhg mm-hg", "133322.387415", _PRESSURE),
    ("psi", "6894757.293168", _PRESSURE),
    ("hp horsepower", "745699.87158227022", ("mass", "length^2", "time^-3")),
    ("btu", "1055055.85262", ("mass", "length^2", "time^-2")),
    ("Nm", "1000", ("mass", "length^2", "time^-2")),
    ("knot kn kt", "463/900", ("length", "time^-1")),
    ("cycle", "1", ("cycle",)),
]
# Chinese units, and Chinese measure words, which have no meaning for the comparison.
_CHINESE = {
    "米": "m",
    "厘米": "cm",
    "毫米": "mm",
    "千米": "km",
    "公里": "km",
    "分米": "dm",
    "克": "g",
    "千克": "kg",
    "公斤": "kg",
}
_CHINESE |= {
    "吨": "t",
    "秒": "s",
    "分钟": "min",
    "小时": "h",
    "天": "day",
    "年": "year",
    "岁": "year",
    "升": "L",
    "毫升": "mL",
}
_CHINESE |= {
    "元": "yuan",
    "度": "degree",
    "平方米": "m^2",
    "平方厘米": "cm^2",
    "立方米": "m^3",
    "立方厘米": "cm^3",
    "分": "minute",
}
_CHINESE |= dict.fromkeys(
    "个 只 人 次 种 张 本 支 条 辆 棵 件 名 位 块 台 枚 颗 组 对 步 页 倍 头 根 座 间".split(), "units"
)


# Countable nouns of answers, in the singular; further names are other forms of the same noun. An answer with a noun
# outside the list is wrong, so the list may grow; uncountable words ("more", "left", "wrong") must not be added.
COUNTED = """
adult;animal;answer;ant;apartment;apple;arrangement;article;atom;bag;ball;balloon;banana;barrel;basket;battery batterie
bead;beat;bean;bear;bed;bee;beetle;bicycle bike;bill;bird;block;boat;book;bookmark;bottle;bow;bowl;bowler;box boxe;boy
branch branche;brick;brother;brownie;bucket;bug;building;bulb;burrito;bus buse;bush bushe;button;cabbage;cake
calf calves;camera;can;candle;candy candie;cannon;car;card;carrot;case;castle;cat;cave;chair;chapter;chef
cherry cherrie;chick;chicken;child children;chip;chocolate;choice;church churche;citizen;city citie;class classe;client
clip;clown;coach coache;coat;coin;colony colonie;color colour;column;combination;committee;computer;container;cookie
copy copie;corner;country countrie;cow;crab;cracker;crate;crayon;crew;crow;cube;cupcake;customer;cycle;deer;desk
diagonal;digit;dinner;dish dishe;divisor;dog;doll;donut doughnut;door;dot;dragon;dragonfly dragonflie;dress dresse
drink;drop;duck;eagle;edge;egg;element;elephant;employee;engineer;envelope;episode;eraser;error;event;face;factor
family familie;fan;farm;farmer;feather;fence;field;file;finger;fish fishe;flag;flavor flavour;floor;flower;fly flie
folder;fork;fox foxe;friend;frog;fruit;function;gallery;game;garden;gem;ghost;gift;girl;glass glasse;goal;goat;goldfish
goose geese;grade;grape;group;guest;guitar;hamburger burger;hand;handshake;hat;head;hen;horse;hot-dog;hotel;house;idea
inhabitant;instrument;integer;interval;island;item;jacket;jar;jelly-bean;journey;judge;kid;kite;kitten;knife knives
ladder;lady ladie;lake;lamp;lap;laptop;lawn;layer;leaf leave leaves;leg;lemon;lesson;letter;lime;line;lion
loaf loave loaves;lobster;locker;log;lollipop;machine;magazine;man men;mango mangoe;map;marble;mark;marker;match matche
matchstick;meal;medal;member;message;mistake;monkey;mountain;mouse mice;movie;muffin;mug;nail;necklace
neighbor neighbour;newspaper;notebook;number;nurse;nut;object;octopus octopuse;officer;onion;orange;outcome;outfit
oyster;pack;package;packet;page;painting;palm;pancake;panda;paper;parent;participant;partition;passenger;pastry pastrie
path;patient;peach peache;peanut;pear;pen;pencil;penguin;people person;permutation;petal;phone;photo;picture;pie;piece
pig;pill;pillow;pilot;pineapple;pitcher;pizza;place;plane;plant;plate;player;plum;point;pole;policeman policemen
polygon;post;poster;pot;potato potatoe;prime;prize;problem;pumpkin;pupil;puppy puppie;puzzle;quail;question;rabbit
racket;raisin;rat;rectangle;referee;resident;ribbon;rider;ring;road;robin;robot;rock;room;root;rose;row;runner;sailor
salesman salesmen;sandwich sandwiche;school;scientist;scout;sculpture;seat;seed;sentence;sequence;sheep
shelf shelve shelves;shell;ship;shirt;shoe;shop;shot;shrimp;side;singer;sister;skirt;slice;slot;snail;snake;sock
soldier;solution;song;spider;spoon;spot;square;squirrel;stair;stamp;star;statue;step;stick;sticker;stone;store
story storie;strawberry strawberrie;street;string;student;subset;suit;sweet;swimmer;table;tail;tank;task;teacher;team
tent;term;test;ticket;tiger;tile;time;tomato tomatoe;tourist;tower;town;toy;track;train;tree;triangle;trip;trout;truck
tulip;turkey;turn;turtle;tutor;unicorn;uniform;value;van;variable;vase;vegetable;vehicle;vertex vertice vertices;video
village;villager;visitor;volunteer;vote;voter;vowel;wagon;wall;watch watche;water-bottle;watermelon;way;whale;wheel
window;wolf wolve wolves;woman women;word;worker;worm;wrestler;yacht;zebra
""".replace("\n", ";").strip(";")
COUNTED = tuple(filter(None, COUNTED.split(";")))

_WHOLE_PHRASES = {
    "mph": "mile per hour",
    "mpg": "mile per gallon",
    "kph": "km per h",
    "kmh": "km per h",
    "kmph": "km per h",
    "fps": "foot per second",
    "rpm": "revolution per minute",
    "years old": "year",
    "year old": "year",
    "months old": "month",
    "percentage points": "percent",
    "percentage point": "percent",
    "per cent": "percent",
    "fl oz": "floz",
    "fluid ounces": "floz",
    "us dollars": "dollar",
    "hot dogs": "hot-dog",
    "jelly beans": "jelly-bean",
    "degrees celsius": "°C",
    "degree celsius": "°C",
    "celsius": "°C",
    "° c": "°C",
    "°c": "°C",
    "degrees fahrenheit": "°F",
    "degree fahrenheit": "°F",
    "fahrenheit": "°F",
    "° f": "°F",
    "°f": "°F",
}
_TEMPERATURES = {
    "°C": Unit(Fraction(1), (("temperature", 1),)),
    "°F": Unit(Fraction(5, 9), (("temperature", 1),), Fraction(-32)),
}
NOTHING = Unit(Fraction(1), ())  # a unit without meaning, such as "units"
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
def _table() -> dict[str, tuple[Unit, ...]]:
    """Maps each name to its readings; SI symbols keep their case, and all names are in lower case."""
    table: dict[str, list[Unit]] = {}

    def add(names: Iterable[str], factor: Fraction, powers: Iterable[str], is_symbol: bool = False) -> None:
        dimensions = tuple(
            sorted((base, int(power or 1)) for base, _, power in (each.partition("^") for each in powers))
        )
        for name in names:
            plurals = [] if is_symbol or len(name) < 2 or (len(name) < 3 and name != "lb") else [f"{name}s"]
            for form in {name, *plurals}:
                unit = Unit(factor, dimensions)
                if unit not in table.setdefault(form, []):
                    table[form].append(unit)

    for names, factor, base, power in _ROWS:
        add(names.split(), Fraction(factor), (f"{base}^{power}",))
    for names, factor, powers in _COMPOUND:
        add(names.split(), Fraction(factor), powers)
    for row in _SI.strip().splitlines():
        symbol, names, factor, powers = row.split()
        for short, (long, exponent) in _PREFIXES.items():
            scale = Fraction(factor) * Fraction(10) ** exponent
            if not short or short + symbol not in _UNPREFIXED:
                add([short + symbol], scale, powers.split(","), is_symbol=True)
            add([long + name for name in names.split(",")], scale, powers.split(","))
    for noun in COUNTED:
        add(noun.split(), Fraction(1), (noun.split()[0],))
    return {name: tuple(readings) for name, readings in table.items()}


@functools.cache
def _in_lower_case() -> dict[str, tuple[Unit, ...]]:
    """Readings of all lowercase names, and of symbols that are often written in lower case, such as kwh and mhz."""
    table: dict[str, tuple[Unit, ...]] = {}
    for name, readings in _table().items():
        if name == name.casefold() or (len(name) > 1 and name[0] in "HkMGcem" or name[1:] in ("L", "B")):
            table[name.casefold()] = (*table.get(name.casefold(), ()), *readings)
    return table


def _readings(name: str) -> tuple[Unit, ...]:
    return _table().get(name) or _in_lower_case().get(name.casefold(), ())


@functools.lru_cache(maxsize=4096)
def units(text: str) -> tuple[Unit, ...]:
    r"""The units that a text can mean: several if it is ambiguous ("pounds"), none if it is not a known unit.

    Args:
        text: name of a unit, without \text around words: "cm^2", "square feet", "miles per hour", "m/s".
    """
    text = re.sub(r"(?<=\() | (?=\))", "", " ".join(text.split())).rstrip(".")
    text = re.sub(r"\b(light|nautical|astronomical) (?=year|mile|unit)", r"\1-", _CHINESE.get(text, text), flags=re.I)
    text = _WHOLE_PHRASES.get(text.casefold(), text)
    if text in _TEMPERATURES:
        return (_TEMPERATURES[text],)
    if _NAMELESS.fullmatch(text):
        return (NOTHING,)
    readings: list[tuple[Fraction, dict[str, int]]] = [(Fraction(1), {})]
    place, sign, within = 0, 1, False
    if leading := re.match(r"(?:/|(?:per|an?|each)\b)\s*", text, re.I):
        # In "$5 per hour" the dollar precedes the number, so the remaining text starts with "per".
        place, sign = leading.end(), -1
    while True:
        factor = _FACTOR.match(text, place)
        known = _readings(factor["name"]) if factor else ()
        if factor and not known and "-" in factor["name"]:
            # kilowatt-hours has its own row, but N-m has not.
            factor = _FACTOR.match(text[: place + text[place:].index("-")], place)
            known = _readings(factor["name"]) if factor else ()
        if not known:
            return ()
        before = (factor["before"] or factor["after"] or "").strip().casefold()
        raised = _BEFORE.get(before, 1) * int(factor["power"] or 1) * sign
        readings = [
            (scale * unit.factor**raised, _joined(counted, unit.dimensions, raised))
            for scale, counted in readings
            for unit in known
        ]
        place = factor.end()
        if within and text[place : place + 1] == ")":
            place, within, sign = place + 1, False, 1
        if place == len(text):
            break
        between = _BETWEEN.match(text, place)
        if not between or not between.group():
            return ()
        place, sign = between.end(), -1 if between["over"] else sign
        if text[place : place + 1] == "(" and not within:
            place, within = place + 1, True
    if within:
        return ()
    return tuple(
        Unit(scale, tuple(sorted((base, power) for base, power in counted.items() if power)))
        for scale, counted in readings
    )


def _joined(counted: dict[str, int], dimensions: tuple[tuple[str, int], ...], raised: int) -> dict[str, int]:
    counted = dict(counted)
    for base, power in dimensions:
        counted[base] = counted.get(base, 0) + power * raised
    return counted
