"""The game of experiments/agents/guessing.yaml: a number from 1 to 31 is to be found by "higher" and "lower".

python -m experiments.agents.guessing runs/guessing        what a run's samples say, next to binary search
python -m experiments.agents.guessing                      writes the files of problems again
"""

import json
import math
import re
import sys
from pathlib import Path

import numpy as np

from recjax.tasks.problems import Problem

LOWEST, HIGHEST, MOST_GUESSES = 1, 31, 6


class Guessing:
    """An environment for `task.agent: environment`; the number is in the problem's column `number`.

    A guess is two digits. It is answered by ">" (the number is higher), "<" (it is lower) or "?" (that is no number
    from 1 to 31). The parts of the reward: accuracy, 1 where the number was found; known, 1 − log n / log 31 where n
    numbers are still possible at the end.
    """

    def __init__(self, problem: Problem):
        """A game that has not begun."""
        self._number = problem.columns["number"]
        self._low, self._high, self._guesses = LOWEST, HIGHEST, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """The problem's prompt says all there is to say."""
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """The answer to a guess."""
        guess = int(action) if re.fullmatch(r"\d\d", action, re.ASCII) else 0
        self._guesses += 1
        if LOWEST <= guess < self._number:
            hint, self._low = ">", max(self._low, guess + 1)
        elif self._number < guess <= HIGHEST:
            hint, self._high = "<", min(self._high, guess - 1)
        else:
            hint = "?"
        found = guess == self._number
        possible = 1 if found else self._high - self._low + 1
        parts = {"accuracy": float(found), "known": 1 - math.log(possible) / math.log(HIGHEST)}
        return hint, float(found), found, self._guesses == MOST_GUESSES, {"parts": parts}


def careless_game(number: int, generator: np.random.Generator) -> str:
    """A game of somebody who forgets half the time what is known; guesses and the answers to them."""
    world, low, high, said = Guessing(Problem("", "", columns={"number": number})), LOWEST, HIGHEST, ""
    while True:
        first, last = (low, high) if generator.random() < 0.5 else (LOWEST, HIGHEST)
        guess = int(generator.integers(first, last + 1))
        hint, _, found, over, _ = world.step(f"{guess:02d}")
        said += f"{guess:02d}"
        if found or over:
            return said
        low, high = (max(low, guess + 1), high) if hint == ">" else (low, min(high, guess - 1))
        said += hint


def write_problems(folder: Path) -> None:
    """Writes the problems to train on and those held out.

    Each prompt comes with every number, so that it says nothing of it. The answers are careless games, which the base
    policy is trained on.
    """
    generator = np.random.default_rng(0)
    for name, names in {"train": range(10, 50), "held_out": range(50, 52)}.items():
        rows = [
            {"prompt": f"{name} 01-31<>?\n", "answer": careless_game(number, generator), "number": number}
            for name in names
            for number in range(LOWEST, HIGHEST + 1)
        ]
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"guessing_{name}.jsonl").write_text(text, encoding="utf-8")


def guesses_of_binary_search(number: int) -> int:
    """How many guesses it takes to find a number from 1 to 31 by always taking the middle."""
    low, high, count = LOWEST, HIGHEST, 0
    while True:
        middle, count = (low + high) // 2, count + 1
        if middle == number:
            return count
        low, high = (middle + 1, high) if middle < number else (low, middle - 1)


def main(run: Path) -> None:
    """Prints success and mean guesses, a game that was lost counting as all of them, before and after training."""
    search = [guesses_of_binary_search(number) for number in range(LOWEST, HIGHEST + 1)]
    for name in ("before", "after"):
        lines = (run / "samples" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        games = [json.loads(line) for line in lines]
        won = [game["accurate"] for game in games]
        turns = np.mean([game["reward/turns"] for game in games])
        print(f"{name}: {len(games)} games, won {np.mean(won):.3f}, {turns:.2f} guesses")
    print(f"binary search: won 1.000, {np.mean(search):.2f} guesses, at most {max(search)}")


if __name__ == "__main__":
    main(Path(sys.argv[1])) if len(sys.argv) > 1 else write_problems(Path(__file__).parent)
