"""A profiler's trace of some steps of a run, for XProf, TensorBoard or Perfetto."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax

logger = logging.getLogger(__name__)


def profiled_steps(
    first: int, last: int, traced: Sequence[int] | None, folder: Path, wait: Callable[[], object]
) -> Iterator[int]:
    """The numbers of a run's steps, each of which has its name in a trace for as long as the caller is at it.

    Close it where the caller may leave early, so that a trace that has begun is written.

    Args:
        first, last: steps that this part of the run makes.
        traced: the first and the last step to trace; what an earlier part of the run has made is not. None: no trace.
        folder: where traces go.
        wait: returns when the devices have done what they were given, so that a trace has its own steps and whole ones.
    """
    begins, ends = (max(first, traced[0]), traced[1]) if traced else (0, 0)
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
    options.python_tracer_level = 0  # every call of every library, among which the phases would be lost
    options.session_id = f"steps_{begins}_to_{ends}"  # one for all hosts of a run
    wait()
    with jax.profiler.trace(folder, profiler_options=options):
        yield
        wait()
    where = folder / "plugins" / "profile" / options.session_id
    logger.info("a trace of steps %d to %d is in %s; docs/performance.md says how to read it", begins, ends, where)
