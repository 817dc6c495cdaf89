"""Writes the README.md of an exported model: base model, task, algorithm, settings and accuracy."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from recjax.config import Config
from recjax.config.fields import value_of

_SETTINGS = (
    *("algorithm.preset", "optimizer.learning_rate", "regime.sync_interval", "regime.sync_offset", "regime.offline"),
    *("rollout.max_completion_tokens", "rollout.temperature", "model.lora", "seed"),
)
_PAPER = """\
```bibtex
@misc{arxiv250924203,
  title={Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm: Demystifying Some Myths About GRPO and Its
    Friends},
  author={Yao, Chaorui and Chen, Yanxi and Sun, Yuchang and Chen, Yushuo and Zhang, Wenhao and Pan, Xuchen and Li,
    Yaliang and Ding, Bolin},
  howpublished={arXiv:2509.24203},
  year={2025}
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
        config: config of the run.
        step: step of the checkpoint.
        summary: summary of the run, or {} if the run is unfinished.
        made_with: newest entry of environment.json, or {}.
        base: folder of the base model, whose README.md may name the license in the metadata.
        figure: name of the training figure in the folder, or "".
        adapter_note: note on the use of a folder with only adapters, or ""; None: a folder with the whole model.
    """
    task = config.task.chosen()
    rollout = config.rollout
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
    before, after = (summary.get(f"accuracy_{when}") for when in ("before", "after"))
    result = "" if before is None or after is None else f"Held-out sampled accuracy: {before:.3f} → {after:.3f}.\n"
    version = f"recjax {made_with.get('recjax', '')}".strip()
    commit = f", commit {made_with['commit']}" if made_with.get("commit") else ""
    settings = "".join(f"\n| {key} | `{value_of(config, key)}` |" for key in _SETTINGS)
    paragraphs = [
        f"# {name}",
        f"{path or 'A decoder made from scratch'}, trained by {config.algorithm.preset} on the task `{task}`:"
        f" {step} optimizer steps of {rollout.prompts_per_step} prompts × {rollout.group_size} completions.",
        result,
        f"![Training]({figure})" if figure else "",
        f"| setting | value |\n|---|---|{settings}",
        adapter_note,
        f"Made with {version}{commit}, after [arXiv 2509.24203](https://arxiv.org/abs/2509.24203). Rewards were"
        f" `{config.task.reward_name()}`. The model was not tested on other tasks.",
        f"The license is the base model's{'' if data.license else ', which is not in its folder'}." if path else "",
        _PAPER,
    ]
    return (
        f"---\n{data.to_yaml()}\n---\n\n"
        + "\n\n".join(paragraph.strip() for paragraph in paragraphs if paragraph)
        + "\n"
    )
