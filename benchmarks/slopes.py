"""How the cost of recjax's generation and update grows with batch, lengths, group size and model.

    python -m benchmarks.slopes --page benchmarks/RESULTS.md --figure benchmarks/slopes.png [--repeats 5]

One thing is changed at a time from shape (a): random weights, no stop token, all rows in slots. A slope is that of log
seconds over log size by least squares: 1 where twice as much takes twice as long. Sizes take turns, so that other load
falls on all; compiling and a first run are apart. The table goes into the page, between its marks.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from matplotlib.ticker import LogLocator
from tqdm import tqdm

from benchmarks.run import machine
from benchmarks.shapes import SHAPES
from benchmarks.tables import show, table
from recjax.algorithms.presets import build_algorithm
from recjax.experience.batch import Batch
from recjax.experience.layout import Layout
from recjax.models.decoder import Decoder, init_params
from recjax.models.decoder_config import DecoderConfig
from recjax.models.logprobs import Sampling
from recjax.models.unrolling import unrolled_for_training
from recjax.plots.style import COLORS, add_legend, new_figure, save_figure
from recjax.rollout.collecting import row_keys
from recjax.rollout.engine import Engine
from recjax.rollout.requests import Request
from recjax.training.update import Recipe, TrainState, UpdateContext, update

OPTIMIZER, ALGORITHM = optax.adamw(1e-6), build_algorithm("grpo", {})
PHASES = ("generation", "update")


class Size(NamedTuple):
    """One step's work; hidden and layers are the model's."""

    prompts: int
    group_size: int
    prompt_tokens: int
    completion_tokens: int
    hidden: int
    layers: int


BASE = Size(8, 8, 64, 64, 256, 4)
VARIED = {
    "prompts": (4, 8, 16, 32),
    "group_size": (4, 8, 16, 32),
    "prompt_tokens": (64, 128, 256, 512),
    "completion_tokens": (32, 64, 128, 256),
    "hidden": (128, 256, 512),
    "layers": (2, 4, 8),
}


def define_flags() -> None:
    """The command's flags, defined when it is run and not when it is imported."""
    flags.DEFINE_string("page", None, "Markdown page whose table to replace; default: the table is printed.")
    flags.DEFINE_string("figure", None, "PNG to draw; default: none.")
    flags.DEFINE_integer("repeats", 5, "Rounds; 0: only draws the page's table again.", lower_bound=0)


