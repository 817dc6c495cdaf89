"""Adds late rewards to the pending rows of an experience store.

    python -m recjax.feedback STORE --file rewards.jsonl

A line is {"id": …, "reward": 1.0} for a row, or {"group_id": …, "reward": [1.0, 0.0, …]} for the rows of a group, in
the store's order (a single number applies to all rows). "reward_parts", "accurate" and "turn_rewards", a list with the
reward of each turn, are optional. The reward is the total of the turns; without it, their sum. The command writes only
if all lines are valid. If it was interrupted, run it again.
"""

from pathlib import Path

from absl import flags

from recjax.errors import UserError
from recjax.runtime.console import command, start
from recjax.store.database import store_name
from recjax.store.feedback import Given, give_rewards
from recjax.store.store import Store
from recjax.tasks.reading import read_file

FLAGS = flags.FLAGS


def feedback(store: str | Path, file: str | Path) -> Given:
    """Completes pending rows of a store from a JSON Lines file.

    Raises:
        UserError: see `give_rewards`; the message has file and line.
    """
    rows = read_file(Path(file), "--file")
    with Store(store) as opened:
        return give_rewards(opened, [row.values for row in rows], [row.location for row in rows].__getitem__)


@command
def main(argv: list[str]) -> None:
    """Adds the rewards and prints their number."""
    if len(argv) != 2:
        raise UserError(problem="give one store: python -m recjax.feedback STORE --file rewards.jsonl")
    counts = feedback(argv[1], FLAGS.file)
    print(f"{store_name(argv[1])}: {counts.completed} rows got rewards, {counts.had_it} already had the same reward")


if __name__ == "__main__":
    flags.DEFINE_string("file", None, "JSON Lines file of rewards.", required=True)
    start(main)
