"""Compiles programs in background threads, before anything runs them."""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import jax
from jax.sharding import Mesh

from recjax.rollout.programs import ProgramCall

logger = logging.getLogger(__name__)


class BackgroundCompiler:
    """Compiles programs in threads and runs none; JAX finds them when they are called with arrays of the same shapes.

    The mesh in context has to be one device.
    """

    def __init__(self):
        """Starts no thread yet."""
        self._threads = ThreadPoolExecutor(4, "compile ahead")
        self._listing: Future | None = None
        self._mesh: Mesh | None = None
        self._compilations: dict[tuple, Future] = {}

    @property
    def has_begun(self) -> bool:
        """True after `begin`."""
        return self._listing is not None

    def begin(self, list_calls: Callable[[], Iterable[ProgramCall]]) -> None:
        """Starts a thread that calls the function, and threads that compile the programs of its calls."""
        self._mesh = jax.sharding.get_mesh()
        self._listing = self._threads.submit(self._in_mesh, self._compile_all, list_calls)

    def wait(self) -> None:
        """Waits for all programs. Errors are not raised: whoever needs the program compiles it and meets them."""
        if self._listing is None:
            return
        errors = [self._listing.exception()]
        errors += [compilation.exception() for compilation in self._compilations.values()]
        for error in errors:
            if error is not None:
                logger.debug("compiling ahead: %r", error)

    def stop(self) -> None:
        """Skips the programs that no thread has begun to compile; does not wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile_all(self, list_calls: Callable[[], Iterable[ProgramCall]]) -> None:
        for call in list_calls():
            lowered = call.trace().lower()
            leaves, structure = jax.tree.flatten(call.arguments)
            shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
            program = (call.function, structure, shapes, tuple(call.options.items()))
            # JAX would compile a program twice for two threads at the same time.
            if program not in self._compilations:
                self._compilations[program] = self._threads.submit(self._in_mesh, lowered.compile)

    def _in_mesh(self, function: Callable, *arguments: object) -> None:
        # A thread has no mesh of its own, and JAX looks for a compiled program under the mesh in context.
        assert self._mesh is not None
        with jax.set_mesh(self._mesh):
            function(*arguments)
