"""The files of the package and their syntax trees, for tests that read the code."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "recjax").rglob("*.py"))
}


def is_command(name):
    """True if a file directly in recjax/ runs as a program."""
    is_at_top = name.count(".") == 1 and name != "recjax.__main__"
    return is_at_top and '\nif __name__ == "__main__":' in PATHS[name].read_text(encoding="utf-8")


@functools.cache
def trees():
    """The syntax tree of every file of the package, by name."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in PATHS.items()}
