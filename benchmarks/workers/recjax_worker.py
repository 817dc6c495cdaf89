"""recjax as its training loop runs it: sampler, grading, update and checkpoint of one config."""

import contextlib
import functools
import importlib
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workers.protocol import Inputs, Stopwatch, System, serve
from recjax.config import TrainingConfig, load_config
from recjax.experience.batch import Batch, pad, to_learn_from
from recjax.experience.group import Group, with_grades
from recjax.experience.layout import choose_layout
from recjax.hub.policy import Policy
from recjax.models.decoder import init_params
from recjax.models.logprobs import completion_logprobs
from recjax.models.placement import on_host, put_rows
from recjax.models.sampling import Sampling
from recjax.models.trainable import combine
from recjax.rollout.collecting import row_keys, sample_groups, submit
from recjax.rollout.decoding import sample_tokens
from recjax.runs import checkpoint
from recjax.runs.spec import spec_of
from recjax.runs.start import begin
from recjax.runtime.cache import keep_compiled_programs
from recjax.runtime.memory import SETTLING_STEPS, close_gaps
from recjax.training.learner import Learner
from recjax.training.mesh import make_mesh
from recjax.training.update import UpdateContext, hyperparameters_of, recipe_of, update

CONFIG = """
output: {scratch}/run
model: {{path: {folder}/model, dtype: {precision}}}
task: {{file: {{train: {folder}/prompts.jsonl, evaluation: {folder}/held_out.jsonl}}, reward: "{reward}"}}
rollout: {{prompts_per_step: {prompts}, group_size: {group_size}, max_completion_tokens: {completion_tokens}}}
algorithm: {{preset: grpo}}
training: {{micro_batch_prompts: {micro_batch_prompts}}}
"""


class DrawingLearner(Learner):
    """Draws the first policy's weights on the device, for a model folder without weights."""

    @staticmethod
    def initial_policy(config: TrainingConfig, policy: Policy, train: object) -> tuple[Policy, dict]:
        """See `recjax.runs.policies.initial_policy`."""
        return policy, init_params(policy.decoder.config, jax.random.key(0))


def read_config(inputs: Inputs):
    """The run's config: the shape, and lines of config from the system and from the command."""
    file, parts = inputs.scratch / "config.yaml", inputs.shape["micro_batches"]
    values = inputs.shape | {
        "folder": inputs.folder,
        "scratch": inputs.scratch,
        "precision": inputs.precision,
        # One micro-batch, as in the other systems, is recjax's own choice.
        "micro_batch_prompts": "null" if parts == 1 else inputs.shape["prompts"] // parts,
    }
    file.write_text(CONFIG.format(reward="benchmarks.reward:vowel_share", **values))
    lines = [*inputs.options.get("config", []), *inputs.options["lines"]]
    return load_config(file, lines), lines


