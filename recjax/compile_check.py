"""Compiles a run's sampling and update ahead of time, to tell if they fit a device before you rent it.

    python -m recjax.compile_check --config FILE --topology v5e:4x4 [key=value ...]

The check runs no program and reads no weights, only the model's config.json. It needs no TPU or GPU; install their
compilers with pip install -e ".[tpu]" and ".[cuda]". `--topology host` compiles for this machine's own GPUs or CPU
devices. The exit status is 0 if both programs fit, 1 if not, and 2 for an invalid config or topology. If a program does
not fit, it is compiled again with changes of the config, the cheapest first, until one fits or `--tries` changes have
been tried.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import NamedTuple

import jax
from absl import app, flags
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from recjax.config import load_config
from recjax.console import command, plain_console
from recjax.models.placement import bytes_on_device
from recjax.planning.ahead import PROGRAMS, Plan, Program, beside, compiled, plan
from recjax.planning.memory import count
from recjax.planning.remedies import Change, changes
from recjax.planning.sampling import cache_bytes
from recjax.planning.topology import GIB, larger_slices, load_target

FLAGS = flags.FLAGS


class Checked(NamedTuple):
    """A plan, its compiled programs, and each program's peak bytes on a device, including all resident data."""

    plan: Plan
    programs: dict[str, Program]
    peaks: dict[str, int]

    @property
    def too_large(self) -> set[str]:
        """Programs that do not fit."""
        memory = self.plan.target.memory
        return {name for name in self.programs if self.programs[name].refusal or self.peaks[name] > memory}


@command
def main(argv: list[str]) -> None:
    """Reads the flags, compiles the programs and prints the result."""
    if FLAGS.topology != "host":
        jax.config.update("jax_platforms", "cpu")  # leaves this machine's accelerator to other programs
        # JAX cannot load cached programs of devices that this machine lacks.
        jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(check(FLAGS.config, FLAGS.topology, argv[1:], FLAGS.memory, FLAGS.tries))


def check(path: str, topology: str, overrides: list[str], memory: float | None = None, tries: int = 6) -> int:
    """Runs the check, prints the reasons and returns the exit status.

    The status is 0 if the programs fit, 1 if not, and 2 for an invalid config or topology.

    Args:
        memory: usable GiB of a device; None: all memory of the topology's devices.
        tries: largest number of config changes to compile if the programs do not fit.
    """
    console = plain_console(soft_wrap=True, highlight=False)
    try:
        target = load_target(topology)
        if memory is not None:
            target = target._replace(memory=int(memory * GIB))
        planned = plan(load_config(path, overrides), target)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show_plan(console, planned)
    checked = compile_all(console, planned, {})
    show_memory(console, checked)
    show_collectives(console, checked)
    if not checked.too_large:
        console.print(f"fits {topology}")
        return 0
    console.print(f"does not fit {topology}: {' and '.join(sorted(checked.too_large))}")
    change = fitting_change(console, path, overrides, checked, tries)
    if change:
        console.print(f"this makes it fit: {' '.join(change.overrides)} ({change.cost})")
        return 1
    larger = "".join(f"; the next larger topology is {name}, not tried" for name in larger_slices(topology)[:1])
    console.print(f"none of the changes tried makes it fit{larger}")
    return 1


def compile_all(console: Console, planned: Plan, known: dict[str, Program]) -> Checked:
    """Compiles all programs of the plan that are not in `known`."""
    programs = dict(known)
    for name in PROGRAMS:
        if name not in programs:
            with _progress(console, f"compiling {name} for {planned.target.name}"):
                programs[name] = compiled(planned, name)
            console.print(f"compiled {name} in {programs[name].seconds:.0f} s")
    peaks = {name: programs[name].needed + beside(planned, name) for name in PROGRAMS}
    return Checked(planned, programs, peaks)


