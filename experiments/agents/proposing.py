"""A proposer and a solver for experiments/agents/proposing.yaml: one policy writes sums for itself and solves them.

python -m experiments.agents.proposing runs/proposing       valid proposals and right answers, before and after
python -m experiments.agents.proposing                      writes the files of problems again
"""

import asyncio
import json
import re
import sys
from pathlib import Path

import numpy as np

from recjax.agents.agent_policy import Seats
from recjax.tasks.problems import Problem

ANSWERS = 4  # of each sum
ASK = "?"  # the proposer's prompt


async def propose_and_solve(problem: Problem, policy: Seats) -> dict[str, float | dict[str, float]]:
    """The proposer writes a sum of two numbers, and the solver answers it four times.

    The solver gets the share p of right answers, and each answer its own reward. The proposer gets 4 p (1 − p), most
    where the solver is right half of the time, and −1 for a text that is no sum; the solver then has no turn.
    """
    proposal = await policy.seat("proposer").complete(ASK)
    numbers = re.fullmatch(r"(\d\d?)\+(\d\d?)=", proposal.text, re.ASCII)
    if numbers is None:
        return {"proposer": {"score": -1.0, "valid": 0.0}, "solver": 0.0}
    solver, right = policy.seat("solver"), str(sum(map(int, numbers.groups())))
    replies = await asyncio.gather(*(solver.complete(proposal.text, max_tokens=4) for _ in range(ANSWERS)))
    are_right = [reply.text == right for reply in replies]
    for reply, is_right in zip(replies, are_right, strict=True):
        solver.reward(float(is_right) / ANSWERS, reply)
    share = float(np.mean(are_right))
    return {"proposer": {"score": 4 * share * (1 - share), "valid": 1.0}, "solver": {"score": 0.0, "accuracy": share}}


def main(run: Path) -> None:
    """Prints the share of valid proposals, the proposer's mean reward and the share of right answers."""
    for name in ("before", "after"):
        rows = [json.loads(line) for line in (run / "samples" / f"{name}.jsonl").read_text().splitlines()]
        proposals, answers = ([row for row in rows if row["seat"] == seat] for seat in ("proposer", "solver"))
        valid = np.mean([row["reward/valid"] for row in proposals])
        worth, share = (
            np.mean([row["reward/score"] for row in proposals]),
            np.mean([row["reward/accuracy"] for row in answers]),
        )
        print(
            f"{name}: {valid:.2f} valid proposals with a mean reward of {worth:.2f}; {share:.2f} of the answers right"
        )


def write_problems(folder: Path) -> None:
    """Writes the examples of both roles that the base policy learns from; agents play from any of them."""
    generator = np.random.default_rng(0)
    for name, count in {"train": 400, "held_out": 8}.items():
        sums = generator.integers(0, 50, (count, 2)).tolist()
        rows = [{"prompt": f"{one}+{other}=", "answer": str(one + other)} for one, other in sums]
        rows += [{"prompt": ASK, "answer": row["prompt"]} for row in rows if name == "train"]
        unique = {(row["prompt"], row["answer"]): row for row in rows}.values()
        (folder / f"proposing_{name}.jsonl").write_text(
            "".join(f"{json.dumps(row)}\n" for row in unique), encoding="utf-8"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1])) if len(sys.argv) > 1 else write_problems(Path(__file__).parent)
