"""Evaluates a policy on held-out problems: accuracy, pass@k, majority@k, rewards and lengths, with intervals.

    python -m recjax.evaluate --config FILE [checkpoint=…] [key=value …] [--output FOLDER]

checkpoint is a training run's folder (its newest checkpoint), a single checkpoint (runs/NAME/checkpoints/80), or a
Hugging Face folder or hub name. Without it, or with `base`, the command evaluates the config's initial model. The
config has the questions and settings: task, evaluation, rollout.max_completion_tokens, rollout.stop and
rollout.prompts_per_step (number of problems sampled at a time). The same command resumes an interrupted evaluation.
Several processes evaluate together if each gets the same command; see docs/devices.md.
"""

import contextlib
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import pandas as pd
from absl import flags
from rich.table import Table

from recjax import hosts
from recjax.analysis.samples import results
from recjax.cache import keep_compiled_programs
from recjax.config import Config, TaskConfig, load_config
from recjax.config.yaml_values import read_yaml_file, write_yaml
from recjax.console import command, define_process_flags, plain_console, progress_bar, start
from recjax.files import json_text, partial_of, whole_file, write_whole, writing
from recjax.host_memory import prepare_host_memory
from recjax.hub.chat_rendering import CHAT_DATE, TEMPLATE_KWARGS
from recjax.plots.samples import draw_evaluation
from recjax.rollout.agents import Agents
from recjax.rollout.trajectory import thoughts_opening
from recjax.tasks.grading.pool import Grading
from recjax.tasks.loading import load_task
from recjax.tasks.problems import Problem, Task
from recjax.tasks.prompts import Prompts, encode_problems
from recjax.training.evaluation import answered, sample_rows, warn_of_ungraded
from recjax.training.mesh import make_mesh
from recjax.training.run import without_long_prompts
from recjax.training.run_folder import differences
from recjax.training.trained import OpenedPolicy, fingerprint, open_policy

FLAGS = flags.FLAGS


@command
def main(argv: list[str]) -> None:
    """Evaluates the policy, writes the folder and prints the numbers."""
    prepare_host_memory()
    keep_compiled_programs()
    checkpoint, overrides = split_arguments(argv[1:])
    config = load_config(FLAGS.config, overrides)
    with hosts.together(FLAGS.coordinator, FLAGS.processes, FLAGS.process_id), jax.set_mesh(make_mesh(config.mesh)):
        folder, numbers = evaluate(config, checkpoint, FLAGS.output)
    if hosts.is_first():
        show_results(numbers)
        print(f"folder: {folder}")


