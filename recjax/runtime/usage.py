"""The help of commands, read from their sources, because imports of what a command runs take seconds."""

import ast
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HELP = {"--help", "-help", "-h", "--helpshort"}
_COMMANDS = Path(__file__).parents[1]
_PROCESS_FLAGS = Path(__file__).with_name("console.py")  # the file of define_process_flags
_WIDTH = 110
_INDENT = 24  # column of the flags' meanings


class Flag(NamedTuple):
    """A flag of a command.

    default: None where the command does without the flag.
    """

    name: str
    default: str | list | bool | int | float | None
    is_required: bool
    meaning: str


def command_file(name: str) -> Path | None:
    """The source of a command, a module or the __main__ of a room; None if the module of this name is no command."""
    if not name.isidentifier():
        return None
    for path in (_COMMANDS / f"{name}.py", _COMMANDS / name / "__main__.py"):
        if path.is_file() and "\n    start(main)\n" in path.read_text(encoding="utf-8"):
            return path
    return None


def flags_of(source: Path) -> list[Flag]:
    """The flags that a file defines, in the order of their definitions.

    Raises:
        ValueError: a meaning is not written as a text, or a default not as a constant.
    """
    found = []
    for call in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if not isinstance(call, ast.Call):
            continue
        function = ast.unparse(call.func)
        if function == "define_process_flags":
            found += flags_of(_PROCESS_FLAGS)
        elif function.startswith("flags.DEFINE_"):
            # DEFINE_enum has its choices between default and meaning.
            meaning = call.args[3] if function == "flags.DEFINE_enum" else call.args[2]
            is_required = any(option.arg == "required" for option in call.keywords)
            found.append(Flag(_text(call.args[0]), _value(call.args[1]), is_required, _text(meaning)))
    return found


def _text(part: ast.expr) -> str:
    """A text; a value inside it, which a loop fills, is its variable's name in capitals."""
    if not isinstance(part, ast.JoinedStr):
        return ast.literal_eval(part)
    pieces = []
    for piece in part.values:
        if isinstance(piece, ast.FormattedValue):
            pieces.append(ast.unparse(piece.value).upper())
        else:
            pieces.append(ast.literal_eval(piece))
    return "".join(pieces)


def _value(part: ast.expr) -> Any:
    """A default; None for one that a loop fills."""
    return None if isinstance(part, ast.Name) else ast.literal_eval(part)


def help_of(source: Path) -> str:
    """A command's docstring and its flags, for a terminal."""
    docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8")))
    lines = [docstring or "", ""]
    flags = flags_of(source)
    if flags:
        lines.append("Flags:")
    for flag in flags:
        name = f"  --{flag.name}"
        if isinstance(flag.default, bool):
            name = f"  --[no]{flag.name}"
        meaning = re.sub(r"\.$", "", flag.meaning)
        if flag.is_required:
            meaning += " (required)"
        elif flag.default is True:
            meaning += " (default: true)"
        elif flag.default not in (None, "", []) and flag.default is not False:
            meaning += f" (default: {flag.default})"
        if len(name) >= _INDENT:
            lines.append(name)
            name = ""
        lines += textwrap.wrap(
            meaning,
            _WIDTH,
            initial_indent=name.ljust(_INDENT),
            subsequent_indent=" " * _INDENT,
            break_long_words=False,
        )
    return "\n".join(lines).rstrip() + "\n"


def answer(command: str, arguments: Sequence[str]) -> None:
    """Prints a command's help and exits with 0, if its arguments ask for help and for nothing else."""
    if len(arguments) != 1 or arguments[0] not in HELP:
        return
    source = command_file(command)
    if source:
        print(help_of(source), end="")
        raise SystemExit(0)
