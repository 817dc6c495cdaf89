"""The tiny run's config for every test of training."""

import pytest

from recjax.config_loading import load_config
from recjax.training import loop
from tests.training.tiny_run import TINY


@pytest.fixture(autouse=True)
def figures(request, monkeypatch):
    """Draws no figures, which take most of a tiny run's time, except for tests that ask for this fixture by name."""
    if "figures" not in request.fixturenames or request.fixturenames.index("figures") < 0:
        return
    if "figures" in request.node.function.__code__.co_varnames:
        return
    for name in ("draw_training", "draw_experience"):
        monkeypatch.setattr(loop, name, lambda rows, title, path: path.parent.mkdir(exist_ok=True))


@pytest.fixture
def tiny(tmp_path):
    """A function from (folder name, overrides) to a config of the tiny run."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return lambda name, *overrides: load_config(path, [f"output={tmp_path / name}", *overrides])
