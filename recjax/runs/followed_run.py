"""Reads the newest weights of a run that another process trains, whenever the run writes a checkpoint.

The two processes communicate only through files. The run may not have started, may be dead, and may delete or move its
checkpoints at any time.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from recjax.config import Config
from recjax.hub.policy import Policy
from recjax.rollout.requests import Weights
from recjax.runs.checkpoint import progress, steps_of
from recjax.runs.policies import checkpoint_reader
from recjax.runs.spec import check_config_file
from recjax.runs.stored_runs import run_config
from recjax.runtime.files import MANIFEST, check_manifest

logger = logging.getLogger(__name__)

FIRST_SECONDS = 0.5  # interval between checks for the first checkpoint
LINE_SECONDS = 10.0  # interval between log lines while waiting

Stamp = tuple[int, int, int]  # identifies a checkpoint: its step, and the inode and modification time of its manifest


class FollowedRun:
    """Reads the newest whole checkpoint of a run whenever it changes."""

    def __init__(self, run: Path):
        """Reads no files yet; the folder need not exist."""
        self._run = run
        self._folder = run / "checkpoints"
        self._config: Config | None = None
        self._policy: Policy | None = None
        self._read_params: Callable[[int], dict] | None = None
        self._taken: Stamp | None = None
        self._refused: set[Stamp] = set()

    @property
    def policy(self) -> Policy:
        """The trained policy without adapters; available after `first`."""
        assert self._policy is not None
        return self._policy

    def first(self) -> Weights:
        """Waits for the newest weights, and logs that it waits.

        Raises:
            UserError: the config of the run cannot be used.
        """
        logged_at = time.monotonic() - LINE_SECONDS
        while (weights := self.newer()) is None:
            if time.monotonic() - logged_at >= LINE_SECONDS:
                logged_at = time.monotonic()
                logger.info("waits for the first checkpoint of %s", self._run)
            time.sleep(FIRST_SECONDS)
        return weights

    def newer(self) -> Weights | None:
        """The newest whole weights, on the host; None without a whole checkpoint, or if it was the last one returned.

        If the run resumes from an older checkpoint because the newest one was damaged, this returns the older one.
        """
        stamps = self._stamps()
        # A run with a checkpoint has already written its config and the result of its warm start.
        if self._policy is None and stamps:
            self._config = run_config(self._run)
            self._policy, self._read_params = checkpoint_reader(self._run, self._config)
        for stamp in stamps:
            if stamp == self._taken:
                return None
            if stamp in self._refused:
                continue
            step = stamp[0]
            try:
                check_manifest(self._folder / str(step))
                checkpoint_progress = progress(self._folder, step)
                assert self._config is not None and self._read_params is not None
                totals = checkpoint_progress.get("totals", {})
                check_config_file(self._run, self._config, totals.get("config"))
                weights = Weights(self._read_params(step), step, totals.get("run"))
            except Exception as error:  # Orbax raises its own exception types
                if stamp not in self._stamps():
                    continue  # the run deleted it during the read
                self._refused.add(stamp)
                logger.warning("the checkpoint of step %d is not taken: %s", step, error)
                continue
            self._taken = stamp
            return weights
        return None

    def _stamps(self) -> list[Stamp]:
        """Stamps of the checkpoints that have a manifest, which is written last; newest first."""
        stamps = []
        for step in reversed(steps_of(self._folder)):
            try:
                status = (self._folder / str(step) / MANIFEST).stat()
            except OSError:
                continue
            stamps.append((step, status.st_ino, status.st_mtime_ns))
        return stamps
