"""The evaluation command: one policy, wherever it is kept, killed or not, gives one result."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from recjax import evaluate as command
from recjax.config import TaskConfig, load_config
from recjax.evaluate import evaluate, seen_in_training, split_arguments
from recjax.export import export
from recjax.runs import sampled_rows
from recjax.tasks.loading import load_task
from tests import commands
from tests.training.counting import MovingLearner, prepared_batch, sampled_by
from tests.training.tiny_run import TINY, train

SHORT = ["training.steps=2", "training.checkpoint_every=1", "evaluation.every=0", "evaluation.samples=4"]


class RandomlyMovingLearner(MovingLearner):
    """Moves the parameters so far that the policy of another step samples other answers."""

    def move(self, step, shape):
        return np.random.default_rng(step).normal(0, 0.3, shape).astype(np.float32)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps, whose updates move all weights at random, and a function from (overrides) to its config."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "tiny.yaml").write_text(TINY)

    def config(*overrides):
        return load_config(folder / "tiny.yaml", [*SHORT, f"output={folder / 'run'}", *overrides])

    train(config(), learner=RandomlyMovingLearner(), sources=sampled_by(prepared_batch))
    return folder, config


@pytest.fixture
def picture():
    """Asks for an evaluation's real picture."""


@pytest.fixture(autouse=True)
def quick_picture(request, monkeypatch):
    """An empty file in place of an evaluation's picture, which takes as long as the evaluation."""
    if "picture" not in request.fixturenames:
        monkeypatch.setattr(command, "draw_evaluation", lambda *arguments: arguments[-1].write_bytes(b""))


