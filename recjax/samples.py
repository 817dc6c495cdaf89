"""Writes an HTML page with completions that the model of a run wrote in training.

    python -m recjax.samples RUN [OTHER_RUN] [--output FILE.html] [--follow]

A run keeps completions of some batches; `samples` in its config sets how many. The page shows their groups step by
step, with rewards, two steps or two runs side by side, and each trajectory turn by turn. For each token it shows the
probability, the ratio, and marks for clipped and masked tokens. The page is a single file and needs no network.
With --follow, the command rewrites the page while the run trains, and the browser shows the newest step.
"""

import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from absl import flags

from recjax.errors import UserError
from recjax.logs.kept_samples import kept_rows, samples_folder
from recjax.runs.folder import is_finished
from recjax.runs.stored_runs import run_config
from recjax.runtime.console import command, start
from recjax.runtime.files import json_text, write_whole

FLAGS = flags.FLAGS
LOOK_SECONDS = 2.0  # `follow` looks for new completions at this interval


def sample_page(runs: Sequence[dict[str, Any]]) -> str:
    """The page; texts of prompts and completions reach it as data and are never read as HTML.

    Args:
        runs: one or two runs, each with `name`, `about` (a description in a few words), and `rows` as
            `recjax.logs.kept_samples` writes them, in order of steps. With `follows`, the browser reads the page
            again every few seconds and shows the run's newest step.
    """
    # "<" would end the element that holds the data, were it of "</script>".
    data = json_text(list(runs), ensure_ascii=False).replace("<", "\\u003c")
    template = files("recjax.plots").joinpath("sample_page.html").read_text(encoding="utf-8")
    return template.replace("{{data}}", data)


def write_page(runs: Sequence[Path], output: Path, follows: bool = False) -> int:
    """Writes the page and returns the number of completions on it.

    Args:
        follows: see `sample_page`.
    Raises:
        UserError: one of `runs` is not a training run or has no kept completions, or the page cannot be written.
    """
    sections: list[dict[str, Any]] = []
    for run in runs:
        config = run_config(run)
        rows = kept_rows(run)
        steps = len({row["step"] for row in rows})
        summary = f"{config.algorithm.preset}, {config.task.chosen()}: {len(rows)} completions of {steps} steps"
        section: dict[str, Any] = {"name": run.resolve().name, "about": summary, "rows": rows}
        if follows:
            section["follows"] = True
        sections.append(section)
    write_whole(output, sample_page(sections))
    return sum(len(section["rows"]) for section in sections)


def follow(runs: Sequence[Path], output: Path) -> int:
    """Rewrites the page whenever the runs keep more completions, until all have finished; see `write_page`.

    The first page waits until each run has kept some.
    """
    count = 0
    shown = None
    while True:
        is_over = all(is_finished(run_config(run)) for run in runs)
        kept = [_file_names(run) for run in runs]
        if is_over or (all(kept) and kept != shown):
            count = write_page(runs, output, follows=not is_over)
            if shown is None and not is_over:
                print(f"{output} follows the run until it ends; open it in a browser", flush=True)
            shown = kept
        if is_over:
            return count
        time.sleep(LOOK_SECONDS)


def _file_names(run: Path) -> list[str]:
    return sorted(path.name for path in samples_folder(run).glob("*.jsonl"))


@command
def main(argv: list[str]) -> None:
    """Writes the page and prints its path."""
    if len(argv) not in (2, 3):
        raise UserError(problem="give one run, or two to compare: python -m recjax.samples runs/NAME")
    runs = [Path(run) for run in argv[1:]]
    output = Path(FLAGS.output) if FLAGS.output else runs[0] / "samples.html"
    if FLAGS.follow:
        count = follow(runs, output)
    else:
        count = write_page(runs, output)
    print(f"{output}: {count} completions; open it in a browser")


if __name__ == "__main__":
    flags.DEFINE_string("output", None, "File to write; default: samples.html in the first run's folder.")
    flags.DEFINE_bool("follow", False, "Rewrite the page while the run trains, until it ends.")
    start(main)
