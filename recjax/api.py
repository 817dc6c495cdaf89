"""Runs from Python: `run` trains, `open_run` opens a run's folder, `plan_run` plans and `run_sweep` makes many runs.

    result = recjax.run(model="HuggingFaceTB/SmolLM2-135M-Instruct", problems=rows, reward=score, steps=50)
    result.metrics.plot("step", "reward")
    print([completion.text for completion in result.policy.sample(["12+30="])])

`run` and `open_run` return a `Result`, which reads the folder.
"""

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import yaml
from matplotlib.figure import Figure

from recjax.algorithms.options import did_you_mean, require
from recjax.analysis.collect import axes_of, check_metrics, collect, read_folders
from recjax.analysis.samples import results
from recjax.analysis.statistics import band
from recjax.analysis.sweeps import read_sweep, run_all
from recjax.config import (
    KEYS,
    MAY_CHANGE,
    PASSED,
    PYTHON,
    SHORT_NAMES,
    Config,
    EvaluationConfig,
    FileTask,
    RolloutConfig,
    TaskConfig,
    make_config,
)
from recjax.config.fields import ConfigBlock, value_of
from recjax.config.yaml_values import read_yaml_file, write_override
from recjax.errors import UserError
from recjax.examples import config_file
from recjax.experience.batch import Shape
from recjax.experience.group import Completion, Group
from recjax.experience.records import Record
from recjax.hub.tokenizers import stop_token_ids
from recjax.logs.kept_samples import kept_rows
from recjax.logs.metrics import read_metrics
from recjax.logs.warnings import warning_steps
from recjax.models.placement import row_shards
from recjax.models.sampling import Sampling
from recjax.planning.dry_run import DryRun, planned_run, warn_of_memory
from recjax.plots.curves import draw_curves
from recjax.plots.page import png
from recjax.plots.training import training_figure
from recjax.rewards.custom import needs_answers, with_columns
from recjax.rewards.reward import named_weights, passed_name
from recjax.rollout.collecting import row_keys, sample_groups
from recjax.rollout.plan import power_of_two
from recjax.runs.checkpoint import steps_of
from recjax.runs.export import export_checkpoint
from recjax.runs.folder import is_finished
from recjax.runs.policies import open_policy
from recjax.runs.report import write_report
from recjax.runs.sampled_rows import sampled_rows
from recjax.runs.start import train
from recjax.runs.stopping import STOPPED
from recjax.runs.stored_runs import run_config
from recjax.runtime.cache import keep_compiled_programs
from recjax.runtime.console import show_messages
from recjax.runtime.files import digest, write_whole
from recjax.runtime.workers import cores, refuse_while_loading
from recjax.sources.generators import require_ray
from recjax.store.missing_logprobs import with_logprobs
from recjax.store.tokenize import tokenized
from recjax.tasks.files import file_problems, keep_rows, rows_file
from recjax.tasks.loading import load_rewards, load_task
from recjax.tasks.problems import Problem, Task, checked_messages
from recjax.tasks.prompts import encode_problems, prompts_of
from recjax.training.loop import Preempted
from recjax.training.mesh import make_mesh

AnyPrompts = Sequence[str | list[dict[str, str]]]

_UNNAMED = "runs/unnamed"  # stands for a folder until the whole config is known
# Keys of `rollout` and `evaluation` that a single call reads.
_SAMPLE_KEYS = ("max_completion_tokens", "stop", *Sampling._fields)
_EVALUATE_KEYS = ("problems", "samples", *Sampling._fields)
# Arguments of TRL's GRPOTrainer for which `run` has arguments of its own.
_TRAINER = {
    "train_dataset": "problems=…",
    "eval_dataset": "problems={'train': …, 'evaluation': …}",
    "reward_funcs": "reward=…",
    "args": "each setting by its name, such as steps=50 or learning_rate=1e-5",
}
_INSTEAD = {"group_size": "`samples` is the number of completions of each prompt", "engine": "this process samples"}


def _check_keys(options: Mapping[str, Any], read: Sequence[str]) -> None:
    """Refuses keys that would have no effect.

    Raises:
        UserError: the message lists the keys that have one.
    """
    for name, value in options.items():
        remedy = f"has no effect here ({_INSTEAD.get(name, 'remove it')}); this call takes {', '.join(read)}"
        require(name in read, name, value, remedy + did_you_mean(name, read))


