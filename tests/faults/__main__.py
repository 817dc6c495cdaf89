"""The campaign of faults: python -m tests.faults [--flips 500] [--kills 40] [--seed 0] [--asynchronous] [--only NAME]

Prints one table: how many faults were tried, how many were as they should be, and each one that was not. Status 1 if
there is any. Two cores take about half an hour for the defaults.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.faults import damage, others
from tests.faults.database import Database
from tests.faults.kills import ASYNC, MODES, kills
from tests.faults.live import kills_of_both
from tests.faults.outcomes import Outcome, table
from tests.faults.runs import Place, place_in

PARTS = ("kills", "live", "database", "flips", "resumed", "disks", "processes", "clocks", "places")


def campaign(place: Place, only: list[str], flips: int, kill_count: int, seed: int, ray: bool) -> Iterator[Outcome]:
    """Every fault of the parts that are asked for."""
    if "kills" in only:
        yield from kills(place, kill_count, seed, MODES | (ASYNC if ray else {}))
    if "live" in only:
        yield from kills_of_both(place, kill_count, seed)
    if "database" in only:
        with Database() as database:
            yield from kills_of_both(place, kill_count, seed, database)
    if {"flips", "resumed"} & {*only}:
        made = damage.subject(place)
    if "flips" in only:
        yield from damage.flips(made, flips, seed)
        yield from damage.cuts(made, max(2, flips // 50), seed)
    if "resumed" in only:
        yield from damage.resumed(made, max(5, flips // 25), seed)
    if {"disks", "processes", "clocks"} & {*only}:
        expected = others.straight(place)
    if "disks" in only:
        yield from others.full_disks(place, expected, max(6, flips // 25), seed)
    if "processes" in only:
        yield from others.two_processes(place, expected, max(4, kill_count // 4), seed)
        yield from others.locks_left(place, expected)
    if "clocks" in only:
        yield from others.clocks(place, expected, 4)
    if "places" in only:
        yield from others.places(place)


def main() -> None:
    """Reads the arguments, tries everything, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=500, help="bits to flip")
    parser.add_argument("--kills", type=int, default=40, help="runs to kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--asynchronous", action="store_true", help="kill asynchronous runs as well, which need Ray")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts of the campaign")
    given = parser.parse_args()
    logging.getLogger("recjax").propagate = False
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="recjax-faults-") as folder:
        place = place_in(Path(folder))
        for outcome in campaign(place, given.only, given.flips, given.kills, given.seed, given.asynchronous):
            outcomes.append(outcome)
            if outcome.result == "NOT":
                print(f"NOT as it should be: {outcome.fault}: {outcome.note}", file=sys.stderr, flush=True)
    print(table(outcomes))
    sys.exit(any(outcome.result == "NOT" for outcome in outcomes))


if __name__ == "__main__":
    main()
