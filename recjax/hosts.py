"""Several processes that run one program, on one host or on many: how they meet, share out rows, agree, and part."""

import contextlib
import functools
import itertools
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import multihost

logger = logging.getLogger(__name__)

T, R = TypeVar("T"), TypeVar("R")
WORTH_SHARING = 5000  # things; one process has computed fewer before an exchange is compiled
SIGNAL_SECONDS = 5  # after which a process that waits for the first one looks whether it was sent a signal
LOST_SECONDS = 60  # after so long without a sign of life a process is taken for lost, and the others end


def meet(coordinator: str | None, processes: int | None, process_id: int | None) -> None:
    """Joins the processes of a run; comes before anything else that JAX does.

    Without arguments JAX asks the environment: a TPU pod's, SLURM's, Open MPI's, or that of a Kubernetes job. Where
    there is none of these, or with one process, this process is alone.

    Args:
        coordinator: host:port of process 0.
        processes: how many there are.
        process_id: which of them this is, from 0.
    Raises:
        ValueError: some of the arguments and not the others, and no environment to say the rest.
    """
    if processes == 1:
        return
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, which a run answers itself
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process_id,
            heartbeat_timeout_seconds=LOST_SECONDS,
            shutdown_timeout_seconds=LOST_SECONDS,
        )
    except ValueError as error:
        if (coordinator, processes, process_id) == (None, None, None):
            return
        raise ValueError(
            f"--coordinator {coordinator} --processes {processes} --process_id {process_id}: {error} Give all three,"
            " or none where the environment is a TPU pod's, SLURM's, Open MPI's or a Kubernetes job's"
        ) from error
    logger.info("process %d of %d", jax.process_index(), jax.process_count())


@contextlib.contextmanager
def together(coordinator: str | None, processes: int | None, process_id: int | None) -> Iterator[None]:
    """What the processes of a command do together: they meet first, and one that loses the others ends at once.

    Args:
        (all): as of `meet`.
    """
    meet(coordinator, processes, process_id)
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        end_after(error)


def is_first() -> bool:
    """Whether this process is the one that writes and reports."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Returns once every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def any_says(yes: bool) -> bool:
    """Whether `yes` is true in any process; every process must call this."""
    return yes if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.array(yes)).any())


class LateAnswers:
    """`any_says`, asked at every step and answered at the next, so that no process waits for what its devices are at.

    All processes have the same answer at the same step. One that is alone has it at once.
    """

    def __init__(self):
        """Nobody has asked yet."""
        self._asked: jax.Array | None = None

    def any_says(self, yes: bool) -> bool:
        """Whether `yes` was true in any process at the call before this one; every process must call this.

        What is asked stands behind the step's update on the devices, and what is read behind that of the step before.
        """
        if jax.process_count() == 1:
            return yes
        before, self._asked = self._asked, _in_any(yes)
        return before is not None and bool(before)


def _in_any(yes: bool) -> jax.Array:
    """Whether `yes` is true in any process, on the devices: whoever reads it waits for them."""
    mesh = _in_a_row()
    flags = np.full(jax.local_device_count(), yes, np.int32)
    with jax.set_mesh(mesh):
        return _greatest(jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("devices")), flags))


@functools.cache
def _in_a_row() -> Mesh:
    return Mesh(np.array(jax.devices()), ("devices",))


@functools.partial(jax.jit, out_shardings=PartitionSpec())
def _greatest(numbers: jax.Array) -> jax.Array:
    return numbers.max()


def least(number: int) -> int:
    """The least of all processes' numbers, to about seven digits; all ask."""
    return number if jax.process_count() == 1 else int(multihost_utils.process_allgather(np.float32(number)).min())


def share(count: int) -> np.ndarray:
    """Places of this process's share of `count` things; as many on each, so that some may be of two processes."""
    size = -(-count // jax.process_count())
    return (jax.process_index() * size + np.arange(size)) % count


def gathered(tree: Any, count: int) -> Any:
    """Arrays with the rows of all processes, from each one's `share` of `count` rows; every process must call it."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(lambda x: x[:count], multihost_utils.process_allgather(tree, tiled=True))


def all_of(own: bytes) -> list[bytes]:
    """What every process gives, in their order; every process must call it."""
    lengths = multihost_utils.process_allgather(np.int32(len(own)))
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: len(own)] = np.frombuffer(own, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def shared_out(compute: Callable[[Sequence[T], int], list[R]], things: Sequence[T]) -> list[R]:
    """`compute(things, 0)`, a result for each thing; of many things each process computes a share, and all call it.

    Args:
        compute: from things that stand together, and the place of the first of them.
    Raises:
        ValueError: that of any process, in all of them.
    """
    if jax.process_count() == 1 or len(things) < WORTH_SHARING:
        return compute(things, 0)
    size = -(-len(things) // jax.process_count())
    first, found, refused = jax.process_index() * size, [], None
    try:
        found = compute(things[first : first + size], first)
    except ValueError as error:
        refused = error
    shares = [pickle.loads(share) for share in all_of(pickle.dumps((found, refused and str(refused))))]
    if messages := [message for _, message in shares if message]:
        raise ValueError(messages[0]) from refused
    return [result for results, _ in shares for result in results]


def from_first(act: Callable[[], T]) -> T:
    """What the first process's `act()` returns, or raises, in every process; every process must call it.

    It goes over the connections to the coordinator and not over devices, so that nobody waits for what these are at.

    Args:
        act: called in the first process alone, for as long as it takes; what it returns can be pickled.
    Raises:
        ValueError: as in the first process, as any other error is there; elsewhere that is a RuntimeError.
    """
    if jax.process_count() == 1:
        return act()
    # Orbax has the client that JAX hides.
    client, place = multihost.get_jax_distributed_client(), f"recjax/from_first/{next(_told)}"
    if is_first():
        try:
            found = act()
        except Exception as error:
            client.key_value_set_bytes(f"{place}/said", pickle.dumps((None, isinstance(error, ValueError), str(error))))
            raise
        client.key_value_set_bytes(f"{place}/said", pickle.dumps((found, None, None)))
        return found
    found, is_user_error, message = pickle.loads(_waited_for(client, f"{place}/said"))
    if client.key_value_increment(f"{place}/read", 1) == jax.process_count() - 1:
        client.key_value_delete(place)
    if message is not None:
        raise (ValueError if is_user_error else RuntimeError)(message)
    return found


_told = itertools.count()


def _waited_for(client: Any, key: str) -> bytes:
    while True:
        try:
            return client.blocking_key_value_get_bytes(key, SIGNAL_SECONDS * 1000)
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("DEADLINE_EXCEEDED"):
                raise


def end_after(error: Exception) -> None:
    """Ends a process that has lost the others, at once: an ordinary exit would wait for them."""
    print(
        f"error: process {jax.process_index()} of {jax.process_count()} lost contact with another, which ended or"
        " cannot be reached; that process's log says why. The same command for all processes goes on from what is on"
        f" disk. ({str(error).splitlines()[0]})",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
