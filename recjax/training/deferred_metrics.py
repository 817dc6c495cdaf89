"""Metrics rows whose numbers the device may still be computing; they are read, checked and written later."""

import contextlib
import math
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp
from tqdm import tqdm

from recjax import hosts
from recjax.training.metrics import MetricsWriter, PhaseSeconds


class DeferredMetrics(contextlib.AbstractContextManager):
    """Holds the metrics row of a step until the next step's update is dispatched, or until the row is needed.

    The device can thus start the next update while the host reads the numbers of the previous one. Use it as a context
    manager: it writes the held row on exit, also after an exception.
    """

    def __init__(
        self,
        writer: MetricsWriter,
        bar: tqdm,
        phases: PhaseSeconds,
        manager: ocp.CheckpointManager,
        impossible_tokens: Literal["error", "drop"] = "error",
    ):
        """Starts without a row; rows go to the writer and the bar.

        Args:
            impossible_tokens: setting `training.impossible_tokens`.
        """
        self._writer, self._bar, self._phases, self._manager = writer, bar, phases, manager
        self._refuses_impossible = impossible_tokens == "error"
        self._row: dict[str, Any] | None = None

    def __exit__(self, *exception: object) -> None:
        self.settle()

    def hold(self, row: dict[str, Any]) -> None:
        """Takes the finished row of a step, which may contain device scalars; the previous row must be settled."""
        if self._row is not None:
            raise AssertionError(f"the row of step {self._row['step']} would be lost")
        self._row = row

    def settle(self) -> None:
        """Waits for the numbers of the held row, if there is one, then writes and shows the row.

        Raises:
            FloatingPointError: see `read`; the row is not written.
        """
        if self._row is None:
            return
        row, self._row = self._row, None  # also if `read` raises: the exit must not try the row again
        row = self.read(row)
        self._writer.write(row)
        _show(self._bar, row)

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with device scalars converted to floats; waits for the device.

        Raises:
            FloatingPointError: the step's loss, gradient or update is not finite, or it has impossible tokens and
                `impossible_tokens` is "error".
        """
        with self._phases.phase("update"):
            # Every process holds complete scalars, so this needs no other process, which may already have failed.
            arrays = jax.device_get({name: value for name, value in row.items() if isinstance(value, jax.Array)})
        row = row | {name: float(value) for name, value in arrays.items()}
        bad = [name for name in ("loss", "gradient_norm", "update_norm") if not math.isfinite(row[name])]
        remedy = "Lower optimizer.learning_rate, or choose an algorithm that clips"
        if not bad and self._refuses_impossible:
            bad = [name for name in row if name.startswith("impossible_tokens/") and row[name]]
            remedy = (
                "It counts tokens whose log-probability under that policy is −inf: its logits are −inf there, or the"
                " log-probabilities come from another vocabulary, or other values of rollout.top_k, top_p or min_p;"
                " training.impossible_tokens=drop drops and counts such tokens"
            )
        if bad:
            good, folder = self._manager.latest_step(), self._manager.directory
            raise FloatingPointError(
                f"step {row['step']}: {', '.join(f'{name} = {row[name]:g}' for name in bad)}. The run"
                f" discards this step; its last good checkpoint is of step {good} in {folder}. {remedy}"
            )
        return row


def _show(bar: tqdm, row: dict[str, Any]) -> None:
    names = ("reward",) if row["reward"] == row["accuracy"] else ("reward", "accuracy")
    shown = {name: f"{row[name]:.2f}" for name in names}
    shown["tok/s"] = f"{row['tokens_per_second']:.0f}"
    if "staleness" in row:
        shown["stale"] = f"{row['staleness']:.0f}"
    if "ratio/q01" in row:
        shown["ratio"] = f"{row['ratio/q01']:.2f}–{row['ratio/q99']:.2f}"
        shown["clip"] = f"{row['clip_fraction/all']:.2f}"
    if "evaluation/accuracy" in row and hosts.is_first():
        bar.write(f"step {row['step']}: held-out accuracy {row['evaluation/accuracy']:.3f}")
    bar.set_postfix(shown, refresh=False)
    bar.update()
