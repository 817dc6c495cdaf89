"""Compares the log-probs of the sampler with those of the update for one model; writes a page and a JSON file.

    python -m recjax.numerics --config FILE [checkpoint=…] [key=value …]

The config has the model, the task, the sampling distribution and the mesh, as for training; `checkpoint` is that of
recjax.evaluate. The engine samples completions of four prompts, and the update scores them with the same weights: in
each layout, in float32 and bfloat16, under cuts with recorded sets, with adapters, as a second turn with and without
cached keys and values, and on one device of a mesh. The command writes numerics.html and numerics.json to the folder
`output`. It exits with status 1 if a case fails its gate.
"""

import base64
import html
import io
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Float, Int
from rich.table import Table

from recjax import hosts
from recjax.cache import keep_compiled_programs
from recjax.config import Config, LoraConfig, MeshConfig, load_config
from recjax.console import command, define_process_flags, plain_console, start
from recjax.evaluate import split_arguments
from recjax.experience.batch import Shape, pad
from recjax.experience.group import Completion, Group, Row
from recjax.experience.layout import Layout, packed_layout, score
from recjax.files import json_text, write_whole, writing
from recjax.hub.policy import Policy
from recjax.models.placement import params_on_host, put_params
from recjax.models.sampling import Sampling
from recjax.models.trainable import flatten, in_compute_dtype, unflatten, with_adapters
from recjax.models.unrolling import unrolled_for_training
from recjax.plots.style import COLORS, GREY, finish, new_figure
from recjax.rollout.collecting import row_keys, sample_groups
from recjax.rollout.engine import Engine
from recjax.rollout.requests import Request
from recjax.tasks.loading import load_task
from recjax.tasks.prompts import Prompts, encode_problems
from recjax.training.mesh import make_mesh
from recjax.training.trained import open_policy

FLAGS = flags.FLAGS
PROMPTS, GROUP, MOST_TOKENS = 4, 4, 128  # prompts, completions of each, and most tokens of a completion
FIRST_DEPTH = 32  # tokens of context of the first range of depths; each further range is twice as long


class Gate(NamedTuple):
    """Limits of a case: KL in nats per token, largest difference of a log-prob, distance of the mean ratio from 1."""

    kl: float
    largest: float
    ratio: float


# bfloat16 has 8 bits of precision, so scores near 16 differ by up to 0.06. float32 has room for TensorFloat32 products.
GATES = {"float32": Gate(1e-5, 0.02, 1e-4), "bfloat16": Gate(2e-3, 1.0, 2e-2)}


def difference(update: Any, sampler: Any) -> dict[str, float]:
    """The distance of the update's log-probs from the sampler's.

    Returns:
        `kl`: mean of ratio − 1 − log ratio, an estimate of KL(sampler ‖ update) that is never negative; `largest` and
        `mean` absolute difference; `mean_ratio`: 1 if both are the same distribution.
    """
    apart = np.asarray(update, np.float64) - np.asarray(sampler, np.float64)
    ratio = np.exp(apart)
    found = {"kl": (ratio - 1 - apart).mean(), "largest": np.abs(apart).max()}
    return {
        name: float(one) for name, one in (found | {"mean": np.abs(apart).mean(), "mean_ratio": ratio.mean()}).items()
    }


def by_depth(
    update: Float[np.ndarray, " tokens"], sampler: Float[np.ndarray, " tokens"], depths: Int[np.ndarray, " tokens"]
) -> list[dict[str, float]]:
    """`difference` for ranges of depth, the number of tokens before a token."""
    ranges, low = [], 0
    while (depths >= low).any():
        high = max(FIRST_DEPTH, 2 * low)
        if (here := (depths >= low) & (depths < high)).any():
            ranges.append(
                {"from": low, "to": high, "tokens": int(here.sum())} | difference(update[here], sampler[here])
            )
        low = high
    return ranges


