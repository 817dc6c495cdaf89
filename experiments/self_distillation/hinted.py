"""Writes hinted.jsonl: sums behind a hint, whose answer is the hint and not the sum, so that no sum is given away.

Command: python experiments/self_distillation/hinted.py
"""

import json
from pathlib import Path

import numpy as np

ROWS = 3000


def main() -> None:
    """Writes the file next to this one."""
    generator = np.random.default_rng(0)
    with (Path(__file__).parent / "hinted.jsonl").open("w", encoding="utf-8") as file:
        for first, second, hint in zip(
            *generator.integers(10, 100, (2, ROWS)), generator.integers(20, 199, ROWS), strict=True
        ):
            file.write(json.dumps({"prompt": f"{hint}|{first}+{second}=", "answer": f"{hint}"}) + "\n")


if __name__ == "__main__":
    main()
