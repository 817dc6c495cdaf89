"""Compiles the large programs of a run ahead of time, to tell if they fit a device before you rent it.

    python -m recjax.compile_check --config FILE --topology v5e:4x4 [key=value ...]

The check runs no program and reads no weights, only the model's config.json. It needs no TPU or GPU; install their
compilers with pip install -e ".[tpu]" and ".[cuda]". `--topology host` compiles for this machine's own GPUs or CPU
devices. The exit status is 0 if all programs fit, 1 if not, and 2 for an invalid config or topology. If a program does
not fit, the command lists changes of the config that need less memory, the cheapest first.
"""

import sys

import jax
from absl import flags
from rich.console import Console

from recjax.config import load_config
from recjax.errors import UserError
from recjax.planning.dry_run import (
    Item,
    axes,
    count,
    phase_bytes,
    resident_items,
    sampling_items,
    show_memory,
    smaller,
    update_items,
)
from recjax.planning.programs import CAST, Plan, Program, compiled, plan, programs_of
from recjax.planning.sampling import most_completions
from recjax.planning.targets import GIB, larger_slices, load_target
from recjax.runtime.console import command, plain_console, start

FLAGS = flags.FLAGS


@command
def main(argv: list[str]) -> None:
    """Reads the flags, compiles the programs and prints the result."""
    if FLAGS.topology != "host":
        jax.config.update("jax_platforms", "cpu")  # leaves this machine's accelerator to other programs
        # JAX cannot load cached programs of devices that this machine lacks.
        jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(check(FLAGS.config, FLAGS.topology, argv[1:], FLAGS.memory))


def check(path: str, topology: str, overrides: list[str], memory: float | None = None) -> int:
    """Runs the check, prints the reasons and returns the exit status.

    The status is 0 if the programs fit, 1 if not, and 2 for an invalid config or topology.

    Args:
        memory: usable GiB of a device; None: all memory of the topology's devices.
    """
    console = plain_console(soft_wrap=True, highlight=False)
    try:
        target = load_target(topology)
        if memory is not None:
            target = target._replace(memory=int(memory * GIB))
        planned = plan(load_config(path, overrides), target)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show_plan(console, planned)
    programs = {}
    for name in programs_of(planned.config):
        console.print(f"compiling {name} for {target.name} …")
        programs[name] = compiled(planned, name)
        console.print(f"compiled {name} in {programs[name].seconds:.0f} s")
    items = compiled_items(planned, programs)
    show_memory(console, items, planned.mesh)
    peaks = phase_bytes(items)
    too_large = {name for name, program in programs.items() if program.refusal or peaks[name] > target.memory}
    for name, program in programs.items():
        if program.refusal:
            console.print(f"{name}: {program.refusal}")
    if not too_large:
        console.print(f"fits {topology}")
        return 0
    console.print(f"does not fit {topology}: {' and '.join(sorted(too_large))}")
    for change, cost in smaller(planned.config, planned.prompt_tokens, planned.mesh, too_large):
        console.print(f"needs less memory: {change} ({cost})")
    larger = larger_slices(topology)
    if larger:
        console.print(f"the next larger topology is {larger[0]}")
    return 1


def compiled_items(planned: Plan, programs: dict[str, Program]) -> list[Item]:
    """Memory of each device: the arrays that it always holds, and the temporaries of each program.

    The compiler states the temporaries; for a backend that does not, they are the estimate of a dry run.
    """
    config = planned.config
    model = planned.model
    mesh = planned.mesh
    items = resident_items(config, model, mesh)
    free = planned.target.memory - sum(item.bytes for item in items)
    for name, program in programs.items():
        estimates = []
        if name == "sample":
            platform = planned.target.devices[0].platform
            estimates = sampling_items(config, model, planned.prompt_tokens, mesh, free=free, platform=platform)
        if program.temporaries is None:
            if not estimates:
                update, _ = update_items(config, model, planned.prompt_tokens, mesh)
                estimates = [item._replace(phase=name) for item in update]
            items += estimates
            continue
        items += [item for item in estimates if item.name == CAST]  # the program gets it as an argument
        formula = "XLA's memory analysis"
        if program.refusal:
            formula = "at least, as the compiler refuses the program"
        parts = [f"{item.name} {item.bytes / GIB:.3f}" for item in estimates if item.name != CAST]
        if parts:
            formula += f"; of these, by formula: {', '.join(parts)}"
        items.append(Item(name, "temporaries", formula, program.temporaries))
    return items


def show_plan(console: Console, planned: Plan) -> None:
    """Prints the model's size, the devices and the sampling plan."""
    model = planned.model
    target = planned.target
    console.print(
        f"{count(model.trained) + count(model.frozen):,} parameters, of which trained {count(model.trained):,};"
        f" compute in {model.decoder.dtype}; prompts of {planned.prompt_tokens} tokens"
    )
    kind = target.devices[0].device_kind
    sampled = planned.sampling_plan
    devices = f"{len(target.devices)} devices ({kind}) of {target.memory / GIB:.2f} GiB"
    console.print(f"{target.name}: {devices} as {axes(planned.mesh)}")
    rows = sampled.prompts * most_completions(planned.config)
    console.print(f"sampling on {axes(sampled.mesh)}; {sampled.slots} slots for {rows} completions")


if __name__ == "__main__":
    flags.DEFINE_string("config", None, "YAML file of a run, or the name of an example.", required=True)
    flags.DEFINE_string(
        "topology", None, "host, a TPU slice such as v5e:4x4, or GPUs such as h100-80:8.", required=True
    )
    flags.DEFINE_float("memory", None, "Usable GiB of each device; default: all that its kind has.", lower_bound=0)
    start(main)
