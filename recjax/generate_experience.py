"""Samples completions of a policy into an experience store.

    python -m recjax.generate_experience --config F --output STORE --steps N [key=value ...]
    python -m recjax.generate_experience --run runs/NAME [--step S] --output STORE --steps N [key=value ...]
    python -m recjax.generate_experience --config F --engine URL [--model M] --output STORE --steps N [key=value ...]

With --config the policy is the config's initial policy, after any warm start (model.path=FOLDER model.decoder=null for
a Hugging Face folder). With --run, the policy is a checkpoint of that run: the newest, or the one that --step names.
With --engine, a server with OpenAI's API samples instead of the policy, and the config's model gives the vocabulary.
Prompts, sampling and rewards match training. A step is rollout.prompts_per_step prompts with rollout.group_size
completions each. If the command was interrupted, run it again: it writes the missing rows. A larger --steps adds rows.
Several processes sample together if each gets the same command; see docs/devices.md.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import jax
from absl import flags

from recjax.agents.agents import Agents
from recjax.algorithms.options import require
from recjax.config import Config, load_config
from recjax.errors import UserError
from recjax.experience.group import Group, with_grades
from recjax.experience.records import Record, records_of
from recjax.hub.chat_rendering import set_template_kwargs
from recjax.hub.policy import Policy, policy_alone
from recjax.hub.tokenizers import encode_after, reads_clock
from recjax.logs.metrics import step_bar
from recjax.models.trainable import fingerprint
from recjax.remote.client import RemoteEngine
from recjax.remote.server import Address, read_keys
from recjax.rewards.custom import Answered
from recjax.rewards.pool import Grading
from recjax.rollout.collecting import Grades
from recjax.runs.folder import check_processes
from recjax.runs.policies import for_sampling, open_policy
from recjax.runs.prepare import check_problems, prepare, untrained
from recjax.runs.provenance import code_digests
from recjax.runs.resolve import resolve_start
from recjax.runs.stored_runs import run_config
from recjax.runtime import hosts
from recjax.runtime.cache import keep_compiled_programs
from recjax.runtime.clocks import PhaseSeconds
from recjax.runtime.console import command, define_process_flags, start
from recjax.runtime.files import digest
from recjax.sources.sampling import BatchSampler
from recjax.store.database import exists, store_name
from recjax.store.store import Store
from recjax.store.tokenize import tokenizer_name
from recjax.tasks.loading import load_task
from recjax.tasks.problems import characters
from recjax.tasks.prompts import Prompts, batch_prompts, encode_problems, prompts_digest, without_long_prompts
from recjax.training.mesh import make_mesh

FLAGS = flags.FLAGS

_KEEP = "reads pass rates of the initial policy, which {} does not load; add task.keep=null to sample from all problems"


def generate(config: Config, location: str | Path, steps: int, run: str | None, step: int | None, source: str) -> int:
    """Samples batches 1 to `steps` into the store; skips batches that the store already holds.

    Args:
        config: config of the prompts, sampling and rewards, and of the policy if `run` is None.
        run: folder of a training run whose checkpoint is the policy.
        step: the checkpoint's step; None: the newest.
        source: name of the new rows in the store.
    Returns:
        Number of batches that this call sampled.
    Raises:
        UserError: the checkpoint is missing, or the task or the store cannot be read.
    """
    check_processes(config)
    if not run:
        config = resolve_start(config)
    stored_ids = known_ids(location)
    model = config.model
    dated_name = None
    if not run and model.path and not model.chat_date and reads_clock(model.path):
        # The model's chat template writes the current date into each prompt.
        undated_name = _config_digest(config, None, 0)
        chat_date = _stored_date(stored_ids, undated_name) or date.today().isoformat()
        config = config.model_copy(update={"model": model.model_copy(update={"chat_date": chat_date})})
        dated_name = f"{undated_name}-{chat_date}"
    sampler, params, version = _make_sampler(config, run, step)
    content = {
        "problems": prompts_digest(sampler.prompts),
        "code": code_digests(config),
        "weights": fingerprint(params),
    }
    name = _with_content(dated_name or _config_digest(config, run, version), content, stored_ids, location)

    def graded_records(groups: list[Group], grades: Grades) -> list[Record]:
        return sampler.records(with_grades(groups, grades.result()))

    def sample_batches(numbers: list[int]) -> Iterator[list[Record]]:
        # The grading of a batch overlaps with the sampling of the next batch.
        previous = None
        for number in numbers:
            sampled = sampler.sample(params, version, number, prefix=f"{name}/", source=source)
            if previous:
                yield graded_records(*previous)
            previous = sampled
        if previous:
            yield graded_records(*previous)

    with contextlib.ExitStack() as stack:
        stack.enter_context(sampler.grading)
        if sampler.agents:
            stack.enter_context(sampler.agents)
        return _fill(location, stored_ids, name, steps, sample_batches)


def _stored_date(stored_ids: Collection[str], undated_name: str) -> str | None:
    """The earliest date in the ids of a store's rows with this name; None if the store has no such rows.

    Such an id is NAME-DATE/BATCH/… or, with a digest of the rows' content, NAME-DATE.CONTENT/BATCH/….
    """
    dates = []
    for row_id in stored_ids:
        if row_id.startswith(f"{undated_name}-"):
            date_and_content = row_id.removeprefix(f"{undated_name}-").partition("/")[0]
            dates.append(date_and_content.partition(".")[0])
    return min(dates, default=None)


def generate_remotely(config: Config, location: str | Path, steps: int, address: Address, source: str | None) -> int:
    """Like `generate`, but a server samples the completions.

    Args:
        source: name of the new rows in the store; None: the name of the server's model.
    Raises:
        UserError: the server refuses or does not answer, or the task or the store cannot be read.
    """
    require(config.task.keep is None, "task.keep", config.task.keep, _KEEP.format("--engine"))
    remedy = "is not for --engine, whose server samples only single turns; remove the key, or sample without --engine"
    require(not config.task.agent, "task.agent", config.task.agent, remedy)
    config = untrained(config)
    stored_ids = known_ids(location)
    task = load_task(config)
    policy = policy_alone(config, characters([*task.train, *task.evaluation]))
    task = without_long_prompts(task, policy.tokenizer, config.rollout)
    train = encode_problems(task.train, policy.tokenizer, config.rollout.max_prompt_tokens, policy.vocabulary)
    with RemoteEngine(address, policy, config) as engine, Grading(config, task.reward) as grading:
        content = {"problems": prompts_digest(train), "code": code_digests(config)}
        config_digest = _config_digest(config, f"{engine.server.model} of a server", 0)
        name = _with_content(config_digest, content, stored_ids, location)
        count = config.rollout.prompts_per_step
        completions_per_batch = count * config.rollout.group_size

        def sample_batches(numbers: list[int]) -> Iterator[list[Record]]:
            # `_fill` stores a batch before the server gets the requests of the next batch.
            for number in numbers:
                prompts = batch_prompts(train, config, count, number)
                # Each batch has seeds of its own, as many as it has completions; this is the first of them.
                seed = (config.seed * 1_000_003 + number) * completions_per_batch % 2**31
                groups = engine.sample_groups(
                    prompts.problems, seed, name=f"{name}/{number:06d}", source=source or engine.server.model
                )
                grades = _submit(groups, prompts, grading, policy)
                groups = with_grades(groups, grades.result())
                records = []
                for record in records_of(groups, tokenizer_name(policy.tokenizer), datetime.now(UTC)):
                    if not record.completion.rows:  # the server gave only the text
                        record = record._replace(tokenizer=None)
                    records.append(record)
                yield records

        return _fill(location, stored_ids, name, steps, sample_batches)


def _with_content(name: str, content: dict[str, Any], stored_ids: Collection[str], location: str | Path) -> str:
    """The rows' name, extended by a digest of their problems, code and weights, which the config only names.

    Rows that an older version of recjax wrote have no such digest; if the store has them, the name stays as it is.

    Args:
        name: the rows' name by their config.
    Raises:
        UserError: the store has rows of the same config with other content.
    """
    stored_names = {row_id.partition("/")[0] for row_id in stored_ids if row_id.startswith(name)}
    if name in stored_names:
        return name
    content_digest = digest(json.dumps(content, sort_keys=True).encode())
    full_name = f"{name}.{content_digest[:8]}"
    if stored_names - {full_name}:
        raise UserError(
            store_name(location),
            "the same command sampled rows there with other problems, code or weights",
            "restore them, or give another --output",
        )
    return full_name


def _fill(
    location: str | Path,
    stored_ids: Collection[str],
    name: str,
    steps: int,
    sample_batches: Callable[[list[int]], Iterator[list[Record]]],
) -> int:
    """Adds the batches 1 to `steps` that the store lacks; returns their number.

    Args:
        stored_ids: ids of the completions in the store.
        name: first part of the completions' ids, before the batch's number.
        sample_batches: samples the batches with these numbers, and yields the records of each batch in order.
    """
    done = {int(row_id.split("/")[1]) for row_id in stored_ids if row_id.startswith(f"{name}/")}
    missing = [number for number in range(1, steps + 1) if number not in done]
    hosts.wait_for_all("looked into the store")
    with step_bar("generate", steps, initial=steps - len(missing)) as bar:
        for records in sample_batches(missing):
            if records and hosts.is_first():
                with Store(location, create=True) as store:
                    store.append(records)
            grades = [record.completion.grade for record in records]
            rewards = [grade.reward for grade in grades if grade and grade.reward is not None]
            mean_reward = sum(rewards) / max(len(rewards), 1)
            bar.set_postfix(reward=f"{mean_reward:.2f}", refresh=False)
            bar.update()
    return len(missing)


def known_ids(location: str | Path) -> Collection[str]:
    """The ids of a store's completions; empty if the store does not exist yet."""
    if not exists(location):
        return ()
    with Store(location, create=True) as store:
        return store.numbers("id")


