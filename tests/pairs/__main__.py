"""The campaign of pairs: python -m tests.pairs [--row "offline, packed"] [--only RELATION] [--random 20] [--seed 0]

Runs every row of the array, or the rows that are given, and checks the relations on each. A row that breaks a relation
is printed as one command, and as the smallest row that still breaks it. Status 1 if there is any. `--table` prints the
pairs and starts no run. `--write` makes a new array after a change of the table of features, and `--grow` adds rows to
the one that is there.
"""

import argparse
import contextlib
import gc
import itertools
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

import tests.conftest  # noqa: F401  (first: four devices and shape checks, before JAX and recjax are imported)
from recjax.errors import UserError
from tests.pairs import covering
from tests.pairs.case import Case
from tests.pairs.covering import PLAIN, Row, named, row_of
from tests.pairs.features import AXES, REFUSED_AT_START
from tests.pairs.materials import Materials
from tests.pairs.relations import RELATIONS, problems
from tests.pairs.running import Stuck

RUNS = "runs"  # a row that the schema accepts starts, and ends without an error
REFUSALS = "refusals"  # a row that the schema accepts and the data do not is refused by name
MOST_BYTES = 4 * 2**30  # of this process, after which it forgets compiled programs


class Hit(NamedTuple):
    """A relation that a row breaks."""

    relation: str
    row: Row
    problem: str

    @property
    def command(self) -> str:
        """The command that shows it."""
        return f'python -m tests.pairs --row "{named(self.row)}" --only {self.relation}'


class Campaign:
    """Runs rows and counts.

    Attributes:
        applied: number of rows on which each relation was checked.
        hits: the relations that rows break.
        rows: number of rows.
        seconds: processor seconds of each relation, with the runs that it makes.
    """

    def __init__(self, materials: Materials, folder: Path, relations: Sequence[str]):
        """Takes folders for what the runs read and write, and the relations to check."""
        self.applied: Counter[str] = Counter()
        self.hits: list[Hit] = []
        self.rows = 0
        self.seconds: Counter[str] = Counter()
        self._materials = materials
        self._folder = folder
        self._relations = relations

    def check(self, row: Row) -> list[Hit]:
        """The relations that a row breaks, which it also keeps."""
        self.rows += 1
        hits = [Hit(relation, row, found) for relation, found in self.found(row, self._relations, self.applied)]
        self.hits += hits
        return hits

    def found(self, row: Row, relations: Sequence[str], applied: Counter[str]) -> list[tuple[str, str]]:
        """The relations that a row breaks, and how."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        case = Case(row, self._materials, folder)
        try:
            applied[RUNS] += 1
            try:
                with self._timed(RUNS):
                    ran = case.run("first")
            except Exception as error:
                return [(RUNS, _line(error))]
            found = []
            for relation in relations:
                try:
                    with self._timed(relation):
                        broken = problems(relation, case, ran)
                except Exception as error:  # a run of the relation may be what breaks
                    broken = [_line(error)]
                if broken is not None:
                    applied[relation] += 1
                    found += [(relation, problem) for problem in broken[:1]]
            return found
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            forget_programs()

    @contextlib.contextmanager
    def _timed(self, relation: str) -> Iterator[None]:
        began = processor_seconds()
        try:
            yield
        finally:
            self.seconds[relation] += processor_seconds() - began

    def check_refusals(self) -> list[Hit]:
        """The rows of REFUSED_AT_START that are not refused by name, which it also keeps."""
        axes = {value: axis for axis, values in AXES.items() for value in values}
        hits = []
        for some, reason in REFUSED_AT_START.items():
            values = [names if isinstance(names, str) else min(names) for names in some]
            row = covering.row_with((axes[value], value) for value in values)
            folder = Path(tempfile.mkdtemp(dir=self._folder))
            self.applied[REFUSALS] += 1
            try:
                Case(row, self._materials, folder).run("first")
                hits.append(Hit(REFUSALS, row, f"it runs, although {reason}"))
            except (UserError, Stuck):
                pass
            except Exception as error:
                hits.append(Hit(REFUSALS, row, _line(error)))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        self.hits += hits
        return hits

    def smallest(self, hit: Hit) -> Row:
        """The row of a hit without the features that do not matter to it."""
        relations = [] if hit.relation == RUNS else [hit.relation]
        axes = sorted(hit.row, key=lambda axis: axis == "model")
        size = len(axes) // 2
        while size >= 1:  # halves first: most features of a row do not matter
            for start in range(0, len(axes), size):
                fewer = axes[:start] + axes[start + size :]
                smaller = {axis: hit.row[axis] for axis in fewer}
                if not fewer or covering.refused(smaller) is not None:
                    continue
                if any(relation == hit.relation for relation, _ in self.found(smaller, relations, Counter())):
                    axes = fewer
                    break
            else:
                size //= 2
            size = min(size, len(axes) - 1)
        return {axis: hit.row[axis] for axis in axes}


def _line(error: Exception) -> str:
    """An error as a problem, with the innermost line of code that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"


def processor_seconds() -> float:
    """Seconds of the processor of this process, and of those that it started and that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def forget_programs() -> None:
    """Forgets compiled programs when they fill memory, or the memory maps that Linux lets a process have."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    maps = Path("/proc/self/maps").read_bytes().count(b"\n")
    if pages * os.sysconf("SC_PAGE_SIZE") > MOST_BYTES or maps > 30_000:
        import jax  # imported here, because the tests' settings must be set before

        jax.clear_caches()
        gc.collect()


