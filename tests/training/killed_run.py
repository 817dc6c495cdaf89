"""A run that kills itself: SIGKILL at a numbered event, an event being a call of the loop's or a change to its files.

Imported once by a server that forks a process for each run, so that twenty runs do not import JAX twenty times.
"""

import json
import os
import signal
import sys
from pathlib import Path

import jax

from recjax.config import load_config
from recjax.logs.metrics import MetricsWriter
from recjax.training import learner, loop
from tests.training.counting import CountingLearner, count
from tests.training.tiny_run import train

WRITING = os.O_WRONLY | os.O_RDWR


def trained(
    config: str,
    overrides: list[str],
    compiled: str,
    kill_at: int | None,
    cache: str = "no cache",
    counts: bool = False,
) -> None:
    """Trains in this process, which ends itself at event number `kill_at`; the number of events goes to `events.json`.

    Which event it was is written beside the run's folder.

    Args:
        compiled: folder for compiled programs, unless the environment names one.
        cache: folder for base policies; changes to its files are events as well.
        counts: with a learner that counts and with prepared groups, which compute nothing.
    """
    os.environ["RECJAX_CACHE"] = cache
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", compiled)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    output = next(value.split("=", 1)[1] for value in overrides if value.startswith("output="))
    seen = []

    def event(name: str) -> None:
        seen.append(name)
        if len(seen) == kill_at:
            Path(f"{output}.killed").open("a").write(f"{kill_at} {name}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    def file_change(name: str, arguments: tuple) -> None:
        written = name == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
        if written or name in ("os.rename", "os.mkdir", "os.remove"):
            if str(arguments[0]).startswith((f"{output}/", f"{cache}/")):
                event(f"{name} {Path(str(arguments[0])).name}")

    def watched(function, name: str):
        def calls(*args, **named):
            result = function(*args, **named)
            event(name)
            return result

        return calls

    def half_a_row(writer: MetricsWriter, row: dict) -> None:
        writer._file.write(json.dumps(row)[:40])
        writer._file.flush()
        event("metrics")
        writer._file.seek(writer._file.tell() - 40)
        writer._file.truncate()
        write(writer, row)

    write, MetricsWriter.write = MetricsWriter.write, half_a_row
    learner.update, loop.next_groups = watched(learner.update, "update"), watched(loop.next_groups, "batch")
    CountingLearner.update = watched(CountingLearner.update, "update")
    sys.addaudithook(file_change)
    (count if counts else train)(load_config(config, overrides))
    Path(output, "events.json").write_text(json.dumps(seen))
