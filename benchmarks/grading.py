"""Mathematical answers: throughput of the built-in reward, and its verdicts next to those of math-verify.

    python -m benchmarks.grading [--answers 1000] [--workers 2] [--repeats 5]
    python -m benchmarks.grading --compare [--python /usr/bin/python3]

The first command grades 1,000 answers in this process, one after another, and through the workers. Answers are whole
numbers, decimals, fractions and roots in equal shares, half of them right, all different, so that nothing is answered
from a cache. Each way is warmed up by one batch; medians, lowest and highest over the repeats.

The second command grades the tables of tests/grading with both graders, keeps the counts of wrong verdicts in
benchmarks/results/grading.json, and writes them into docs/grading.md. math-verify runs in an environment of its own.
"""

import json
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from absl import app, flags

from benchmarks.systems import System, interpreter
from benchmarks.tables import put_into_page, table
from recjax import __version__
from recjax.config import Config, GradingConfig
from recjax.rewards.pool import Answered, Grading
from recjax.rewards.reward import load_reward
from recjax.runtime.cache import cache_folder
from tests.grading.reward_cases import math_tables

FLAGS = flags.FLAGS
ROOT = Path(__file__).parents[1]
RESULT, PAGE = ROOT / "benchmarks" / "results" / "grading.json", ROOT / "docs" / "grading.md"
MATH_VERIFY = System("math_verify_worker", "math_verify", {}, "math-verify")


def make_answers(count: int, repeat: int) -> tuple[list[str], list[str]]:
    """Completions and true answers that no other repeat has."""
    kinds = ["%d", "%d.5", r"\frac{%d}{7}", r"%d\sqrt{3}"]
    numbers = [repeat * count + index for index in range(count)]
    answers = [kinds[index % len(kinds)] % number for index, number in enumerate(numbers)]
    said = [kinds[index % len(kinds)] % (number + index // 4 % 2) for index, number in enumerate(numbers)]
    return [f"The answer is $\\boxed{{{text}}}$." for text in said], answers


def errors(rows: list[tuple[str, str, str, int]], verdicts: list[bool]) -> dict[str, int]:
    """Counts wrong answers that a grader accepted, and right answers that it refused."""
    pairs = [(right, verdict) for (*_, right), verdict in zip(rows, verdicts, strict=True)]
    return {
        "wrong_paid": sum(verdict and not right for right, verdict in pairs),
        "right_refused": sum(right and not verdict for right, verdict in pairs),
    }


def compared(python: str) -> dict[str, Any]:
    """The wrong verdicts of both graders on every table, and the versions."""
    rewards = {name: load_reward(name).function for name in ("math", "guru_math")}
    command = [python, "-m", f"benchmarks.workers.{MATH_VERIFY.worker}"]

    def of_math_verify(rows):
        pairs = json.dumps([row[1:3] for row in rows])
        return json.loads(
            subprocess.run(command, input=pairs, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
        )

    result, tables = {"versions": {"recjax": __version__}, "tables": {}}, math_tables()
    with ThreadPoolExecutor(max_workers=2) as pool:
        for (name, rows), theirs in zip(tables.items(), pool.map(of_math_verify, tables.values()), strict=True):
            ours = [rewards[reward](completion, truth, {})["accuracy"] == 1 for reward, completion, truth, _ in rows]
            result["versions"] |= theirs["versions"]
            result["tables"][name] = {
                "answers": len(rows),
                "right": sum(right for *_, right in rows),
                "recjax": errors(rows, ours),
                "math-verify": errors(rows, theirs["verdicts"]),
            }
    return result


def comparison(result: dict[str, Any]) -> str:
    """The page's table: a row for each table of cases, and the versions."""
    head = ["table", "wrong answers", "paid by recjax", "paid by math-verify"]
    rows = [[*head, "right answers", "refused by recjax", "refused by math-verify"]]
    for name, counts in result["tables"].items():
        graders = [counts["recjax"], counts["math-verify"]]
        wrong = [counts["answers"] - counts["right"], *(errors["wrong_paid"] for errors in graders)]
        right = [counts["right"], *(errors["right_refused"] for errors in graders)]
        rows.append([f"[{name}](../tests/grading/{name})", *(f"{count:,}" for count in wrong + right)])
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join([*table(rows), "", f"Versions: {versions}.", ""])


def main(argv: list[str]) -> None:
    """Compares the graders, or times both ways and prints a line for each."""
    if FLAGS.compare:
        given = {"math_verify": FLAGS.python} if FLAGS.python else {}
        result = compared(interpreter(MATH_VERIFY, cache_folder("benchmarks"), given))
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        put_into_page(str(PAGE), "math-verify", comparison(result))
        return
    reward = load_reward("math")
    config = Config.model_construct(output="", grading=GradingConfig(workers=FLAGS.workers))
    with Grading(config, reward) as grading:

        def in_workers(completions, answers):
            rows = [Answered("", *row, {}, 1) for row in zip(completions, answers, strict=True)]
            return grading.submit(rows).result().rewards

        def in_process(completions, answers):
            return [reward.function(*row, {})["accuracy"] for row in zip(completions, answers, strict=True)]

        for name, graded in [("in this process", in_process), (f"{FLAGS.workers} workers", in_workers)]:
            seconds = []
            for repeat in range(FLAGS.repeats + 1):
                completions, answers = make_answers(FLAGS.answers, repeat)
                start = time.perf_counter()
                rewards = graded(completions, answers)
                seconds.append(time.perf_counter() - start)
                assert sum(rewards) == FLAGS.answers / 2
            measured = [f(seconds[1:]) for f in (statistics.median, min, max)]
            print("{}: {:.2f} s ({:.2f} to {:.2f})".format(name, *measured), end="")
            print(f", {FLAGS.answers / measured[0]:.0f} answers a second; the first batch {seconds[0]:.2f} s")


if __name__ == "__main__":
    flags.DEFINE_integer("answers", 1000, "Answers in a batch; a multiple of 8.", lower_bound=8)
    flags.DEFINE_integer("workers", 2, "Worker processes.", lower_bound=1)
    flags.DEFINE_integer("repeats", 5, "Batches timed.", lower_bound=1)
    flags.DEFINE_boolean("compare", False, "Compare the verdicts with math-verify's, and write the page.")
    flags.DEFINE_string("python", None, "An interpreter that has math-verify, instead of a new environment.")
    app.run(main)
