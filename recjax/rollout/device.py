"""The device on which an engine runs its programs, and one that only compiles them."""

import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from recjax.models.decoder_config import DecoderConfig
from recjax.models.placement import on_host
from recjax.models.unrolling import unrolled_arrays, unrolled_params

logger = logging.getLogger(__name__)


class Device:
    """Runs the programs of an engine."""

    def run(self, program: Callable, *arguments: Any, **options: Any) -> Any:
        """The results of a jitted function."""
        return program(*arguments, **options)

    def read(self, results: Any) -> Any:
        """Results as arrays on the host."""
        return on_host(results)

    def unrolled(self, config: DecoderConfig, params: dict) -> dict:
        """Parameters of a decoder with unrolled layers."""
        return unrolled_arrays(config, params)


RUNNING = Device()


class CompilingDevice(Device):
    """Compiles programs in threads and runs none; the mesh in context has to be one device.

    Results are shapes. On the host, they are arrays of -1, which is no token, so no completion ends.

    Attributes:
        begun: the function that has an engine call its programs; None before `begin`.
    """

    def __init__(self):
        """Starts no thread yet."""
        self._threads = ThreadPoolExecutor(4, "compile ahead")
        self.begun: Future | None = None
        self._programs: dict[tuple, Future] = {}

    def begin(self, calls: Callable[[], None]) -> None:
        """Starts a function in a thread; it has an engine call its programs on this device."""
        self._mesh = jax.sharding.get_mesh()
        self.begun = self._threads.submit(self._in_mesh, calls)

    def _in_mesh(self, function: Callable[[], Any]) -> None:
        # A thread has no mesh of its own, and JAX looks for a compiled program under the mesh in context.
        with jax.set_mesh(self._mesh):
            function()

    def wait(self) -> None:
        """Waits for all programs. Errors are not raised: whoever needs the program compiles it and meets them."""
        for works in ([self.begun] if self.begun else [], self._programs.values()):
            for work in works:
                if error := work.exception():
                    logger.debug("compiling ahead: %r", error)

    def stop(self) -> None:
        """Leaves out the programs that no thread has begun to compile; does not wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def run(self, program: Any, *arguments: Any, **options: Any) -> Any:
        """Shapes of the results of a jitted function."""
        lowered = program.lower(*arguments, **options)
        leaves, structure = jax.tree.flatten(arguments)
        name = program, structure, *((leaf.shape, leaf.dtype) for leaf in leaves), *options.items()
        # JAX would compile a program twice for two threads at the same time.
        if name not in self._programs:
            self._programs[name] = self._threads.submit(self._in_mesh, lowered.compile)
        return self._shapes(lowered.out_info)

    def read(self, results: Any) -> Any:
        """See `CompilingDevice`."""
        return jax.tree.map(lambda shape: np.full(shape.shape, -1).astype(shape.dtype), results)

    def unrolled(self, config: DecoderConfig, params: dict) -> dict:
        """Shapes of parameters of a decoder with unrolled layers."""
        shapes = self._shapes(jax.eval_shape(functools.partial(unrolled_params, config), params))
        if jax.default_backend() != "cpu":
            return shapes
        # On a CPU the layers are views, which may lie on any device.
        layers = {name: jax.tree.map(lambda leaf: leaf.update(sharding=None), shapes[name]) for name in shapes}
        return layers | {name: leaf for name, leaf in params.items() if name != "layers"}

    def _shapes(self, tree: Any) -> Any:
        """Shapes of arrays on the device."""
        sharding = NamedSharding(self._mesh, PartitionSpec())
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)
