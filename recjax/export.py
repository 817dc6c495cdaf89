"""Writes a run's policy as a folder that transformers and other programs load.

    python -m recjax.export --run runs/NAME --output FOLDER [--step N] [--dtype float32|bfloat16|float16]
    python -m recjax.export --run runs/NAME --output FOLDER --adapters [--step N]
    python -m recjax.export --model PATH --output FOLDER [--dtype …]

The run may be finished or not; the newest checkpoint is taken, or that of --step. Adapters are merged into the model,
or with --adapters written by themselves as PEFT reads them. --model writes a Hugging Face folder anew, in another
dtype for instance. JAX_PLATFORMS=cpu in front leaves an accelerator to others.
"""

import tempfile
from pathlib import Path

from absl import app, flags

from recjax.console import command
from recjax.hub.export import COMPANION_FILES, DTYPES, check_output, export_model, write_adapters, write_base
from recjax.hub.tokenizers import model_folder
from recjax.hub.weights import load_pretrained
from recjax.training.trained import run_adapters, run_config, run_params

FLAGS = flags.FLAGS


@command
def main(argv: list[str]) -> None:
    """Writes the folder and says what is in it."""
    if argv[1:]:
        raise ValueError(f"{argv[1]!r} is not understood; give --run or --model, and --output")
    source = export(FLAGS.run, FLAGS.model, FLAGS.output, FLAGS.step, FLAGS.dtype, FLAGS.adapters)
    print(f"wrote {FLAGS.output}: {source} in {FLAGS.dtype}")


def export(
    run: str | None, model: str | None, output: str, step: int | None, dtype: str, adapters: bool = False
) -> str:
    """Does what the flags say; returns what was exported, in words.

    Raises:
        ValueError: flags that contradict each other, or something that cannot be read or written.
    """
    if (run is None) == (model is None):
        found = "both" if run else "neither"
        raise ValueError(f"give exactly one of --run (a training run) and --model (a model folder); found {found}")
    if model and step is not None:
        raise ValueError(f"--step {step} is not read with --model, which has no checkpoints; remove it")
    check_output(output)
    if adapters:
        if model or dtype != "float32":
            raise ValueError("--adapters takes --run, and keeps float32; remove --model and --dtype")
        return f"adapters of {run} after step {export_adapters(Path(run), Path(output), step)}"
    if model:
        export_model(output, *load_pretrained(model), model_folder(model, COMPANION_FILES), dtype)
        return model
    config = run_config(Path(run))
    step, policy, params = run_params(Path(run), config, step)
    with tempfile.TemporaryDirectory() as made:
        base = Path(made)
        if config.model.path:
            base = model_folder(config.model.path, COMPANION_FILES)
        else:
            write_base(base, policy.decoder.config, policy.tokenizer, policy.stop_ids)
        export_model(output, policy.decoder.config, params, base, dtype)
    return f"{run} after step {step}"


def export_adapters(run: Path, output: Path, step: int | None) -> int:
    """A run's adapters at a checkpoint, in PEFT's format; returns the step."""
    config = run_config(run)
    if not (config.model.lora and config.model.path):
        raise ValueError(
            f"--adapters: {str(run)!r} did not train adapters (model.lora) beside a model that is kept somewhere"
            " (model.path); leave --adapters out, which exports the whole model"
        )
    step, decoder_config, params = run_adapters(run, config, step)
    output.mkdir(parents=True, exist_ok=True)
    write_adapters(output, decoder_config, params, str(config.model.path))
    return step


if __name__ == "__main__":
    # Not at the top: flags are global, and whoever imports this module has their own.
    flags.DEFINE_string("run", None, "Folder of a training run, finished or not.")
    flags.DEFINE_string("model", None, "Hugging Face folder or hub name to write anew.")
    flags.DEFINE_string("output", None, "Folder to write; new or empty.", required=True)
    flags.DEFINE_integer("step", None, "Checkpoint to take; default: the newest.")
    flags.DEFINE_bool("adapters", False, "Write the run's adapters alone, as PEFT reads them.")
    flags.DEFINE_enum("dtype", "float32", DTYPES, "Of the weights; float32 keeps them exactly, the others round.")
    app.run(main)