def prepare(inputs: Inputs) -> System:
    """The parts of a run, and their timed phases."""
    for place, value in inputs.options.get("set", {}).items():
        module, name = place.split(":")
        setattr(importlib.import_module(module), name, value)
    config, lines = read_config(inputs)
    jax.set_mesh(make_mesh(config.mesh))
    begun, state = begin(
        spec_of(config), overwrite=True, learner=DrawingLearner() if inputs.shape["is_drawn"] else None
    )
    run, learner, _, manager = begun
    held, recipe = {"state": state, "steps": 0}, recipe_of(config, run.policy.decoder)
    sampling, numbers = config.rollout.sampling(), hyperparameters_of(config, config.optimizer.learning_rate)
    del state
    prompts = run.train.take(np.arange(inputs.shape["prompts"]))
    np.testing.assert_array_equal(prompts.tokens, inputs.prompts)
    contextlib.ExitStack().enter_context(run.grading)  # until the process ends
    limit, policy, group_size = config.rollout.max_completion_tokens, run.policy, config.rollout.group_size

    def updated(trained, batch: Batch, number: int):
        layout = choose_layout(config, recipe.algorithm, recipe.decoder, batch)
        trained, metrics, _ = update(
            trained,
            put_rows(batch._replace(reward_parts={})),
            layout,
            UpdateContext(learner.frozen, jax.random.key(number), hyperparameters=numbers),
            recipe=recipe,
        )
        return trained, {name: float(value) for name, value in on_host(metrics).items()}

    def sampler_params():
        return learner.behavior_params(held["state"])

    def sampled(number: int, behavior: dict, max_tokens: int, sampling: Sampling, group_size: int) -> list[Group]:
        keys = row_keys(jax.random.fold_in(jax.random.key(config.seed), number), len(prompts.texts) * group_size)
        params, about = combine(behavior, learner.frozen), {"name": f"{number}", "source": "policy", "version": number}
        return sample_groups(policy, params, prompts, keys, group_size, max_tokens, sampling, **about)

    def step(number: int) -> dict:
        watch = Stopwatch()
        groups = sampled(number, sampler_params(), limit, sampling, group_size)
        watch.part("generate")
        batch = pad(with_grades(groups, submit(groups, prompts, run.grading).result()), run.shape)
        watch.part("grade")
        trained, _ = updated(held["state"].trained, to_learn_from(batch, config.task), number)
        held["state"] = held["state"]._replace(trained=trained, version=number)
        jax.block_until_ready(trained)
        watch.part("update")
        # One less than in a run, which does not wait for updates: here the next one needs the result of this one.
        if held["steps"] < SETTLING_STEPS - 1:
            close_gaps()
        held["steps"] += 1
        return {"inside": watch.seconds, "tokens": int(batch.completion_mask.sum())}

    def trace(folder: str, round: int) -> dict:
        with jax.profiler.trace(folder):
            return step(round)

    def prefill(number: int) -> dict:
        started = time.perf_counter()
        behavior = jax.block_until_ready(sampler_params())
        copied = time.perf_counter() - started
        sampled(number, behavior, 1, sampling, group_size)
        return {"inside": {"weight_copy": copied}}

    def write_checkpoint(number: int) -> dict:
        held["state"] = held["state"]._replace(step=held["state"].step + 1)
        checkpoint.save(manager, held["state"], TrainingConfig(keep_checkpoints=1))
        return {}

    # --- Behavior log-probs: the time of storing them during sampling, and the forward pass that it saves.
    scores = jax.random.normal(jax.random.key(1), (inputs.shape["vocabulary"],))
    rows = len(inputs.completions)

    def drawing(number: int) -> dict:
        watch = Stopwatch()
        for stored in (True, False):
            jax.block_until_ready(_drawing_alone(scores, jax.random.key(number), sampling, rows, limit, stored))
            watch.part("with_logprobs" if stored else "without_logprobs")
        return {"inside": watch.seconds}

    mask = np.ones(inputs.completions.shape, bool)
    rescored = jax.jit(completion_logprobs, static_argnames=("decoder", "sampling", "chunk"))

    def logprobs() -> np.ndarray:
        given = (prompts.tokens, prompts.mask, inputs.completions, mask)
        everything = combine(held["state"].trained.params, learner.frozen)
        chunk = config.model.logprob_chunk
        return np.asarray(rescored(policy.decoder, everything, *given, sampling=sampling, chunk=chunk)[0])

    def rescore(number: int) -> dict:
        logprobs()
        return {}

    # --- Results that are compared with other systems.
    def greedy() -> list:
        groups = sampled(0, sampler_params(), limit, Sampling(temperature=0.0), 1)
        return pad(groups, run.shape._replace(group=1)).completions.tolist()

    def save_logprobs(file: str) -> None:
        np.save(file, logprobs())

    def loss(file: str) -> dict:
        batch = Batch(
            prompts=prompts.tokens,
            prompt_mask=prompts.mask,
            completions=inputs.completions,
            completion_mask=mask,
            behavior_logprobs=np.load(file),
            rewards=inputs.rewards,
            group_ids=np.repeat(np.arange(len(prompts.texts), dtype=np.int32), config.rollout.group_size),
            policy_version=np.zeros(rows, np.int32),
            truncated=np.zeros(rows, bool),
            accurate=np.zeros(rows, bool),
            reward_parts={},
        )
        # The step is taken, as a copy of the state would stay in the heap and be counted as a step's memory.
        trained, metrics = updated(held["state"].trained, batch, 0)
        held["state"] = held["state"]._replace(trained=trained)
        return {name: metrics[name] for name in ("loss", "gradient_norm")}

    return System(
        phases={
            "step": step,
            "prefill": prefill,
            "drawing": drawing,
            "rescore": rescore,
            "checkpoint": write_checkpoint,
        },
        checks={
            "greedy": greedy,
            "logprobs": save_logprobs,
            "loss": loss,
            "peaks": functools.partial(_peaks, inputs),
            "trace": trace,
        },
        peak_device_bytes=lambda: (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        packages=("jax", "jaxlib", "flax", "optax"),
        notes={**({"config": list(lines)} if lines else {}), "device": jax.local_devices()[0].device_kind},
    )


@functools.partial(jax.jit, static_argnames=("sampling", "rows", "times", "stored"))
def _drawing_alone(scores, key, sampling: Sampling, rows: int, times: int, stored: bool):
    """`times` tokens for each row from scores that differ by row and time, with their log-probabilities or without."""

    def one(total, time):
        shifted = scores + jnp.sin(time + jnp.arange(rows))[:, None] * scores[::-1]
        tokens, logprobs = sample_tokens(shifted, sampling, jax.random.split(jax.random.fold_in(key, time), rows))
        return total + tokens.sum() + (logprobs.sum() if stored else 0.0), None

    return jax.lax.scan(one, 0.0, jnp.arange(times))[0]


def _peaks(inputs: Inputs) -> dict[str, float]:
    """The best of five: FLOP/s of a matrix product in the precision, bytes/s of a copy that no cache holds."""
    dtype = jnp.dtype(inputs.precision)
    square, long = jnp.ones((2048, 2048), dtype), jnp.ones(1 << 27, jnp.float32)
    product, copied = jax.jit(jnp.matmul), jax.jit(lambda x: x + 1)

    def best(call) -> float:
        seconds = []
        for _ in range(6):
            started = time.perf_counter()
            jax.block_until_ready(call())
            seconds.append(time.perf_counter() - started)
        return min(seconds[1:])

    return {
        "flops": 2 * 2048**3 / best(lambda: product(square, square)),
        "bytes": 2 * long.nbytes / best(lambda: copied(long)),
    }


if __name__ == "__main__":
    keep_compiled_programs()
    serve(prepare)
