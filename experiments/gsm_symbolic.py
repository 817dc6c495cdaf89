"""Writes problems of reasoning_gym's generator gsm_symbolic as files of GSM8K's form, to train and to evaluate on.

    python experiments/gsm_symbolic.py --output data/gsm_symbolic

Their solutions end in "#### 72" as GSM8K's do, so that `task: gsm8k` reads the folder as it reads the hub's data set.
"""

import json
from pathlib import Path

from absl import app, flags

from recjax.config import ReasoningGymTask
from recjax.tasks.gym import gym_problems

FLAGS = flags.FLAGS


def write_splits(output: Path, train: int, test: int) -> None:
    """train.jsonl and test.jsonl with the columns question and answer."""
    made = gym_problems(ReasoningGymTask(name="gsm_symbolic"), test + train, seed=0)
    splits = made[test:], made[:test]
    output.mkdir(parents=True, exist_ok=True)
    for name, problems in zip(("train", "test"), splits, strict=True):
        entries = [problem.columns["entry"] for problem in problems]
        rows = [{"question": entry["question"], "answer": entry["metadata"]["answer_cot"]} for entry in entries]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (output / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def main(argv: list[str]) -> None:
    """Writes both files."""
    write_splits(Path(FLAGS.output), FLAGS.train, FLAGS.test)


if __name__ == "__main__":
    flags.DEFINE_string("output", "data/gsm_symbolic", "Folder to write to.")
    flags.DEFINE_integer("train", 400, "Problems to train on.", lower_bound=1)
    flags.DEFINE_integer("test", 100, "Problems to evaluate on.", lower_bound=1)
    app.run(main)
