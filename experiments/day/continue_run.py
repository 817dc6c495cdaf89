"""Continues a run with another learning rate and algorithm in a new folder, then resumes it with a third rate.

    python -m experiments.day.continue_run --config experiments/quickstart.yaml --output runs/day [key=value ...]

The three trainings are those of `recjax.train`; overrides apply to all of them.
"""

from pathlib import Path

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("config", "experiments/quickstart.yaml", "YAML file of the first run.")
flags.DEFINE_string("output", "runs/continue_run", "Folder of both runs.")


def main(argv: list[str]) -> None:
    """Trains, continues and resumes; prints accuracy before and after each."""
    from recjax.config import load_config
    from recjax.runs.start import train
    from recjax.runtime.cache import keep_compiled_programs

    keep_compiled_programs()
    first, second = (str(Path(FLAGS.output) / name) for name in ("first", "second"))
    base = load_config(FLAGS.config, argv[1:])
    rate, steps = base.optimizer.learning_rate, base.training.steps
    # The new run starts from the best checkpoint of the first, with its optimizer state; a KL keeps it near.
    continued = [f"model.run={first}/checkpoints/best", "warm_start=null", f"output={second}"]
    continued += ["algorithm.preset=grpo", "algorithm.reference_kl={coefficient: 0.01}"]
    schedule = f"optimizer.schedule={{name: linear_schedule, end_value: 0.0, transition_begin: {steps // 2}}}"
    lower = [f"optimizer.learning_rate={rate / 5}", schedule, f"optimizer.warmup_steps={max(steps // 20, 1)}"]
    again = [f"optimizer.learning_rate={rate / 10}", "optimizer.schedule=constant", "optimizer.warmup_steps=0"]
    named = "[optimizer.learning_rate, optimizer.schedule, optimizer.warmup_steps]"
    again += [f"training.steps={steps + steps // 2}", f"training.resume_with={named}"]
    for title, overrides in (
        ("first run", [f"output={first}"]),
        ("continued: another rate, schedule and algorithm", [*continued, *lower]),
        ("resumed with another rate", [*continued, *again]),
    ):
        summary = train(load_config(FLAGS.config, [*argv[1:], *overrides]))
        before, after = summary["accuracy_before"], summary["accuracy_after"]
        print(f"{title}: held-out accuracy {before:.3f} before, {after:.3f} after {summary['steps']} steps")


if __name__ == "__main__":
    app.run(main)
