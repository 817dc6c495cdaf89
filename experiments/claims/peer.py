"""GRPO and REINFORCE through TRL's published loss, from the toy task's policy and with its batches.

    pip install -e . -r benchmarks/requirements/trl.txt    # in an environment of its own
    python -m experiments.claims.peer                      # writes experiments/claims/peer.parquet

`GRPOTrainer._compute_loss` and torch's AdamW train the weights; prompts, completions, rewards, advantages and
evaluations are those of programs.py, made with these weights and with the keys of the run beside it, which recjax
trains. REINFORCE is TRL's loss without old log-probs, whose ratio is then 1.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pandas as pd
import torch
from absl import app, flags
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

from experiments.claims.map import HERE
from experiments.claims.programs import Programs, Regime, Seed, seed_of
from recjax.analysis.sweeps import SweepRun, read_sweep
from recjax.config import Config
from recjax.errors import UserError
from recjax.experience.batch import Batch
from recjax.hub.export import export_model, write_base
from recjax.hub.policy import Policy
from recjax.hub.weights import read_params
from recjax.runtime.console import command, progress_bar

FLAGS = flags.FLAGS
TABLE = HERE / "peer.parquet"
ALGORITHMS, RATES, REGIME = ("grpo", "reinforce"), ("2e-4", "4e-4"), "interval_20"


def written(policy: Policy, params: dict, folder: Path) -> Path:
    """A folder that transformers loads, with these weights."""
    base = folder / "base"
    base.mkdir()
    write_base(base, policy.decoder.config, policy.tokenizer, policy.stop_ids)
    export_model(folder / "model", policy.decoder.config, params, base)
    return folder / "model"


def trainer_of(model: PreTrainedModel, model_folder: Path, config: Config, scratch: Path) -> GRPOTrainer:
    """TRL's trainer, of which the loss alone is used."""
    settings = GRPOConfig(
        output_dir=str(scratch),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=config.rollout.prompts_per_step * config.rollout.group_size,
        num_generations=config.rollout.group_size,
        max_completion_length=config.rollout.max_completion_tokens,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",  # the mean over the batch's tokens
        gradient_checkpointing=False,
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda prompts, **_: [0.0] * len(prompts),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["1"]}),
        processing_class=AutoTokenizer.from_pretrained(model_folder),
    )


def inputs_of(batch: Batch, algorithm: str, group_size: int) -> dict:
    """A batch as TRL's loss takes it."""
    rewards = np.asarray(batch.rewards, np.float64).reshape(-1, group_size)
    advantages = rewards - rewards.mean(1, keepdims=True)
    if algorithm == "grpo":
        advantages /= rewards.std(1, keepdims=True) + 1e-6
    mask = np.asarray(batch.completion_mask)
    inputs = {
        "prompt_ids": torch.tensor(np.repeat(batch.prompts, group_size, 0)).long(),
        "completion_ids": torch.tensor(np.asarray(batch.completions)).long(),
        "completion_mask": torch.tensor(mask).long(),
        "advantages": torch.tensor(advantages.reshape(-1), dtype=torch.float32),
        "num_items_in_batch": torch.tensor(mask.sum()),
    }
    inputs["prompt_mask"] = torch.ones_like(inputs["prompt_ids"])
    if algorithm == "grpo":
        inputs["old_per_token_logps"] = torch.tensor(np.asarray(batch.behavior_logprobs))
    return inputs


def learned_with_trl(program: Programs, run: SweepRun, seed: Seed, policy: Policy, folder: Path) -> Iterator[dict]:
    """What each evaluation finds, the first before training.

    Args:
        folder: for weights on their way from torch.
    """
    config = run.config
    rollout, own = config.rollout, config.optimizer
    model_folder = written(policy, seed.params, folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    trainer = trainer_of(model, model_folder, config, folder / "scratch")
    optimizer = torch.optim.AdamW(
        model.parameters(), own.learning_rate, (own.beta1, own.beta2), own.epsilon, own.weight_decay
    )
    sampler = seed.params

    def params() -> dict:
        model.save_pretrained(folder / "now")
        return read_params(folder / "now", policy.decoder.config)

    yield {"step": 0} | program.evaluated(seed, sampler, seed.evaluation_keys[0])
    for place in range(config.training.steps):
        if place and place % config.regime.sync_interval == 0:
            sampler = params()
        batch = program.batch(seed, sampler, seed.asked[place], seed.keys[place])
        trainer._compute_loss(model, inputs_of(batch, run.settings["algorithm"], rollout.group_size)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), own.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        number = place + 1
        if number % config.evaluation.every == 0:
            keys = seed.evaluation_keys[number // config.evaluation.every]
            yield {"step": number} | program.evaluated(seed, params(), keys)


def both(run: SweepRun) -> pd.DataFrame:
    """A run's evaluations with recjax's loss and with TRL's."""
    config = run.config
    seed, policy = seed_of(config)
    program = Programs(config, policy, 0)
    regime = Regime(jnp.int32(config.regime.sync_interval))
    own = program.run(seed, config.optimizer.learning_rate, regime)
    with tempfile.TemporaryDirectory() as folder:
        theirs = pd.DataFrame(learned_with_trl(program, run, seed, policy, Path(folder))).astype(float)
    tables = {"recjax": own, "trl": theirs}
    columns = ["step", "evaluation/accuracy", "evaluation/initial_kl"]
    return pd.concat([table[columns].assign(loss=name, **run.settings) for name, table in tables.items()])


@command
def main(argv: list[str]) -> None:
    """Trains every run twice and writes the table."""
    if argv[1:]:
        raise UserError("", f"{argv[1]!r} is not understood; see --help")
    torch.set_num_threads(1)  # the decoder is so small that threads wait for each other
    everything = read_sweep(HERE / "map.yaml", extra=[f"training.steps={FLAGS.steps}"])[1]
    runs = [
        run
        for run in everything
        if run.settings["algorithm"] in ALGORITHMS
        and run.settings["rate"] in RATES
        and (run.settings["regime"], run.settings["seed"]) == (REGIME, "0")
    ]
    tables = []
    with progress_bar("peer", len(runs), unit="run") as bar:
        for run in runs:
            tables.append(both(run))
            bar.update(1)
            curves = tables[-1].pivot(index="step", columns="loss", values="evaluation/accuracy")
            print(curves.round(3).to_string(), flush=True)
    pd.concat(tables, ignore_index=True).to_parquet(TABLE, index=False, compression="zstd")


if __name__ == "__main__":
    flags.DEFINE_integer("steps", 300, "Optimizer steps of a run.", lower_bound=25)
    app.run(main)