class _Report:
    """Samples and scores with one policy, and collects the cases."""

    def __init__(self, config: Config, policy: Policy, params: dict, prompts: Prompts):
        self.config, self.policy, self.params, self.prompts = config, policy, params, prompts
        self.keys = row_keys(jax.random.key(config.seed), len(prompts.texts) * GROUP)
        self.tokens = min(config.rollout.max_completion_tokens, MOST_TOKENS)
        self.cases: list[dict[str, Any]] = []

    def sample(self, policy: Policy, params: dict, sampling: Sampling) -> list[Group]:
        params = in_compute_dtype(policy.decoder, params, copy=False)
        arguments = policy, params, self.prompts, self.keys, GROUP, self.tokens, sampling
        return sample_groups(*arguments, name="numerics", source="policy", version=0)

    def second_turns(self, sampling: Sampling, is_cached: bool) -> list[Group]:
        """A second turn of each completion, whose prompt repeats the first one after the first turn."""
        policy = self.policy

        def engine() -> Engine:
            made = Engine(policy.decoder, policy.stop_ids, slots=policy.slots, prefix_time=self.prompts.tokens.shape[1])
            made.replace_weights(in_compute_dtype(policy.decoder, self.params, copy=False), 0)
            return made

        first = [tokens[real] for tokens, real in zip(self.prompts.tokens, self.prompts.mask, strict=True)]
        sampler, prefixes = engine(), [prefix for prefix in first for _ in range(GROUP)]
        for _ in range(2):
            asked = zip(prefixes, self.keys, strict=True)
            tickets = sampler.admit([Request(prefix, key, self.tokens // 2 or 1, sampling) for prefix, key in asked])
            done = sampler.drain()
            turns = [(prefix, done[ticket]) for prefix, ticket in zip(prefixes, tickets, strict=True)]
            prefixes = [np.concatenate([prefix, one.tokens, prefix]) for prefix, one in turns]
            sampler = sampler if is_cached else engine()
        return [
            Group(str(number), prefix, (_completion(Row(prefix, *one.row_columns), sampling),), "")
            for number, (prefix, one) in enumerate(turns)
        ]

    def add(
        self,
        name: str,
        groups: list[Group],
        sampling: Sampling,
        layout: str = "shared",
        policy: Policy | None = None,
        params: dict | None = None,
        is_gated: bool = True,
    ) -> None:
        """Scores groups and adds a case; a name with the case's difference from the first."""
        policy, params = policy or self.policy, self.params if params is None else params
        if layout == "padded":
            groups = [group._replace(completions=(one,)) for group in groups for one in group.completions]
        rows = [one.rows[0] for group in groups for one in group.completions]
        longest = max(len(row.prompt_tokens) for row in rows), max(len(row.tokens) for row in rows)
        batch = pad(groups, Shape(len(groups), len(groups[0].completions), *longest))
        scorer = policy._replace(decoder=unrolled_for_training(policy.decoder))
        made = packed_layout(scorer.decoder, batch) if layout == "packed" else Layout()
        scored = score(scorer, params, batch, sampling, self.config.model.logprob_chunk, made)
        update = np.concatenate([logprobs[: len(row.tokens)] for logprobs, row in zip(scored, rows, strict=True)])
        sampler = np.concatenate([row.behavior_logprobs for row in rows])
        depths = np.concatenate([len(row.prompt_tokens) + np.arange(len(row.tokens)) for row in rows])
        dtype, found = jnp.dtype(policy.decoder.dtype).name, difference(update, sampler)
        gate = GATES[dtype]
        passes = (
            found["kl"] <= gate.kl and found["largest"] <= gate.largest and abs(found["mean_ratio"] - 1) <= gate.ratio
        )
        case = {"case": name, "dtype": dtype, "layout": layout, "sampling": list(sampling), "tokens": len(update)}
        ranges = {"by_depth": by_depth(update, sampler, depths)}
        self.cases.append(case | found | {"passes": passes if is_gated else None} | ranges)


def _completion(row: Row, sampling: Sampling) -> Completion:
    return Completion("", "policy", "", (row,), sampling, 0, True)


def measure(config: Config, checkpoint: str | None) -> dict[str, Any]:
    """Samples and scores in all cases; returns the content of numerics.json.

    Args:
        checkpoint: see `recjax.training.trained.open_policy`.
    Raises:
        ValueError: the model or the task cannot be used.
    """
    opened = open_policy(checkpoint, config)
    policy, problems = opened.policy._replace(stop_ids=()), load_task(config, "held_out").evaluation[:PROMPTS]
    prompts = encode_problems(problems, policy.tokenizer, None, policy.vocabulary)
    report, plain = _Report(config, policy, opened.params, prompts), Sampling(config.rollout.temperature)
    groups = report.sample(policy, opened.params, plain)
    for layout in ("shared", "padded", "packed"):
        report.add(f"{layout} rows", groups, plain, layout)
    own = jnp.dtype(policy.decoder.dtype)
    other = policy._replace(decoder=policy.decoder.clone(dtype=jnp.dtype(*GATES.keys() - {own.name})))
    report.add("other dtype", report.sample(other, opened.params, plain), plain, policy=other)
    cut = config.rollout.sampling() if config.rollout.sampling().has_cuts else plain._replace(top_p=0.8)
    of_sets = policy._replace(kept_ids=policy.kept_ids or policy.vocabulary)
    groups = report.sample(of_sets, opened.params, cut)
    report.add("cuts, recorded sets", groups, cut)
    report.add("cuts, recorded sets", groups, cut, "packed")
    groups = [group._replace(completions=tuple(map(_without_sets, group.completions))) for group in groups]
    report.add("cuts, sets of the update's policy", groups, cut, is_gated=False)
    report.add("cuts, no sets: all tokens", groups, plain, is_gated=False)
    with_lora = with_adapters(policy.decoder, opened.params, config.model.lora or LoraConfig(), jax.random.key(0))
    adapted, params = policy._replace(decoder=with_lora[0]), flatten(with_lora[1])
    for number, (path, leaf) in enumerate(params.items()):
        if path.endswith("_lora_b/kernel"):  # new adapters are 0 and change nothing
            params[path] = 0.02 * jax.random.normal(jax.random.key(number), leaf.shape, leaf.dtype)
    params = unflatten(params)
    report.add("adapters", report.sample(adapted, params, plain), plain, policy=adapted, params=params)
    for is_cached, name in ((True, "second turn, cached"), (False, "second turn, not cached")):
        report.add(name, report.second_turns(plain, is_cached), plain, "padded")
    mesh = jax.sharding.get_mesh()
    if mesh.size > 1 and jax.process_count() == 1:
        groups, held = report.sample(policy, opened.params, plain), params_on_host(opened.params)
        with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
            report.add("sampled on the mesh, scored on one device", groups, plain, params=put_params(held))
    return {
        "model": opened.name,
        "device": jax.devices()[0].device_kind,
        "mesh": dict(mesh.shape),
        "gates": {name: gate._asdict() for name, gate in GATES.items()},
        "passes": all(case["passes"] is not False for case in report.cases),
        "cases": report.cases,
    }


def _without_sets(completion: Completion) -> Completion:
    return completion._replace(rows=tuple(row._replace(recorded={}) for row in completion.rows))


_VERDICTS = {True: "passes", False: "FAILS", None: "not gated"}


def table_of(report: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head and the rows of the table of cases."""
    head = "case", "layout", "dtype", "tokens", "KL (nats)", "largest |Δ|", "mean ratio", "gate"
    rows = [
        (
            *(str(case[name]) for name in ("case", "layout", "dtype", "tokens")),
            f"{case['kl']:.1e}",
            f"{case['largest']:.1e}",
            f"{case['mean_ratio']:.5f}",
            _VERDICTS[case["passes"]],
        )
        for case in report["cases"]
    ]
    return head, rows


def page_of(report: dict[str, Any]) -> str:
    """The page: the table, and the differences over the depth of the context, in one file without links."""
    figure = new_figure(11, 4.2, "")
    panels = zip(
        figure.subplots(1, 2), ("kl", "largest"), ("KL (nats per token)", "largest difference (nats)"), strict=True
    )
    for axes, name, label in panels:
        for number, case in enumerate(report["cases"]):
            middle = [(depth["from"] + depth["to"]) / 2 for depth in case["by_depth"]]
            color, dashes = (GREY, ":") if case["passes"] is None else (COLORS[number % len(COLORS)], "-")
            legend = f"{case['case']}, {case['layout']}, {case['dtype']}"
            values = [max(depth[name], 1e-16) for depth in case["by_depth"]]
            axes.plot(middle, values, marker="o", ms=3 + number % 3, color=color, ls=dashes, label=legend)
        axes.set(xlabel="tokens before the token", ylabel=label, xscale="log", yscale="log")
    figure.legend(*axes.get_legend_handles_labels(), fontsize="x-small", loc="outside right upper")
    picture = io.BytesIO()
    finish(figure).savefig(picture, format="png", dpi=130)
    image = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    head, rows = table_of(report)
    cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    verdict = "All gates pass." if report["passes"] else "A gate fails."
    about = f"{report['model']} on {report['device']}, mesh {report['mesh']}"
    return (
        "<!doctype html><meta charset='utf-8'><title>numerics</title><style>body{font:15px sans-serif;margin:2em}"
        "td,th{padding:.2em .8em;text-align:left;border-bottom:1px solid #ddd}img{max-width:100%}</style>"
        f"<h1>Log-probs of the sampler and of the update</h1><p>{html.escape(about)}. {verdict}</p><table><tr>"
        + "".join(f"<th>{html.escape(name)}</th>" for name in head)
        + "".join(f"<tr>{row}" for row in cells)
        + f"</table><img alt='differences over depth' src='{image}'>"
    )


@command
def main(argv: list[str]) -> None:
    """Measures, writes both files and prints the table."""
    keep_compiled_programs()
    overrides = [text for text in argv[1:] if not text.startswith("checkpoint=")]
    checkpoint, _ = split_arguments([text for text in argv[1:] if text.startswith("checkpoint=")])
    config = load_config(FLAGS.config, overrides)
    with hosts.together(FLAGS.coordinator, FLAGS.processes, FLAGS.process_id), jax.set_mesh(make_mesh(config.mesh)):
        report = measure(config, checkpoint)
    if hosts.is_first():
        folder = Path(config.output)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "numerics.json", json_text(report, indent=2) + "\n")
        write_whole(folder / "numerics.html", page_of(report))
        head, rows = table_of(report)
        table = Table(*head, title=f"{report['model']}: sampler and update")
        for row in rows:
            table.add_row(*row)
        plain_console().print(table)
        print(f"page: {folder / 'numerics.html'}")
    if not report["passes"]:
        sys.exit(1)


if __name__ == "__main__":
    # Not at module level: absl flags are global, and importing this module must not define them.
    flags.DEFINE_string("config", None, "YAML file of a training run, for its model, task and settings.", required=True)
    define_process_flags()
    start(main)
