"""Saves completions of training batches in the run folder, with rewards and per-token results of the update."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from recjax.experience.batch import row_places
from recjax.experience.group import Completion, Group
from recjax.hub.tokenizers import token_texts
from recjax.models.placement import on_host
from recjax.runtime import hosts
from recjax.runtime.files import json_text, write_whole, writing
from recjax.sources.setup import Setup
from recjax.tasks.problems import question_of
from recjax.training.run import Update

logger = logging.getLogger(__name__)


def folder_of(output: Path) -> Path:
    """The folder of the saved completions: one file per step, one line per completion."""
    return output / "samples" / "training"


def keep(setup: Setup, update: Update) -> list[dict[str, Any]]:
    """Saves the first groups of an update if `samples.every` says so, up to the size limit of the config.

    Every process must call it.

    Returns:
        The saved rows, one a completion.
    """
    config = setup.config.samples
    tokenizer = setup.policy.tokenizer
    step = update.step
    if not config.every or (step > 1 and step % config.every):
        return []
    tokens = on_host(update.tokens)
    if not hosts.is_first():
        return []
    folder = folder_of(Path(setup.config.output))
    path = folder / f"{step:08d}.jsonl"
    held = sum(file.stat().st_size for file in folder.glob("*.jsonl") if file != path)
    if held >= config.megabytes * 2**20:
        logger.debug(
            "samples.megabytes = %g: limit reached; recjax saves no completions of step %d", config.megabytes, step
        )
        return []
    saved = []
    terms = tokens.terms
    columns = {
        "probability_now": np.exp(tokens.logprobs),
        "advantage": np.broadcast_to(terms.advantages, terms.ratio.shape),
        "kept": terms.clip,
        "coefficient": terms.coefficients,
    }
    places = iter(row_places(update.groups, setup.shape))
    placed = [
        (group, [[next(places) for _ in completion.rows] for completion in group.completions])
        for group in update.groups
    ]
    rows = update.layout.rows  # of a minibatch; None: all
    if rows is not None:
        placed = [(group, of_group) for group, of_group in placed if all(rows[indices].all() for indices in of_group)]
    for group, of_group in placed[: config.groups]:
        for completion, of_completion in zip(group.completions, of_group, strict=True):
            row = _described(step, group, completion, tokenizer)
            lengths = [(index, len(each.tokens)) for index, each in zip(of_completion, completion.rows, strict=True)]
            for name, values in columns.items():
                values = _joined(values[index, :length] for index, length in lengths)
                row[name] = values.astype(int).tolist() if name == "kept" else _short(values)
            saved.append(row)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json_text(row, ensure_ascii=False) + "\n" for row in saved))
    return saved


def summaries(saved: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Saved completions without results of their tokens, for trackers; `staleness` is in optimizer steps."""
    return [
        {
            "reward": row["reward"],
            "staleness": row["version"] if row["version"] is None else row["step"] - 1 - row["version"],
            "source": row["source"],
            "tokens": len(row["tokens"]),
            "truncated": row["truncated"],
            "answer": row["answer"],
            "question": row["question"],
            "completion": row["text"],
        }
        for row in saved
    ]


def _described(step: int, group: Group, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    grade = completion.known_grade
    rows = completion.rows
    is_known = all(row.behavior_logprobs is not None for row in rows)
    starts = np.cumsum([0, *(len(row.tokens) for row in rows)]).tolist()  # of each row in the joined tokens
    turns = {
        "turns": [starts[turn.row] + turn.end for turn in completion.turns],
        "turn_rewards": list(grade.turns),
        "contexts": {starts[number]: tokenizer.decode(rows[number].prompt_tokens) for number in range(1, len(rows))},
    }
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
        "tokens": token_texts(tokenizer, _joined(row.tokens for row in rows).astype(int).tolist()),
        "chosen": _joined(row.mask for row in rows).astype(int).tolist(),
        "probability": _short(np.exp(_joined(np.asarray(row.behavior_logprobs) for row in rows))) if is_known else None,
        **(turns if completion.turns else {}),
    }


def _joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.float32), *arrays])


def _short(numbers: np.ndarray) -> list[float]:
    """The numbers rounded to four significant digits."""
    return [float(f"{number:.4g}") for number in numbers.tolist()]