def keep_programs(folder: Path) -> None:
    """Reads and writes compiled programs in this folder, also in processes that this one starts."""
    import jax  # imported here, because the tests' settings must be set before

    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))


def random_row(chance: random.Random) -> Row:
    """A row of random values that recjax accepts."""
    row: Row = {}
    axes = list(AXES)
    chance.shuffle(axes)
    for axis in axes:
        value = chance.choice(list(AXES[axis]))
        changed = row | ({axis: value} if value != PLAIN[axis] else {})
        if covering.refused(changed) is None:
            row = changed
    return row


def pair_table() -> str:
    """The counts of the table of features and of the array."""
    pairs = covering.all_pairs()
    rows = covering.stored_array()
    covered = set(itertools.chain.from_iterable(map(covering.pairs_of, rows)))
    refused = sum(covering.refused(covering.row_with(pair)) is not None for pair in pairs if pair not in covered)
    counts = {
        "axes": len(AXES),
        "values": sum(map(len, AXES.values())),
        "values that are not plain": sum(map(len, AXES.values())) - len(AXES),
        "pairs": len(pairs),
        "pairs covered": len(covered),
        "pairs refused": refused,
        "rows": len(rows),
    }
    return "\n".join(f"{name:<28} {count:>6}" for name, count in counts.items())


def arguments() -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs="+", help="rows to run, each a list of values; default: the array")
    parser.add_argument("--only", nargs="+", choices=[RUNS, *RELATIONS], help="relations to check")
    parser.add_argument("--random", type=int, default=0, help="random rows to run, in place of the array")
    parser.add_argument("--seed", type=int, help="seed of the random rows; default: a new one")
    parser.add_argument("--part", default="1/1", help="K/N: every Nth row from the Kth on, for N processes")
    parser.add_argument("--whole", action="store_true", help="do not look for the smallest row that shows a fault")
    parser.add_argument("--folder", help="keep models, stores and compiled programs here, for the next command")
    parser.add_argument("--table", action="store_true", help="print the pairs, and run nothing")
    parser.add_argument("--write", action="store_true", help="write a new array, and run nothing")
    parser.add_argument("--grow", action="store_true", help="add rows for new values to the array, and run nothing")
    return parser.parse_args()


def chosen_rows(given: argparse.Namespace, say: Callable[[str], None]) -> list[Row]:
    """The rows that the arguments ask for."""
    if given.row:
        return list(map(row_of, given.row))
    if given.random:
        seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
        say(f"random rows of --seed {seed}")
        chance = random.Random(seed)
        return [random_row(chance) for _ in range(given.random)]
    return covering.stored_array()


def main() -> None:
    """Reads the arguments, runs the rows, prints the table."""
    gc.enable()  # the tests' settings disable it until all tests are collected
    given = arguments()
    if given.write or given.grow:
        covering.write_array(given.grow)
    if given.write or given.grow or given.table:
        print(pair_table())
        return
    logging.getLogger("recjax").setLevel(logging.ERROR)
    # No progress bars between the rows, and no lines of bars either.
    tqdm.display = lambda *arguments, **named: True
    tqdm.write = staticmethod(lambda text, file=None, **named: None if file is None else print(text, file=file))

    def say(text: str) -> None:
        print(text, flush=True)

    if given.folder:
        keep_programs(Path(given.folder) / "programs")
    part, parts = map(int, given.part.split("/"))
    rows = chosen_rows(given, say)[part - 1 :: parts]
    relations = [name for name in RELATIONS if given.only is None or name in given.only]
    began, began_cpu = time.monotonic(), processor_seconds()
    with tempfile.TemporaryDirectory(prefix="recjax-pairs-") as folder:
        materials = Materials(Path(given.folder or f"{folder}/materials"))
        campaign = Campaign(materials, Path(folder), relations)
        if not given.row and not given.random and part == 1 and given.only is None:
            for hit in campaign.check_refusals():
                say(f"{hit.relation}: {named(hit.row)}: {hit.problem}")
        for number, row in enumerate(rows, 1):
            before = campaign.seconds.total()
            hits = campaign.check(row)
            seconds = f"{campaign.seconds.total() - before:.0f} s, at {time.monotonic() - began:.0f} s"
            say(f"{number}/{len(rows)} {seconds}: {named(row)}{': BROKEN' * bool(hits)}")
            for hit in hits:
                say(f"  {hit.relation}: {hit.problem}\n    {hit.command}")
                if not given.whole and len(hit.row) > 1:
                    say(f"    smallest: {hit._replace(row=campaign.smallest(hit)).command}")
    say(f"\n{'relation':<40} {'rows':>5} {'hits':>5} {'seconds':>8}")
    for relation in (REFUSALS, RUNS, *relations):
        hits = sum(hit.relation == relation for hit in campaign.hits)
        seconds = campaign.seconds[relation]
        say(f"{relation:<40} {campaign.applied[relation]:>5} {hits:>5} {seconds:>8.0f}")
    seconds = f"{time.monotonic() - began:.0f} seconds, {processor_seconds() - began_cpu:.0f} of the processor"
    say(f"{campaign.rows} rows, {sum(campaign.applied.values())} checks, {len(campaign.hits)} hits, {seconds}")
    sys.exit(bool(campaign.hits))


if __name__ == "__main__":
    main()
