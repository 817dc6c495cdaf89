"""Throughput of the built-in `math` reward: 1,000 answers in this process, one after another, and through the workers.

    python -m benchmarks.grading [--answers 1000] [--workers 2] [--repeats 5]

Answers are whole numbers, decimals, fractions and roots in equal shares, half of them right, all different, so that
nothing is answered from a cache. Each way is warmed up by one batch; medians, lowest and highest over the repeats.
"""

import statistics
import time

from absl import app, flags

from recjax.config import Config, GradingConfig
from recjax.tasks.grading.pool import Answered, Grading
from recjax.tasks.grading.reward import load_reward

FLAGS = flags.FLAGS


def make_answers(count: int, repeat: int) -> tuple[list[str], list[str]]:
    """Completions and true answers that no other repeat has."""
    kinds = ["%d", "%d.5", r"\frac{%d}{7}", r"%d\sqrt{3}"]
    numbers = [repeat * count + index for index in range(count)]
    answers = [kinds[index % len(kinds)] % number for index, number in enumerate(numbers)]
    said = [kinds[index % len(kinds)] % (number + index // 4 % 2) for index, number in enumerate(numbers)]
    return [f"The answer is $\\boxed{{{text}}}$." for text in said], answers


def main(argv: list[str]) -> None:
    """Times both ways and prints a line for each."""
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
    app.run(main)
