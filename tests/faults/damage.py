"""Flipped bits and cut files, over everything that a run, its cache, its stores and its export are made of.

What is promised of each kind of file stands in docs/faults.md; `KINDS` says it in code: a function that reads the file
as the package does, and returns what somebody would go on with. A fault is noticed if that raises a ValueError or
warns, harmless if it returns what it returned before.
"""

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recjax.config import MAY_CHANGE, load_config
from recjax.export import export
from recjax.hub.weights import load_pretrained
from recjax.logs.metrics import MetricsWriter
from recjax.models.trainable import fingerprint
from recjax.runs import checkpoint
from recjax.runs import folder as run_folder
from recjax.runs.spec import check_config_file, dotted
from recjax.runs.stored_runs import run_config
from recjax.runtime import files
from recjax.store.store import Store
from tests.experience.rows import grouped
from tests.faults.kills import WARM_START
from tests.faults.outcomes import Outcome
from tests.faults.runs import OPTIONS, Place, differs, run

RECORDING = ["experience.replay={draw_every: 2, half_life: 2.0}", "experience.record=true", WARM_START]
LONGER = "training.steps=14"  # than OPTIONS say: what a damaged run then goes on to


class Subject(NamedTuple):
    """A finished run with all that belongs to it."""

    place: Place
    output: Path
    cache: Path
    exported: Path

    @property
    def options(self) -> list[str]:
        """Of the run."""
        return [*OPTIONS, *RECORDING]


def subject(place: Place) -> Subject:
    """Makes the run, its cache of base policies, and its export."""
    folder = place.folder / "damage"
    made = Subject(place, folder / "run", folder / "cache", folder / "exported")
    status, said = run(place, made.options, made.output, cache=str(made.cache))
    if status:
        raise RuntimeError(f"the run to damage ended with {status}: {said}")
    export(str(made.output), None, str(made.exported), None, "float32")
    return made


# --- What somebody goes on with, for each kind of file.


def _checkpoints(made: Subject) -> Any:
    """The newest checkpoint, by which the run goes on, whole."""
    files.check_manifest(made.output / "checkpoints" / "12")
    return "whole"


def _cache(made: Subject) -> Any:
    for folder in filter(Path.is_dir, (made.cache / "warm_start").iterdir()):
        files.check_manifest(folder)
    return "whole"


def _record(made: Subject) -> Any:
    with Store(made.output / "experience.db") as store:
        return [grouped(store), *map(repr, store.records())]


def _exported(made: Subject) -> Any:
    config, params = load_pretrained(made.exported)
    return config, fingerprint(params)


def _config(made: Subject) -> Any:
    """What training compares with the config that it is given, and what evaluate and export make of the file."""
    given = load_config(made.place.config, [*made.options, LONGER, f"output={made.output}"])
    run_folder.check_run_folder(given, overwrite=False)
    config = run_config(made.output)
    progress = checkpoint.progress(made.output / "checkpoints", 12)
    check_config_file(made.output, config, progress["totals"]["config"])
    fixed = dotted(config.model_dump())
    return {key: value for key, value in fixed.items() if key not in MAY_CHANGE}


def _metrics(made: Subject) -> Any:
    """The rows that a run which goes on keeps."""
    path = made.output / "metrics.jsonl"
    before = path.read_bytes() if path.exists() else None
    try:
        written = checkpoint.progress(made.output / "checkpoints", 12)["totals"]["metrics"]
        with MetricsWriter(made.output, 12, written):
            pass
        return path.read_bytes()
    finally:
        path.unlink(missing_ok=True)
        if before is not None:
            path.write_bytes(before)


def _summary(made: Subject) -> Any:
    """Whether a run that is asked for more steps than it has would be taken for finished.

    One that has them all and is taken for unfinished goes on for no step, and makes the file again.
    """
    return run_folder.is_finished(load_config(made.place.config, [*made.options, LONGER, f"output={made.output}"]))


def _derived(made: Subject) -> Any:
    """Samples, figures, the report and TensorBoard's files are for people: nothing reads them back to go on with."""
    return "for people"


class Kind(NamedTuple):
    """Files of which the same is promised: which they are, and what is gone on with."""

    files: Callable[[Subject], list[Path]]
    read: Callable[[Subject], Any]


def _under(*places: str) -> Callable[[Subject], list[Path]]:
    def files(made: Subject) -> list[Path]:
        found = [path for place in places for path in (made.output / place).rglob("*")]
        found += [made.output / place for place in places]
        return sorted(path for path in found if path.is_file() and path.name != ".lock" and path.stat().st_size)

    return files


KINDS = {
    "checkpoint": Kind(_under("checkpoints/12"), _checkpoints),
    "base policy in the cache": Kind(
        lambda made: sorted(path for path in (made.cache / "warm_start").glob("*/**/*") if path.is_file()), _cache
    ),
    "store": Kind(_under("experience.db"), _record),
    "exported model": Kind(lambda made: sorted(path for path in made.exported.rglob("*") if path.is_file()), _exported),
    "config.yaml": Kind(_under("config.yaml"), _config),
    "metrics.jsonl": Kind(_under("metrics.jsonl"), _metrics),
    "summary.json": Kind(_under("summary.json"), _summary),
    "samples, figures, report, TensorBoard": Kind(_under("samples", "figures", "report.html", "tensorboard"), _derived),
}


