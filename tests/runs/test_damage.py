"""Damage to a run's folder: the run goes on from what is whole, with the same numbers, or says what is wrong."""

import json
import logging
import shutil
from pathlib import Path

import chex
import jax
import orbax.checkpoint as ocp
import pytest
from etils import epath

import recjax
from recjax.api import open_run
from recjax.config import load_config, to_yaml
from recjax.export import export
from recjax.logs.metrics import MetricsWriter, read_metrics
from recjax.runs import checkpoint, start
from recjax.runs import folder as run_folder
from recjax.runs.policies import open_policy
from recjax.runs.spec import check_config_file
from recjax.runs.stored_runs import ENVIRONMENT, run_config
from recjax.runtime import files
from recjax.train import show_result
from tests.marks import slow
from tests.training.counting import CountingLearner, Interrupted, count, prepared_batch, sampled_by
from tests.training.tiny_run import TINY, one_device, train, without_figures, without_times

OPTIONS = ["training.checkpoint_every=2", "evaluation.every=0", "evaluation.problems=5", "training.keep_checkpoints=4"]


def made_by(trains, folder):
    """A folder with a run of six steps that was killed after step 5, and the rows of a run that was not."""
    (folder / "tiny.yaml").write_text(TINY)
    config = load_config(folder / "tiny.yaml", [*OPTIONS, "training.steps=6", f"output={folder / 'straight'}"])
    straight = trains(config)
    shutil.copytree(folder / "straight", folder / "killed")
    shutil.rmtree(folder / "killed" / "checkpoints" / "6")
    (folder / "killed" / "summary.json").unlink()
    rows = (folder / "killed" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "killed" / "metrics.jsonl").write_text("".join(rows[:6]) + rows[6][:20])
    return folder, straight


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What `made_by` makes without a compiled program."""
    return made_by(count, tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def with_weights(tmp_path_factory):
    """A killed run with the weights of a model."""
    return made_by(train, tmp_path_factory.mktemp("with_weights"))[0] / "killed"


@pytest.fixture
def run(made, tmp_path):
    """A copy of that run to damage: its config and folder."""
    folder, _ = made
    shutil.copytree(folder / "killed", tmp_path / "run")
    config = load_config(folder / "tiny.yaml", [*OPTIONS, "training.steps=6", f"output={tmp_path / 'run'}"])
    return config, tmp_path / "run"


@pytest.fixture
def said(monkeypatch):
    """Messages of the package, whose own handler a command may have set."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    package = logging.getLogger("recjax")
    level = package.level
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    yield records
    package.removeHandler(handler)
    package.setLevel(level)


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGES = {
    "a flipped bit": lambda step: flip(largest(step / "state")),
    "a truncated file": lambda step: largest(step).write_bytes(largest(step).read_bytes()[:-7]),
    "an emptied folder": empty,
    "a deleted array": lambda step: shutil.rmtree(step / "state"),
    "no manifest": lambda step: (step / files.MANIFEST).unlink(),
    "a flipped word": lambda step: flip(step / "progress" / "metadata"),
}


QUICK = ("a flipped bit", "an emptied folder")


@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in DAMAGES]
)
def test_damaged_checkpoint_is_set_aside_without_changing_the_run(made, run, said, damage):
    config, folder = run
    DAMAGES[damage](folder / "checkpoints" / "4")
    assert without_times(count(config)) == without_times(made[1])
    lines = [line for line in said if "checkpoint of step 4" in line and "damaged/4" in line]
    assert len(lines) == 1 and "the run resumes from the checkpoint of step 2" in lines[0]
    assert (folder / "damaged" / "4").is_dir() and (folder / "checkpoints" / "6" / files.MANIFEST).is_file()


def test_run_without_whole_checkpoints_is_refused(run):
    config, folder = run
    for step in (0, 2, 4):
        flip(largest(folder / "checkpoints" / str(step)))
    with pytest.raises(ValueError, match="no checkpoint is whole .step 4: .*; step 2: .*; step 0: .*--overwrite"):
        count(config)
    assert not (folder / "damaged").exists() and not (folder / "running.json").exists()
    with pytest.raises(ValueError, match="no checkpoint is whole"):
        open_policy(folder)


def test_a_run_whose_first_checkpoint_is_damaged_begins_again(made, run, said):
    config, folder = run
    for step in (2, 4):
        shutil.rmtree(folder / "checkpoints" / str(step))
    flip(largest(folder / "checkpoints" / "0"))
    assert without_times(count(config)) == without_times(made[1])
    assert any("damaged/0, and the run starts again" in line for line in said)