def _checked(prompts: str | AnyPrompts) -> list[str | list[dict[str, Any]]]:
    """The prompts, one or several, with chats whose messages have roles and contents."""
    if isinstance(prompts, str):
        return [prompts]
    checked: list[str | list[dict[str, Any]]] = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            checked.append(prompt)
        else:
            checked.append(checked_messages(prompt, f"prompt {number}"))
    return checked


def run(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    problems: Any = None,
    reward: Callable | Sequence[Callable] | None = None,
    on_step: Callable[[dict[str, Any]], Any] | None = None,
    overwrite: bool = False,
    **keys: Any,
) -> "Result":
    """Trains to the last step and returns the run; resumes from the newest checkpoint in `output`, if there is one.

    A second call returns a finished run at once, and resumes a run that Ctrl-C, a signal or an error ended. `run` keeps
    compiled programs on disk for other processes, needs no `if __name__ == "__main__":`, and works in notebooks.

    Args:
        config: a `Config`, its values as a dict, a YAML file, or the name of an example such as "quickstart". With
            `problems` it needs no task. Without `output`, the run gets a folder in runs/ whose name follows from the
            model, the other keys, the problems and the reward, so that the same call resumes the same run.
        problems: rows with the columns of `task.file`, by default "prompt" and "answer": dicts, a pandas DataFrame or a
            datasets.Dataset; recjax holds out a third. Or a mapping of "train" and "evaluation" (or "test") to
            such rows. The run folder gets a copy.
        reward: function of lists (prompts, completions, answers) or (prompts, completions, answers, columns) that
            returns a number for each completion, or a dict of named parts; see docs/rewards.md. It may be a lambda or a
            closure. Worker processes call a copy with the completions of one prompt, within the limits of
            `grading`; its changes to other objects are lost. An `async` function runs in this process. A list of
            functions is a reward with a part for each, named as the function is; `task.reward_weights` may then also be
            a list, as in TRL.
        on_step: called with each row of metrics, one step late at most. If it returns True, the run writes a checkpoint
            and stops, and `run` returns it. Other values than True, False and None are an error.
        overwrite: delete the run in `output` first.
        keys: values over those of `config`, by the short names of `recjax.config.SHORT_NAMES`, such as model, steps and
            learning_rate, by `output`, `seed` and the other keys without a block, or by dotted key:
            `run(config, **{"mesh.data": 2})`.
    Raises:
        UserError: a config, task, model, store or folder that cannot be used, a reward function at fault, or the run
            in `output` has problems or a reward with another digest.
        Preempted: on Ctrl-C and signals, after the current step and its checkpoint; a script that does not catch it
            ends with one line.
        UserError: a worker process imports the module of this call for the reward.
        (others): see `recjax.runs.start.train`.
    """
    refuse_while_loading("recjax.run")
    is_function = callable(on_step) and not inspect.iscoroutinefunction(on_step)
    require(on_step is None or is_function, "on_step", on_step, "takes a function, not async, which gets a row")
    show_messages()
    keep_compiled_programs()
    config = _with_task(config, problems, reward, keys)
    require_ray(config)
    if overwrite or not is_finished(config):
        try:
            train(config, overwrite, reward=reward, on_step=on_step, check=warn_of_memory)
        except Preempted as stopped:
            if stopped.signal != STOPPED:
                raise
    return Result(Path(config.output), reward)


def plan_run(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    problems: Any = None,
    reward: Callable | Sequence[Callable] | None = None,
    device: str | None = None,
    **keys: Any,
) -> DryRun:
    """What a run would need, from shapes: sizes, memory and staleness; it reads no weights and trains nothing.

    `print` shows the result as `python -m recjax.train --dry_run` does. Its `table` has the memory, and `starts` is
    True if nothing is missing and the devices have enough memory.

    Args:
        config, problems, reward, keys: as for `run`.
        device: devices to plan for, such as "h100-80", "h100-80:8", "v5e:4x4" or "host"; None: one of this machine's.
    Raises:
        UserError: a config or task that cannot be used, or an unknown device.
    """
    return planned_run(_with_task(config, problems, reward, keys), device, reward)


