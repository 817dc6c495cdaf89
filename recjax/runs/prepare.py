"""Reads everything that a run needs before its first step: task, policy, store, demonstrations."""

import hashlib
import logging
from collections.abc import Callable, Container, Generator, Sequence
from typing import Any

import jax

from recjax.agents.agents import Agents
from recjax.config import Config, TrainingConfig
from recjax.errors import UserError
from recjax.experience.packing import shape_for
from recjax.experience.replay import judge_of
from recjax.experience.teacher_prompts import TeacherPrompts
from recjax.hub.policy import Policy, policy_alone
from recjax.hub.tokenizers import model_folder
from recjax.hub.weights import MODEL_FILES, warn_beyond_context
from recjax.models.decoder import abstract_params
from recjax.models.placement import row_shards
from recjax.models.trainable import fingerprint, in_compute_dtype, split_params
from recjax.rewards.pool import Grading
from recjax.rewards.reward import MODEL, MixedReward, Reward
from recjax.runs.policies import initial_policy
from recjax.runs.provenance import code_digests
from recjax.runs.warm_start import load_demonstrations
from recjax.runtime import hosts
from recjax.runtime.clocks import PhaseSeconds
from recjax.runtime.console import under_way
from recjax.runtime.files import digest, json_text, size_and_digest
from recjax.sources.setup import Demonstrations, Setup, batch_shape
from recjax.store.missing_logprobs import with_initial_logprobs
from recjax.store.stored import Stored, check_prompts, load_stored, warn_of_other_weights
from recjax.store.stored_groups import ByPrompt
from recjax.tasks.loading import load_task
from recjax.tasks.pass_rates import within_pass_rates
from recjax.tasks.problems import Task, characters, problem_key
from recjax.tasks.prompts import Prompts, prompts_digest, prompts_of
from recjax.training.evaluation import accurate_counts
from recjax.training.mesh import check_fits

logger = logging.getLogger(__name__)


def prepare(
    config: Config, make_policy: Callable = initial_policy, reward: Callable | Sequence[Callable] | None = None
) -> tuple[Setup, dict]:
    """Loads the task, the initial policy (after a warm start, if the config has one), and the experience store.

    Args:
        make_policy: `initial_policy`, or a function with its arguments and results.
        reward: reward function that a program passed; None if `task.reward` names it.
    Returns:
        The setup, and all of the initial policy's parameters in float32.
    Raises:
        UserError: a task, model or store that cannot be read or does not fit the rest; a micro-batch too small.
    """
    phases = PhaseSeconds()
    reads_files = config.task.arithmetic is None
    with under_way(f"reading the task {config.task.chosen()}", shown=reads_files):
        task = load_task(config, function=reward)
    check_problems(config, task)

    # Files: all errors of the task, the store and the demonstrations come before weights are read.
    policy = policy_alone(config, characters([*task.train, *task.evaluation]))
    agents = None
    if config.task.agent:
        agents = Agents(config, policy)
    check_fits(jax.sharding.get_mesh(), policy.decoder.config)
    train, held_out = prompts_of(config, policy, task)
    warn_of_context(config, train.tokens.shape[1])
    stored = _load_store(config, policy, task.reward)
    joins_groups = False  # True if stored completions join the groups of sampled ones
    if stored is not None and config.experience is not None and config.experience.mix is not None:
        mix = config.experience.mix
        joins_groups = mix.of == "group"
        if joins_groups:
            check_prompts(stored.groups, agents is not None, mix.store, train, config.task.trained_seats)
    if config.training.tokens_per_micro_batch:
        shape_for(config, batch_shape(config, train, stored), row_shards())
    if config.model.freeze:
        split_params(abstract_params(policy.decoder.config), config.model)
    teacher_prompts = None
    if config.task.teacher_template:
        if stored is not None and stored.shape.group is None:
            problem = "has trajectories, which task.teacher_template does not support"
            raise UserError(_store_name(config), problem, "remove that key")
        teacher_prompts = TeacherPrompts(config, policy, train.problems)
    demonstrations = load_demonstrations(config, policy)
    if jax.process_count() > 1:  # Programs have shapes that depend on the data, so processes compare the data first.
        hosts.agree("data", data_digests(config, train, held_out, stored, demonstrations))

    # Weights.
    policy, params = make_policy(config, policy, train)
    if config.task.keep:
        initial = in_compute_dtype(policy.decoder, params, copy=False)
        train = kept_prompts(config, policy, initial, train, task.reward)
        del initial
    if config.task.curriculum:
        train = train._replace(keys=[problem_key(problem.prompt, problem.answer) for problem in train.problems])
    if stored is not None and config.experience and config.experience.missing_logprobs == "initial":
        groups = with_initial_logprobs(
            stored.groups,
            stored.shape,
            policy,
            params=in_compute_dtype(policy.decoder, params, copy=False),
            sampling=config.rollout.sampling(),
            chunk=config.model.logprob_chunk,
        )
        stored = stored._replace(groups=groups)
    phases.totals["prepare"] = phases.wall_seconds

    others = None
    if stored is not None and joins_groups:
        others = ByPrompt(stored.groups, by_problem=agents is not None)
    grading = Grading(config, task.reward)
    setup = Setup(
        config=config,
        policy=policy,
        train=train,
        held_out=held_out,
        grading=grading,
        phases=phases,
        stored=stored,
        others=others,
        demonstrations=demonstrations,
        agents=agents,
        judge=judge_of(config, grading.reward.weights),
        teacher_prompts=teacher_prompts,
    )
    return setup, params


