"""Samples completions of a policy into an experience store.

    python -m recjax.generate_experience --config F --output STORE --steps N [key=value ...]
    python -m recjax.generate_experience --run runs/NAME [--step S] --output STORE --steps N [key=value ...]
    python -m recjax.generate_experience --config F --engine URL [--model M] --output STORE --steps N [key=value ...]

With --config the policy is the config's initial policy, after any warm start (model.path=FOLDER model.decoder=null for
a Hugging Face folder). With --run it is a run's checkpoint, the newest or that of --step. With --engine, a server with
OpenAI's API samples instead of the policy, and the config's model gives the vocabulary. Prompts, sampling and rewards
match training. A step is rollout.prompts_per_step prompts with rollout.group_size completions each. If the command was
interrupted, run it again: it writes the missing rows. A larger --steps adds rows. Several processes sample together if
each gets the same command; see docs/devices.md.
"""

import hashlib
import json
from collections.abc import Collection, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from recjax import hosts
from recjax.cache import keep_compiled_programs
from recjax.config import Config, load_config
from recjax.console import command, define_process_flags, start
from recjax.experience.group import Completion, Group, Row, with_grades
from recjax.experience.store import CHAT_TEMPLATE, Record, Store, exists, records_of, store_name
from recjax.experience.tokenize import tokenizer_name
from recjax.host_memory import prepare_host_memory
from recjax.hub.chat_rendering import set_template_kwargs
from recjax.hub.policy import Policy, policy_alone
from recjax.hub.tokenizers import encode_after, reads_clock
from recjax.models.placement import put_params
from recjax.rollout.collecting import Grades
from recjax.rollout.remote import Address, Answer, RemoteEngine, read_key
from recjax.tasks.grading.pool import Answered, Grading
from recjax.tasks.loading import load_task
from recjax.tasks.problems import Problem
from recjax.tasks.prompts import Prompts, batch_indices, encode_problems
from recjax.training.mesh import make_mesh
from recjax.training.metrics import PhaseSeconds, step_bar
from recjax.training.run import Run, characters, prepare, untrained, without_long_prompts
from recjax.training.sources import sample_batch
from recjax.training.trained import for_sampling, open_checkpoint, run_config

FLAGS = flags.FLAGS


def generate(config: Config, place: str | Path, steps: int, run: str | None, step: int | None, source: str) -> int:
    """Samples batches 1 to `steps` into the store; skips batches that the store already holds.

    Args:
        config: config of the prompts, sampling and rewards, and of the policy if `run` is None.
        run: folder of a training run whose checkpoint is the policy.
        step: step of the checkpoint; None: the newest.
        source: name of the new rows in the store.
    Returns:
        Number of batches that this call sampled.
    Raises:
        ValueError: the checkpoint is missing, or the task or the store cannot be read.
    """
    known, model, name = known_ids(place), config.model, None
    if not run and model.path and not model.chat_date and reads_clock(model.path):
        # The chat template reads the date: rows in the store set it, or else today. The rows' name ends with the date.
        digest = _name(config, None, 0)
        dates = (row[len(digest) + 1 :].partition("/")[0] for row in known if row.startswith(f"{digest}-"))
        chat_date = min(dates, default=date.today().isoformat())
        config = config.model_copy(update={"model": model.model_copy(update={"chat_date": chat_date})})
        name = f"{digest}-{chat_date}"
    sampler, params, version = _sampler(config, run, step)
    name = name or _name(config, run, version)
    done = {int(row.split("/")[1]) for row in known if row.startswith(f"{name}/")}
    missing = [number for number in range(1, steps + 1) if number not in done]
    hosts.wait_for_all("looked into the store")
    tokenizer = tokenizer_name(sampler.policy.tokenizer)
    with sampler.grading, step_bar("generate", steps, initial=steps - len(missing)) as bar:

        def keep(groups: list[Group], grades: Grades) -> None:
            records = records_of(with_grades(groups, grades.result()), tokenizer, datetime.now(UTC))
            if hosts.is_first():
                with Store(place, create=True) as store:
                    store.append(records)
            rewards = _rewards(records)
            bar.set_postfix(reward=f"{sum(rewards) / max(len(rewards), 1):.2f}", refresh=False)
            bar.update()

        # Overlap the grading of a batch with the sampling of the next.
        before = None
        for number in missing:
            sampled = sample_batch(sampler, params, version, number, f"{name}/", source)
            if before:
                keep(*before)
            before = sampled
        if before:
            keep(*before)
    return len(missing)