def prepare(size: Size) -> dict[str, Callable[[int], None]]:
    """Functions that sample and train a batch of a size, by phase; both return when they are done."""
    model = SHAPES["a"].model
    heads = size.hidden // model.head_dim
    config = DecoderConfig(model.vocabulary, size.hidden, 4 * size.hidden, size.layers, heads, heads, model.head_dim)
    decoder, params = Decoder(config), init_params(config, jax.random.key(0))
    random, rows = np.random.default_rng(0), size.prompts * size.group_size
    prompts = random.integers(0, config.vocab_size, (size.prompts, size.prompt_tokens)).astype(np.int32)
    mask, zeros = np.ones(prompts.shape, bool), np.zeros(rows, np.int32)
    held = {"state": TrainState(jax.tree.map(jnp.copy, params), OPTIMIZER.init(params))}

    def generation(number: int) -> None:
        keys, limits = row_keys(jax.random.key(number), rows), (size.completion_tokens, Sampling())
        engine = Engine(decoder, (), slots=rows, prefix_time=size.prompt_tokens)
        engine.replace_weights(params, version=0)
        requests = [Request(prompts[row // size.group_size], key, *limits) for row, key in enumerate(keys)]
        tickets, finished = engine.admit(requests, size.group_size), engine.drain()
        sampled = [finished[ticket] for ticket in tickets]
        held["tokens"] = np.stack([completion.tokens for completion in sampled])
        held["logprobs"] = np.stack([completion.logprobs for completion in sampled])

    def one_update(number: int) -> None:
        batch = Batch(
            prompts=prompts,
            prompt_mask=mask,
            completions=held["tokens"],
            completion_mask=np.ones(held["tokens"].shape, bool),
            behavior_logprobs=held["logprobs"],
            rewards=random.integers(0, 2, rows).astype(np.float32),
            group_ids=np.repeat(np.arange(size.prompts, dtype=np.int32), size.group_size),
            policy_version=zeros,
            truncated=zeros == 1,
            accurate=zeros == 1,
            reward_parts={},
        )
        held["state"], *_ = jax.block_until_ready(
            update(
                held["state"],
                batch,
                Layout(),
                UpdateContext({}, jax.random.key(number)),
                recipe=Recipe(unrolled_for_training(decoder), ALGORITHM, OPTIMIZER, Sampling(), 1024),
            )
        )

    return {"generation": generation, "update": one_update}


def measure(repeats: int) -> dict[Size, dict[str, np.ndarray]]:
    """Seconds of every size and phase, [repeats]."""
    sizes = list(dict.fromkeys(BASE._replace(**{name: value}) for name, values in VARIED.items() for value in values))
    ready = {}
    for size in tqdm(sizes, "compiling", unit="size"):
        ready[size] = prepare(size)
        for run in ready[size].values():
            run(0)
    seconds = {size: {phase: np.zeros(repeats) for phase in PHASES} for size in sizes}
    for number in tqdm(range(repeats), "measuring", unit="round"):
        for size in sizes:
            for phase, run in ready[size].items():
                started = time.perf_counter()
                run(number)
                seconds[size][phase][number] = time.perf_counter() - started
    return seconds


def slopes(name: str, phase: str, seconds: dict[Size, dict[str, np.ndarray]]) -> np.ndarray:
    """The slope of each round in the size that `name` varies."""
    logs = np.log([seconds[BASE._replace(**{name: value})][phase] for value in VARIED[name]])
    return np.polyfit(np.log(VARIED[name]), logs, 1)[0]


def rows_of(seconds: dict[Size, dict[str, np.ndarray]]) -> list[list[str]]:
    """The table's cells: median seconds at each value, and the slope with its range over rounds."""
    cells = [["varied", "values", *(text for phase in PHASES for text in (f"{phase}, s", "slope"))]]
    for name, values in VARIED.items():
        cells.append([name.replace("_", " "), ", ".join(map(str, values))])
        for phase in PHASES:
            found = slopes(name, phase, seconds)
            medians = [np.median(seconds[BASE._replace(**{name: value})][phase]) for value in values]
            cells[-1].append(", ".join(f"{median:.2f}" for median in medians))
            cells[-1].append(f"{np.median(found):.2f} ({found.min():.2f}–{found.max():.2f})")
    return cells


def medians_in(text: str) -> dict[str, dict[str, list[float]]]:
    """Median seconds at each value of each varied thing and phase, from a page's table.

    Raises:
        ValueError: the page has no such table.
    """
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        name = cells[0].replace(" ", "_")
        if name in VARIED and len(cells) == 2 + 2 * len(PHASES):
            columns = zip(PHASES, cells[2::2], strict=True)
            found[name] = {phase: [float(number) for number in cell.split(", ")] for phase, cell in columns}
    if list(found) != list(VARIED):
        raise ValueError(f"the page's table has {', '.join(found) or 'no rows'}, and not {', '.join(VARIED)}")
    return found


def draw(medians: dict[str, dict[str, list[float]]], path: str) -> None:
    """Draws seconds over size, relative to shape (a), logarithmic in both.

    Args:
        medians: as `medians_in` returns them.
    """
    figure = new_figure(9, 3.6, "")
    panels = figure.subplots(1, len(PHASES), sharey=True)
    for panel, phase in zip(panels, PHASES, strict=True):
        for number, (name, values) in enumerate(VARIED.items()):
            relative = np.array(values) / getattr(BASE, name)
            times = medians[name][phase]
            label = name.replace("_", " ")
            panel.plot(relative, times, marker="o", markersize=4, color=COLORS[number], label=label)
        panel.set(xscale="log", yscale="log", title=phase, xlabel="size, as a multiple of shape (a)'s")
        panel.set_xticks([0.5, 1, 2, 4, 8], ["½", "1", "2", "4", "8"])
        panel.yaxis.set_major_locator(LogLocator(2))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.minorticks_off()
    panels[0].set_ylabel("seconds")
    add_legend(panels[1])
    save_figure(figure, Path(path))


def main(_) -> None:
    """Measures, then writes the table and the picture."""
    page = flags.FLAGS.page
    figure = flags.FLAGS.figure
    rounds = flags.FLAGS.repeats
    if rounds == 0:
        draw(medians_in(Path(page).read_text(encoding="utf-8")), figure)
        return
    where = machine()
    rows = rows_of(measure(rounds))
    about = (
        f"Shape (a) with one thing varied; medians of {rounds} rounds, slopes with their range over rounds;"
        f" {where['cpu']}, {where['cores']} cores, {where['date'][:10]}."
    )
    show(page, "slopes", about, rows)
    if figure:
        draw(medians_in("\n".join(table(rows))), figure)


if __name__ == "__main__":
    define_flags()
    app.run(main)