def test_run_of_another_version_is_read_with_warning(run, tmp_path, said):
    folder = run[1]
    path, config = folder / "config.yaml", run_config(folder)
    written = path.read_text()
    path.write_text(written.replace("model:\n", "model:\n  widget: 3\n", 1).replace("mesh:\n", "gadget: 1\nmesh:\n", 1))
    starts = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps([{**starts[0], "recjax": "9.9"}]))
    assert run_config(folder) == config
    (line,) = [line for line in said if "not read" in line]
    assert "model.widget, gadget" in line and "made with recjax 9.9" in line
    in_checkpoint = config.model_dump() | {"gadget": {"x": 1}}
    check_config_file(folder, config, in_checkpoint)
    in_checkpoint["seed"] = 5
    in_checkpoint["se"] = 1  # an unknown key whose name begins a known one
    with pytest.raises(ValueError, match="seed: 5 there"):
        check_config_file(folder, config, in_checkpoint)


def test_each_start_records_versions_and_commit(made, run):
    config, folder = run
    (first,) = json.loads((folder / "environment.json").read_text())
    assert first["recjax"] == recjax.__version__ and first["packages"]["jax"] == jax.__version__
    if first["commit"]:  # the package is in its checkout
        assert len(first["commit"].rstrip("+")) == 40
    count(config)
    assert len(json.loads((folder / "environment.json").read_text())) == 2


@pytest.mark.slow
def test_export_takes_the_newest_whole_checkpoint(with_weights, tmp_path, said):
    folder = shutil.copytree(with_weights, tmp_path / "run")
    flip(largest(folder / "checkpoints" / "4"))
    assert export(str(folder), None, str(tmp_path / "out"), None, "float32").endswith("after step 2")
    assert any("checkpoint of step 4" in line and "that of step 2 is taken" in line for line in said)
    with pytest.raises(ValueError, match="step 4: .* is damaged"):
        export(str(folder), None, str(tmp_path / "named"), 4, "float32")
    assert not (folder / "damaged").exists()  # a reader moves nothing


@pytest.mark.slow
def test_an_exported_folder_that_was_damaged_is_refused(with_weights, tmp_path):
    folder = shutil.copytree(with_weights, tmp_path / "run")
    export(str(folder), None, str(tmp_path / "out"), None, "float32")
    flip(tmp_path / "out" / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors: is damaged.*delete .*manifest.json"):
        export(None, str(tmp_path / "out"), str(tmp_path / "again"), None, "bfloat16")


@pytest.mark.slow
def test_a_config_file_that_was_changed_is_not_exported(with_weights, tmp_path):
    folder = shutil.copytree(with_weights, tmp_path / "run")
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("num_kv_heads: 1", "num_kv_heads: 2"))
    with pytest.raises(
        ValueError, match="config.yaml: differs from the config in the run's checkpoints .*num_kv_heads: 1 there, 2 now"
    ):
        export(str(folder), None, str(tmp_path / "out"), None, "float32")


@pytest.mark.parametrize("content", ["", "{", "- 1", "\0", "seed: 2026-99-99"])
def test_damaged_config_file_is_read_from_the_checkpoint(made, run, said, content):
    config, folder = run
    (folder / "config.yaml").write_text(content)
    run_folder.check_run_folder(config, overwrite=False)
    assert any("config.yaml is damaged" in line and "the checkpoint of step 4" in line for line in said)
    with pytest.raises(ValueError, match="learning_rate: 0.01 there, 0.5 now"):
        other = load_config(made[0] / "tiny.yaml", [*OPTIONS, "optimizer.learning_rate=0.5", f"output={folder}"])
        run_folder.check_run_folder(other, overwrite=False)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ValueError, match="config.yaml: is damaged .*, and no checkpoint contains the config"):
        run_folder.check_run_folder(config, overwrite=False)


def test_config_file_without_a_key_has_its_default(tiny):
    config = tiny("run")
    output = Path(config.output)
    output.mkdir(parents=True)
    lines = to_yaml(config).splitlines()
    (output / "config.yaml").write_text("\n".join(line for line in lines if "min_p" not in line))
    (output / ENVIRONMENT).write_text("[]")
    assert sum("min_p" in line for line in lines) == 2
    run_folder.check_run_folder(config, overwrite=False)
    with pytest.raises(ValueError, match="rollout.min_p: None there, 0.2 now"):
        run_folder.check_run_folder(tiny("run", "rollout.min_p=0.2"), overwrite=False)


