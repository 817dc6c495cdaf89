"""The tiny run's config for every test of training."""

import pytest

from recjax.config import load_config
from recjax.training.generators import keep_ray_on_loopback
from tests import commands
from tests.training.tiny_run import TINY


@pytest.fixture
def tiny(tmp_path):
    """A function from (folder name, overrides) to a config of the tiny run."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return lambda name, *overrides: load_config(path, [f"output={tmp_path / name}", *overrides])


@pytest.fixture(scope="module")
def prompt_generators():
    """Generators of asynchronous runs with as much of the processor as others.

    Ray gives them the lowest priority, at which they wait for all other tests.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_worker_niceness", "0")
        patched.setenv("PYTHONPATH", str(commands.ROOT))  # generators of a cluster import the tests' functions
        keep_ray_on_loopback()  # before a test imports Ray; for good, as the module stays imported
        yield
