"""Writes the policy of a run as a folder that transformers and other programs load.

    python -m recjax.export --run runs/NAME --output FOLDER [--step N] [--dtype float32|bfloat16|float16]
    python -m recjax.export --run runs/NAME --output FOLDER --adapters [--step N]
    python -m recjax.export --model PATH --output FOLDER [--dtype …]

The run may be unfinished. The command takes the newest checkpoint, or that of --step. It merges adapters into the
model; with --adapters it writes only the adapters, in PEFT's format. A model card describes the training. --push
uploads the folder to the Hugging Face hub. --model rewrites a Hugging Face folder, for example in another dtype. With
JAX_PLATFORMS=cpu in front, the command uses no accelerator.
"""

from pathlib import Path

from absl import flags
from huggingface_hub import HfApi

from recjax.errors import UserError
from recjax.hub.export import COMPANION_FILES, DTYPES, check_output, export_model
from recjax.hub.tokenizers import model_folder
from recjax.hub.weights import load_pretrained
from recjax.runs.export import export_checkpoint
from recjax.runtime.console import command, start

FLAGS = flags.FLAGS


@command
def main(argv: list[str]) -> None:
    """Exports the model and prints a description of the export."""
    if argv[1:]:
        raise UserError(problem=f"unknown argument {argv[1]!r}", remedy="give --run or --model, and --output")
    source = export(FLAGS.run, FLAGS.model, FLAGS.output, step=FLAGS.step, dtype=FLAGS.dtype, adapters=FLAGS.adapters)
    print(f"wrote {FLAGS.output}: {source} in {FLAGS.dtype}")
    if FLAGS.push:
        print(f"pushed to {push(FLAGS.output, FLAGS.push, FLAGS.public)}")


def export(
    run: str | None, model: str | None, output: str, step: int | None, dtype: str, adapters: bool = False
) -> str:
    """Exports a run or a model to `output`; returns a description of the export.

    Raises:
        UserError: the arguments contradict each other, or a file cannot be read or written.
    """
    if (run is None) == (model is None):
        given_flags = "both" if run else "neither"
        raise UserError(
            problem="give exactly one of --run (a training run) and --model (a model folder)",
            remedy=f"found {given_flags}",
        )
    if model and step is not None:
        raise UserError("--step", "applies only to --run", "remove it, or give --run", value=step)
    check_output(output)
    if adapters and (model or dtype != "float32"):
        raise UserError(problem="--adapters needs --run and float32", remedy="remove --model and --dtype")
    if model:
        config, params = load_pretrained(model)
        export_model(output, config, params, base=model_folder(model, COMPANION_FILES), dtype=dtype)
        return model
    assert run is not None
    return export_checkpoint(Path(run), Path(output), step, dtype, adapters)


def push(folder: str, repository: str, public: bool = False) -> str:
    """Uploads an exported folder to a repository of the Hugging Face hub, and creates the repository if needed.

    Returns:
        Address of the repository.
    Raises:
        UserError: the hub refuses the upload or cannot be reached; the folder remains.
    """
    api = HfApi()
    try:
        address = api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder)
    except (OSError, ValueError) as error:  # the hub's own errors are OSErrors
        raise UserError(
            f"--push {repository!r}",
            str(error).strip()[:500],
            f"{folder} is complete, so log in with `hf auth login` and upload the folder with `hf upload`",
        ) from error
    return str(address)


if __name__ == "__main__":
    flags.DEFINE_string("run", None, "Folder of a training run, finished or not.")
    flags.DEFINE_string("model", None, "Hugging Face folder or hub name to rewrite instead of a run.")
    flags.DEFINE_string("output", None, "Folder to write: new or empty.", required=True)
    flags.DEFINE_integer("step", None, "Step of the checkpoint; default: the newest.")
    flags.DEFINE_bool("adapters", False, "Write only the run's adapters, in PEFT's format.")
    flags.DEFINE_string("push", None, "Hub repository, OWNER/NAME, to upload the folder to; private unless --public.")
    flags.DEFINE_bool("public", False, "With --push: a new repository is public.")
    flags.DEFINE_enum("dtype", "float32", DTYPES, "Dtype of the weights: float32, which is exact, bfloat16 or float16.")
    start(main)
