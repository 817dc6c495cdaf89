"""Four virtual CPU devices, and shape and type checking of the package, for every test; the GPU for `-m gpu`."""

import gc
import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402  (which reads the variable)
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

import tests.shape_checking  # noqa: E402, F401  (the hook finds it among the loaded modules)

# Not by an environment variable: what a test starts has one device, unless it asks for more.
jax.config.update("jax_num_cpu_devices", 4)
jaxtyping.install_import_hook("recjax", "tests.shape_checking.checked")


def pytest_configure(config):
    """Leaves the choice of device to JAX where the tests of a GPU, and no others, are run."""
    if config.option.markexpr == "gpu":
        jax.config.update("jax_platforms", None)


@pytest.fixture(autouse=True, scope="module")
def room_for_compiled_programs():
    """Forgets compiled programs when they fill a part of the 65,530 memory maps that Linux lets a process have.

    XLA's compiler does not report that there are no more; it crashes.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()
