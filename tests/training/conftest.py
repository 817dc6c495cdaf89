"""The tiny run's config for every test of training."""

import pytest

from recjax.config_loading import load_config
from recjax.training import loop
from tests.training.tiny_run import TINY


@pytest.fixture
def tiny(tmp_path):
    """A function from (folder name, overrides) to a config of the tiny run."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return lambda name, *overrides: load_config(path, [f"output={tmp_path / name}", *overrides])


@pytest.fixture
def figures():
    """Asks for a run's real figures."""


@pytest.fixture(autouse=True)
def quick_figures(request, monkeypatch):
    """Empty files in place of a run's figures, which take most of a tiny run's time."""

    def draw(rows, title, path):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")

    if "figures" not in request.fixturenames:
        monkeypatch.setattr(loop, "draw_training", draw)
        monkeypatch.setattr(loop, "draw_experience", draw)
