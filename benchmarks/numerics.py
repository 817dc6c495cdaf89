"""Compares the log-probs of the sampler with those of the update for one model; writes a page and a JSON file.

    python -m benchmarks.numerics --config FILE [key=value …]

The config has the model (`model.run` for that of a run), task, sampling distribution and mesh, as for training.
The engine samples completions of four prompts, and the update's forward pass scores them with the same weights: in each
layout, in float32 and bfloat16, under cuts with recorded sets, with adapters, as a second turn with and without cached
keys and values, and on one device of a mesh. With `rollout.engine`, it also compares that engine's log-probs, which
have no gate; --engine_only skips all other cases. The command writes numerics.html and
numerics.json to the folder `output`, and exits with status 1 if a case fails its gate.
"""

import base64
import html
import io
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from absl import flags

from recjax.config import Config, LoraConfig, MeshConfig, load_config
from recjax.errors import UserError
from recjax.experience.batch import Shape, pad
from recjax.experience.group import Completion, Group, Row
from recjax.experience.layout import Layout, packed_layout, score
from recjax.hub.policy import Policy
from recjax.models.placement import params_on_host, put_params
from recjax.models.sampling import Sampling, TokenRecord
from recjax.models.trainable import flatten, in_compute_dtype, unflatten, with_adapters
from recjax.models.unrolling import unrolled_for_training
from recjax.plots.style import COLORS, finish, new_figure
from recjax.remote.client import RemoteEngine
from recjax.rollout.collecting import row_keys, sample_groups
from recjax.rollout.engine import Engine
from recjax.rollout.requests import Request
from recjax.runs.policies import open_policy
from recjax.runtime import hosts
from recjax.runtime.cache import keep_compiled_programs
from recjax.runtime.console import command, define_process_flags, start
from recjax.runtime.files import json_text, write_whole, writing
from recjax.tasks.loading import load_task
from recjax.tasks.prompts import Prompts, encode_problems
from recjax.training.mesh import make_mesh

FLAGS = flags.FLAGS
PROMPTS, GROUP, MOST_TOKENS = 4, 4, 128  # prompts, completions of each, and most tokens of a completion
FIRST_DEPTH = 32  # tokens of context of the first range of depths; each further range is twice as long


# Limits by dtype: KL and largest difference in nats, and the mean ratio's distance from 1. bfloat16 rounds scores near
# 16 by up to 0.06; the limits of float32 allow products in TensorFloat32.
GATES = {
    "float32": {"kl": 1e-5, "largest": 0.02, "mean_ratio": 1e-4},
    "bfloat16": {"kl": 2e-3, "largest": 1.0, "mean_ratio": 2e-2},
}


