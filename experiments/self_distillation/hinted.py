"""Writes hinted.jsonl: sums behind a hint, whose answer is the hint and not the sum, so that no sum is given away.

Command: python experiments/self_distillation/hinted.py
"""

import json
from pathlib import Path

import numpy as np

ROWS = 3000


def lines() -> list[str]:
    """The lines of the file."""
    generator = np.random.default_rng(0)
    numbers = (*generator.integers(10, 100, (2, ROWS)), generator.integers(20, 199, ROWS))
    rows = [
        {"prompt": f"{hint}|{first}+{second}=", "answer": f"{hint}"}
        for first, second, hint in zip(*numbers, strict=True)
    ]
    return [json.dumps(row) for row in rows]


if __name__ == "__main__":
    Path(__file__).with_suffix(".jsonl").write_text("\n".join(lines()) + "\n", encoding="utf-8")