def generate_remotely(config: Config, place: str | Path, steps: int, address: Address, source: str | None) -> int:
    """Like `generate`, but a server samples the completions.

    Args:
        source: name of the new rows in the store; None: the name of the server's model.
    Raises:
        ValueError: the server refuses or does not answer, or the task or the store cannot be read.
    """
    _refuse_agents(config)
    config, known = untrained(config), known_ids(place)
    task = load_task(config)
    policy = policy_alone(config, characters([*task.train, *task.evaluation]))
    task = without_long_prompts(task, policy.tokenizer, config.rollout)
    train = encode_problems(task.train, policy.tokenizer, config.rollout.max_prompt_tokens, policy.vocabulary)
    with RemoteEngine(address, policy, config.rollout) as engine, Grading(config, task.reward) as grading:
        name = _name(config, f"{engine.model} of a server", 0)
        done = {int(row.split("/")[1]) for row in known if row.startswith(f"{name}/")}
        missing = [number for number in range(1, steps + 1) if number not in done]
        count = config.rollout.prompts_per_step
        with step_bar("generate", steps, initial=steps - len(missing)) as bar:
            for number in missing:
                asked = train.take(batch_indices(len(train.texts), count, number, config.seed))
                seed = (config.seed * 1_000_003 + number) * count * config.rollout.group_size % 2**31
                common = config.model.chat_template_kwargs
                templates = [{**common, **problem.template} for problem in asked.problems]
                answers = engine.answers([problem.prompt for problem in asked.problems], seed, templates)
                records = _remote_records(
                    config, policy, asked.problems, answers, f"{name}/{number:06d}", source or engine.model
                )
                own = asked.take(np.repeat(np.arange(count), [*map(len, answers)]))
                records = _graded(records, own, grading, policy)
                if records:
                    with Store(place, create=True) as store:
                        store.append(records)
                rewards = _rewards(records)
                bar.set_postfix(reward=f"{sum(rewards) / max(len(rewards), 1):.2f}", refresh=False)
                bar.update()
    return len(missing)


def known_ids(place: str | Path) -> Collection[str]:
    """The ids of a store's completions; empty if the store does not exist yet."""
    if not exists(place):
        return ()
    with Store(place, create=True) as store:
        return store.numbers("id")


def _rewards(records: Sequence[Record]) -> list[float]:
    grades = [record.completion.grade for record in records]
    return [grade.reward for grade in grades if grade and grade.reward is not None]


def _remote_records(
    config: Config, policy: Policy, problems: list[Problem], answers: list[list[Answer]], name: str, source: str
) -> list[Record]:
    """One completion per answer, without a reward."""
    now, vocabulary, records = datetime.now(UTC), tokenizer_name(policy.tokenizer), []
    for place, (problem, own) in enumerate(zip(problems, answers, strict=True)):
        for answer in own:
            prompt, rows = np.zeros(0, np.int32), ()
            if answer.tokens is not None:
                prompt, tokens = np.array(answer.prompt, np.int32), np.array(answer.tokens, np.int32)
                logprobs = answer.logprobs and np.array(answer.logprobs, np.float32)
                rows = (Row(prompt, tokens, np.ones(len(tokens), bool), logprobs),)
            completion = Completion(
                id=f"{name}/{len(records):05d}",
                source=source,
                text=answer.text,
                rows=rows,
                sampling=config.rollout.sampling(),
                policy_version=None,
                truncated=answer.truncated,
                metadata={CHAT_TEMPLATE: dict(problem.template)} if problem.template else {},
            )
            asked = problem.prompt if isinstance(problem.prompt, str) else list(problem.prompt)
            group = Group(f"{name}/{place:05d}", prompt, (completion,), asked, problem.answer)
            records.append(Record(group, now, vocabulary if rows else None))
    return records


def _graded(records: list[Record], own: Prompts, grading: Grading, policy: Policy) -> list[Record]:
    """Adds the task's rewards to the completions.

    Args:
        own: prompts of the completions, one for each.
    """
    if not records:
        return []
    answered = []
    for prompt, problem, record in zip(own.texts, own.problems, records, strict=True):
        one = record.completion
        if one.rows:
            prompt = policy.tokenizer.decode(one.rows[0].prompt_tokens)  # the prompt that the server's model saw
            length = len(one.rows[0].tokens)
        else:
            try:
                length = len(encode_after(policy.tokenizer, (), one.text))
            except ValueError:
                length = len(one.text)  # text outside the vocabulary: counts characters
        answered.append(Answered(prompt, one.text, problem.answer, problem.columns, length))
    grades = Grades(grading.submit(answered), len(records)).result()
    groups = with_grades([record.group for record in records], grades)
    return [record._replace(group=group) for record, group in zip(records, groups, strict=True)]


def _refuse_agents(config: Config) -> None:
    if config.task.agent:
        raise ValueError(
            f"task.agent = {config.task.agent!r}: this command samples only single turns; remove the key, or train with"
            " experience.record=true, which records the trajectories of agents"
        )


