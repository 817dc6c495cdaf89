"""Seconds that each part of a step takes on the host, and how they grow with the rows of a step.

    python -m benchmarks.host --page benchmarks/RESULTS.md [--rows 256,512,1024] [--repeats 5]

Trains with a sampler and a learner that compute nothing: the engine's programs return random tokens at once, with
lengths drawn evenly up to the longest completion, and the update only returns numbers. The loop, engine, queue,
batches, packing, metrics, record and kept completions are those of every run; workers grade nothing. A part's seconds
do not include those of another part that it calls. Processor seconds are those of all threads of the process, so other
programs hardly change them. Tables have the best step after the first two. A slope is that of log seconds over log rows
by least squares, with its range over steps.
"""

import contextlib
import functools
import gc
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks.run import machine
from benchmarks.tables import show
from recjax.algorithms.losses import TokenTerms
from recjax.config import Config, load_config
from recjax.experience.group import Grade
from recjax.experience.layout import Layout
from recjax.hub.policy import Policy
from recjax.logs import kept_samples, log
from recjax.logs.metrics import MetricsWriter
from recjax.models.decoder import Decoder
from recjax.models.layer import Cache, KeysValues
from recjax.rollout import collecting, decoding
from recjax.rollout.decoding import Decoded, RoundOptions, SlotState
from recjax.rollout.keys_values import Memory
from recjax.runs import start
from recjax.runs.sources import source_of
from recjax.sources.recording import BatchRecorder
from recjax.sources.sampling import BatchSampler
from recjax.training import learner, loop
from recjax.training.evaluation import Evaluation, HeldOut
from recjax.training.update import TokenResults, TrainState

CONFIG = """
output: unset
model: {decoder: {hidden_size: 16, num_layers: 1, num_heads: 2, num_kv_heads: 1, intermediate_size: 32}}
task:
  arithmetic: {problems: ["10..99 + 10..99"], template: "How much is {a} {op} {b}? Answer: "}
  reward: math
algorithm: {preset: rec_one_side_nois}
evaluation: {every: 0, problems: 16}
experience: {record: true}
"""
STOP = 0  # the built-in tokenizer's end-of-sequence token
WARM_UPS = 2  # the first steps compile the few programs that move slots
TIMED = {
    collecting.Engine: {"admit": "slots", "drain": "slots"},
    collecting: {"sample_groups": "groups"},
    loop: {
        "put": "queue",
        "wait_for_grades": "queue",
        "deliver": "queue",
        "take": "queue",
        "pad": "pad",
        "wait_for_due_grades": "queue",
    },
    log: {
        "batch_metrics": "metrics",
        "task_metrics": "metrics",
        "queue_metrics": "metrics",
        "padding_waste": "metrics",
    },
    kept_samples: {"save_samples": "log"},
    MetricsWriter: {"hold": "log", "settle": "log"},
    learner: {"choose_layout": "layout"},
    BatchRecorder: {"write": "record"},
}
PARTS = ("slots", "groups", "queue", "record", "pad", "layout", "metrics", "log", "other")


def define_flags() -> None:
    """The command's flags, defined when it is run and not when it is imported."""
    flags.DEFINE_list("rows", "256,512,1024,2048,4096,8192,16384", "Rows of a step, each a multiple of the group size.")
    flags.DEFINE_integer("group_size", 16, "Completions of each prompt.", lower_bound=1)
    flags.DEFINE_integer("tokens", 96, "Longest completion.", lower_bound=1)
    flags.DEFINE_integer("micro_batch", 16384, "Tokens of a packed micro-batch.", lower_bound=256)
    flags.DEFINE_integer("repeats", 5, "Timed steps.", lower_bound=1)
    flags.DEFINE_string("page", None, "Markdown page whose table to replace; default: the table is printed.")


class Clock:
    """Seconds of named parts, on the wall and of the process's threads; a part within another stops the outer part."""

    def __init__(self):
        """Starts the first step."""
        self.steps: list[dict[str, np.ndarray]] = []
        gc.unfreeze()
        self._totals: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
        self._parts = ["other"]
        self._since = self._now()

    def _now(self) -> np.ndarray:
        return np.array([time.perf_counter(), time.process_time()])

    def _switch(self) -> None:
        now = self._now()
        self._totals[self._parts[-1]] += now - self._since
        self._since = now

    def end_step(self) -> None:
        """Stores the seconds of a step and starts the next."""
        self._switch()
        self.steps.append({part: self._totals[part] for part in PARTS})
        self._totals.clear()

    def timed(self, part: str, function: Callable) -> Callable:
        """The function, whose seconds count for a part."""

        def call(*arguments: Any, **options: Any) -> Any:
            self._switch()
            self._parts.append(part)
            try:
                return function(*arguments, **options)
            finally:
                self._switch()
                self._parts.pop()

        return call