def split_arguments(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Splits arguments into the checkpoint, if any, and the config overrides.

    Raises:
        ValueError: there are several checkpoints, or an `output=` override.
    """
    checkpoints = [text.partition("=")[2] for text in arguments if text.startswith("checkpoint=")]
    overrides = [text for text in arguments if not text.startswith("checkpoint=")]
    if len(checkpoints) > 1:
        raise ValueError(f"found {len(checkpoints)} values of checkpoint=; give one")
    if any(text.startswith("output=") for text in overrides):
        raise ValueError("output=… names a training run's folder; name the evaluation's folder with --output FOLDER")
    return (checkpoints[0] if checkpoints else None), overrides


def evaluate(config: Config, checkpoint: str | None, output: str | None) -> tuple[Path, dict[str, Any]]:
    """Samples completions and writes the results; returns the folder and, in the first process, results.json's content.

    Every checkpoint uses the random numbers of a run's first evaluation. Two policies therefore get the same problems
    and noise, and equal weights from two places give equal numbers.

    Args:
        checkpoint: name of the checkpoint; see `recjax.training.trained.open_policy`.
        output: folder to write; None: a folder in runs/evaluations with the names of model and task.
    Raises:
        ValueError: the data is invalid, the checkpoint is missing, or the folder holds something else.
    """
    task, evaluated, label = load_task(config), open_policy(checkpoint, config), task_label(config.task)
    folder = Path(output or "runs/evaluations/" + re.sub(r"[^\w.-]+", "_", f"{evaluated.name}-{label}"))
    # An interrupted evaluation keeps the date of its prompts, unless a run or the config sets one.
    own_date, stored = evaluated.policy.tokenizer.init_kwargs.get(CHAT_DATE), folder / "config.yaml"
    begun = None
    if own_date and not (evaluated.run or config.model.chat_date) and stored.is_file():
        begun = (read_yaml_file(stored) or {}).get(CHAT_DATE)
    if begun and begun != own_date:
        config = config.model_copy(update={"model": config.model.model_copy(update={"chat_date": begun})})
        evaluated = open_policy(checkpoint, config)
    task = without_long_prompts(task, evaluated.policy.tokenizer, config.rollout)
    limit, vocabulary = config.rollout.max_prompt_tokens, evaluated.policy.vocabulary
    prompts = encode_problems(task.evaluation, evaluated.policy.tokenizer, limit, vocabulary)
    open_folder(folder, what_decides(config, evaluated))
    if not hosts.any_says((folder / "samples.parquet").is_file()):
        sample_rounds(config, evaluated, prompts, task, folder)
    if not hosts.is_first():
        return folder, {}
    shutil.rmtree(folder / "rounds", ignore_errors=True)
    rows = _read(folder / "samples.parquet")
    warn_of_ungraded(rows["ungraded"])
    numbers = {"model": evaluated.name, "task": label} | results(rows)
    if evaluated.run:
        numbers["seen_in_training"] = seen_in_training(evaluated.run, task.evaluation)
    write_whole(folder / "results.json", json_text(numbers, indent=2) + "\n")
    draw_evaluation(rows, numbers, f"{evaluated.name} on {label}", folder / "evaluation.png")
    return folder, numbers


def task_label(task: TaskConfig) -> str:
    """A name for the task, its file's name or its generator's name."""
    if task.file:
        return Path(task.file.evaluation or task.file.train).stem
    return f"reasoning_gym_{task.reasoning_gym.name}" if task.reasoning_gym else task.chosen()


def what_decides(config: Config, evaluated: OpenedPolicy) -> dict[str, Any]:
    """Everything that determines the samples; weights count by their values, not by their path."""
    rollout = ("prompts_per_step", "max_prompt_tokens", "max_context_tokens", "max_completion_tokens")
    evaluation = ("problems", "samples", "temperature", "top_k", "top_p", "min_p")
    given = {name: evaluated.policy.tokenizer.init_kwargs.get(name) for name in (CHAT_DATE, TEMPLATE_KWARGS)}
    return {
        **{name: value for name, value in given.items() if value},
        "model": evaluated.name,
        "weights": fingerprint(evaluated.params),
        "dtype": str(evaluated.policy.decoder.dtype),
        "seed": config.seed,
        "task": config.task.model_dump(),
        "rollout": {name: getattr(config.rollout, name) for name in (*rollout, "long_prompts", "stop")},
        "evaluation": {name: getattr(config.evaluation, name) for name in evaluation},
    }


def open_folder(folder: Path, decides: dict[str, Any]) -> None:
    """Creates the folder with its config.yaml, or checks that an existing folder holds the same evaluation.

    Raises:
        ValueError: the folder holds another evaluation or other files.
    """
    with writing(folder):
        stored = folder / "config.yaml"
        found = folder.exists() and {path.name for path in folder.iterdir()} - {partial_of(stored.name)}
    known = stored.is_file()
    hosts.wait_for_all("looked into the evaluation's folder")
    if known:
        theirs = read_yaml_file(stored)
        if not isinstance(theirs, dict):
            raise ValueError(f"{stored} is damaged (no keys and values); name another folder with --output")
        if changed := differences(decides, theirs, {"model"}):
            raise ValueError(f"{folder} holds another evaluation ({changed}); name another folder with --output")
    elif found:
        raise ValueError(f"{folder} holds other files than an evaluation's; name another folder with --output")
    elif hosts.is_first():
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_whole(stored, write_yaml(decides))


def sample_rounds(config: Config, evaluated: OpenedPolicy, prompts: Prompts, task: Task, folder: Path) -> None:
    """Samples the missing rounds, one file per round, and merges all rounds into samples.parquet."""
    size, count = config.rollout.prompts_per_step, len(prompts.texts)
    files = {first: folder / "rounds" / f"{first:06d}.parquet" for first in range(0, count, size)}
    begin = hosts.least(next((first for first, file in files.items() if not file.is_file()), count))
    if hosts.is_first():
        (folder / "rounds").mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        grading = stack.enter_context(Grading(config, task.reward))
        bar = stack.enter_context(progress_bar(evaluated.name, count, begin, unit="problem", shown=hosts.is_first()))
        agents = Agents(config, evaluated.policy) if config.task.agent else None
        stack.enter_context(agents or contextlib.nullcontext())
        options = {"step": 0, "first": begin, "agents": agents}
        for done in answered(config, evaluated.policy, evaluated.params, prompts, grading, **options):
            if hosts.is_first():
                rows = pd.DataFrame(sample_rows(done))
                tokenizer = evaluated.policy.tokenizer
                openings = [thoughts_opening(one, tokenizer) for group in done.groups for one in group.completions]
                rows["parsed"] = grading.parsed(rows["completion"].tolist(), openings)
                _write_table(rows, files[done.first])
            bar.update(len(done.groups))
    if hosts.is_first():
        _write_table(pd.concat(map(_read, files.values()), ignore_index=True), folder / "samples.parquet")


def _read(file: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error}); delete it and run the same command again") from error


def _write_table(rows: pd.DataFrame, path: Path) -> None:
    with whole_file(path) as file:
        rows.to_parquet(file, index=False, compression="zstd")


def seen_in_training(run: Config, problems: list[Problem]) -> int | None:
    """Counts the problems that a run trains on; None if the task of the run is no longer readable.

    A run holds out problems by its own config, so it may have trained on problems that this evaluation uses.
    """
    try:
        known = {(str(problem.prompt), problem.answer) for problem in load_task(run).train}
    except ValueError:
        return None
    return sum((str(problem.prompt), problem.answer) in known for problem in problems)


def show_results(numbers: dict[str, Any]) -> None:
    """Prints every metric with its interval, accuracy by difficulty, and the accuracy of the best constant answer."""

    def cells(estimate: dict) -> tuple[str, str]:
        interval = "" if estimate["low"] is None else f"{estimate['low']:.3f} – {estimate['high']:.3f}"
        return f"{estimate['value']:.3f}", interval

    console = plain_console()
    title = f"{numbers['model']} on {numbers['task']}: {numbers['problems']} problems × {numbers['samples']} samples"
    table = Table("", "value", "95 % interval", title=title)
    for name, estimate in numbers["metrics"].items():
        table.add_row(name, *cells(estimate))
    console.print(table)
    if numbers["difficulty"]:
        table = Table("difficulty", "problems", "accuracy", "95 % interval")
        for label, estimate in numbers["difficulty"].items():
            table.add_row(label, str(estimate["problems"]), *cells(estimate))
        console.print(table)
    constant = numbers["constant_answer"]
    print(f"always answering {constant['answer']!r:.60} would be right on {constant['share']:.3f} of the problems")
    if numbers.get("seen_in_training"):
        print(f"warning: the run was trained on {numbers['seen_in_training']} of these problems")


if __name__ == "__main__":
    # Not at module level: absl flags are global, and importing this module must not define them.
    flags.DEFINE_string("config", None, "YAML file of a training run, for its task and settings.", required=True)
    flags.DEFINE_string("output", None, "Folder to write; default: runs/evaluations/MODEL-TASK.")
    define_process_flags()
    start(main)