def _sampler(config: Config, run: str | None, step: int | None) -> tuple[Run, dict, int]:
    """The sampler, its parameters in compute dtype, and the number of optimizer updates behind them."""
    _refuse_agents(config)
    # The config may name the store that this command creates.
    config = untrained(config)
    if run is None:
        (sampler, params), version = prepare(config), 0
    else:
        # The run's config determines the policy, the command's config the prompts.
        _, policy, params, version, _ = open_checkpoint(Path(run), step)
        set_template_kwargs(policy.tokenizer, config.model.chat_template_kwargs)
        task = without_long_prompts(load_task(config), policy.tokenizer, config.rollout)
        train = encode_problems(task.train, policy.tokenizer, config.rollout.max_prompt_tokens, policy.vocabulary)
        sampler = Run(config, policy, train, train, Grading(config, task.reward), PhaseSeconds())
        params = put_params(params)
    return sampler, for_sampling(sampler.policy, params), version


def _name(config: Config, run: str | None, version: int) -> str:
    """A digest of everything that determines the rows."""
    depends_on: dict[str, Any] = config.model_dump()
    held_out = depends_on["evaluation"]["problems"]
    keys = ("seed", "model", "task", "warm_start", "rollout")
    depends_on = {key: depends_on[key] for key in keys} | {"held_out": held_out, "version": version}
    if run:
        config_file = Path(run) / "config.yaml"
        depends_on["run"] = config_file.read_text(encoding="utf-8") if config_file.is_file() else run
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:12]


def read_flags(config: str | None, run: str | None, step: int | None, overrides: list[str]) -> tuple[Config, str]:
    """The config, and the default source name for the rows.

    Raises:
        ValueError: the flags contradict each other, or the config is invalid.
    """
    if (config is None) == (run is None):
        found = "found both" if run else "found neither"
        raise ValueError(f"give exactly one of --config (its initial policy) and --run (a checkpoint); {found}")
    if run is None:
        if step is not None:
            raise ValueError(f"--step {step}: has no effect with --config, which has no checkpoints; remove it")
        return load_config(config, overrides), "initial"
    run_config(Path(run))
    return load_config(Path(run) / "config.yaml", overrides), Path(run).name


@command
def main(argv: list[str]) -> None:
    """Reads the flags, generates the rows and prints the store's size."""
    prepare_host_memory()
    keep_compiled_programs()
    config, source = read_flags(FLAGS.config, FLAGS.run, FLAGS.step, argv[1:])
    if FLAGS.engine is None and (FLAGS.model or FLAGS.api_key_file):
        raise ValueError("--model and --api_key_file: have an effect only with --engine; give --engine, or remove them")
    if FLAGS.engine is not None and FLAGS.run is not None:
        raise ValueError("--run: has no effect with --engine, whose server samples; give --config")
    if FLAGS.engine is not None and (FLAGS.processes or 1) > 1:
        raise ValueError(f"--processes {FLAGS.processes}: --engine uses a single process; remove the flag")
    with hosts.together(FLAGS.coordinator, FLAGS.processes, FLAGS.process_id), jax.set_mesh(make_mesh(config.mesh)):
        if FLAGS.engine is None:
            new = generate(config, FLAGS.output, FLAGS.steps, FLAGS.run, FLAGS.step, FLAGS.source or source)
        else:
            key = read_key(FLAGS.api_key_file)
            address = Address(FLAGS.engine, FLAGS.model, key, FLAGS.concurrency, FLAGS.reply_seconds, FLAGS.retries)
            new = generate_remotely(config, FLAGS.output, FLAGS.steps, address, FLAGS.source)
    if not hosts.is_first():
        return
    rows = len(known_ids(FLAGS.output))
    print(
        f"{store_name(FLAGS.output)}: {new} new batches, {FLAGS.steps - new} already in the store; {rows} rows in total"
    )


if __name__ == "__main__":
    # Not at module level: absl flags are global, and importing this module must not define them.
    flags.DEFINE_string("config", None, "YAML file of a training run; its initial policy samples.")
    flags.DEFINE_string("run", None, "Folder of a training run, finished or not; its checkpoint samples.")
    flags.DEFINE_integer("step", None, "Checkpoint to use; default: the newest.")
    flags.DEFINE_string("output", None, "File or URL of the store; created if it does not exist.", required=True)
    flags.DEFINE_integer(
        "steps", None, "Number of batches that the store has in the end.", required=True, lower_bound=1
    )
    flags.DEFINE_string("engine", None, "URL of a server with OpenAI's API that samples instead of the policy.")
    flags.DEFINE_string("model", None, "Engine: name of the model; default: the server's only model.")
    flags.DEFINE_string("api_key_file", None, "Engine: file with the API key.")
    flags.DEFINE_integer("concurrency", 8, "Engine: largest number of parallel requests.", lower_bound=1)
    flags.DEFINE_float("reply_seconds", 600, "Engine: time limit for a reply.", lower_bound=0.1)
    flags.DEFINE_integer("retries", 6, "Engine: retries after a temporary failure.", lower_bound=0)
    flags.DEFINE_string("source", None, "Source of the rows; default: initial, or the name of the run's folder.")
    define_process_flags()
    start(main)