# --- A sampler that computes nothing. Caches have no layers, so the programs that move slots have nothing to copy.


def prefill(params: dict, tokens: np.ndarray, mask: np.ndarray, held: Any = None, *, decoder: Decoder) -> tuple:
    """Keys and values without layers, and no scores."""
    cache = jnp.zeros((0, len(tokens), 1, tokens.shape[1], 1), jnp.float32)
    return Cache(KeysValues(cache, cache)), np.zeros((len(tokens), 1), np.float32)


def lengths_of(keys: np.ndarray, longest: int) -> np.ndarray:
    """The length of each completion, which follows from its key."""
    return 1 + keys[:, -1] % longest


def first_tokens(scores: np.ndarray, prompt_rows: np.ndarray, keys: np.ndarray, **_: Any) -> tuple:
    """First tokens; a completion of one token ends with it."""
    tokens = np.where(lengths_of(keys, flags.FLAGS.tokens) == 1, STOP, 1 + keys[:, 0] % 9).astype(np.int32)
    return tokens, np.full(len(prompt_rows), -1.0, np.float32), {}


def decode(
    params: dict, memory: Memory, rows: SlotState, enough: np.ndarray, *, decoder: Decoder, options: RoundOptions
) -> tuple[Memory, Decoded]:
    """A round of random tokens, until completions have their lengths or only `enough` slots are live."""
    missing = np.where(rows.live, lengths_of(rows.keys, flags.FLAGS.tokens) - rows.counts, 0)
    ordered = np.sort(missing)[::-1]
    time_run = min(options.time, int(ordered[min(int(enough), len(ordered) - 1)]))
    counts = np.minimum(missing, time_run).astype(np.int32)
    tokens = np.random.default_rng(int(rows.counts.sum())).integers(1, 9, (len(counts), options.time), np.int32)
    ends = (missing > 0) & (missing <= time_run)
    tokens[ends, counts[ends] - 1] = STOP
    last = np.where(counts > 0, tokens[np.arange(len(counts)), counts - 1], rows.last)
    logprobs = np.full(tokens.shape, -1.0, np.float32)
    return memory, Decoded(np.array(time_run, np.int32), missing > time_run, last, None, tokens, logprobs, counts, {})


class Given:
    """Grades that are there."""

    def __init__(self, grades: list[Grade]):
        """Takes the grades."""
        self._grades = grades

    def result(self) -> list[Grade]:
        """Returns the grades."""
        return self._grades


def sample(sampler: BatchSampler, params: dict, version: int, number: int, **_: Any) -> tuple:
    """The groups of a batch, from the engine, with rewards of 0 and 1."""
    config = sampler.config
    count, group_size = config.own_counts
    rows = count * group_size
    generator = np.random.default_rng(number)
    keys = generator.integers(0, 2**31, (rows, 2)).astype(np.uint32)
    prompts = sampler.batch_prompts(number)
    longest = config.rollout.max_completion_tokens
    names = {"name": f"{number:06d}", "source": "policy", "version": version}
    sampling = config.rollout.sampling()
    groups = collecting.sample_groups(sampler.policy, params, prompts, keys, group_size, longest, sampling, **names)
    right = generator.random(rows) < 0.5
    return groups, Given([Grade(float(value), {"accuracy": float(value)}, bool(value)) for value in right])


# --- A learner that computes nothing.


