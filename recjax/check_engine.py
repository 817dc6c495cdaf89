"""Checks if a run can be trained on the samples of another server (`rollout.engine`).

    python -m recjax.check_engine --url URL --config FILE [checkpoint=…] [key=value …]

The config is that of the run: model, task and sampling. The command knows recjax.serve, vLLM, SGLang and llama.cpp. It
compares the server's log-probs with recjax's own, tests if tokens follow the distribution that the server reports, and
checks the number of choices, seeds, end tokens, a push of weights and throughput. It pushes the weights of the config's
initial model, or of `checkpoint`, a run's folder or checkpoint; --nopush leaves the server's weights alone. The exit
status is 0 only if training on the server's samples is exact within the limits, and 1 otherwise.
"""

import shutil
import sys
from pathlib import Path

import jax
from absl import flags

from recjax.config import load_config
from recjax.planning.engine_checks import FAIL, EngineCheck, Line, check_config
from recjax.runs.policies import open_policy
from recjax.runtime.cache import keep_compiled_programs
from recjax.runtime.console import command, start
from recjax.training.mesh import make_mesh

FLAGS = flags.FLAGS


@command
def main(argv: list[str]) -> None:
    """Reads the flags, checks the server and prints a line for each check."""
    keep_compiled_programs()
    lines = check_server(FLAGS.config, FLAGS.url, argv[1:], FLAGS.push, FLAGS.draws)
    sys.exit(any(line.verdict == FAIL for line in lines))


def check_server(
    path: str | Path, url: str, arguments: list[str], pushes: bool = True, draws: int = 2000
) -> list[Line]:
    """Checks a server, prints a line for each check and returns the lines.

    Args:
        path: YAML file of a run, or the name of an example.
        arguments: overrides of the config, and `checkpoint=…`.
        pushes, draws: see `EngineCheck`.
    Raises:
        UserError: the config is invalid, or the server does not answer.
    """
    checkpoint = None
    overrides = []
    for argument in arguments:
        if not argument.startswith("checkpoint="):
            overrides.append(argument)
        elif checkpoint is None:
            checkpoint = argument.removeprefix("checkpoint=")
    overrides.append(f"rollout.engine.url={url}")
    run = load_config(path, overrides)
    config = check_config(run)
    with jax.set_mesh(make_mesh(config.mesh)):
        opened = open_policy(checkpoint, config)
        lines = []
        print("what | measured | limit | verdict | remedy")
        # Runs of these kinds push no complete weights.
        needs_weights = not (run.regime.offline or run.model.lora)
        for line in EngineCheck(config, opened, needs_weights, pushes, draws).lines():
            # Line by line, as a check may take seconds, and wide cells read badly in a table.
            print(" | ".join(line), flush=True)
            lines.append(line)
    assert config.rollout.engine is not None
    shutil.rmtree(str(config.rollout.engine.folder), ignore_errors=True)
    fails = any(line.verdict == FAIL for line in lines)
    print(f"{url} is {'no' if fails else 'an'} exact engine of {path}")
    return lines


if __name__ == "__main__":
    flags.DEFINE_string("url", None, "URL of the server.", required=True)
    flags.DEFINE_string("config", None, "YAML file of the run, or the name of an example.", required=True)
    flags.DEFINE_bool("push", True, "Push weights; the server then keeps those of the config or checkpoint.")
    flags.DEFINE_integer("draws", 2000, "Tokens that test the sampling distribution.", lower_bound=100)
    start(main)
