"""Cache folders that all runs share: base policies, compiled programs, and large stores as tokens."""

import functools
import logging
import os
from pathlib import Path
from typing import Any

from recjax.runtime.memory import close_gaps

logger = logging.getLogger(__name__)


def cache_folder(name: str) -> Path:
    """The folder `name` under $RECJAX_CACHE, or under ~/.cache/recjax; it may not exist yet."""
    return (Path(os.environ.get("RECJAX_CACHE", Path.home() / ".cache" / "recjax")) / name).absolute()


def keep_compiled_programs() -> None:
    """Lets JAX keep compiled programs on disk, unless JAX_COMPILATION_CACHE_DIR or a program has set the folder."""
    import jax  # not at module level: graders read files from the cache, and need no JAX
    from jax.experimental.compilation_cache import compilation_cache

    settings: Any = jax.config

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and settings.jax_compilation_cache_dir is None:
        compilation_cache.reset_cache()  # JAX uses no cache if it has compiled without a folder
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("compiled")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    close_gaps_after_compiling()
    logger.info("folder of compiled programs: %s", settings.jax_compilation_cache_dir or "none")


@functools.cache
def close_gaps_after_compiling() -> None:
    """Registers a listener that closes the gaps which compiling a large program leaves on the heap, once a process."""
    import jax

    def compiled(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and duration_secs > 0.5:
            close_gaps()

    jax.monitoring.register_event_duration_secs_listener(compiled)
