"""The systems that are compared: each a program in its own environment, and how that environment is made."""

import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

from recjax.errors import UserError

HERE = Path(__file__).parent


class System(NamedTuple):
    """A system, and how to run it.

    worker: a module of benchmarks.workers.
    requirements: a file's name; None: where the driver itself runs.
    environment: variables of the worker's process.
    """

    worker: str
    requirements: str | None
    options: dict
    what: str
    environment: dict[str, str] = {}


SYSTEMS = {
    "recjax": System("recjax_worker", None, {}, "recjax"),
    # Optimizations that made a difference, each switched off.
    "recjax_padded": System(
        "recjax_worker", None, {"set": {"recjax.experience.layout:LEAST_SAVED": 1e30}}, "recjax, no batch packed"
    ),
    "recjax_untransposed": System(
        "recjax_worker",
        None,
        {"set": {"recjax.models.products:WRITE_TRANSPOSED": []}},
        "recjax, gradients of weights as XLA takes them by itself",
    ),
    "recjax_joined": System(
        "recjax_worker",
        None,
        {"set": {"recjax.models.products:JOIN": ["cpu"]}, "config": ["model.joined_projections=true"]},
        "recjax, projections of one input as one matmul",
    ),
    "recjax_scanned": System(
        "recjax_worker",
        None,
        {"set": {"recjax.models.unrolling:MOST_TRAINED_LOW": 8}},
        "recjax, no more layers written out in bfloat16 than in float32",
    ),
    "recjax_gaps": System(
        "recjax_worker",
        None,
        {"set": {"recjax.runtime.memory:LEAST_GAP": 2**40}},
        "recjax, what compiling leaves is left",
    ),
    "recjax_small_pages": System(
        "recjax_worker", None, {}, "recjax, without huge pages", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    ),
    "torch": System(
        "torch_worker", "torch", {"shared": False}, "plain torch: own loop, static cache, prompts run once"
    ),
    "torch_shared": System(
        "torch_worker", "torch", {"shared": True}, "the same, and prompts read once a group in decode and update"
    ),
    "transformers": System("transformers_worker", "torch", {}, "transformers' generate and a torch step"),
    "trl": System("trl_worker", "trl", {}, "TRL's GRPOTrainer"),
    "tunix": System("tunix_worker", "tunix", {}, "Tunix's GRPO learner"),
}


def named(label: str) -> tuple[System, str]:
    """The system and the precision of a label such as `torch:bfloat16`.

    Raises:
        ValueError: the system or precision does not exist.
    """
    name, _, precision = label.partition(":")
    if name not in SYSTEMS or precision not in ("", "float32", "bfloat16"):
        raise UserError("", f"--systems {label!r}: name one of {', '.join(SYSTEMS)}, with or without :bfloat16")
    return SYSTEMS[name], precision or "float32"


def interpreter(system: System, cache: Path, given: dict[str, str]) -> str:
    """The Python that runs a system's worker; makes its environment where it is not there.

    Args:
        cache: folder of the environments.
        given: requirements' names → interpreters to use in their place.
    Raises:
        RuntimeError: the environment could not be made, with pip's last words.
    """
    if system.requirements is None:
        return sys.executable
    if system.requirements in given:
        return given[system.requirements]
    file = HERE / "requirements" / f"{system.requirements}.txt"
    folder = cache / system.requirements
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    made = folder / "requirements.txt"  # written last, so that an environment cut short is made again
    if made.is_file() and made.read_text() == file.read_text():
        return str(python)
    print(f"{folder}: installing {file}", file=sys.stderr, flush=True)
    venv.create(folder, clear=True, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q", "-r", str(file)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "ERROR" in line] or result.stderr.splitlines()[-1:]
        raise RuntimeError(f"pip could not install {file.name}: {lines[-1] if lines else 'no reason given'}")
    made.write_text(file.read_text())
    return str(python)
