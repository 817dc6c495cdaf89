"""Four virtual CPU devices, and shape and type checking of the package, for every test."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ["JAX_PLATFORMS"] = "cpu"

import jaxtyping  # noqa: E402  (importing jax reads both variables)

import tests.shape_checking  # noqa: E402, F401  (the hook finds it among the loaded modules)

jaxtyping.install_import_hook("recjax", "tests.shape_checking.checked")