def _load_store(config: Config, policy: Policy, reward: Reward | MixedReward) -> Stored | None:
    """The groups of the store at rest that the run trains on; None if the run has no such store."""
    experience = config.experience
    if experience is None or experience.follow:
        return None
    if not experience.store and not experience.mix:
        return None
    stored = load_stored(config, policy)
    if stored and not experience.regrade and not config.algorithm.build().reads("reward_parts"):
        warn_of_other_weights(stored.groups, config.task, reward)
    return stored


def warn_of_context(config: Config, prompt_tokens: int) -> None:
    """Warns if the run's longest rows may exceed the context of its model; `prompt_tokens` is the longest prompt's."""
    rollout = config.rollout
    tokens = prompt_tokens + rollout.max_completion_tokens
    keys = "rollout.max_prompt_tokens or rollout.max_completion_tokens"
    if rollout.max_context_tokens:
        tokens = rollout.max_context_tokens
        keys = "rollout.max_context_tokens"
    warn_beyond_context(config.model.path or "", tokens, keys)


def check_problems(config: Config, task: Task) -> None:
    """Compares the problems of all processes; every process must call it.

    Raises:
        UserError: they differ; the message names files and tasks.
    """
    if jax.process_count() == 1:
        return
    unread: Any = None  # digests depend on texts and problems only
    pools = []
    for problems in (task.train, task.evaluation):
        texts = [str(problem.prompt) for problem in problems]
        pools.append(Prompts(tokens=unread, mask=unread, texts=texts, problems=problems))
    train, held_out = pools
    hosts.agree("data", data_digests(config, train, held_out))


def _store_name(config: Config) -> str:
    """The store at rest whose groups the run trains on, alone or in a mix."""
    experience = config.experience
    assert experience is not None
    if experience.store:
        return experience.store
    assert experience.mix is not None
    return experience.mix.store


def data_digests(
    config: Config,
    train: Prompts,
    held_out: Prompts,
    stored: Stored | None = None,
    demonstrations: Demonstrations | None = None,
) -> dict[str, str]:
    """Digests of the data that a run reads, and that must stay the same until its end, by their names in messages."""
    digests = {}
    if stored:
        digests[f"the experience store {_store_name(config)!r}"] = stored.digest
    if demonstrations:
        digests[f"the demonstrations {config.demonstrations!r}"] = demonstrations.digest
    evaluated = f"first {config.evaluation.most_problems} held-out"
    for name, task in config.task.tasks().items():
        block = getattr(task, task.chosen())
        block_key = "task"
        if name:
            block_key = f"task.mixture.{name}"
        train_file = getattr(block, "train", None)
        evaluation_file = getattr(block, "evaluation", None)
        if not evaluation_file:
            evaluation_file = train_file
        for kind, prompts, file in (("train", train, train_file), (evaluated, held_out, evaluation_file)):
            source = f"{block_key}.{task.chosen()}"
            if file:
                source += f" = {file!r}"
            count = sum(problem.task == name for problem in prompts.problems)
            digests[f"the {kind} problems of {source}"] = f"{count} with digest {prompts_digest(prompts, name)}"
        reward = task.reward_name()
        if reward is not None and reward.startswith(MODEL):
            folder = model_folder(reward.removeprefix(MODEL), MODEL_FILES)
            files = []
            for path in sorted(folder.iterdir()):
                if path.suffix in (".safetensors", ".json", ".jinja"):
                    files.append((path.name, *size_and_digest(path)))
            digests[f"the reward model {block_key}.reward = {reward!r}"] = digest(repr(files).encode())
    return digests


def untrained(config: Config) -> Config:
    """The config's policy and task, without the settings that only training reads and that `prepare` would check."""
    task = config.task.model_copy(update={"teacher_template": None})
    return config.model_copy(update={"experience": None, "training": TrainingConfig(), "task": task})


def kept_prompts(config: Config, policy: Policy, params: dict, train: Prompts, reward: Reward | MixedReward) -> Prompts:
    """The train prompts whose pass rate under the given parameters is within `task.keep.pass_rate`.

    Args:
        params: all parameters in the dtype that they compute in.
    Raises:
        ValueError: see `within_pass_rates`.
    """
    file_name = _rates_name(config, policy, params, train, reward)

    def counts(known: Container[int]) -> Generator[tuple[int, list[int]], None, None]:
        return accurate_counts(config, policy, params, train, reward=reward, done=known)

    return within_pass_rates(config, train, file_name, counts)


def _rates_name(config: Config, policy: Policy, params: dict, train: Prompts, reward: Reward | MixedReward) -> str:
    """A digest of everything that determines the pass rates."""
    if isinstance(reward, MixedReward):
        rewards = list(reward.rewards.values())
    else:
        rewards = [reward]
    functions = []
    for task_reward in rewards:
        if isinstance(task_reward.function, tuple):
            functions += task_reward.function
        else:
            functions.append(task_reward.function)
    keep = config.task.keep
    assert keep is not None
    task = config.task.model_dump(exclude={"keep": True, "curriculum": True, "mixture": {"__all__": {"weight"}}})
    settings = config.model_dump(include={"seed": True, "rollout": True, "grading": {"seconds", "max_characters"}})
    depends_on = {
        "accurate": "answer",  # files without this entry counted shaped rewards
        "weights": fingerprint(params),
        "dtype": str(policy.decoder.dtype),
        "problems": prompts_digest(train),
        "code": code_digests(config, functions),
        "samples": keep.samples,
        "task": task,
    }
    content = json_text(depends_on | settings, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
