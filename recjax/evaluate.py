"""Evaluates a policy on held-out problems: accuracy, pass@k, majority@k, rewards and lengths, with intervals.

    python -m recjax.evaluate --config FILE [checkpoint=…] [key=value …] [--all] [--output FOLDER]

checkpoint is the folder of a run (its newest checkpoint), a single checkpoint (runs/NAME/checkpoints/80), or a
Hugging Face folder or hub name. Without it, or with `base`, the command evaluates the config's initial model. The
config has the questions and settings: task, evaluation, rollout.max_completion_tokens, rollout.stop and
rollout.prompts_per_step (number of problems sampled at a time). --all evaluates on all problems of the task, not on
held-out ones only; then task.file.train is enough. The same command repeats an evaluation, also an
interrupted one. Several processes evaluate together if each gets the same command; see docs/devices.md.
"""

import glob
import re
from pathlib import Path
from typing import Any

import jax
from absl import flags
from rich.table import Table

from recjax.analysis.samples import results
from recjax.config import Config, TaskConfig, load_config
from recjax.config.yaml_values import read_yaml_file, write_yaml
from recjax.errors import UserError
from recjax.hub.chat_rendering import CHAT_DATE, TEMPLATE_KWARGS
from recjax.models.trainable import fingerprint
from recjax.plots.samples import draw_evaluation
from recjax.runs.folder import check_processes
from recjax.runs.policies import OpenedPolicy, open_policy
from recjax.runs.prepare import check_problems
from recjax.runs.sampled_rows import sampled_rows
from recjax.runs.spec import changes, changes_in_words
from recjax.runtime import hosts
from recjax.runtime.cache import keep_compiled_programs
from recjax.runtime.console import command, define_process_flags, plain_console, start
from recjax.runtime.files import json_text, partial_of, whole_file, write_whole, writing
from recjax.tasks.loading import load_task
from recjax.tasks.problems import Problem
from recjax.tasks.prompts import encode_problems, without_long_prompts
from recjax.training.evaluation import warn_of_ungraded
from recjax.training.mesh import make_mesh

FLAGS = flags.FLAGS


@command
def main(argv: list[str]) -> None:
    """Evaluates the policy, writes the folder and prints the numbers."""
    keep_compiled_programs()
    checkpoint, overrides = split_arguments(argv[1:])
    config = load_config(FLAGS.config, overrides)
    with hosts.connected(FLAGS.coordinator, FLAGS.processes, FLAGS.process_id), jax.set_mesh(make_mesh(config.mesh)):
        folder, numbers = evaluate(config, checkpoint, FLAGS.output, FLAGS.all)
    if hosts.is_first():
        show_results(numbers)
        print(f"folder: {folder}")


