"""Writes the README.md of an exported model: base model, task, algorithm, settings and accuracy."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from recjax.config import Config
from recjax.config.fields import value_of

_SETTINGS = (
    "algorithm.preset",
    "optimizer.learning_rate",
    "regime.sync_interval",
    "regime.sync_offset",
    "regime.offline",
    "rollout.max_completion_tokens",
    "rollout.temperature",
    "model.lora",
    "seed",
)
_PAPER = """\
```bibtex
@inproceedings{yao2026grouprelative,
  title={Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm: Demystifying Some Myths About GRPO and Its
    Friends},
  author={Yao, Chaorui and Chen, Yanxi and Sun, Yuchang and Chen, Yushuo and Zhang, Wenhao and Pan, Xuchen and Li,
    Yaliang and Ding, Bolin},
  booktitle={International Conference on Learning Representations},
  year={2026},
  note={arXiv:2509.24203v2}
}
```"""


def model_card(
    name: str,
    config: Config,
    step: int,
    summary: dict[str, Any],
    made_with: dict[str, Any],
    base: Path,
    figure: str,
    adapter_note: str | None = None,
) -> str:
    """The text of the card, which starts with its metadata.

    Args:
        config: the run's config.
        step: the checkpoint's step.
        summary: the run's summary, or {} if the run is unfinished.
        made_with: newest entry in environment.json, or {}.
        base: the base model's folder, whose README.md may name the license in its metadata.
        figure: name of the training figure in the folder, or "".
        adapter_note: note on the use of a folder with only adapters, or ""; None: the folder has the complete model.
    """
    path = config.model.path
    try:
        data: Any = ModelCard.load(base / "README.md", ignore_metadata_errors=True).data
        base_license = data.license
    except (OSError, ValueError):
        base_license = None
    data = ModelCardData(
        library_name="transformers" if adapter_note is None else "peft",
        base_model=path if path and not Path(path).exists() else None,
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "recjax", config.algorithm.preset],
        license=base_license,
    )
    rollout = config.rollout
    policy = path or "A decoder made from scratch"
    paragraphs = [
        f"# {name}",
        f"{policy}, trained by {config.algorithm.preset} on the task `{config.task.chosen()}`:"
        f" {step} optimizer steps of {rollout.prompts_per_step} prompts × {rollout.group_size} completions.",
    ]
    before = summary.get("accuracy_before")
    after = summary.get("accuracy_after")
    if before is not None and after is not None:
        paragraphs.append(f"Held-out sampled accuracy: {before:.3f} → {after:.3f}.")
    if figure:
        paragraphs.append(f"![Training]({figure})")
    table = ["| setting | value |", "|---|---|"]
    table += [f"| {key} | `{value_of(config, key)}` |" for key in _SETTINGS]
    paragraphs.append("\n".join(table))
    if adapter_note:
        paragraphs.append(adapter_note.strip())
    version = f"recjax {made_with.get('recjax', '')}".strip()
    if made_with.get("commit"):
        version += f", commit {made_with['commit']}"
    paragraphs.append(
        f"Made with {version}, after [arXiv 2509.24203](https://arxiv.org/abs/2509.24203). Rewards were"
        f" `{config.task.reward_name()}`. The model was not tested on other tasks."
    )
    if path and data.license:
        paragraphs.append("The license is the base model's.")
    elif path:
        paragraphs.append("The license is the base model's, which is not in its folder.")
    paragraphs.append(_PAPER)
    text = "\n\n".join(paragraphs)
    return f"---\n{data.to_yaml()}\n---\n\n{text}\n"