class Idle(learner.Learner):
    """Chooses layouts and counts steps."""

    def __init__(self, clock: Clock):
        """Takes the clock, on which every update is the end of a step."""
        super().__init__()
        self._clock = clock

    def initial_policy(self, config: Config, policy: Any, train: Any) -> tuple:
        """A policy of one number."""
        return policy, {"step": np.zeros(1, np.float32)}

    def begin(self, config: Config, policy: Policy, params: dict, held_out: HeldOut, **others: Any) -> TrainState:
        """A state without an optimizer."""
        self._config = config
        self._decoder = policy.decoder
        return TrainState(params, ())

    def behavior_params(self, state: Any, copy: bool = False) -> dict:
        """The number."""
        return state.trained.params

    def layout(self, batch: Any, rows: Any, doublings: int | None) -> Layout:
        """The layout of a compiled update."""
        algorithm = self._config.algorithm.build()
        return learner.choose_layout(self._config, algorithm, self._decoder, batch, rows, doublings)

    def update(self, trained: TrainState, batch: Any, layout: Layout, step: int, *_: Any) -> tuple:
        """The same state, and numbers."""
        self._clock.end_step()
        if len(self._clock.steps) == WARM_UPS:  # as commands do after their first steps
            gc.collect()
            gc.freeze()
        numbers = dict.fromkeys(("loss", "gradient_norm", "update_norm", "learning_rate"), 1.0)
        zeros = np.zeros(batch.completions.shape, np.float32)
        return trained, numbers, TokenResults(zeros, TokenTerms(zeros, zeros, zeros > 0, zeros))

    def evaluate(self, state: Any) -> Evaluation:
        """One empty answer."""
        graded = {"reward": 0.0, "accurate": False, "truncated": False}
        sample = {"problem": 0, "prompt": "", "question": "", "answer": "", "completion": "", **graded}
        return Evaluation(0.0, 0.0, None, [sample])


@contextlib.contextmanager
def without_a_device(clock: Clock) -> Iterator[None]:
    """Replaces the engine's programs, and times the parts of the loop."""
    with contextlib.ExitStack() as stack:
        for function in (prefill, first_tokens, decode):
            stack.enter_context(mock.patch.object(decoding, function.__name__, function))
        for holder, parts in TIMED.items():
            for name, part in parts.items():
                timed = clock.timed(part, getattr(holder, name))
                stack.enter_context(mock.patch.object(holder, name, timed))
        yield


def measure(rows: int, repeats: int) -> list[dict[str, np.ndarray]]:
    """Seconds of the timed steps of a run with so many rows a step: each part's, on the wall and of the processor."""
    options = flags.FLAGS
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, without_a_device(clock):
        path = Path(folder) / "host.yaml"
        path.write_text(CONFIG)
        overrides = [
            f"output={folder}/run",
            f"rollout.prompts_per_step={rows // options.group_size}",
            f"rollout.group_size={options.group_size}",
            f"rollout.max_completion_tokens={options.tokens}",
            f"training.tokens_per_micro_batch={options.micro_batch}",
            f"training.steps={WARM_UPS + repeats}",
            f"training.checkpoint_every={WARM_UPS + repeats}",
        ]
        sources = functools.partial(source_of, sample=sample)
        start.train(load_config(path, overrides), sources=sources, learner=Idle(clock))
    return clock.steps[WARM_UPS:]


def rows_of(measured: dict[int, list[dict[str, np.ndarray]]]) -> list[list[str]]:
    """The table's cells: a row for each part with its processor seconds and their slope, then the whole step."""
    sizes = list(measured)
    cells = [["part", *(f"{size:,} rows" for size in sizes), "slope"]]
    # [size, step, part, clock]
    seconds = np.array([[[step[part] for part in PARTS] for step in steps] for steps in measured.values()])
    lines = {part: seconds[:, :, number, 1] for number, part in enumerate(PARTS)}
    # A device computes an update while the host writes the record.
    waits = seconds[..., 1].sum(-1) - lines["record"]
    lines |= {"all but record": waits, "all": seconds[..., 1].sum(-1), "all, on the wall": seconds[..., 0].sum(-1)}
    for name, of_steps in lines.items():
        best = of_steps.min(1)
        slope, *of_each = np.polyfit(np.log(sizes), np.log(np.maximum(np.column_stack([best, of_steps]), 1e-6)), 1)[0]
        cells.append([name, *(f"{value * 1000:.1f}" for value in best)])
        cells[-1].append(f"{slope:.2f} ({min(of_each):.2f}–{max(of_each):.2f})")
    return cells


def main(_) -> None:
    """Measures, then writes the table."""
    where, repeats = machine(), flags.FLAGS.repeats
    measured = {size: measure(size, repeats) for size in map(int, flags.FLAGS.rows)}
    options = flags.FLAGS
    about = (
        f"Milliseconds of a processor for each part of a step on the host, best of {repeats} steps; groups of"
        f" {options.group_size}, completions of up to {options.tokens} tokens, {options.micro_batch:,} tokens a"
        f" micro-batch; slopes with their range over steps; {where['cpu']}, {where['cores']} shared cores,"
        f" {where['date'][:10]}."
    )
    show(flags.FLAGS.page, "host", about, rows_of(measured))


if __name__ == "__main__":
    define_flags()
    app.run(main)
