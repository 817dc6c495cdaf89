"""Writes experiments/objectives/differences.csv: how far each preset is from its source's objective.

python -m tests.algorithms.differences
"""

import csv

from experiments.objectives.page import DIFFERENCES
from tests.algorithms.test_published import compare, largest_difference


def main() -> None:
    """Compares all forms and writes the table; differences have one digit."""
    with DIFFERENCES.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["preset", "overrides", "difference"])
        for (preset, overrides), batches in compare().items():
            writer.writerow([preset, overrides, f"{largest_difference(batches):.0e}"])


if __name__ == "__main__":
    main()
