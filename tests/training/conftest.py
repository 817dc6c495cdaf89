"""The tiny run's config for every test of training."""

import pytest

from recjax.config import load_config
from tests.training.tiny_run import TINY


@pytest.fixture
def tiny(tmp_path):
    """A function from (folder name, overrides) to a config of the tiny run."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return lambda name, *overrides: load_config(path, [f"output={tmp_path / name}", *overrides])
