"""A supervised stage for a Hugging Face model, then training with a reward model, on a tiny model of random weights.

    python -m experiments.day.demonstrations --output runs/demonstrations

It writes a model folder with a chat template, chats that show sums, and a classifier with one label. The first run
learns only from the chats (`training.steps: 0`) and is exported. The second run trains the exported model with the
classifier as the reward. The classifier's weights are random, so only the rise of its score means something.
"""

import itertools
import json
from pathlib import Path

import jax
import numpy as np
from absl import app, flags
from transformers import PreTrainedTokenizerBase

from recjax.config import Config, make_config
from recjax.export import export
from recjax.hub.export import export_model, write_base, write_tensors
from recjax.hub.tokenizers import character_tokenizer
from recjax.hub.weights import load_pretrained, tensor_names
from recjax.logs.metrics import read_metrics
from recjax.models.decoder import init_params
from recjax.models.decoder_config import DecoderConfig
from recjax.models.trainable import flatten
from recjax.runs.start import train

FLAGS = flags.FLAGS
TEMPLATE = """{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}{%
if add_generation_prompt %}a:{% endif %}"""


def write_model(folder: Path) -> PreTrainedTokenizerBase:
    """Writes a decoder of random weights with a chat template; returns its tokenizer."""
    tokenizer = character_tokenizer("0123456789+:aus")
    tokenizer.chat_template = TEMPLATE
    shape = DecoderConfig(len(tokenizer), 64, 128, 2, 4, 4, 16)
    (folder / "base").mkdir(parents=True)
    write_base(folder / "base", shape, tokenizer, (0,))
    export_model(folder / "model", shape, jax.device_get(init_params(shape, jax.random.key(0))), folder / "base")
    return tokenizer


def write_classifier(folder: Path, model: Path) -> None:
    """Writes a sequence classifier with the model's weights and a random score head."""
    config, params = load_pretrained(model)
    folder.mkdir(exist_ok=True)
    tensors = {"score.weight": np.random.default_rng(1).normal(size=(1, config.hidden_size)).astype(np.float32)}
    leaves = flatten(jax.device_get(params))
    for path, names in tensor_names(config).items():
        values = leaves[path] if len(names) > 1 else leaves[path][None]
        values = values.swapaxes(-1, -2) if path.endswith("/kernel") else values
        tensors |= {name: np.ascontiguousarray(value) for name, value in zip(names, values, strict=True)}
    write_tensors(folder / "model.safetensors", tensors)
    fields = json.loads((model / "config.json").read_text(encoding="utf-8"))
    fields |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "score"}}
    (folder / "config.json").write_text(json.dumps(fields, indent=2), encoding="utf-8")


def write_rows(path: Path, rows: list[dict]) -> None:
    """Writes JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def config_of(folder: Path, name: str, model: Path, **blocks: dict) -> Config:
    """The config of a run in `folder`."""
    values = {
        "output": str(folder / name),
        "model": {"path": str(model)},
        "task": {"file": {"train": str(folder / "problems.jsonl")}, "reward": f"model:{folder / 'classifier'}"},
        "rollout": {"prompts_per_step": 8, "group_size": 8, "max_completion_tokens": 4},
        "optimizer": {"learning_rate": 3e-3},
        "evaluation": {"every": 0, "problems": 24, "samples": 4},
    }
    return make_config(values | blocks)


def show(folder: Path, shown_steps: int, steps: int) -> tuple[list[float], list[float]]:
    """Makes the folder and trains twice; returns held-out losses of the warm start and scores of the training."""
    tokenizer = write_model(folder)
    write_classifier(folder / "classifier", folder / "model")
    tokenizer.save_pretrained(folder / "classifier")
    problems, chats = [], []
    for first, second in itertools.product(range(1, 16), repeat=2):
        prompt, answer = [{"role": "user", "content": f"{first}+{second}"}], str(first + second)
        problems.append({"prompt": prompt, "answer": answer})
        chats.append({"messages": [*prompt, {"role": "assistant", "content": answer}]})
    write_rows(folder / "problems.jsonl", problems)
    write_rows(folder / "chats.jsonl", chats)

    shown = {"demonstrations": str(folder / "chats.jsonl"), "steps": shown_steps, "batch_size": 64}
    shown |= {"learning_rate": 3e-3, "every": max(1, shown_steps // 4)}
    train(config_of(folder, "supervised", folder / "model", warm_start=shown, training={"steps": 0}))
    export(str(folder / "supervised"), None, str(folder / "tuned"), None, "float32")
    train(config_of(folder, "trained", folder / "tuned", training={"steps": steps, "checkpoint_every": steps}))

    def values(run: str, name: str) -> list[float]:
        return [row[name] for row in read_metrics(folder / run / "metrics.jsonl") if name in row]

    return values("supervised/warm_start", "held_out_loss"), values("trained", "evaluation/reward")


def main(argv: list[str]) -> None:
    """Prints the results of both runs."""
    losses, scores = show(Path(FLAGS.output), FLAGS.shown_steps, FLAGS.steps)
    print(f"held-out loss, nats per token: {losses[0]:.3f} before the warm start, {losses[-1]:.3f} after it")
    print(f"mean score of the classifier: {scores[0]:.3f} before training, {scores[-1]:.3f} after it")


if __name__ == "__main__":
    flags.DEFINE_string("output", "runs/demonstrations", "New folder for models, data and runs.")
    flags.DEFINE_integer("shown_steps", 300, "Optimizer steps on the chats.", lower_bound=1)
    flags.DEFINE_integer("steps", 60, "Optimizer steps with the reward model.", lower_bound=1)
    app.run(main)
