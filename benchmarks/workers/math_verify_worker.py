"""math-verify, used as its README shows: reads pairs of completion and truth as JSON, writes versions and verdicts."""

import importlib.metadata
import json
import logging
import sys

import math_verify

PACKAGES = ("math-verify", "latex2sympy2_extended", "sympy")


def main() -> None:
    """Reads standard input, and writes one line."""
    logging.disable()  # math-verify logs each answer that it cannot read
    verdicts = []
    for completion, truth in json.load(sys.stdin):
        gold = math_verify.parse(f"${truth}$")
        verdicts.append(bool(math_verify.verify(gold, math_verify.parse(completion))))
    print(json.dumps({"versions": {name: importlib.metadata.version(name) for name in PACKAGES}, "verdicts": verdicts}))


if __name__ == "__main__":
    main()