# --- Faults.


def flips(made: Subject, count: int, seed: int) -> Iterator[Outcome]:
    """One bit each, `count` in all: of every kind as many, of its files at random, weighted by nothing."""
    for number, (name, kind) in enumerate(KINDS.items()):
        generator = np.random.default_rng([seed, 2, number])
        before, files = kind.read(made), kind.files(made)
        for _ in range(-(-count // len(KINDS))):
            file = files[generator.integers(len(files))]
            content = file.read_bytes()
            place, bit = int(generator.integers(len(content))), int(generator.integers(8))
            damaged = content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]
            where = f"bit {bit} of byte {place} of {file}"
            yield _tried(made, f"flip, {name}", kind, before, file, content, damaged, where)


def cuts(made: Subject, count: int, seed: int) -> Iterator[Outcome]:
    """Files emptied, cut in the middle and by one byte, and deleted: `count` of each kind's files."""
    for number, (name, kind) in enumerate(KINDS.items()):
        generator = np.random.default_rng([seed, 3, number])
        before, files = kind.read(made), kind.files(made)
        chosen = generator.permutation(len(files))[:count]
        for file in (files[place] for place in chosen):
            content = file.read_bytes()
            for damaged in (b"", content[: len(content) // 2], content[:-1], None):
                if damaged != content:
                    where = f"{file} {'deleted' if damaged is None else f'cut to {len(damaged)} bytes'}"
                    yield _tried(made, f"cut or deleted, {name}", kind, before, file, content, damaged, where)


class _Warnings(logging.Handler):
    """Whether anything was warned of."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a warning."""
        self.said.append(record.getMessage())


def _tried(
    made: Subject, fault: str, kind: Kind, before: Any, file: Path, content: bytes, damaged: bytes | None, where: str
) -> Outcome:
    status, warnings, package = file.stat(), _Warnings(), logging.getLogger("recjax")
    package.addHandler(warnings)
    try:
        file.unlink() if damaged is None else file.write_bytes(damaged)
        after = kind.read(made)
    except ValueError:
        return Outcome(fault, "noticed")
    except Exception as error:
        return Outcome(fault, "NOT", f"{where}: {type(error).__name__}: {error}")
    finally:
        package.removeHandler(warnings)
        for beside in file.parent.glob(f"{file.name}-*"):  # what SQLite has made of a damaged file
            beside.unlink()
        file.write_bytes(content)
        file.chmod(status.st_mode)
    if warnings.said:
        return Outcome(fault, "noticed")
    same = after == before
    return Outcome(fault, "harmless" if same else "NOT", "" if same else f"{where} goes unnoticed")


def resumed(made: Subject, count: int, seed: int) -> Iterator[Outcome]:
    """Damaged runs that really go on, two steps further, against one that was not damaged."""
    generator, fault = np.random.default_rng([seed, 4]), "flip or cut, and the run goes on"
    options = [*made.options, LONGER]
    straight = made.output.with_name("longer")
    shutil.copytree(made.output, straight)
    status, said = run(made.place, options, straight, cache=str(made.cache))
    if status:
        yield Outcome(fault, "NOT", f"undamaged it ended with {status}: {said[-300:]}")
        return
    for number in range(count):
        output, cache = (made.output.with_name(f"{name}{number}") for name in ("resumed", "cache"))
        shutil.copytree(made.output, output)
        shutil.copytree(made.cache, cache)
        copy = made._replace(output=output, cache=cache)
        kind = ["checkpoint", "base policy in the cache", "checkpoint", "metrics.jsonl", "summary.json"][number % 5]
        files = KINDS[kind].files(copy)
        file = files[generator.integers(len(files))]
        content = bytearray(file.read_bytes())
        if number % 2 and kind == "checkpoint":
            del content[len(content) // 2 :]
        else:
            content[generator.integers(len(content))] ^= 1 << int(generator.integers(8))
        file.write_bytes(content)
        status, said = run(made.place, options, output, cache=str(cache))
        # The numbers of a damaged log are not those of a whole one; that it was damaged has been said.
        wrong = "" if status == 0 and kind == "metrics.jsonl" and "differ from the rows" in said else None
        if kind == "metrics.jsonl" and status == 1 and "is not a row of metrics" in said:
            wrong = ""
        if wrong is None:
            wrong = differs(output, straight) if status == 0 else f"{file}: it ended with {status}: {said[-500:]}"
        if kind == "checkpoint" and not (output / "damaged" / "12").is_dir():
            wrong = wrong or f"{file}: the damaged checkpoint was not set aside"
        yield Outcome(fault, "NOT" if wrong else "as without", wrong)
        shutil.rmtree(output)
        shutil.rmtree(cache)
