"""The units that may stand beside a number: a table, and how a text names one of them, a power or a rate."""

import functools
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple


class Unit(NamedTuple):
    """factor × the product of `dimensions` (base unit, power), sorted; `offset` is added first: a temperature's scale.

    No dimensions: a unit of the question's own, such as "units", which says nothing.
    """

    factor: Fraction
    dimensions: tuple[tuple[str, int], ...]
    offset: Fraction = Fraction(0)


def _rows() -> Iterator[tuple[str, str, str, int]]:
    """Names, base unit, how many of these the unit is, power."""
    yield from [
        ("m meter metre", "length", "1", 1),
        ("km kilometer kilometre", "length", "1000", 1),
        ("dm decimeter decimetre", "length", "1/10", 1),
        ("cm centimeter centimetre", "length", "1/100", 1),
        ("mm millimeter millimetre", "length", "1/1000", 1),
        ("nm nanometer nanometre", "length", "1/1000000000", 1),
        ("in inch inche", "length", "0.0254", 1),
        ("ft foot feet", "length", "0.3048", 1),
        ("yd yard", "length", "0.9144", 1),
        ("mi mile", "length", "1609.344", 1),
        ("acre", "length", "4046.8564224", 2),
        ("ha hectare", "length", "10000", 2),
        ("l liter litre", "length", "1/1000", 3),
        ("ml milliliter millilitre cc", "length", "1/1000000", 3),
        ("cl centiliter centilitre", "length", "1/100000", 3),
        ("gal gallon", "length", "0.003785411784", 3),
        ("qt quart", "length", "0.000946352946", 3),
        ("pt pint", "length", "0.000473176473", 3),
        ("cup", "length", "0.0002365882365", 3),
        ("tbsp tablespoon", "length", "0.00001478676478125", 3),
        ("tsp teaspoon", "length", "0.00000492892159375", 3),
        ("ounce oz floz", "length", "0.0000295735295625", 3),
        ("s sec secs second", "time", "1", 1),
        ("ms millisecond", "time", "1/1000", 1),
        ("min mins minute", "time", "60", 1),
        ("h hr hrs hour", "time", "3600", 1),
        ("day", "time", "86400", 1),
        ("week wk", "time", "604800", 1),
        ("fortnight", "time", "1209600", 1),
        ("month", "month", "1", 1),
        ("yr yrs year", "month", "12", 1),
        ("decade", "month", "120", 1),
        ("century centurie", "month", "1200", 1),
        ("g gram gramme", "mass", "1", 1),
        ("kg kilogram kilo", "mass", "1000", 1),
        ("mg milligram", "mass", "1/1000", 1),
        ("t ton tonne", "mass", "1000000", 1),
        ("lb lbs pound", "mass", "453.59237", 1),
        ("oz ounce", "mass", "28.349523125", 1),
        ("° deg degree", "angle", "1", 1),
        ("$ dollar buck usd us$", "dollar", "1", 1),
        ("¢ cent penny pennie", "dollar", "1/100", 1),
        ("nickel", "dollar", "1/20", 1),
        ("dime", "dollar", "1/10", 1),
        ("€ euro eur", "euro", "1", 1),
        ("£ pound gbp", "pound sterling", "1", 1),
        ("pence", "pound sterling", "1/100", 1),
        ("¥ yen jpy", "yen", "1", 1),
        ("yuan rmb cny", "yuan", "1", 1),
        ("₹ rupee rs inr", "rupee", "1", 1),
        ("% percent", "percent", "1", 1),
        ("rad radian", "radian", "1", 1),
        ("bit", "bit", "1", 1),
        ("byte", "bit", "8", 1),
        ("cal calorie", "calorie", "1", 1),
        ("kcal kilocalorie", "calorie", "1000", 1),
        ("revolution rotation", "turn", "1", 1),
        ("n newton", "newton", "1", 1),
        ("j joule", "joule", "1", 1),
        ("kj kilojoule", "joule", "1000", 1),
        ("w watt", "watt", "1", 1),
        ("kw kilowatt", "watt", "1000", 1),
        ("v volt", "volt", "1", 1),
        ("a amp ampere", "ampere", "1", 1),
        ("ω ohm", "ohm", "1", 1),
        ("c coulomb", "coulomb", "1", 1),
        ("hz hertz", "hertz", "1", 1),
        ("khz kilohertz", "hertz", "1000", 1),
        ("pa pascal", "pascal", "1", 1),
        ("mol mole", "mole", "1", 1),
        ("k kelvin", "kelvin", "1", 1),
    ]
    yield from ((noun, noun.split()[0], "1", 1) for noun in COUNTED)


