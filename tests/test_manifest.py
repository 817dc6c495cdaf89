"""Manifests: any change to a folder's files is noticed, and named."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recjax import manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    (folder / "inner").mkdir()
    (folder / "inner" / "array").write_bytes(bytes(range(256)) * 9)
    (folder / "text.json").write_text('{"a": 1}')
    (folder / "empty").write_bytes(b"")
    manifest.write_manifest(folder)
    return folder


def test_what_was_not_touched_is_whole(folder):
    manifest.check_manifest(folder)
    before = (folder / manifest.NAME).read_bytes()
    manifest.write_manifest(folder)  # it does not list itself
    assert (folder / manifest.NAME).read_bytes() == before


@given(st.data())
def test_no_bit_changes_unnoticed(folder, data):
    name = data.draw(st.sampled_from(["inner/array", "text.json", manifest.NAME]))
    file = folder / name
    before = file.read_bytes()
    place, bit = data.draw(st.integers(0, len(before) - 1)), data.draw(st.integers(0, 7))
    file.write_bytes(before[:place] + bytes([before[place] ^ 1 << bit]) + before[place + 1 :])
    try:
        # A space of the manifest may become another one, which says the same.
        same = name == manifest.NAME and chr(before[place]).isspace() and chr(before[place] ^ 1 << bit) in " \t\n\r"
        if same:
            manifest.check_manifest(folder)
        else:
            with pytest.raises(ValueError, match=re.escape(name.split("/")[-1]) + ".* is damaged"):
                manifest.check_manifest(folder)
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "text.json").write_text("{"), "text.json is damaged: it has 1 bytes and not 8"),
        (lambda folder: (folder / "text.json").unlink(), "text.json is missing"),
        (lambda folder: (folder / manifest.NAME).unlink(), "has no manifest.json, which is written last"),
        (lambda folder: (folder / manifest.NAME).write_text(""), "manifest.json is damaged"),
    ],
)
def test_what_is_cut_or_gone_is_named(tmp_path, change, message):
    (tmp_path / "text.json").write_text('{"a": 1}')
    manifest.write_manifest(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError, match=message):
        manifest.check_manifest(tmp_path)


def test_a_folder_that_is_gone_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not there"):
        manifest.check_manifest(tmp_path / "nowhere")
