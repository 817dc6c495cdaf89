"""Gives late rewards to the pending rows of an experience store.

    python -m recjax.feedback STORE --file rewards.jsonl

A line is {"id": …, "reward": 1.0} for a row, or {"group_id": …, "reward": [1.0, 0.0, …]} for the rows of a group, in
the store's order (one number: the same for all). "reward_parts" and "accurate" may stand beside it. Nothing is written
unless all lines fit; a command that was cut short is given again.
"""

import json
import sys
from pathlib import Path

from absl import app, flags

from recjax.console import configure_logging
from recjax.experience.feedback import Given, give_rewards

FLAGS = flags.FLAGS


def feedback(folder: str | Path, file: str | Path) -> Given:
    """Completes pending rows of a store from a JSON Lines file.

    Raises:
        ValueError: as `give_rewards`, with file and line.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"--file {str(file)!r}: there is no such file")
    entries, places = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            places.append(f"{path}: line {number}")
            try:
                entries.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{places[-1]}: not valid JSON ({error})") from error
            if not isinstance(entries[-1], dict):
                raise ValueError(f"{places[-1]}: a line takes names and values; got {entries[-1]!r:.80}")
    return give_rewards(folder, entries, places.__getitem__)


def main(argv: list[str]) -> None:
    """Gives the rewards and says how many."""
    configure_logging()
    try:
        if len(argv) != 2:
            raise ValueError("give one store: python -m recjax.feedback STORE --file rewards.jsonl")
        given = feedback(argv[1], FLAGS.file)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"{argv[1]}: {given.completed} rows completed, {given.had_it} had the same reward before")


if __name__ == "__main__":
    # Not at the top: flags are global, and whoever imports this module has their own.
    flags.DEFINE_string("file", None, "JSON Lines of rewards.", required=True)
    sys.modules["__main__"].__doc__ = __doc__
    app.run(main)
