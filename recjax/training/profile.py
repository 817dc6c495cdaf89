"""Profiler traces of training steps, for XProf, TensorBoard or Perfetto."""

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import jax

logger = logging.getLogger(__name__)


def profiled_steps(
    first: int, last: int, traced: Sequence[int] | None, folder: Path, wait: Callable[[], object]
) -> Generator[int, None, None]:
    """Yields the step numbers; a trace shows each step by name until the caller requests the next one.

    Close the generator if the caller may leave early, so that a started trace is written.

    Args:
        first, last: first and last step of this part of the run.
        traced: first and last step to trace; steps before `first` are not traced. None: no trace.
        folder: folder of the traces; each process of a run with several makes a folder of its own there.
        wait: function that returns once the devices are idle, so that a trace has only its own steps, and these whole.
    """
    begins = ends = 0  # no step
    if traced:
        begins = max(first, traced[0])
        ends = traced[1]
    with contextlib.ExitStack() as trace:
        for step in range(first, last + 1):
            if begins == step <= ends:
                trace.enter_context(_trace(begins, ends, folder, wait))
            with jax.profiler.StepTraceAnnotation("step", step_num=step):
                yield step
            if step == ends:
                trace.close()


@contextlib.contextmanager
def _trace(begins: int, ends: int, folder: Path, wait: Callable[[], object]) -> Iterator[None]:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a trace of every Python call would hide the phases
    options.session_id = f"steps_{begins}_to_{ends}"
    if jax.process_count() > 1:  # JAX names files after the host, which may run several processes
        options.session_id += f"_process_{jax.process_index()}"
    wait()
    with jax.profiler.trace(folder, profiler_options=options):
        yield
        wait()
    where = folder / "plugins" / "profile" / options.session_id
    logger.info(
        "wrote a trace of steps %d to %d to %s; docs/performance.md explains how to read it", begins, ends, where
    )
