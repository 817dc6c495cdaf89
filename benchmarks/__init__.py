"""Speed and memory."""

import sys

from recjax.runtime.memory import prepare_host_memory

if any(f"benchmarks.{name}" in sys.orig_argv for name in ("large_store", "packing", "serving", "slopes", "together")):
    prepare_host_memory()  # before JAX starts threads
