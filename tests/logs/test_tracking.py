"""Trackers: modules of wandb's shape get what metrics.jsonl has; what they do wrong stops nothing."""

import contextlib
import functools
import importlib.util
import json
import struct
import sys
import time
from types import ModuleType

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from recjax.logs import tracking
from recjax.logs.tracking import TensorBoard
from tests.marks import slow
from tests.training.counting import count, killed

SHORT = ["training.steps=3", "evaluation.every=0", "evaluation.problems=4"]


class FakeRun:
    """What a module's init returns."""

    def __init__(self, module: "Fake"):
        self.module = module

    def log(self, row: dict, step: int) -> None:
        """As wandb's."""
        if self.module.fails_at == step:
            raise ConnectionError("the tracker is down")
        time.sleep(self.module.seconds)
        self.module.logged.append((step, row))

    def finish(self) -> None:
        """As wandb's."""
        self.module.finished = True


class Fake(ModuleType):
    """A module of wandb's shape that keeps what it is given."""

    def __init__(self, fails_at: int | None = None, seconds: float = 0.0):
        super().__init__("wandb")
        self.fails_at, self.seconds = fails_at, seconds
        self.logged, self.finished, self.options = [], False, None
        self.Image, self.Table = lambda path: ("image", path), lambda dataframe: ("table", dataframe)

    def init(self, **options) -> FakeRun:
        """As wandb's."""
        self.options = options
        if self.fails_at == -1:
            raise SystemExit(1)
        return FakeRun(self)


def tracked(tiny, monkeypatch, module) -> list[dict]:
    monkeypatch.setitem(sys.modules, "wandb", module)
    return count(tiny("run", *SHORT, "tracking.wandb={project: sums, tags: [one]}"))


def test_a_tracker_gets_rows_config_figures_and_samples(tiny, monkeypatch):
    module = Fake()
    rows = tracked(tiny, monkeypatch, module)
    assert module.options["project"] == "sums" and module.options["tags"] == ["one"] and module.options["name"] == "run"
    assert module.options["config"]["training"]["steps"] == 3 and module.finished
    logged = {name: [step for step, row in module.logged if name in row] for name in ("samples", "figures/training")}
    assert logged == {"samples": [0, 3], "figures/training": [3]}  # at each evaluation, and at the end
    numbers = [(step, row) for step, row in module.logged if "wall_seconds" in row or (step == 0 and len(row) > 1)]
    assert [step for step, _ in module.logged] == sorted(step for step, _ in module.logged)
    assert [step for step, _ in numbers] == [row["step"] for row in rows] == [0, 1, 2, 3]
    for (_, sent), row in zip(numbers, rows, strict=True):
        assert sent == {name: value for name, value in row.items() if name != "step" and not isinstance(value, dict)}
    results = {name: value for _, row in module.logged for name, value in row.items()}
    assert results["figures/training"][0] == "image" and results["figures/training"][1].endswith("training.png")
    assert list(results["samples"][1]["question"])[:1] and len(results["samples"][1]) == 4