def _submit(groups: Sequence[Group], prompts: Prompts, grading: Grading, policy: Policy) -> Grades:
    """Submits a server's completions for grading; a server may return prompts and completions without their tokens."""
    answered = []
    for group, recjax_prompt, problem in zip(groups, prompts.texts, prompts.problems, strict=True):
        prompt = recjax_prompt
        if len(group.prompt_tokens):
            # The reward gets the prompt that the server's model saw.
            prompt = str(policy.tokenizer.decode(group.prompt_tokens))
        for completion in group.completions:
            if completion.rows:
                length = completion.sampled_tokens
            else:
                length = _text_length(policy, completion.text)
            answered.append(Answered.to(problem, prompt, completion.text, length, completion.id))
    scores = None
    if answered:
        scores = grading.submit(answered)
    return Grades(scores, len(answered))


def _text_length(policy: Policy, text: str) -> int:
    """Number of tokens of a text, or number of characters if the vocabulary cannot express the text."""
    try:
        return len(encode_after(policy.tokenizer, (), text))
    except UserError:
        return len(text)


def _make_sampler(config: Config, run: str | None, step: int | None) -> tuple[BatchSampler, dict, int]:
    """The sampler, its parameters in compute dtype, and the number of optimizer updates that made them."""
    # The config may name the store that this command creates.
    config = untrained(config)
    if run is None:
        setup, params = prepare(config)
        return setup.sampler, for_sampling(setup.sampler.policy, params), 0
    require(config.task.keep is None, "task.keep", config.task.keep, _KEEP.format("--run"))
    # The run's config determines the policy, the command's config the prompts.
    opened = open_policy(run, run_config(Path(run)), step)
    policy = opened.policy
    set_template_kwargs(policy.tokenizer, config.model.chat_template_kwargs)
    task = load_task(config)
    check_problems(config, task)
    task = without_long_prompts(task, policy.tokenizer, config.rollout)
    train = encode_problems(task.train, policy.tokenizer, config.rollout.max_prompt_tokens, policy.vocabulary)
    agents = None
    if config.task.agent:
        agents = Agents(config, policy, opened.older_params)
    sampler = BatchSampler(config, policy, train, Grading(config, task.reward), phases=PhaseSeconds(), agents=agents)
    return sampler, for_sampling(policy, opened.params), opened.version


