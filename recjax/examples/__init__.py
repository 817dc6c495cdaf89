"""Example configs that `--config` finds by name: links to files of experiments/ in a checkout, files in a wheel."""

import difflib
import os
from pathlib import Path

from recjax.errors import UserError

_FOLDER = Path(__file__).parent


def example_names() -> list[str]:
    """Names of the examples, such as `quickstart` or `gsm8k/on_policy`."""
    files = [*_FOLDER.glob("*.yaml"), *_FOLDER.glob("*/*.yaml")]
    return sorted(file.relative_to(_FOLDER).with_suffix("").as_posix() for file in files)


def config_file(path: str | Path) -> Path:
    """The file of a config. A file of the user comes before the example with the same name.

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
    nearest = difflib.get_close_matches(given, names)
    meant = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
    remedy = f"give a YAML file or one of these names: {', '.join(names)}"
    raise UserError(given, f"neither a file nor the name of an example{meant}", remedy)
