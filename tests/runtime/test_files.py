"""Manifests notice and name any change of a folder's files; locks exclude a second holder."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recjax.runtime import files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    (folder / "inner").mkdir()
    (folder / "inner" / "array").write_bytes(bytes(range(256)) * 9)
    (folder / "text.json").write_text('{"a": 1}')
    (folder / "empty").write_bytes(b"")
    files.write_manifest(folder)
    return folder


def test_what_was_not_touched_is_whole(folder):
    files.check_manifest(folder)
    before = (folder / files.MANIFEST).read_bytes()
    files.write_manifest(folder)  # it does not list itself
    assert (folder / files.MANIFEST).read_bytes() == before


@settings(deadline=None)
@given(st.data())
def test_no_bit_changes_unnoticed(folder, data):
    name = data.draw(st.sampled_from(["inner/array", "text.json", files.MANIFEST]))
    file = folder / name
    before = file.read_bytes()
    place, bit = data.draw(st.integers(0, len(before) - 1)), data.draw(st.integers(0, 7))
    file.write_bytes(before[:place] + bytes([before[place] ^ 1 << bit]) + before[place + 1 :])
    try:
        # A space of the manifest may become another one, which says the same.
        same = name == files.MANIFEST and chr(before[place]).isspace() and chr(before[place] ^ 1 << bit) in " \t\n\r"
        if same:
            files.check_manifest(folder)
        else:
            with pytest.raises(ValueError, match=re.escape(name.split("/")[-1]) + ".* is damaged"):
                files.check_manifest(folder)
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "text.json").write_text("{"), "text.json: is damaged: it has 1 bytes, not 8"),
        (lambda folder: (folder / "text.json").unlink(), "text.json: is missing"),
        (lambda folder: (folder / files.MANIFEST).unlink(), "has no manifest.json"),
        (lambda folder: (folder / files.MANIFEST).write_text(""), "manifest.json: is damaged"),
    ],
)
def test_what_is_cut_or_gone_is_named(tmp_path, change, message):
    (tmp_path / "text.json").write_text('{"a": 1}')
    files.write_manifest(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError, match=message):
        files.check_manifest(tmp_path)


def test_a_folder_that_is_gone_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere: does not exist"):
        files.check_manifest(tmp_path / "nowhere")


def test_writers_of_one_file_take_nothing_from_each_other(tmp_path):
    first, second = files.whole_file(tmp_path / "rows"), files.whole_file(tmp_path / "rows")
    with first as one, second as other:
        one.write(b"rows")
        other.write(b"rows")
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
