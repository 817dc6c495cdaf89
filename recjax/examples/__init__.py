"""Example configs that `--config` finds by name: links to files of experiments/ in a checkout, files in a wheel."""

import difflib
import os
from pathlib import Path

from recjax.errors import UserError

_FOLDER = Path(__file__).parent


def example_names() -> list[str]:
    """Names of the examples, such as `quickstart` or `gsm8k/on_policy`."""
    names = []
    for pattern in ("*.yaml", "*/*.yaml"):
        names += [file.relative_to(_FOLDER).with_suffix("").as_posix() for file in _FOLDER.glob(pattern)]
    return sorted(names)


def config_file(path: str | Path) -> Path:
    """The config's file. A user's file comes before the example with the same name.

    Args:
        path: a file, or the name of an example. Whoever reads the file reports a path with an ending that is no file.
    Raises:
        UserError: neither a file nor the name of an example; the message has the nearest names and all of them.
    """
    if os.path.exists(path) and not os.path.isdir(path):
        return Path(path)
    given = str(path)
    names = example_names()
    if given in names:
        return _FOLDER / f"{given}.yaml"
    name = os.path.splitext(given)[0].removeprefix("./").removeprefix("experiments/")
    if name in names:
        raise UserError(given, "no such file", f"for recjax's example of this name give {name}")
    if os.path.exists(path) or os.path.splitext(given)[1]:
        return Path(path)
    problem = "neither a file nor the name of an example"
    nearest = difflib.get_close_matches(given, names)
    if nearest:
        problem += f"; did you mean {' or '.join(nearest)}?"
    raise UserError(given, problem, f"give a YAML file or one of these names: {', '.join(names)}")
