"""The environment of a run: versions, commit and devices, with one entry for each start."""

import functools
import json
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import jax

import recjax
from recjax.files import write_whole

NAME = "environment.json"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")


def record_start(output: Path) -> None:
    """Adds an entry to environment.json in the run folder; replaces the file if it cannot be read."""
    entry = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "recjax": recjax.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "devices": f"{jax.device_count()} × {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
    }
    write_whole(output / NAME, json.dumps([*starts(output), entry], indent=2) + "\n")


def starts(output: Path) -> list[dict]:
    """The entries of environment.json in a run folder; an empty list if the file is missing or damaged."""
    try:
        found = json.loads((output / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []


@functools.cache  # a process runs the code of one commit
def commit() -> str | None:
    """The commit of the package's own checkout, with "+" appended if files differ; None outside a checkout."""

    def git(*arguments: str) -> str:
        asked = ["git", "-C", str(Path(recjax.__file__).parent), *arguments]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # A package installed inside another repository does not belong to that repository's commit.
        if git("ls-files", "--error-unmatch", "__init__.py") != "__init__.py":
            return None
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None