def split_arguments(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Splits arguments into the checkpoint, if any, and the config overrides.

    Raises:
        UserError: there are several checkpoints, or an `output=` override.
    """
    checkpoints = []
    overrides = []
    for argument in arguments:
        if argument.startswith("checkpoint="):
            checkpoints.append(argument.removeprefix("checkpoint="))
        else:
            overrides.append(argument)
    if len(checkpoints) > 1:
        raise UserError(problem=f"found {len(checkpoints)} values of checkpoint=", remedy="give one")
    if any(override.startswith("output=") for override in overrides):
        raise UserError(
            problem="output=… names a training run's folder", remedy="name the evaluation's folder with --output FOLDER"
        )
    checkpoint = checkpoints[0] if checkpoints else None
    return checkpoint, overrides


def evaluate(
    config: Config, checkpoint: str | None, output: str | None, everything: bool = False
) -> tuple[Path, dict[str, Any]]:
    """Samples completions and writes the results; returns the folder and, in the first process, results.json's content.

    Every checkpoint uses the random numbers of a training run's first evaluation. Two policies therefore get the same
    problems and noise, and equal weights from two places give equal numbers.

    Args:
        checkpoint: name of the checkpoint; see `recjax.runs.policies.open_policy`.
        output: folder to write; None: a folder in runs/evaluations with the names of model and task.
        everything: True to evaluate on all problems of the task, and not only on held-out ones.
    Raises:
        UserError: the data is invalid, the checkpoint is missing, or the folder holds something else.
    """
    check_processes(config)
    task = load_task(config, "all" if everything else "held_out")._replace(train=[])
    check_problems(config, task)
    evaluated = open_policy(checkpoint, config)
    label = task_label(config.task)
    settings = deciding_settings(config, evaluated)
    if everything:
        label += "-all"
        settings["pool"] = "all"
    default_name = re.sub(r"[^\w.-]+", "_", f"{evaluated.name}-{label}")
    folder = Path(output or f"runs/evaluations/{default_name}")
    task = without_long_prompts(task, evaluated.policy.tokenizer, config.rollout)
    limit = config.rollout.max_prompt_tokens
    vocabulary = evaluated.policy.vocabulary
    prompts = encode_problems(task.evaluation, evaluated.policy.tokenizer, limit, vocabulary)
    open_folder(folder, settings)
    rows = sampled_rows(config, evaluated, prompts, task)
    if not hosts.is_first():
        return folder, {}
    with whole_file(folder / "samples.parquet") as file:
        rows.to_parquet(file, index=False, compression="zstd")
    warn_of_ungraded(rows["ungraded"], config.task.agent is not None)
    groups = len(prompts.texts) * len(config.task.trained_seats)
    numbers = {"model": evaluated.name, "task": label} | results(rows, groups)
    if "task" in rows:
        numbers["tasks"] = {name: results(task_rows) for name, task_rows in rows.groupby("task")}
    if evaluated.run:
        numbers["seen_in_training"] = seen_in_training(evaluated.run, task.evaluation)
    write_whole(folder / "results.json", json_text(numbers, indent=2) + "\n")
    draw_evaluation(rows, numbers, f"{evaluated.name} on {label}", folder / "evaluation.png")
    return folder, numbers


def task_label(task: TaskConfig) -> str:
    """A name for the task, its file's name or its generator's name."""
    if task.file:
        path = Path(task.file.evaluation or task.file.train)
        while glob.has_magic(path.name) and not path.exists():  # a pattern gets its folder's name
            path = path.parent
        return path.stem or "file"
    if task.reasoning_gym:
        return f"reasoning_gym_{task.reasoning_gym.name}"
    return task.chosen()


def deciding_settings(config: Config, evaluated: OpenedPolicy) -> dict[str, Any]:
    """Everything that determines the samples; weights count by their values, not by their path."""
    settings: dict[str, Any] = {}
    for name in (CHAT_DATE, TEMPLATE_KWARGS):
        value = evaluated.policy.tokenizer.init_kwargs.get(name)
        if value:
            settings[name] = value
    settings["model"] = evaluated.name
    settings["weights"] = fingerprint(evaluated.params)
    settings["dtype"] = str(evaluated.policy.decoder.dtype)
    rollout = {
        "prompts_per_step",
        "max_prompt_tokens",
        "max_context_tokens",
        "max_completion_tokens",
        "long_prompts",
        "stop",
    }
    settings |= config.model_dump(include={"seed": True, "base_seed": True, "task": True, "rollout": rollout})
    evaluation = {"samples", "temperature", "top_k", "top_p", "min_p"}
    settings["evaluation"] = config.evaluation.model_dump(include=evaluation)
    settings["evaluation"]["problems"] = config.evaluation.most_problems
    return settings


def open_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Creates the folder with its config.yaml, or checks that it belongs to the same evaluation.

    Args:
        settings: the evaluation's `deciding_settings`.
    Raises:
        UserError: the folder holds another evaluation or other files.
    """
    stored = folder / "config.yaml"
    with writing(folder):
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    hosts.wait_for_all("looked into the evaluation's folder")
    # An interrupted evaluation leaves these files.
    interrupted_names = {stored.name, partial_of(stored.name), partial_of("samples.parquet")}
    if "samples.parquet" in names and stored.name in names:
        stored_settings = read_yaml_file(stored)
        if not isinstance(stored_settings, dict):
            raise UserError(stored, "is damaged (no keys and values)", "name another folder with --output")
        changed = changes(stored_settings, settings, ignored={"model"})
        if changed:
            raise UserError(
                folder, f"holds another evaluation ({changes_in_words(changed)})", "name another folder with --output"
            )
    elif names - interrupted_names:
        raise UserError(folder, "holds other files than an evaluation's", "name another folder with --output")
    elif hosts.is_first():
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_whole(stored, write_yaml(settings))


def seen_in_training(run: Config, problems: list[Problem]) -> int | None:
    """Counts the problems that a run trains on; None if the run's task is no longer readable.

    A run holds out problems by its own config, so it may have trained on problems that this evaluation uses.
    """
    try:
        trained_problems = {(str(problem.prompt), problem.answer) for problem in load_task(run).train}
    except UserError:
        return None
    return sum((str(problem.prompt), problem.answer) in trained_problems for problem in problems)


def show_results(numbers: dict[str, Any]) -> None:
    """Prints every metric with its interval, accuracy by difficulty, and the accuracy of the best constant answer."""

    def cells(estimate: dict | None) -> tuple[str, str]:
        if estimate is None:
            return "–", ""
        interval = "" if estimate["low"] is None else f"{estimate['low']:.3f} – {estimate['high']:.3f}"
        return f"{estimate['value']:.3f}", interval

    console = plain_console()
    title = f"{numbers['model']} on {numbers['task']}: {numbers['problems']} problems × {numbers['samples']} samples"
    table = Table("", "value", "95 % interval", title=title)
    for name, estimate in numbers["metrics"].items():
        if "problems" in estimate:
            name += f", {estimate['problems']} problems"
        table.add_row(name, *cells(estimate))
    console.print(table)
    if numbers["difficulty"]:
        table = Table("difficulty", "problems", "accuracy", "95 % interval")
        for label, estimate in numbers["difficulty"].items():
            table.add_row(label, str(estimate["problems"]), *cells(estimate))
        console.print(table)
    if numbers.get("tasks"):
        table = Table("task", "problems", "accuracy", "95 % interval", "reward", "95 % interval")
        for name, task_numbers in numbers["tasks"].items():
            accuracy = cells(task_numbers["metrics"].get("accuracy"))
            reward = cells(task_numbers["metrics"].get("reward"))
            table.add_row(name, str(task_numbers["problems"]), *accuracy, *reward)
        console.print(table)
    constant = numbers["constant_answer"]
    if constant["answer"] and not numbers.get("tasks"):
        print(f"always answering {constant['answer']!r:.60} would be right on {constant['share']:.3f} of the problems")
    if numbers.get("seen_in_training"):
        print(f"warning: the run was trained on {numbers['seen_in_training']} of these problems")


if __name__ == "__main__":
    flags.DEFINE_string("config", None, "YAML file or example, for its task and settings.", required=True)
    flags.DEFINE_bool("all", False, "Evaluate on all problems of the task, train problems too.")
    flags.DEFINE_string("output", None, "Folder to write; default: runs/evaluations/MODEL-TASK.")
    define_process_flags()
    start(main)
