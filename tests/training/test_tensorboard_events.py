"""TensorBoard's files: what is in them, and what happens when there is no room for them."""

import struct

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from recjax.training import tensorboard_events
from recjax.training.tensorboard_events import TensorBoardEvents


def events_in(folder):
    (file,) = folder.iterdir()
    content, found = file.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        found.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    return found


def test_scalars_come_by_step_after_the_mark_that_ends_earlier_files(tmp_path):
    events = TensorBoardEvents(tmp_path / "tensorboard", first_step=3)
    events.write(3, {"loss": 0.5, "ratio/max": 2})
    events.write(4, {"loss": float("nan")})
    events.close()
    version, begins, third, fourth = events_in(tmp_path / "tensorboard")
    assert version.file_version == "brain.Event:2"
    assert (begins.step, begins.session_log.status) == (3, SessionLog.START)
    assert {value.tag: value.simple_value for value in third.summary.value} == {"loss": 0.5, "ratio/max": 2.0}
    assert (third.step, fourth.step) == (3, 4)


def test_texts_come_by_step_as_the_text_plugin_reads_them(tmp_path):
    events = TensorBoardEvents(tmp_path / "tensorboard", first_step=0)
    events.write_text(7, "samples", "**1**, α")
    events.close()
    event = events_in(tmp_path / "tensorboard")[-1]
    (value,) = event.summary.value
    assert event.step == 7 and value.tag.startswith("samples")
    assert value.metadata.plugin_data.plugin_name == "text" and value.tensor.string_val == ["**1**, α".encode()]


def test_a_full_disk_is_an_error_and_no_hang(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    events = TensorBoardEvents(tmp_path / "tensorboard", first_step=0)
    monkeypatch.setattr(tensorboard_events, "FLUSH_SECONDS", -1.0)
    monkeypatch.setattr(events._file, "flush", full)
    for step in range(20):
        with pytest.raises(ValueError, match="tensorboard cannot be written .No space left"):
            events.write(step, {"loss": 0.5})