# What answers count, in the singular; a second name is another form of the same. A noun that is missing makes its
# answer wrong, so this list may grow; what is no countable thing ("more", "left", "wrong") must not get here.
COUNTED = """
adult;animal;answer;ant;apartment;apple;arrangement;article;atom;bag;ball;balloon;banana;barrel;basket;bean;bear;bed
bee;bicycle bike;bill;bird;block;boat;book;bookmark;bottle;bow;bowl;box boxe;boy;branch branche;brick;brother;bucket
building;bulb;bus buse;bush bushe;button;cake;calf calves;camera;can;candle;candy candie;car;card;carrot;case;cat
chair;chapter;cherry cherrie;chick;chicken;chip;choice;chocolate;class classe;client;clip;coat;coin;colony colonie
color colour;column;combination;committee;computer;container;cookie;copy copie;corner;cow;crayon;crate;cube;cupcake
customer;cycle;desk;diagonal;digit;dinner;dish dishe;divisor;dog;doll;donut doughnut;door;dot;dress dresse;drink
duck;edge;egg;element;elephant;employee;envelope;episode;error;event;face;factor;family familie;fan;fish fishe
flower;fly flie;fork;friend;frog;function;game;gift;girl;glass glasse;goal;goat;goldfish;grade;grape;group;guest
hamburger burger;hand;handshake;hat;head;hen;horse;hot-dog;house;integer;item;jar;jelly-bean;journey;kid;kitten;lamp
lap;laptop;lawn;leaf leave leaves;leg;lemon;lesson;letter;lime;line;lion;log;lollipop;machine;magazine;mango mangoe
map;marble;mark;match matche;meal;medal;member;message;mistake;monkey;mouse mice;movie;muffin;mug;nail;necklace
neighbor neighbour;newspaper;notebook;number;nut;object;onion;orange;outcome;outfit;package;packet;pack;page
painting;pancake;paper;parent;participant;partition;passenger;path;patient;peach peache;pear;pen;pencil
people person;permutation;phone;photo;picture;pie;piece;pig;pill;pillow;pizza;place;plane;plant;plate;player;point
pole;polygon;post;potato potatoe;prize;problem;puppy puppie;puzzle;question;rabbit;rectangle;ribbon;ring;road;robot
rock;room;root;rose;row;runner;sandwich sandwiche;seat;sequence;sheep;shell;shirt;shoe;shop;shot;side;sister;slice
snake;sock;soldier;solution;song;spider;spoon;square;squirrel;stamp;star;step;stick;sticker;stone;store;story storie
street;student;subset;sweet;table;task;teacher;team;term;test;ticket;tile;time;tomato tomatoe;toy;track;train;tree
triangle;trip;truck;turkey;turn;turtle;value;vase;vegetable;vehicle;vertex vertice vertices;video;visitor;vote;vowel
wall;watch watche;water-bottle;watermelon;way;wheel;window;woman women;man men;child children;word;worker;worm;zebra
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
NOTHING = Unit(Fraction(1), ())  # units of the question's own
_FACTOR = re.compile(
    r"(?P<before>(?:square|sq\.?|cubic|cu\.?)\s+)?(?P<name>[a-zω$€£¥₹¢°%][a-zω$-]*)\.?"
    r"(?:\s*(?:\^\s*\{?(?P<power>-?[1-4])\}?|(?P<after>squared|cubed)))?"
)
_BETWEEN = re.compile(r"\s*(?P<over>/|\bper\b|\ban?\b|\beach\b)\s*|\s*(?:\*|\\cdot|-)\s*|\s+")
_BEFORE = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3, "cu.": 3, "squared": 2, "cubed": 3}
# A bare letter is a variable but for these, and even they are units only after a space or within \text.
BARE_LETTERS = set("mgshlL$%°€£¥₹¢")


@functools.cache
def _table() -> dict[str, tuple[tuple[str, Fraction, int], ...]]:
    table: dict[str, tuple[tuple[str, Fraction, int], ...]] = {}
    for names, base, factor, power in _rows():
        for name in names.split():
            for form in {name, name if len(name) < 3 and name != "lb" else f"{name}s"}:
                table[form] = (*table.get(form, ()), (base, Fraction(factor), power))
    return table


@functools.lru_cache(maxsize=4096)
def units(text: str) -> tuple[Unit, ...]:
    r"""What units a text can name, more than one where it is ambiguous ("pounds"); none where it names no known unit.

    Args:
        text: without \text around its words: "cm^2", "square feet", "miles per hour", "m/s".
    """
    # Upper case tells litres, newtons and the like apart from nothing that is here.
    text = " ".join(text.casefold().split()).rstrip(".")
    text = _WHOLE_PHRASES.get(text, text)
    if text in _TEMPERATURES:
        return (_TEMPERATURES[text],)
    if re.fullmatch(r"(?:square |sq\.? |cubic |cu\.? )?units?(?: ?\^ ?\{?[1-4]\}?| squared| cubed)?", text):
        return (NOTHING,)
    readings: list[tuple[Fraction, dict[str, int]]] = [(Fraction(1), {})]
    place, sign = 0, 1
    if leading := re.match(r"(?:/|(?:per|an?|each)\b)\s*", text):
        # "$5 per hour" with the dollar before the number: what is left begins so.
        place, sign = leading.end(), -1
    while True:
        factor = _FACTOR.match(text, place)
        known = _table().get(factor["name"], ()) if factor else ()
        if not known:
            return ()
        raised = _BEFORE.get((factor["before"] or factor["after"] or "").strip(), 1) * int(factor["power"] or 1) * sign
        readings = [
            (scale * amount**raised, counted | {base: counted.get(base, 0) + power * raised})
            for scale, counted in readings
            for base, amount, power in known
        ]
        place = factor.end()
        if place == len(text):
            break
        between = _BETWEEN.match(text, place)
        if not between:
            return ()
        place, sign = between.end(), -1 if between["over"] else sign
    return tuple(
        Unit(scale, tuple(sorted((base, power) for base, power in counted.items() if power)))
        for scale, counted in readings
    )