def _config_digest(config: Config, run: str | None, version: int) -> str:
    """A digest of all settings that determine the rows: the start of their ids.

    Args:
        run: folder of the run that the policy comes from, or the name of a server's model; None: the initial policy.
        version: the policy's version in its run.
    """
    depends_on: dict[str, Any] = config.model_dump(include={"seed", "model", "task", "warm_start", "rollout"})
    del depends_on["rollout"]["engine"]  # This command never samples with the engine that the config names.
    depends_on["held_out"] = config.evaluation.most_problems
    depends_on["version"] = version
    if config.base_seed is not None:
        depends_on["base_seed"] = config.base_seed
    if run:
        config_file = Path(run) / "config.yaml"
        depends_on["run"] = run
        if config_file.is_file():
            depends_on["run"] = config_file.read_text(encoding="utf-8")
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:12]


def read_flags(config: str | None, run: str | None, step: int | None, overrides: list[str]) -> tuple[Config, str]:
    """The config, and the default source name for the rows.

    Raises:
        UserError: the flags contradict each other, or the config is invalid.
    """
    if (config is None) == (run is None):
        found = "found both" if run else "found neither"
        raise UserError(
            problem="give exactly one of --config (its initial policy) and --run (a checkpoint)", remedy=found
        )
    if run is None:
        if step is not None:
            raise UserError(f"--step {step}", "has no effect with --config, which has no checkpoints", "remove it")
        assert config is not None
        return load_config(config, overrides), "initial"
    run_config(Path(run))
    return load_config(Path(run) / "config.yaml", overrides), Path(run).name


