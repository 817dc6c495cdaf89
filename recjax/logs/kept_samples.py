"""Saves completions of training batches in the run folder, with rewards and per-token results of the update."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from recjax.errors import UserError
from recjax.experience.batch import row_places
from recjax.experience.group import Completion, Group
from recjax.hub.tokenizers import token_texts
from recjax.models.placement import on_host
from recjax.runtime import hosts
from recjax.runtime.files import json_text, write_whole, writing
from recjax.sources.setup import Setup
from recjax.tasks.problems import question_of
from recjax.tasks.reading import read_file
from recjax.training.run import Update

logger = logging.getLogger(__name__)


def samples_folder(output: Path) -> Path:
    """The folder for the saved completions: one file per step, one line per completion."""
    return output / "samples" / "training"


def kept_rows(run: Path) -> list[dict[str, Any]]:
    """Reads the completions that a run kept, by step.

    Raises:
        UserError: the run kept no completions, or a file is damaged.
    """
    folder = samples_folder(run)
    rows: list[Any] = []
    for path in sorted(folder.glob("*.jsonl")):
        rows += [row.values for row in read_file(path, "samples")]
    if not rows:
        raise UserError(folder, "holds no completions", "set samples.every above 0 and train")
    return rows


def save_samples(setup: Setup, update: Update) -> list[dict[str, Any]]:
    """Saves the first groups of an update if `samples.every` says so, up to the size limit of the config.

    Every process must call it.

    Returns:
        The saved rows, one for each completion.
    """
    config = setup.config.samples
    tokenizer = setup.policy.tokenizer
    step = update.step
    if not config.every or (step > 1 and step % config.every):
        return []
    tokens = on_host(update.tokens)
    if not hosts.is_first():
        return []
    folder = samples_folder(Path(setup.config.output))
    path = folder / f"{step:08d}.jsonl"
    saved_bytes = sum(file.stat().st_size for file in folder.glob("*.jsonl") if file != path)
    if saved_bytes >= config.megabytes * 2**20:
        logger.debug(
            "samples.megabytes = %g: limit reached; recjax saves no completions of step %d", config.megabytes, step
        )
        return []
    terms = tokens.terms
    probability = np.exp(tokens.logprobs)
    advantages = np.broadcast_to(terms.advantages, terms.ratio.shape)
    saved = []
    for group, places in _placed_groups(setup, update)[: config.groups]:
        for completion, completion_places in zip(group.completions, places, strict=True):
            row = _described(step, group, completion, tokenizer)
            row["probability_now"] = _short(_token_values(probability, completion, completion_places))
            row["advantage"] = _short(_token_values(advantages, completion, completion_places))
            row["kept"] = _token_values(terms.clip, completion, completion_places).astype(int).tolist()
            row["coefficient"] = _short(_token_values(terms.coefficients, completion, completion_places))
            saved.append(row)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json_text(row, ensure_ascii=False) + "\n" for row in saved))
    return saved


def _placed_groups(setup: Setup, update: Update) -> list[tuple[Group, list[list[int]]]]:
    """The groups that the update trained on, with the places of each completion's rows in the batch."""
    trained_rows = update.layout.rows  # None if the update trained on all rows
    places = iter(row_places(update.groups, setup.shape))
    placed = []
    for group in update.groups:
        group_places = [[next(places) for _ in completion.rows] for completion in group.completions]
        if trained_rows is None or all(trained_rows[completion_places].all() for completion_places in group_places):
            placed.append((group, group_places))
    return placed


def summaries(saved: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Saved completions without results of their tokens, for trackers; `staleness` is in optimizer steps."""
    rows = []
    for row in saved:
        staleness = None
        if row["version"] is not None:
            staleness = row["step"] - 1 - row["version"]
        rows.append(
            {
                "reward": row["reward"],
                "staleness": staleness,
                "source": row["source"],
                "tokens": len(row["tokens"]),
                "truncated": row["truncated"],
                "answer": row["answer"],
                "question": row["question"],
                "completion": row["text"],
            }
        )
    return rows


def _described(step: int, group: Group, completion: Completion, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    grade = completion.known_grade
    rows = completion.rows
    token_ids = _joined(row.tokens for row in rows).astype(int).tolist()
    probability = None
    if all(row.behavior_logprobs is not None for row in rows):
        logprobs = _joined(np.asarray(row.behavior_logprobs) for row in rows)
        probability = _short(np.exp(logprobs))
    described: dict[str, Any] = {
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
        "tokens": token_texts(tokenizer, token_ids),
        "chosen": _joined(row.mask for row in rows).astype(int).tolist(),
        "probability": probability,
    }
    if completion.turns:
        starts = [0]  # first token of each row in the joined tokens
        for row in rows:
            starts.append(starts[-1] + len(row.tokens))
        contexts = {}
        for number in range(1, len(rows)):
            contexts[starts[number]] = tokenizer.decode(rows[number].prompt_tokens)
        described["turns"] = [starts[turn.row] + turn.end for turn in completion.turns]
        described["turn_rewards"] = list(grade.turns)
        described["contexts"] = contexts
    return described


def _token_values(values: np.ndarray, completion: Completion, places: Sequence[int]) -> np.ndarray:
    """The values at the completion's tokens, from the places of its rows in the batch."""
    return _joined(values[place, : len(row.tokens)] for place, row in zip(places, completion.rows, strict=True))


def _joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.float32), *arrays])


def _short(numbers: np.ndarray) -> list[float]:
    """The numbers rounded to four significant digits."""
    return [float(f"{number:.4g}") for number in numbers.tolist()]