def test_trackers_get_the_completions_that_a_run_keeps(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", module := Fake())
    config = tiny("run", *SHORT, "samples.every=2", "regime.sync_interval=2", "tracking.wandb={project: sums}")
    count(config)
    tables = {step: row["completions"][1] for step, row in module.logged if "completions" in row}
    assert list(tables) == [1, 2] and set(tables[1]["staleness"]) == {"0"} and set(tables[2]["staleness"]) == {"1"}
    path = tmp_path / "run" / "samples" / "training" / "00000002.jsonl"
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert tables[2]["completion"].tolist() == [row["text"] for row in kept]
    assert tables[2]["reward"].tolist() == [str(row["reward"]) for row in kept]
    texts = [value for event in events_in(tmp_path / "run" / "tensorboard") for value in event.summary.value]
    (shown,) = (text for text in texts if "completions" in text.tag and "staleness 1" in str(text.tensor.string_val))
    lines = shown.tensor.string_val[0].decode().splitlines()
    question = f"    {kept[0]['question']}"
    assert lines[0] == question and lines.count(question) == 1  # all completions of a group follow its question
    assert lines[2].startswith(f"**1.** reward {kept[0]['reward']}, staleness 1, source policy, ")


@pytest.mark.parametrize("fails_at", [-1, 2, *slow(0, 3)])
def test_a_failing_tracker_warns_once_and_stops_nothing(tiny, monkeypatch, caplog, fails_at):
    rows = tracked(tiny, monkeypatch, Fake(fails_at))
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    said = [record.getMessage() for record in caplog.records if "tracking.wandb" in record.getMessage()]
    assert len(said) == 1 and "gets no more rows of this run" in said[0] and "metrics.jsonl has all rows" in said[0]


def test_a_tracker_that_hangs_is_not_waited_for(tiny, monkeypatch, caplog):
    monkeypatch.setattr(tracking, "LAST_SECONDS", 0.1)
    assert len(tracked(tiny, monkeypatch, Fake(seconds=5.0))) == 4
    assert "it did not log its remaining rows within 0.1 s" in caplog.text


def test_trackers_continue_a_resumed_run(tiny, monkeypatch, tmp_path):
    config = tiny("run", "training.steps=4", "evaluation.every=0", "evaluation.problems=4", "tracking.wandb={}")
    made = []
    for learner in (killed(at=4), None):
        monkeypatch.setitem(sys.modules, "wandb", module := Fake())
        with pytest.raises(KeyboardInterrupt) if learner else contextlib.nullcontext():
            count(config, learner)
        made.append({name: module.options[name] for name in ("id", "name", "resume")})
    assert made[0] == made[1] and made[0]["resume"] == "allow" and len(made[0]["id"]) >= 8
    assert [step for step, _ in module.logged] == [4, 4, 4]  # samples, metrics, figures


class ByName(Fake):
    """A module that knows runs by name, as trackio does."""

    def init(self, project, name=None, config=None, resume="never"):
        return super().init(project=project, name=name, config=config, resume=resume)


def test_trackers_identify_a_run_by_its_folder(tiny, tmp_path):
    def options(folder, module, **given):
        feed = tracking._Feed("wandb", functools.partial(tracking._ModuleRun, module, tiny(folder), given))
        feed.put("finish")
        feed.join()
        return module.options

    (tmp_path / "one").mkdir()
    first = options("one", Fake(), project="sums")
    assert options("one", Fake(), id="mine", name="other")["id"] == "mine"
    by_name = options("one", ByName(), project="sums")
    assert by_name["name"] == f"one-{first['id'][:8]}" and by_name["resume"] == "allow" and "id" not in by_name
    (tmp_path / "one").rename(tmp_path / "two")
    assert options("two", Fake(), project="sums") | {"config": 0} == first | {"config": 0}
    (tmp_path / "one").mkdir()
    assert options("one", Fake(), project="sums")["id"] != first["id"]
    (tmp_path / "two" / tracking.NAME).write_text("[")
    assert options("two", Fake(), project="sums")["id"] != first["id"]


def test_a_missing_tracker_module_is_an_early_error(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="tracking.wandb: .*; pip install wandb, or remove the block"):
        count(tiny("run", *SHORT, "tracking.wandb={project: sums}"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_modules_themselves(tiny, tmp_path, monkeypatch, caplog, name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    count(tiny("run", *SHORT, f"tracking.{name}={{project: sums}}"))
    assert f"tracking.{name}" not in caplog.text
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb" if name == "wandb" else "trackio/sums.db"))


def events_in(folder):
    (file,) = folder.iterdir()
    content, found = file.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        found.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    return found


def test_scalars_follow_the_mark_that_ends_earlier_files(tmp_path):
    board = TensorBoard(tmp_path / "tensorboard")
    board.log({"loss": 0.5, "ratio/max": 2}, step=3)
    board.log({"loss": float("nan")}, step=4)
    board.finish()
    version, begins, third, fourth = events_in(tmp_path / "tensorboard")
    assert version.file_version == "brain.Event:2"
    assert (begins.step, begins.session_log.status) == (3, SessionLog.START)
    assert {value.tag: value.simple_value for value in third.summary.value} == {"loss": 0.5, "ratio/max": 2.0}
    assert (third.step, fourth.step) == (3, 4)


def test_texts_have_the_text_plugins_form(tmp_path):
    board = TensorBoard(tmp_path / "tensorboard")
    board.log_text("samples", "**1**, α", step=7)
    board.finish()
    event = events_in(tmp_path / "tensorboard")[-1]
    (value,) = event.summary.value
    assert event.step == 7 and value.tag.startswith("samples")
    assert value.metadata.plugin_data.plugin_name == "text" and value.tensor.string_val == ["**1**, α".encode()]


def test_a_full_disk_ends_tensorboard_with_a_warning(tiny, monkeypatch, caplog):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tracking.EventsWriter, "write_event", full)
    rows = count(tiny("run", *SHORT))
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    said = [record.getMessage() for record in caplog.records if "TensorBoard" in record.getMessage()]
    assert len(said) == 1 and "No space left on device; metrics.jsonl has all rows" in said[0]
