"""Saves completions of training batches in the run folder, with rewards and per-token results of the update."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from recjax import hosts
from recjax.experience.group import Completion, Group
from recjax.files import json_text, write_whole, writing
from recjax.hub.tokenizers import token_texts
from recjax.models.placement import on_host
from recjax.tasks.problems import question_of
from recjax.training.run import Run
from recjax.training.update import Learned

logger = logging.getLogger(__name__)


def folder_of(output: Path) -> Path:
    """The folder of the saved completions: one file per step, one line per completion."""
    return output / "samples" / "training"


def keep(run: Run, step: int, groups: Sequence[Group], learned: Learned) -> None:
    """Saves the first groups of a batch if `samples.every` says so, up to the size limit of the config.

    Every process must call it.

    Args:
        groups: groups of the batch; each has `run.shape.group` consecutive rows, which begin with its completions.
        learned: per-token results of the update.
    """
    config, rows_per_group, tokenizer = run.config.samples, run.shape.group, run.policy.tokenizer
    if not config.every or (step > 1 and step % config.every):
        return
    learned = on_host(learned)
    if not hosts.is_first():
        return
    # The rows of a trajectory are not in the groups' order.
    learned = None if run.config.has_trajectories else learned
    folder = folder_of(Path(run.config.output))
    path = folder / f"{step:08d}.jsonl"
    held = sum(file.stat().st_size for file in folder.glob("*.jsonl") if file != path)
    if held >= config.megabytes * 2**20:
        logger.debug(
            "samples.megabytes = %g: limit reached; recjax saves no completions of step %d", config.megabytes, step
        )
        return
    rows = []
    for place, group in enumerate(groups[: config.groups]):
        for number, completion in enumerate(group.completions):
            row = _described(step, group, completion, tokenizer)
            if learned is not None:
                index, terms, length = place * rows_per_group + number, learned.terms, len(completion.tokens)
                advantages = np.broadcast_to(terms.advantages[index], terms.ratio[index].shape)
                row["probability_now"] = _short(np.exp(learned.logprobs[index, :length]))
                row["advantage"] = _short(advantages[:length])
                row["kept"] = terms.clip[index, :length].astype(int).tolist()
                row["coefficient"] = _short(terms.coefficients[index, :length])
            rows.append(row)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json_text(row, ensure_ascii=False) + "\n" for row in rows))


def _described(step: int, group: Group, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    grade, known = completion.grade, completion.behavior_logprobs
    return {
        "step": step,
        "group": group.id,
        "id": completion.id,
        "source": completion.source,
        "question": question_of(group.prompt),
        "prompt": tokenizer.decode(group.prompt_tokens),
        "answer": group.answer,
        "text": completion.text,
        "reward": grade.reward,
        "parts": dict(grade.reward_parts or {}),
        "accurate": grade.accurate,
        "truncated": completion.truncated,
        "version": completion.policy_version,
        "tokens": token_texts(tokenizer, completion.tokens.tolist()),
        "chosen": completion.mask.astype(int).tolist(),
        "probability": None if known is None else _short(np.exp(known)),
    }


def _short(numbers: np.ndarray) -> list[float]:
    """The numbers rounded to four significant digits."""
    return [float(f"{number:.4g}") for number in numbers.tolist()]