def run_sweep(
    sweep: str | Path | Mapping[str, Any], *, smoke: bool = False, workers: int | None = None, **keys: Any
) -> pd.DataFrame:
    """Makes the unfinished runs of a sweep, each in a process of its own; the same call resumes them.

    Args:
        sweep: sweep file, or its content, see docs/sweeps.md; `config` then is relative to the working directory, or
            the name of an example. Its content is kept as sweep.yaml in `output`.
        smoke: make the runs of the block `smoke`.
        workers: number of runs at a time; None: the number of cores. On one GPU, give 1.
        keys: values of the config in all runs, as for `run`; dotted keys take `**{"training.steps": 5}`.
    Returns:
        The table of `recjax.analysis.collect.collect`: a run's settings, steps and metrics, in means over some steps.
    Raises:
        UserError: the sweep or one of its configs is refused, or runs failed; the message has each run's last line.
    """
    if not isinstance(sweep, Mapping):
        path = Path(sweep)
    else:
        for name in ("config", "output"):
            require(isinstance(sweep.get(name), str | Path), f"sweep[{name!r}]", sweep.get(name), "takes a path")
        path = Path(sweep["output"]) / "sweep.yaml"
        content = {**sweep, "config": str(config_file(sweep["config"]).resolve()), "output": str(sweep["output"])}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, yaml.safe_dump(content, sort_keys=False))
    show_messages()
    overrides = [write_override(SHORT_NAMES.get(name, name), value) for name, value in keys.items()]
    base, runs = read_sweep(path, smoke, overrides)
    failed = run_all(base, runs, workers or cores())
    if failed:
        reasons = "".join(f"\n{name}: {reason}" for name, reason in failed.items())
        problem = f"{len(failed)} of {len(runs)} runs failed"
        raise UserError(path, problem, f"correct what they name; the same call resumes the others:{reasons}")
    return collect(runs)


def _with_task(
    config: Config | Mapping[str, Any] | str | Path | None,
    problems: Any,
    reward: Callable | Sequence[Callable] | None,
    keys: Mapping[str, Any],
) -> Config:
    """The checked config, with names for the problems and the reward that a program passes."""
    for name in keys.keys() & _TRAINER.keys():
        raise UserError(name, f"recjax.run takes {_TRAINER[name]} instead", "docs/coming_from.md lists other names")
    options = dict(keys)
    for name, value in keys.items():
        if isinstance(value, Path):
            options[name] = str(value)
    weights = options.get("task.reward_weights")
    if isinstance(weights, list | tuple):
        options["task.reward_weights"] = named_weights(reward, weights)
    config = _config_of(config, options)
    task = config.task
    if problems is not None:
        task = _with_problems(task, problems)
    if reward is not None:
        if task.reward is not None and not task.reward.startswith(PYTHON):
            raise UserError("reward", f"the config has task.reward = {task.reward!r}", "remove it, or pass no reward")
        task = task.model_copy(update={"reward": passed_name(reward)})
    config = Config(**(dict(config) | {"task": task}))  # checks the task against other blocks
    if config.output != _UNNAMED:
        return config
    # Calls that differ only in what may change at a resume share a folder.
    fixed = {}
    for name in sorted(KEYS.keys() - MAY_CHANGE):
        value = value_of(config, name)
        if not isinstance(value, ConfigBlock):
            fixed[name] = value
    model = Path(config.model.path or config.model.run or config.model.adapter or "decoder").name
    return config.replace(output=f"runs/{model}-{digest(repr(fixed).encode())[:8]}")


def _config_of(config: Config | Mapping[str, Any] | str | Path | None, keys: Mapping[str, Any]) -> Config:
    """The config of a call of `run`, with `keys` over its values; `output` is _UNNAMED if neither names it."""
    if isinstance(config, Config):
        if not keys:
            return config
        return config.replace(**keys)
    source = "config"
    values: Any = config
    if config is None:
        values = {}
    elif isinstance(config, str | Path):
        path = config_file(config)
        source = str(path)
        values = read_yaml_file(path)
    if not isinstance(values, Mapping):
        raise UserError("config", "takes a Config, a dict of its values or a YAML file", value=config)
    return make_config({"output": _UNNAMED} | dict(values), keys, source)