def test_lines_that_are_no_rows_are_named(tmp_path):
    for line in ('{"loss": 1.0}', "garbage", "", '{"step": "1"}', "[1]", "\udcff"):
        content = f'{{"step": 0}}\n{line}\n{{"step": 2}}\n{{"st'
        (tmp_path / "metrics.jsonl").write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(ValueError, match="metrics.jsonl: line 2: is not a row of metrics .*; restore the file"):
            read_metrics(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "lo')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0}]


def test_metrics_that_changed_since_the_checkpoint_are_noticed(run, said):
    _, folder = run
    path = folder / "metrics.jsonl"
    known = json.loads((folder / "checkpoints" / "4" / "progress" / "metadata").read_text())["totals"]["metrics"]
    rows = path.read_bytes()
    for content, kept, warns in [
        (rows, 5, False),
        (rows.replace(b'"step": 3', b'"step": 2'), 5, True),
        (b"", 0, True),
        (rows[: rows.index(b"\n") + 1], 1, True),
    ]:
        path.write_bytes(content)
        said.clear()
        with MetricsWriter(folder, 4, known):
            pass
        assert len(read_metrics(path)) == kept
        assert any("differ from the rows that the run wrote" in line for line in said) == warns


@pytest.mark.parametrize("content", ["", "{", *slow("[]", '{"steps": null}', "{}")])
def test_run_survives_damaged_summary_and_lost_metrics(made, tmp_path, capsys, content):
    folder, straight = made
    shutil.copytree(folder / "straight", tmp_path / "run")
    config = load_config(folder / "tiny.yaml", [*OPTIONS, "training.steps=6", f"output={tmp_path / 'run'}"])
    (tmp_path / "run" / "summary.json").write_text(content)
    if content == "":
        (tmp_path / "run" / "metrics.jsonl").write_text("")
        (tmp_path / "run" / "samples" / "before.jsonl").write_text("")
    if content == "{":
        (tmp_path / "run" / "samples" / "after.jsonl").write_text("{")
    assert not run_folder.is_finished(config)
    with one_device(), without_figures():
        summary = start.train(config, learner=CountingLearner(), sources=sampled_by(prepared_batch))
    assert summary["steps"] == 6
    assert summary["accuracy_after"] == (None if content == "" else straight[-1]["evaluation/accuracy"])
    show_result(open_run(tmp_path / "run"))
    shown = capsys.readouterr()
    assert "held-out accuracy" in shown.out and ("line 1 is damaged" in shown.err) == (content == "{")


def test_deleted_folder_ends_the_run_with_one_error(run):
    config, folder = run
    with pytest.raises(ValueError, match="was deleted during the run"):
        count(config, Interrupted(1, lambda: shutil.rmtree(folder)))
    assert not folder.exists()


def test_a_long_error_keeps_its_reason_at_the_end():
    """As tensorstore writes it, with the names of two files before the reason."""
    file = "/runs/" + "a_long_name/" * 20 + "checkpoints/2.orbax-checkpoint-tmp/state/d/0ce8f391cb205f"
    reason = "Failed to write 11485184 bytes to file 20: No space left on device [os_error_code='28']"
    error = ValueError(f'RESOURCE_EXHAUSTED: Error writing "count/0" in OCDBT database at "{file}": "{file}": {reason}')
    shown = files.short_error(error)
    assert shown.startswith("ValueError: RESOURCE_EXHAUSTED: Error writing") and shown.endswith(reason)
    assert len(shown) < 330
    assert files.short_error(KeyError("a")) == "KeyError: 'a'" and files.short_error(OSError()) == "OSError"


def test_orbax_threads_log_no_error_twice(caplog):
    shown, logs = [], logging.getLogger("absl")
    caplog.set_level(logging.WARNING, "absl")  # as in commands
    handler = logging.Handler()
    handler.emit = shown.append
    logs.addHandler(handler)
    for file, level in (("site-packages/orbax/future.py", 40), ("site-packages/orbax/future.py", 30), ("a.py", 40)):
        logs.handle(logging.LogRecord("absl", level, f"/{file}", 1, "it failed", (), None))
    logs.removeHandler(handler)
    assert [record.levelno for record in shown] == [30, 40]


def test_run_resumes_after_a_full_disk(made, run, monkeypatch):
    config, _folder = run

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as without_room:
        without_room.setattr(files, "write_whole", full)
        with pytest.raises(ValueError, match="checkpoints: the checkpoint of step 6 cannot be written .*No space left"):
            count(config)
    assert without_times(count(config)) == without_times(made[1])


def test_orbax_reads_folder_names_literally(tmp_path):
    folder = tmp_path / "run [ab] *?" / "checkpoints"
    arrays = {"weights": jax.numpy.arange(5.0)}
    with checkpoint.open_checkpoints(folder) as manager:
        manager.save(3, args=ocp.args.Composite(state=ocp.args.StandardSave(arrays)))
        restored = manager.restore(3, args=ocp.args.Composite(state=ocp.args.StandardRestore(arrays)))
    chex.assert_trees_all_equal(restored["state"], arrays)
    assert list(epath.Path(tmp_path).glob("ru[n]*/checkp*")) == [folder]


def test_a_copied_checkpoint_is_no_later_one(tiny):
    config = tiny("run", "training.steps=3")
    count(config)
    folder = Path(config.output) / "checkpoints"
    shutil.copytree(folder / "3", folder / "9")
    with pytest.raises(ValueError, match="checkpoints/9: is a copy of the checkpoint of step 3; delete it"):
        count(tiny("run", "training.steps=12"))