def files(folder: Path) -> dict[str, bytes]:
    """What an evaluation wrote, but for its name in words and the picture."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix != ".png"}


def without_name(numbers: dict) -> dict:
    return {key: value for key, value in numbers.items() if key not in ("model", "seen_in_training")}


@pytest.mark.slow
def test_the_folder_has_completions_and_their_numbers(finished, tmp_path, picture):
    folder, config = finished
    output, numbers = evaluate(config(), str(folder / "run"), str(tmp_path / "out"))
    assert {file.name for file in output.iterdir()} == {
        "config.yaml",
        "samples.parquet",
        "results.json",
        "evaluation.png",
    }
    assert (output / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    rows = pd.read_parquet(output / "samples.parquet")
    assert len(rows) == 40 and rows["problem"].tolist() == [place for place in range(10) for _ in range(4)]
    assert json.loads((output / "results.json").read_text()) == numbers
    assert numbers["model"] == "run-2" and numbers["task"] == "arithmetic" and numbers["seen_in_training"] == 0
    np.testing.assert_allclose(numbers["metrics"]["accuracy"]["value"], rows["accurate"].mean())
    np.testing.assert_allclose(numbers["metrics"]["reward"]["value"], rows["reward"].mean())
    asked = [problem.prompt for problem in load_task(config()).evaluation]
    assert rows["prompt"].tolist()[::4] == asked
    assert (rows["parsed"] == rows["completion"].str.strip()).all()


@pytest.mark.slow
def test_the_base_policy_repeats_a_runs_first_evaluation(finished, tmp_path):
    _, config = finished
    folder = tmp_path / "trained"
    train(config(f"output={folder / 'run'}"))
    _, numbers = evaluate(config(), None, str(tmp_path / "out"))
    before = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[0])
    np.testing.assert_allclose(numbers["metrics"]["accuracy"]["value"], before["evaluation/accuracy"])
    np.testing.assert_allclose(numbers["metrics"]["reward"]["value"], before["evaluation/reward"], rtol=1e-5)
    said = [json.loads(line) for line in (folder / "run" / "samples" / "before.jsonl").read_text().splitlines()]
    rows = pd.read_parquet(tmp_path / "out" / "samples.parquet")
    assert rows["completion"].tolist() == [row["completion"] for row in said]


@pytest.mark.slow
def test_a_checkpoint_and_its_export_give_equal_numbers(finished, tmp_path):
    folder, config = finished
    export(str(folder / "run"), None, str(tmp_path / "exported"), None, "float32")
    newest, by_step, exported, older = (
        evaluate(config(), str(checkpoint), str(tmp_path / "out" / name))[1]
        for name, checkpoint in {
            "newest": folder / "run",
            "by_step": folder / "run" / "checkpoints" / "2",
            "exported": tmp_path / "exported",
            "older": folder / "run" / "checkpoints" / "1",
        }.items()
    )
    assert newest == by_step and newest["model"] == "run-2"
    assert exported["model"] == "exported" and "seen_in_training" not in exported
    assert without_name(exported) == without_name(newest)
    weights = {
        name: yaml.safe_load((tmp_path / "out" / name / "config.yaml").read_text())["weights"]
        for name in ("newest", "exported", "older")
    }
    assert weights["newest"] == weights["exported"] != weights["older"]
    assert older["model"] == "run-1" and without_name(older) != without_name(newest)


def test_killed_or_finished_and_started_again_equals_straight_through(finished, tmp_path, monkeypatch):
    folder, config = finished
    evaluate(config(), str(folder / "run"), str(tmp_path / "straight"))
    rounds, scored = sampled_rows.sample_rows, []

    def dies_in_the_third_round(done):
        scored.append(done.first)
        if len(scored) == 3:
            raise KeyboardInterrupt
        return rounds(done)

    monkeypatch.setattr(sampled_rows, "sample_rows", dies_in_the_third_round)
    with pytest.raises(KeyboardInterrupt):
        evaluate(config(), str(folder / "run"), str(tmp_path / "killed"))
    assert {file.name for file in (tmp_path / "killed").iterdir()} == {"config.yaml"}
    for times in (2, 3):
        evaluate(config(), str(folder / "run"), str(tmp_path / "killed"))
        assert scored == [0, 4, 8] * times and files(tmp_path / "killed") == files(tmp_path / "straight")


def test_another_evaluations_folder_is_refused(finished, tmp_path):
    folder, config = finished
    evaluate(config(), str(folder / "run"), str(tmp_path / "out"))
    for overrides, checkpoint, reason in [
        (["seed=1"], "run", "seed: 0 there, 1 now"),
        (["evaluation.temperature=0.5"], "run", "evaluation.temperature: 1.0 there, 0.5 now"),
        (["rollout.max_completion_tokens=2"], "run", "rollout.max_completion_tokens: 3 there, 2 now"),
        (["task.success=0.5"], "run", "task.success: 1.0 there, 0.5 now"),
        ([], "run/checkpoints/1", "holds another evaluation .weights: .*name another folder with --output"),
    ]:
        with pytest.raises(ValueError, match=reason):
            evaluate(config(*overrides), str(folder / checkpoint), str(tmp_path / "out"))
    evaluate(config("optimizer.learning_rate=1.0", "training.steps=9"), str(folder / "run"), str(tmp_path / "out"))
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(ValueError, match="thesis: holds other files than an evaluation's"):
        evaluate(config(), str(folder / "run"), str(tmp_path / "thesis"))


def test_checkpoints_that_are_not_there_are_refused(finished, tmp_path):
    folder, config = finished
    shutil.copytree(folder / "run", tmp_path / "started", ignore=shutil.ignore_patterns("checkpoints"))
    (tmp_path / "empty").mkdir()
    for checkpoint, reason in [
        (folder / "run" / "checkpoints" / "7", "step 7: .* holds the steps 1, 2; name one of them"),
        (tmp_path / "started", "holds no checkpoint yet"),
        (tmp_path / "nowhere" / "checkpoints" / "3", "holds no config.yaml"),
        (tmp_path / "empty", "is neither a run's folder nor a model: .* holds no config.json"),
        (tmp_path / "nowhere", "is neither a run's folder nor a model: .* is no local folder"),
    ]:
        with pytest.raises(ValueError, match=reason):
            evaluate(config(), str(checkpoint), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_adapters_are_evaluated_from_the_runs_folder(finished, tmp_path):
    _, config = finished
    lora = config("model.lora={rank: 2, alpha: 8}", f"output={tmp_path / 'lora'}", "optimizer.learning_rate=0.1")
    train(lora)
    first = evaluate(lora, str(tmp_path / "lora" / "checkpoints" / "1"), str(tmp_path / "first"))[1]
    last = evaluate(lora, str(tmp_path / "lora"), str(tmp_path / "last"))[1]
    other = config("model.decoder.hidden_size=8")
    assert without_name(evaluate(other, str(tmp_path / "lora"), str(tmp_path / "other"))[1]) == without_name(last)
    assert without_name(first) != without_name(last)
    # Fresh adapters change nothing, so that the base is the same with and without them.
    bases = [evaluate(each, "base", str(tmp_path / name))[1] for name, each in {"a": lora, "b": config()}.items()]
    assert without_name(bases[0]) == without_name(bases[1])


def test_problems_that_a_run_trains_on_are_counted(finished):
    _, config = finished
    assert seen_in_training(config(), load_task(config()).evaluation) == 0
    assert 0 < seen_in_training(config(), load_task(config("seed=1")).evaluation) <= 10
    gone = config("task.arithmetic=null", "task.file={train: nowhere.jsonl}")
    assert seen_in_training(gone, load_task(config()).evaluation) is None


@pytest.mark.slow
def test_the_command_prints_a_table_or_one_line(finished, tmp_path):
    folder, _ = finished

    def run(*arguments):
        return commands.run(["-m", "recjax.evaluate", "--config", folder / "tiny.yaml", *arguments])

    done = run("checkpoint=base", "evaluation.samples=2", "--output", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    for part in ("pass@2", "95 % interval", "completion_length/median", "always answering"):
        assert part in done.stdout
    refused = run(f"checkpoint={tmp_path / 'nowhere'}")
    assert refused.returncode != 0 and "is neither a run's folder nor a model" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_arguments_that_contradict_are_refused():
    assert split_arguments(["seed=1", "checkpoint=a/b=c"]) == ("a/b=c", ["seed=1"])
    assert split_arguments([]) == (None, [])
    with pytest.raises(ValueError, match="found 2 values of checkpoint="):
        split_arguments(["checkpoint=a", "checkpoint=b"])
    with pytest.raises(ValueError, match="output=.*--output FOLDER"):
        split_arguments(["output=x"])


@pytest.mark.parametrize(
    ("where", "label"),
    [("data/sums.jsonl", "sums"), ("data/sums/*.parquet", "sums"), ("sums/**/test-*.parquet", "sums"), ("*", "file")],
)
def test_a_pattern_has_the_name_of_its_folder(where, label):
    assert command.task_label(TaskConfig(file={"train": "unset", "evaluation": where})) == label