@command
def main(argv: list[str]) -> None:
    """Reads the flags, generates the rows and prints the store's size."""
    keep_compiled_programs()
    config, default_source = read_flags(FLAGS.config, FLAGS.run, FLAGS.step, argv[1:])
    if FLAGS.engine is None and (FLAGS.model or FLAGS.api_key_file):
        raise UserError(
            "--model and --api_key_file", "have an effect only with --engine", "give --engine, or remove them"
        )
    if FLAGS.engine is not None and FLAGS.run is not None:
        raise UserError("--run", "has no effect with --engine, whose server samples", "give --config")
    if FLAGS.engine is not None and (FLAGS.processes or 1) > 1:
        raise UserError(f"--processes {FLAGS.processes}", "--engine uses a single process", "remove the flag")
    with hosts.connected(FLAGS.coordinator, FLAGS.processes, FLAGS.process_id), jax.set_mesh(make_mesh(config.mesh)):
        if FLAGS.engine is None:
            new = generate(
                config,
                FLAGS.output,
                FLAGS.steps,
                run=FLAGS.run,
                step=FLAGS.step,
                source=FLAGS.source or default_source,
            )
        else:
            api_key = next(iter(read_keys(FLAGS.api_key_file, most=1)), None)
            address = Address(
                FLAGS.engine,
                FLAGS.model,
                api_key,
                concurrency=FLAGS.concurrency,
                seconds=FLAGS.reply_seconds,
                retries=FLAGS.retries,
            )
            new = generate_remotely(config, FLAGS.output, FLAGS.steps, address, FLAGS.source)
    if not hosts.is_first():
        return
    rows = len(known_ids(FLAGS.output))
    print(
        f"{store_name(FLAGS.output)}: {new} new batches, {FLAGS.steps - new} already in the store; {rows} rows in total"
    )


if __name__ == "__main__":
    flags.DEFINE_string("config", None, "YAML file of a run, or the name of an example; its initial policy samples.")
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
