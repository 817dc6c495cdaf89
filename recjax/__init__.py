"""recjax: off-policy reinforcement learning of language models in JAX (arXiv 2509.24203)."""

import glob
import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

_RUN_MODULE = dict(zip(sys.orig_argv, sys.orig_argv[1:], strict=False)).get("-m", "")
IS_COMMAND = _RUN_MODULE.startswith("recjax.")
if IS_COMMAND:
    from recjax.runtime.memory import prepare_host_memory
    from recjax.runtime.usage import answer

    answer(_RUN_MODULE.removeprefix("recjax."), sys.argv[1:])  # help needs none of the command's imports

    prepare_host_memory()  # JAX has not started threads yet

# libtpu, which compile_check needs on machines without a TPU, would take time there in every process that uses JAX, and
# would write messages. These are the device files of TPUs, NVIDIA's GPUs and AMD's GPUs.
_DEVICES = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia*", "/dev/dxg", "/dev/kfd")
if "JAX_FORCE_TPU_INIT" not in os.environ and importlib.util.find_spec("libtpu"):
    if not any(glob.glob(pattern) for pattern in _DEVICES):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")

# True if transformers should look for torch in vain; see recjax/hub/tokenizers.py.
HIDES_TORCH = IS_COMMAND

# Without this, transformers reports at every start that torch is missing; recjax needs only its tokenizers and configs.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

if TYPE_CHECKING:  # editors and type checkers do not call `__getattr__`
    from recjax.analysis.compare import Comparison, compare_runs
    from recjax.analysis.runs_table import runs_table
    from recjax.api import Result, open_run, plan_run, run, run_sweep
    from recjax.config import Config, load_config

__version__ = "0.2.0"
# The module of each public name. Names are imported on first use, because most commands begin without JAX.
_PUBLIC = {"Config": "config", "load_config": "config"}
_PUBLIC |= dict.fromkeys(("Result", "open_run", "plan_run", "run", "run_sweep"), "api")
_PUBLIC |= dict.fromkeys(("Comparison", "compare_runs"), "analysis.compare")
_PUBLIC["runs_table"] = "analysis.runs_table"
__all__ = [
    "Comparison",
    "Config",
    "Result",
    "compare_runs",
    "load_config",
    "open_run",
    "plan_run",
    "run",
    "run_sweep",
    "runs_table",
]


def _imported(name: str) -> Any:
    """Imports a public name."""
    global HIDES_TORCH
    if name in _PUBLIC:
        # A program that has imported one of these before may need models of both.
        if _PUBLIC[name] != "config" and sys.modules.keys().isdisjoint(("torch", "transformers")):
            HIDES_TORCH = True
        return getattr(importlib.import_module(f"recjax.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # a type checker would take every name for a public one
    __getattr__ = _imported


def __dir__() -> list[str]:
    """The names, public names included."""
    return sorted({*globals(), *_PUBLIC})