@contextlib.contextmanager
def _progress(console: Console, what: str) -> Iterator[None]:
    """Shows a spinner with the elapsed time during a compilation."""
    if not console.is_terminal:
        console.print(f"{what} …")
        yield
        return
    with Progress(SpinnerColumn(), TextColumn(what), TimeElapsedColumn(), console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield


def fitting_change(console: Console, path: str, overrides: list[str], checked: Checked, tries: int) -> Change | None:
    """The cheapest config change that compiles and fits; None if no tried change fits."""
    for change in changes(checked.plan, checked.too_large):
        try:
            planned = plan(load_config(path, [*overrides, *change.overrides]), checked.plan.target)
        except ValueError:
            continue  # the config or the model does not allow this change
        lasting = bytes_on_device(planned.held | planned.sampler) + planned.sampling_plan.moved + _cache(planned)
        if lasting > planned.target.memory:
            continue  # the resident data, and sampling's weights and cache, exceed the memory
        if tries == 0:
            return None
        tries -= 1
        console.print(f"trying {' '.join(change.overrides)}")
        known = {name: program for name, program in checked.programs.items() if name not in change.programs}
        tried = compile_all(console, planned, known)
        peaks = ", ".join(f"{name} {_gib(peak)}" for name, peak in tried.peaks.items())
        console.print(f"peak in GiB: {peaks}{'' if tried.too_large else ': fits'}")
        if not tried.too_large:
            return change
    return None


def show_plan(console: Console, planned: Plan) -> None:
    """Prints the model's size, the devices and the sampling plan."""
    model, target = planned.model, planned.target
    console.print(
        f"{count(model.trained) + count(model.frozen):,} parameters, of which trained {count(model.trained):,};"
        f" compute in {model.decoder.dtype}; prompts of {planned.prompt_tokens} tokens"
    )
    kind, sampled = target.devices[0].device_kind, planned.sampling_plan
    console.print(
        f"{target.name}: {len(target.devices)} devices ({kind}) of {_gib(target.memory)} GiB as {_axes(planned.mesh)}"
    )
    console.print(f"sampling on {_axes(sampled.mesh)}; {sampled.slots} slots for {sampled.rows} completions")


def _axes(mesh: Mesh) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items())


def show_memory(console: Console, checked: Checked) -> None:
    """Prints each program's memory on a device, by purpose, and its costs."""
    planned, programs = checked.plan, checked.programs
    table = Table("on each device", *PROGRAMS, title="GiB, and costs of a step")
    for name, tree in planned.held.items():
        if size := bytes_on_device(tree):
            table.add_row(name, *(_gib(size) for _ in PROGRAMS))
    cache, moved = _cache(planned), planned.sampling_plan.moved
    if moved:
        table.add_row("weights, as sampling has them", _gib(moved), "")
    table.add_row("keys and values", _gib(cache), "")
    rest = {"sample": programs["sample"].temporaries - cache - moved, "update": programs["update"].temporaries}
    shown = ["not known" if programs[name].refusal else _gib(max(rest[name], 0)) for name in PROGRAMS]
    table.add_row("activations and other temporaries", *shown)
    peaks = [("over " if programs[name].refusal else "") + _gib(checked.peaks[name]) for name in PROGRAMS]
    table.add_row("peak", *peaks, end_section=True)
    table.add_row("there is", *(_gib(planned.target.memory) for _ in PROGRAMS))
    table.add_row("TFLOPs of matrix products", *(f"{programs[name].flops / 1e12:.3g}" for name in PROGRAMS))
    table.add_row("seconds to compile", *(f"{programs[name].seconds:.0f}" for name in PROGRAMS))
    console.print(table)
    for name in PROGRAMS:
        if programs[name].refusal:
            console.print(f"{name}: {programs[name].refusal}")


def _cache(planned: Plan) -> int:
    return cache_bytes(planned.config, planned.model.decoder, planned.sampling_plan)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size >= 0.1 * GIB else f"{size / GIB:.2g}"


def show_collectives(console: Console, checked: Checked) -> None:
    """Prints the number of collectives in a step, and the GiB that each device sends."""
    table = Table("program", "collective", "times", "GiB sent", title="collectives of a step, on each device")
    for name, program in checked.programs.items():
        for kind, traffic in program.collectives.items():
            table.add_row(name, kind, f"{traffic.count:,}", _gib(traffic.bytes))
    if table.row_count:
        console.print(table)


if __name__ == "__main__":
    # Not at module level: absl flags are global, and importing this module must not define them.
    flags.DEFINE_string("config", None, "YAML file of a training run.", required=True)
    flags.DEFINE_string(
        "topology", None, "host, a TPU slice such as v5e:4x4, or GPUs such as h100-80:8.", required=True
    )
    flags.DEFINE_float(
        "memory", None, "GiB of each device that may be used; default: what its kind has.", lower_bound=0
    )
    flags.DEFINE_integer("tries", 6, "Changes that are compiled at most, if it does not fit.", lower_bound=0)
    app.run(main)