def _with_problems(task: TaskConfig, problems: Any) -> TaskConfig:
    """The task with names for the problems that a program passes."""
    splits = {"train": problems}
    if isinstance(problems, Mapping):
        splits = problems
    if "train" not in splits or not splits.keys() <= {"train", "evaluation", "test"}:
        names = ", ".join(map(repr, splits))
        raise UserError(
            "problems",
            "takes rows, or a mapping with train and evaluation (or test)",
            f"got {names:.200}; for columns, pass pandas.DataFrame(problems)",
        )
    if task.file is None or task.file.train.partition(":")[0] != PASSED:
        raise UserError("problems", f"the config has the task {task.chosen()}", "remove it, or pass no problems")
    files = {}
    for name, rows in splits.items():
        split = name
        if name == "test":
            split = "evaluation"
        files[split] = keep_rows(rows)
    return task.model_copy(update={"file": task.file.model_copy(update=files)})


def open_run(folder: str | Path, reward: Callable | Sequence[Callable] | None = None) -> "Result":
    """The run in a folder, finished or not; another process may be training it.

    Args:
        reward: the function that the program passed to `run`, for `TrainedPolicy.evaluate`.
    Raises:
        UserError: the folder is not a run.
    """
    run_config(Path(folder))
    return Result(Path(folder), reward)


class Result:
    """A run's folder: config, metrics, and the policies of the checkpoints."""

    def __init__(self, folder: Path, reward: Callable | Sequence[Callable] | None = None):
        """Stores the arguments of `open_run`."""
        self.folder = folder
        self._reward = reward

    def __repr__(self) -> str:
        """The folder and the step of the newest checkpoint."""
        done = max(steps_of(self.folder / "checkpoints"), default=0)
        return f"Result({str(self.folder)!r}: {done} of {self.config.training.steps} steps)"

    @property
    def config(self) -> Config:
        """The config of the run."""
        return run_config(self.folder)

    @property
    def metrics(self) -> pd.DataFrame:
        """The rows of metrics.jsonl: one for each step, from 0; docs/metrics.md explains the columns."""
        return pd.DataFrame(read_metrics(self.folder / "metrics.jsonl"))

    @property
    def summary(self) -> dict[str, Any] | None:
        """Accuracy before and after training, and the costs; None before the end of the run."""
        path = self.folder / "summary.json"
        if not path.is_file():
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
        # A continued run keeps its earlier summary until the new end.
        if content.get("steps") != self.config.training.steps:
            return None
        return content

    def samples(self) -> pd.DataFrame:
        """The completions that the run kept of its training batches: one row each, with rewards and log-probs.

        `samples` in the config sets how many; `python -m recjax.samples` shows them as a page.

        Raises:
            UserError: the run kept no completions, or a file is damaged.
        """
        return pd.DataFrame(kept_rows(self.folder))

    def plot(self, *metrics: str) -> Figure:
        """The run's picture so far, or a panel for each of some metrics, over optimizer steps; notebooks show it.

        Args:
            metrics: numeric columns of `metrics`; none: the panels of figures/training.png.
        Raises:
            UserError: the run has no such metric.
        """
        if metrics:
            table = read_folders([self.folder])
            check_metrics(table, metrics, "metric")
            line = axes_of(table)[0]
            return draw_curves(table.assign(panel=self.folder.name), line, "panel", list(metrics), band=band)
        rows = read_metrics(self.folder / "metrics.jsonl")
        title = f"{self.config.algorithm.preset}: {self.folder.name}"
        return training_figure(rows, title, warning_steps(rows))

    def report(self) -> Path:
        """Writes report.html about the run so far, one page to send to others, and returns its path.

        A run writes it at its end, also if it is stopped.

        Raises:
            UserError: config.yaml or metrics.jsonl is damaged, or the page cannot be written.
        """
        return write_report(self.folder, [png(self.plot())])

    @functools.cached_property
    def policy(self) -> "TrainedPolicy":
        """The policy of the checkpoint that is the newest at the first access."""
        return TrainedPolicy(self.folder, reward=self._reward)

    @functools.cached_property
    def best(self) -> "TrainedPolicy":
        """The policy of the checkpoint with the best `training.keep_best` at the first access.

        Without `training.keep_best`: with the highest evaluation/accuracy.
        """
        return TrainedPolicy(self.folder, "best", self._reward)


