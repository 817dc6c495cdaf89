"""Writes an HTML page with completions that a run's model wrote in training.

    python -m recjax.samples RUN [--output FILE.html]

A run keeps completions of some batches; `samples` in its config sets how many. The page shows their groups step by
step, with rewards. For each token it shows the probability, the ratio, and marks for clipped and masked tokens. The
page is a single file and needs no network.
"""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from absl import flags

from recjax.console import command, start
from recjax.files import json_text, write_whole
from recjax.tasks.reading import read_file
from recjax.training.kept_samples import folder_of
from recjax.training.trained import run_config

FLAGS = flags.FLAGS


def kept_rows(run: Path) -> list[dict[str, Any]]:
    """Reads the completions that a run kept, by step.

    Raises:
        ValueError: the run kept no completions, or a file is damaged.
    """
    rows = [row.values for path in sorted(folder_of(run).glob("*.jsonl")) for row in read_file(path, "samples")]
    if not rows:
        raise ValueError(f"{folder_of(run)} holds no completions; set samples.every above 0 and train")
    return rows


def sample_page(name: str, about: str, rows: Sequence[dict[str, Any]]) -> str:
    """The page; texts of prompts and completions reach it as data and are never read as HTML.

    Args:
        name: name of the run.
        about: description of the run in a few words.
        rows: as `recjax.training.kept_samples` writes them, in order of steps.
    """
    data = json_text({"name": name, "about": about, "rows": list(rows)}, ensure_ascii=False)
    # "<" would end the element that holds the data, were it of "</script>".
    data = data.replace("<", "\\u003c")
    template = files("recjax.plots").joinpath("sample_page.html").read_text(encoding="utf-8")
    return template.replace("{{data}}", data)


def write_page(run: Path, output: Path) -> int:
    """Writes the page and returns the number of completions on it.

    Raises:
        ValueError: `run` is not a training run or has no kept completions, or the page cannot be written.
    """
    config, rows = run_config(run), kept_rows(run)
    steps = len({row["step"] for row in rows})
    about = f"{config.algorithm.preset}, {config.task.chosen()}: {len(rows)} completions of {steps} steps"
    write_whole(output, sample_page(run.resolve().name, about, rows))
    return len(rows)


@command
def main(argv: list[str]) -> None:
    """Writes the page and prints its path."""
    if len(argv) != 2:
        raise ValueError("give one run: python -m recjax.samples runs/NAME")
    run = Path(argv[1])
    output = Path(FLAGS.output) if FLAGS.output else run / "samples.html"
    count = write_page(run, output)
    print(f"{output}: {count} completions; open it in a browser")


if __name__ == "__main__":
    flags.DEFINE_string("output", None, "File to write; default: samples.html in the run's folder.")
    start(main)