def logprob_difference(update: Any, sampler: Any) -> dict[str, float]:
    """The distance of the update's log-probs from the sampler's.

    Returns:
        `kl`: mean of ratio − 1 − log ratio, an estimate of KL(sampler ‖ update) that is never negative; `largest` and
        `mean` absolute difference; `mean_ratio`: 1 if both are the same distribution.
    """
    apart = np.asarray(update, np.float64) - np.asarray(sampler, np.float64)
    sizes, ratio = np.abs(apart), np.exp(apart)
    found = {"kl": (ratio - 1 - apart).mean(), "largest": sizes.max(), "mean": sizes.mean(), "mean_ratio": ratio.mean()}
    return {name: float(value) for name, value in found.items()}


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
        policy, params = self.policy, in_compute_dtype(self.policy.decoder, self.params, copy=False)
        first = [tokens[real] for tokens, real in zip(self.prompts.tokens, self.prompts.mask, strict=True)]
        engine, prefixes = None, [prefix for prefix in first for _ in range(GROUP)]
        for _ in range(2):
            if engine is None or not is_cached:
                sizes = {"slots": policy.slots, "prefix_time": self.prompts.tokens.shape[1]}
                engine = Engine(policy.decoder, policy.stop_ids, **sizes)
                engine.replace_weights(params, 0)
            asked = zip(prefixes, self.keys, strict=True)
            tickets = engine.admit([Request(prefix, key, -(-self.tokens // 2), sampling) for prefix, key in asked])
            done = engine.drain()
            rows = [Row(prefix, *done[ticket].row_columns) for prefix, ticket in zip(prefixes, tickets, strict=True)]
            prefixes = [np.concatenate([row.prompt_tokens, row.tokens, row.prompt_tokens]) for row in rows]
        made = [Completion(str(place), "policy", "", (row,), sampling, 0, True) for place, row in enumerate(rows)]
        return [Group(one.id, one.rows[0].prompt_tokens, (one,), "") for one in made]

    def add(
        self,
        name: str,
        groups: list[Group],
        sampling: Sampling,
        layout: str = "shared",
        policy: Policy | None = None,
        params: dict | None = None,
        has_gate: bool = True,
        **changes: Any,
    ) -> None:
        """Scores groups and adds a case, with `changes` of the batch."""
        policy, params = policy or self.policy, self.params if params is None else params
        if layout == "padded":
            groups = [group._replace(completions=(one,)) for group in groups for one in group.completions]
        rows = [one.rows[0] for group in groups for one in group.completions]
        longest = max(len(row.prompt_tokens) for row in rows), max(len(row.tokens) for row in rows)
        batch = pad(groups, Shape(len(groups), len(groups[0].completions), *longest))._replace(**changes)
        scorer = unrolled_for_training(policy.decoder)
        laid_out = packed_layout(scorer, batch) if layout == "packed" else Layout()
        scored = score(scorer, params, batch, sampling, self.config.model.logprob_chunk, laid_out)
        update, sampler = scored[batch.completion_mask], batch.behavior_logprobs[batch.completion_mask]
        depths = np.concatenate([len(row.prompt_tokens) + np.arange(len(row.tokens)) for row in rows])
        level = np.ceil(np.log2(np.maximum(depths + 1, FIRST_DEPTH) / FIRST_DEPTH)).astype(int)
        dtype, found = jnp.dtype(policy.decoder.dtype).name, logprob_difference(update, sampler)
        is_within = [abs(found[key] - (key == "mean_ratio")) <= most for key, most in GATES[dtype].items()]
        self.cases.append(
            {"case": name, "layout": layout, "dtype": dtype, "sampling": list(sampling), "tokens": len(update)}
            | found
            | {"passes": all(is_within) if has_gate else None}
            | {
                "by_depth": [
                    {"below": FIRST_DEPTH * 2 ** int(n), "tokens": int((level == n).sum())}
                    | logprob_difference(update[level == n], sampler[level == n])
                    for n in np.unique(level)
                ]
            }
        )

    def add_own(self, plain: Sampling) -> None:
        """Adds the cases of recjax's own engine."""
        config, policy = self.config, self.policy
        sampled = self.sample(policy, self.params, plain)
        for layout in ("shared", "padded", "packed"):
            self.add("as configured", sampled, plain, layout)
        (dtype,) = GATES.keys() - {jnp.dtype(policy.decoder.dtype).name}
        other = policy._replace(decoder=policy.decoder.clone(dtype=jnp.dtype(dtype)))
        self.add("other dtype", self.sample(other, self.params, plain), plain, policy=other)
        cut = config.rollout.sampling() if config.rollout.sampling().has_cuts else plain._replace(top_p=0.8)
        all_sets = TokenRecord(policy.recording.kept_ids or policy.vocabulary)
        groups = self.sample(policy._replace(recording=all_sets), self.params, cut)
        for layout in ("shared", "packed"):
            self.add("cuts, recorded sets", groups, cut, layout)
        self.add("cuts, sets of the update's policy", groups, cut, has_gate=False, recorded={})
        self.add("cuts, all tokens", groups, plain, has_gate=False, recorded={})
        decoder, params = with_adapters(
            policy.decoder, self.params, config.model.lora or LoraConfig(), jax.random.key(config.seed)
        )
        leaves, generator = flatten(params), np.random.default_rng(config.seed)
        for path, leaf in leaves.items():
            if path.endswith("_lora_b/kernel"):  # new adapters are 0 and change nothing
                leaves[path] = jnp.asarray(0.02 * generator.normal(size=leaf.shape), leaf.dtype, device=leaf.sharding)
        adapted, params = policy._replace(decoder=decoder), unflatten(leaves)
        self.add("adapters", self.sample(adapted, params, plain), plain, policy=adapted, params=params)
        for is_cached, name in ((True, "second turn, cached"), (False, "second turn, not cached")):
            self.add(name, self.second_turns(plain, is_cached), plain, "padded")
        mesh = jax.sharding.get_mesh()
        if mesh.size > 1 and jax.process_count() == 1:
            held = params_on_host(self.params)
            with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
                self.add("scored on one device", sampled, plain, params=put_params(held))


def measure(config: Config, engine_only: bool = False) -> dict[str, Any]:
    """Samples and scores in all cases; returns the content of numerics.json.

    Args:
        engine_only: True to measure only the log-probs of `rollout.engine`.
    Raises:
        ValueError: the model, the task or the engine cannot be used.
    """
    if engine_only and not config.rollout.engine:
        raise UserError("", "--engine_only: the config has no rollout.engine; set it, or remove the flag")
    opened = open_policy(None, config)
    policy, problems = opened.policy._replace(stop_ids=()), load_task(config, "held_out").evaluation[:PROMPTS]
    prompts = encode_problems(problems, policy.tokenizer, None, policy.vocabulary)
    report = _Report(config, policy, opened.params, prompts)
    if config.rollout.engine:
        with RemoteEngine.of_config(config, opened.policy) as engine:
            groups = engine.sample_tokens(prompts, GROUP, config.seed, name="numerics", source="engine", version=0)
        report.add(f"rollout.engine, {engine.api}", groups, config.rollout.sampling(), has_gate=False)
    if not engine_only:
        report.add_own(Sampling(config.rollout.temperature))
    return {
        "model": opened.name,
        "device": jax.devices()[0].device_kind,
        "mesh": dict(jax.sharding.get_mesh().shape),
        "gates": GATES,
        "passes": all(case["passes"] is not False for case in report.cases),
        "cases": report.cases,
    }


def table_of(report: dict[str, Any]) -> pd.DataFrame:
    """The cases as a table for readers."""
    columns = ["case", "layout", "dtype", "tokens", "kl", "largest", "mean_ratio", "passes"]
    table = pd.DataFrame(report["cases"])[columns].rename(columns={"passes": "gate"})
    table["gate"] = table["gate"].map({True: "passes", False: "FAILS", None: "not gated"})
    formats = {"kl": "{:.1e}", "largest": "{:.1e}", "mean_ratio": "{:.5f}"}
    return table.assign(**{name: table[name].map(form.format) for name, form in formats.items()})


def page_of(report: dict[str, Any]) -> str:
    """The page: the table, and the differences over the depth of the context, in one file without links."""
    figure, picture = new_figure(12, 4.2, ""), io.BytesIO()
    panels = {"kl": "KL (nats per token)", "largest": "largest difference (nats)"}
    for axes, (name, label) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for number, case in enumerate(report["cases"]):
            values = [(depth["below"], max(depth[name], 1e-16)) for depth in case["by_depth"]]
            dashes = ":" if case["passes"] is None else ("-", "--")[number // len(COLORS)]
            legend = f"{case['case']}, {case['layout']}, {case['dtype']}"
            axes.plot(*zip(*values, strict=True), dashes, marker="o", color=COLORS[number % len(COLORS)], label=legend)
        axes.set(xlabel="tokens before the token, at most", ylabel=label, yscale="log")
    figure.legend(*axes.get_legend_handles_labels(), fontsize="x-small", loc="outside right upper")
    finish(figure).savefig(picture, format="png", dpi=130)
    about = html.escape(f"{report['model']} on {report['device']}, mesh {report['mesh']}")
    return (
        "<!doctype html><meta charset='utf-8'><title>numerics</title><style>body{font:15px sans-serif;margin:2em}"
        "td,th{padding:.2em .8em;text-align:left}img{max-width:100%}</style><h1>Log-probs of sampler and update</h1>"
        f"<p>{about}. {'All gates pass.' if report['passes'] else 'A gate fails.'}</p>"
        f"{table_of(report).to_html(index=False, border=0)}"
        f"<img alt='over depth' src='data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}'>"
    )


@command
def main(argv: list[str]) -> None:
    """Measures, writes both files and prints the table."""
    keep_compiled_programs()
    config = load_config(FLAGS.config, argv[1:])
    with hosts.connected(FLAGS.coordinator, FLAGS.processes, FLAGS.process_id), jax.set_mesh(make_mesh(config.mesh)):
        report = measure(config, FLAGS.engine_only)
    if hosts.is_first():
        folder = Path(config.output)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "numerics.json", json_text(report, indent=2) + "\n")
        write_whole(folder / "numerics.html", page_of(report))
        print(table_of(report).to_string(index=False))
        print(f"page: {folder / 'numerics.html'}")
    if not report["passes"]:
        sys.exit(1)


if __name__ == "__main__":
    flags.DEFINE_string("config", None, "YAML file of a training run, for its model, task and settings.", required=True)
    flags.DEFINE_bool("engine_only", False, "Measure only the log-probs of rollout.engine.")
    define_process_flags()
    start(main)
