"""Keeps the train prompts whose pass rate is within `task.keep.pass_rate`."""

import contextlib
import json
import logging
import math
from collections.abc import Callable, Container, Generator

import numpy as np

from recjax.config import Config
from recjax.runtime import hosts
from recjax.runtime.cache import cache_folder
from recjax.runtime.console import progress_bar
from recjax.runtime.files import json_text, writing
from recjax.tasks.loading import require_enough
from recjax.tasks.prompts import Prompts

logger = logging.getLogger(__name__)


def within_pass_rates(
    config: Config,
    train: Prompts,
    name: str,
    accurate_counts: Callable[[Container[int]], Generator[tuple[int, list[int]], None, None]],
) -> Prompts:
    """The train prompts whose pass rate is within `task.keep.pass_rate`.

    Completions are sampled once, `rollout.prompts_per_step` prompts at a time. recjax keeps their numbers of accurate
    ones in a file of the cache, and an interrupted call continues with that file. Every process must call this.

    Args:
        name: the file's name, which depends on everything that determines the pass rates.
        accurate_counts: samples parts of `rollout.prompts_per_step` prompts, except the parts whose first prompt's
            index is in its argument. It yields the index of a part's first prompt, and the number of accurate
            completions of each prompt in the part.
    Raises:
        UserError: too few problems remain, or the cache cannot be written.
    """
    keep = config.task.keep
    assert keep is not None
    count = len(train.texts)
    path = cache_folder("pass_rates") / f"{name}.jsonl"
    size = config.rollout.prompts_per_step

    def measured() -> dict[int, list[int]]:
        """Numbers of accurate completions by the index of a part's first prompt; skips damaged lines."""
        known = {}
        if not path.exists():
            return known
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                if len(row["accurate"]) == min(size, count - row["first"]):
                    known[row["first"]] = row["accurate"]
        return known

    known = hosts.from_first(measured)
    if len(known) < math.ceil(count / size):
        known_prompts = sum(map(len, known.values()))
        with (
            contextlib.closing(accurate_counts(set(known))) as parts,
            progress_bar("pass rates", count, known_prompts, unit="problem", shown=hosts.is_first()) as bar,
        ):
            for first, accurate in parts:
                known[first] = accurate
                if hosts.is_first():
                    with writing(path):
                        path.parent.mkdir(parents=True, exist_ok=True)
                        with path.open("ab") as file:  # A kill may have left half a line.
                            file.write(f"\n{json_text({'first': first, 'accurate': accurate})}\n".encode())
                bar.update(len(accurate))
    rates = np.concatenate([known[start] for start in sorted(known)]) / keep.samples
    low, high = keep.pass_rate
    chosen = np.flatnonzero((low <= rates) & (rates <= high))
    logger.info(
        "task.keep: keeping %d of %d train problems; the pass rates of %d are below %g, of %d above %g; %s",
        len(chosen),
        count,
        (rates < low).sum(),
        low,
        (rates > high).sum(),
        high,
        path,
    )
    require_enough([train.problems[index] for index in chosen], config, "widen task.keep.pass_rate, or add problems")
    return train.take(chosen)
