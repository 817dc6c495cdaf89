"""Trains a language model with off-policy group-relative REINFORCE.

    python -m recjax.train --config experiments/quickstart.yaml [key=value ...]
    python -m recjax.train --help [KEY ...]

`--config quickstart` also finds this example, without a checkout; `recjax --help` lists the examples.

Several processes, on one host or on many, train together if each gets the same command; see docs/devices.md.

Overrides are dotted keys of the config with their values, such as optimizer.learning_rate=1e-6 or
regime.sync_interval=20. The same command resumes an interrupted run. On SIGTERM, SIGHUP and Ctrl-C a run finishes its
step, writes a checkpoint and exits with status 143, 129 or 130. --verbosity=0 shows log messages of libraries.

--help KEY explains a key of the config, such as regime.sync_interval, or the keys of a block, such as regime.
--help keys explains all. A part of a name finds the keys that contain it.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from recjax.config import load_config
from recjax.config.help import help_text
from recjax.errors import UserError
from recjax.runtime.console import command, define_process_flags, plain_console, start
from recjax.runtime.usage import HELP
from recjax.tasks.problems import question_of

if TYPE_CHECKING:
    from recjax.api import Result

FLAGS = flags.FLAGS
flags.DEFINE_string("config", None, "YAML file of the run, or the name of an example.", required=True)
define_process_flags()
flags.DEFINE_bool("overwrite", False, "Delete the run in the output folder.")
flags.DEFINE_bool(
    "dry_run", False, "Check the config, print sizes, memory and staleness; read no weights, train nothing."
)

flags.DEFINE_string(
    "device", None, "With --dry_run: devices to plan for, such as h100-80, h100-80:8, v5e:4x4, v5p-16 or host."
)


@command
def main(argv: list[str]) -> None:
    """Reads the config, trains and prints the result."""
    if FLAGS.device and not FLAGS.dry_run:
        raise UserError("--device", "applies only with --dry_run", "add it, or remove --device", value=FLAGS.device)
    config = None if FLAGS.dry_run else load_config(FLAGS.config, argv[1:])
    # These imports take seconds, so --help and config errors come first.
    from recjax.api import run
    from recjax.planning.dry_run import print_dry_run
    from recjax.runs.folder import check_processes, check_run_folder
    from recjax.runtime import hosts
    from recjax.runtime.cache import keep_compiled_programs
    from recjax.training.loop import Preempted

    if FLAGS.dry_run:
        keep_compiled_programs()
        sys.exit(print_dry_run(FLAGS.config, argv[1:], FLAGS.device))
    assert config is not None
    try:
        with hosts.connected(FLAGS.coordinator, FLAGS.processes, FLAGS.process_id):
            check_processes(config)
            check_run_folder(config, FLAGS.overwrite)  # `run` accepts a finished run
            result = run(config, overwrite=FLAGS.overwrite)
    except Preempted as stopped:
        print(f"{config.output}: {stopped}", file=sys.stderr)
        sys.exit(128 + stopped.signal)
    if hosts.is_first():
        show_result(result)


def show_result(result: "Result") -> None:
    """Prints accuracy (or the reward), and completions of a few problems, before and after training, and the costs."""
    from rich.table import Table  # not at module level: --help needs no tables
    from rich.text import Text

    console = plain_console()
    output = result.folder
    summary = result.summary
    assert summary is not None
    table = Table("", "before", "after", title=f"{output}: {summary['steps']} steps")
    measured = {name.partition("_")[0] for name, value in summary.items() if value is not None}
    measure = "reward" if "reward" in measured and "accuracy" not in measured else "accuracy"
    table.add_row(
        f"held-out {measure}",
        _shown(summary.get(f"{measure}_before")),
        _shown(summary.get(f"{measure}_after")),
    )
    try:
        before = _samples(output / "samples" / "before.jsonl")
        after = _samples(output / "samples" / "after.jsonl")
    except UserError as error:
        print(f"warning: {error}; recjax shows no samples", file=sys.stderr)
        before = []
        after = []
    pairs = {old["prompt"]: (old, new) for old, new in zip(before, after, strict=False)}
    width = max(16, (console.width - 10) // 3)
    for old, new in list(pairs.values())[:5]:
        cells = []
        for text in (old["question"], old["completion"], new["completion"]):
            line = repr(text)[1:-1]
            if len(line) > 2 * width:
                line = f"{line[:width]} … {line[-width + 3 :]}"
            cells.append(Text(line))
        table.add_row(*cells)
    console.print(table)
    files = f"figure: {output / 'figures' / 'training.png'}"
    report = output / "report.html"
    if report.is_file():
        files += f"; report: {report}"
    console.print(
        f"{summary['wall_seconds']:.0f} s, {_shown(summary['tokens_per_second'], 0)} completion tokens/s,"
        f" peak memory {summary['peak_memory_bytes'] / 2**30:.2f} GiB; {files}",
        highlight=False,
        soft_wrap=True,
    )


def _shown(number: float | None, places: int = 3) -> str:
    """A number in the summary; a dash if the number is missing."""
    return "–" if number is None else f"{number:.{places}f}"


def _samples(path: Path) -> list[dict]:
    if not path.is_file():
        return []
    samples = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            sample = json.loads(line)
            prompt = str(sample["prompt"])
            completion = str(sample["completion"])
            question = str(sample.get("question", question_of(prompt)))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(path, f"line {number} is damaged ({type(error).__name__}: {error})") from error
        samples.append({"prompt": prompt, "completion": completion, "question": question})
    return samples


if __name__ == "__main__":
    if HELP.intersection(sys.argv[1:2]):
        print(help_text(sys.argv[2:]), end="")
        sys.exit()
    start(main)