class TrainedPolicy:
    """The policy of a checkpoint, on the mesh of the run: samples, scores, evaluates and exports.

    Attributes:
        step: step of the checkpoint.
    """

    def __init__(
        self, run: str | Path, step: int | str | None = None, reward: Callable | Sequence[Callable] | None = None
    ):
        """Loads the policy.

        Args:
            run: folder of the run.
            step: step of the checkpoint, or "best"; None: the newest.
            reward: function for `evaluate`; None: `task.reward` names it.
        Raises:
            UserError: the checkpoint does not exist, or its model or problems cannot be read.
        """
        keep_compiled_programs()
        self._run = Path(run)
        self._reward = reward
        self._config = run_config(self._run)
        with self._mesh():
            self._opened = open_policy(self._run, self._config, step)
        self.step = self._opened.version

    def _mesh(self) -> contextlib.AbstractContextManager:
        """A context with the mesh of the run; with the mesh in context, if there is one."""
        if jax.sharding.get_mesh().empty:
            return jax.set_mesh(make_mesh(self._config.mesh))
        return contextlib.nullcontext()

    def sample(self, prompts: AnyPrompts, samples: int = 1, *, seed: int = 0, **rollout: Any) -> list[Completion]:
        """Samples completions; `text` is a completion's text, and `rows[0]` has its tokens and log-probs.

        Args:
            prompts: texts, which the model reads unchanged, or chats as lists of messages with role and content; or
                one text.
            samples: completions of each prompt, at least 1, consecutive in the result.
            seed: equal seeds give equal completions.
            rollout: keys of `rollout` with other values than in the run: temperature, top_k, top_p, min_p,
                max_completion_tokens and stop. Temperature 0 takes the most likely tokens, whose log-probs are then 0.
        Raises:
            UserError: a prompt that the model cannot read, another key, or a value that `rollout` refuses.
        """
        _check_keys(rollout, _SAMPLE_KEYS)
        is_count = isinstance(samples, int | np.integer) and samples >= 1
        require(is_count, "samples", samples, "takes a whole number from 1")
        values = dict(self._config.rollout) | rollout
        is_greedy = "temperature" in rollout and rollout["temperature"] == 0
        if is_greedy:  # training cannot be greedy, so RolloutConfig refuses temperature 0
            values["temperature"] = self._config.rollout.temperature
        settings = RolloutConfig(**values)
        sampling = settings.sampling()
        if is_greedy:
            sampling = Sampling(0.0)
        policy = self._opened.policy
        problems = [Problem(prompt, "") for prompt in _checked(prompts)]
        if not problems:
            return []
        if "stop" in rollout:
            policy = policy._replace(stop_ids=stop_token_ids(policy.tokenizer, settings.stop, self._config.model.path))
        with self._mesh():
            encoded = encode_problems(problems, policy.tokenizer, None, policy.vocabulary)
            keys = row_keys(jax.random.key(seed), len(problems) * samples)
            groups = sample_groups(
                policy,
                self._opened.params,
                encoded,
                keys,
                samples,
                max_tokens=settings.max_completion_tokens,
                sampling=sampling,
                name="sample",
                source=self._opened.name,
                version=self.step,
            )
        sampled = []
        for group in groups:
            sampled += group.completions
        return sampled

    def score(self, prompts: AnyPrompts, completions: Sequence[str | Completion], **sampling: Any) -> list[np.ndarray]:
        """The log-prob of each token of the completions.

        Args:
            prompts: one for each completion, as for `sample`.
            completions: results of `sample`, or texts, which get an end token.
            sampling: temperature, top_k, top_p and min_p of the distribution; default: temperature 1, and all tokens.
        Raises:
            UserError: a text outside the vocabulary, or another key.
        """
        _check_keys(sampling, Sampling._fields)
        records = []
        checked = _checked(prompts)
        if len(checked) != len(completions):
            raise UserError(
                problem=f"{len(checked)} prompts and {len(completions)} completions", remedy="give one prompt for each"
            )
        if not checked:
            return []
        for number, (prompt, completion) in enumerate(zip(checked, completions, strict=True)):
            if isinstance(completion, str):
                completion = Completion(
                    id="",
                    source="text",
                    text=completion,
                    rows=(),
                    sampling=None,
                    policy_version=None,
                    truncated=False,
                )
            unscored = tuple(row._replace(behavior_logprobs=None) for row in completion.rows)
            prompt_tokens = np.zeros(0, np.int32)
            if unscored:
                prompt_tokens = unscored[0].prompt_tokens
            completion = completion._replace(id=str(number), rows=unscored)
            group = Group(str(number), prompt_tokens, (completion,), prompt)
            records.append(Record(group, datetime.now(UTC)))
        groups = [record.group for record in tokenized(records, self._opened.policy)]
        rows = [group.completions[0].rows[0] for group in groups]
        longest_prompt = max(len(row.prompt_tokens) for row in rows)
        longest_completion = max(len(row.tokens) for row in rows)
        with self._mesh():
            rollout = self._config.rollout
            batch_size = rollout.prompts_per_step * rollout.group_size
            shards = row_shards()
            shape = Shape(
                prompts=-(-batch_size // shards) * shards,  # the next multiple of the shards
                group=1,
                prompt_time=power_of_two(longest_prompt),
                time=power_of_two(longest_completion),
            )
            chunk = self._config.model.logprob_chunk
            scored = with_logprobs(
                groups, shape, self._opened.policy, self._opened.params, sampling=Sampling(**sampling), chunk=chunk
            )
            logprobs: list[Any] = [group.completions[0].rows[0].behavior_logprobs for group in scored]
            return logprobs

    def evaluate(
        self, problems: Any = None, reward: Callable | Sequence[Callable] | None = None, **evaluation: Any
    ) -> tuple[dict[str, Any], pd.DataFrame]:
        """Samples and grades completions; returns the content of an evaluation's results.json, and its rows.

        Args:
            problems: rows to evaluate on, as for `run`; a number: that many held-out problems of the run; None: as many
                as `evaluation.problems`.
            reward: a function, as for `run`; None: the reward of the run.
            evaluation: keys of `evaluation` with other values than in the run: samples, temperature, top_k, top_p and
                min_p.
        Raises:
            UserError: problems that cannot be used, another key, a value that `evaluation` refuses, or a missing
                reward function.
        """
        _check_keys(evaluation, _EVALUATE_KEYS)
        if not reward:
            reward = self._reward
        config = self._config
        if isinstance(problems, int):
            evaluation = {**evaluation, "problems": problems}
            problems = None
        task = config.task
        if reward is not None:
            task = task.model_copy(update={"reward": passed_name(reward)})
        settings = EvaluationConfig(**(dict(config.evaluation) | evaluation))
        config = config.model_copy(update={"task": task, "evaluation": settings})
        if problems is None:
            tested = load_task(config, function=reward)
        else:
            remedy = "names the tasks of a mixture, whose rewards differ; evaluate without problems"
            require(not task.mixture, "problems", task.chosen(), remedy)
            graded = load_rewards(config, reward)[""]
            path = rows_file(keep_rows(problems))
            rows = file_problems(path, task.file or FileTask(), task.system_prompt, needs_answers(graded))
            tested = Task([], rows, with_columns(graded, rows))
        with self._mesh():
            nothing: Any = None  # reading prompts needs no reward
            _, prompts = prompts_of(config, self._opened.policy, tested._replace(reward=nothing))
            rows = sampled_rows(config, self._opened, prompts, tested)
        group_count = len(prompts.texts) * len(task.trained_seats)
        return {"model": self._opened.name} | results(rows, group_count), rows

    def export(self, folder: str | Path, dtype: str = "float32", adapters: bool = False) -> Path:
        """Writes a folder that transformers and other programs load, and returns it.

        `recjax.runs.export.export_checkpoint` describes the arguments.
        """
        export_checkpoint(self._run, Path(folder), self.step, dtype, adapters)
        return Path(folder)
