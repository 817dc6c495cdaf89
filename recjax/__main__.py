"""Runs a command by its name.

    recjax COMMAND [arguments]

`recjax train --config quickstart` is short for `python -m recjax.train --config quickstart`: the same process, with the
same flags, exit status and import path. `recjax COMMAND --help` shows the flags of a command.
"""

import ast
import difflib
import os
import sys

from recjax.examples import example_names
from recjax.runtime.usage import command_file

# A user meets them in this order.
COMMANDS = (
    "train",
    "evaluate",
    "compare",
    "plot",
    "samples",
    "runs",
    "sweep",
    "objectives",
    "schema",
    "serve",
    "export",
    "generate_experience",
    "import_experience",
    "export_experience",
    "inspect_experience",
    "feedback",
    "check_engine",
    "compile_check",
)
_WIDTH = max(map(len, COMMANDS))


def main() -> None:
    """Becomes the process of the command, or prints the list of commands."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--help", "-h", "help"):
        print(overview())
        return
    if name not in COMMANDS:
        problem = f"{name!r} is not a command of recjax"
        nearest = difflib.get_close_matches(name, COMMANDS)
        if nearest:
            problem += f"; did you mean {' or '.join(nearest)}?"
        sys.exit(f"error: {problem}; recjax --help lists the commands")
    # A process of its own finds modules of the user in the current folder, as with python -m, and recjax prepares
    # memory before its imports.
    os.execv(sys.executable, [sys.executable, "-m", f"recjax.{name}", *sys.argv[2:]])


def overview() -> str:
    """The commands with a line each, and the names of the example configs."""
    lines = __doc__.splitlines()
    lines += ["", "Commands:"]
    lines += [f"  {name:{_WIDTH}}  {first_line(name)}" for name in COMMANDS]
    lines += ["", f"Examples for --config: {', '.join(example_names())}"]
    return "\n".join(lines)


def first_line(name: str) -> str:
    """The first line of a command's docstring, without an import of the command."""
    file = command_file(name)
    assert file, f"{name} is no command"
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    assert docstring, f"{name} has no docstring"
    return docstring.partition("\n")[0]


if __name__ == "__main__":
    main()
