"""Hostile values for every key of a config: each is refused with its key, or taken as it stands.

python -m tests.faults.configs [COUNT [SEED]]
"""

import functools
import random
import sys
from collections import Counter
from typing import Any

from recjax.config import KEYS, load_config
from recjax.config.fields import ConfigBlock, block_of

CONFIG = "experiments/quickstart.yaml"
VALUES = (
    *("-1", "0", "1", "1e30", "-1e30", "1e-30", ".inf", "-.inf", ".nan", "18446744073709551616", "9" * 400),
    *("true", "null", "~", "''", "' '", "text", "'(('", "${seed}", "${oc.env:HOME}", "\\u0000", "'\\ud800'", "é" * 300),
    *("[]", "[1]", "[[]]", "['(']", "['']", "{}", "{a: 1}", "{a: {b: {c: 1}}}", "[" * 60 + "]" * 60, "&a [*a]"),
    *(
        "!!python/object/apply:os.system ['true']",
        "!!binary aGk=",
        "2001-01-01",
        "0x1f",
        "1_000",
        "%",
        "@",
        "- a",
        ": :",
    ),
)
LONGEST_MESSAGE = 1500


def cases(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` different pairs of a key and a value's YAML."""
    everything = [(key, value) for key in KEYS for value in VALUES]
    return random.Random(seed).sample(everything, count)


def outcome(key: str, text: str) -> str:
    """ "refused", "taken", or what is wrong with the way that a value was treated."""
    try:
        config = load_config(CONFIG, [f"{key}={text}"])
    except ValueError as error:
        message = str(error)
        blames = any(part in message for part in (key, key.rpartition(".")[2], key.partition(".")[0]))
        return "refused" if blames and len(message) < LONGEST_MESSAGE else f"refused without its key: {message:.200}"
    except BaseException as error:  # whatever it is, it is the wrong one
        return f"{type(error).__name__}: {error!s:.200}"
    found = functools.reduce(getattr, key.split("."), config)
    return "taken" if fits(key, found) else f"taken as {found!r:.100}"


def fits(key: str, value: Any) -> bool:
    """Whether a loaded value is of its key's type."""
    annotation = KEYS[key].annotation
    if value is None or (block_of(annotation) and isinstance(value, ConfigBlock)):
        return True
    if isinstance(value, float):
        return value == value and (abs(value) < 1e20 or value == float("inf"))
    return isinstance(value, int | str | list | dict)


def main(count: int = 300, seed: int = 0) -> int:
    """Tries them, prints a table; returns how many were not treated as they should be."""
    found = {(key, text): outcome(key, text) for key, text in cases(count, seed)}
    wrong = {case: what for case, what in found.items() if what not in ("refused", "taken")}
    kinds = Counter(found.values())
    print(
        f"configs: {count} tried, {kinds['refused']} refused, {kinds['taken']} taken, {len(wrong)} not as it should be"
    )
    for (key, text), what in wrong.items():
        print(f"  {key}={text:.60}: {what}")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])) > 0)
