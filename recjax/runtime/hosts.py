"""Several processes of one program, on one host or on many: how they connect, split work, agree, and stop."""

import contextlib
import functools
import ipaddress
import itertools
import logging
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import multihost

from recjax.errors import UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
WORTH_SHARING = 5000  # things; one process has computed fewer before an exchange is compiled
SIGNAL_SECONDS = 5  # seconds after which a process that waits for the first process checks for signals
LOST_SECONDS = 60  # seconds without a heartbeat after which a process counts as lost, and all other processes end
MEETING_SECONDS = 300  # seconds for which the processes wait for each other at the start
NOTICE_SECONDS = 30  # seconds between two messages that name the missing processes
_CHECK = "check --coordinator, the firewall, and that all processes were started"
_LOST = (
    "lost contact with another process, which ended or cannot be reached; see its log. The same command for all"
    " processes continues from the files on disk"
)
_REPORTER = "import sys; sys.stdin.read() or sys.exit(sys.argv[1])"


def connect_processes(coordinator: str | None, processes: int | None, process_id: int | None) -> None:
    """Joins the processes of a run; must come before any other use of JAX.

    Without arguments JAX reads the environment of a TPU pod, SLURM, Open MPI or a Kubernetes job. Without such an
    environment, or with one process, this is the only process.

    Args:
        coordinator: host:port of process 0.
        processes: number of processes.
        process_id: number of this process, from 0.
    Raises:
        UserError: some arguments are missing, and no environment provides them; the coordinator has no port, or
            another program uses it; a process does not come, or comes with other arguments.
    """
    if processes == 1:
        return
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise UserError(
            f"--coordinator {coordinator}", "has no port", f"give HOST:PORT of process 0, such as {coordinator}:8476"
        )
    # JAX aborts if a process is missing or comes twice, or if the port is in use. So recjax lets them meet before.
    if coordinator is not None and process_id in range(processes or 0):
        if process_id == 0:
            assert processes is not None
            _receive_calls(coordinator, processes)
        else:
            assert processes is not None and process_id is not None
            _call_first(coordinator, processes, process_id)
    jax.config.update("jax_enable_preemption_service", False)  # its handler of SIGTERM would replace recjax's handler
    late = threading.Timer(
        MEETING_SECONDS, _end, [f"error: not all processes came within {MEETING_SECONDS} s; {_CHECK}"]
    )
    late.daemon = True
    # JAX's own default is all interfaces.
    bind_address = coordinator if coordinator is not None and _loopback_host(coordinator) else None
    late.start()
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process_id,
            coordinator_bind_address=bind_address,
            initialization_timeout=2 * MEETING_SECONDS,
            heartbeat_timeout_seconds=LOST_SECONDS,
            shutdown_timeout_seconds=LOST_SECONDS,
        )
    except ValueError as error:
        if (coordinator, processes, process_id) == (None, None, None):
            return
        raise UserError(
            f"--coordinator {coordinator} --processes {processes} --process_id {process_id}",
            f"{error} Give all three",
            "or none on a TPU pod, or under SLURM, Open MPI or a Kubernetes job",
        ) from error
    finally:
        late.cancel()
    logger.info("process %d of %d", jax.process_index(), jax.process_count())
    multihost_utils.process_allgather(np.zeros(1))  # see `connect_devices`


def _loopback_host(coordinator: str) -> str | None:
    """The coordinator's own address if only this machine reaches it; None for all other addresses and names."""
    host = coordinator.rpartition(":")[0].strip("[]")
    if host == "localhost":
        host = "127.0.0.1"
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        return None
    return host if is_loopback else None


def _receive_calls(coordinator: str, processes: int) -> None:
    """Waits in process 0 until all other processes have called, then answers each with the reason not to start, if any.

    Raises:
        UserError: see `connect_processes`.
    """
    host = _loopback_host(coordinator)
    dual = socket.has_dualstack_ipv6() and host is None
    family = socket.AF_INET
    if dual or (host is not None and ":" in host):
        family = socket.AF_INET6
    port = int(coordinator.rpartition(":")[2])
    try:
        listener = socket.create_server((host or "", port), family=family, dualstack_ipv6=dual)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--coordinator {coordinator}", f"process 0 cannot listen at this port ({error})", "choose another one"
        ) from error
    deadline = time.monotonic() + MEETING_SECONDS
    calls = []
    missing = set(range(1, processes))
    refusal = ""
    listener.settimeout(1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(listener)
        while missing and not refusal:
            try:
                calls.append(stack.enter_context(listener.accept()[0]))
                calls[-1].settimeout(5)
                number, count = map(int, calls[-1].recv(100).split())
            except (OSError, ValueError):  # nobody called, or a different program did
                names = f"process{'es' * (len(missing) > 1)} {', '.join(map(str, sorted(missing)))} of {processes}"
                logger.info("waiting for %s", names)
                listener.settimeout(NOTICE_SECONDS)
                if time.monotonic() > deadline:
                    refusal = f"{names} did not come within {MEETING_SECONDS} s; {_CHECK}"
            else:
                if count != processes or number not in missing:
                    refusal = (
                        f"a process came with --processes {count} --process_id {number}, to process 0 with --processes"
                        f" {processes}; give all the same --processes, and each another --process_id from 0"
                    )
                missing.discard(number)
        for call in calls:
            with contextlib.suppress(OSError):  # the process may have ended
                call.sendall(f"recjax {refusal}".encode())
    if refusal:
        raise UserError(problem=refusal)


def _call_first(coordinator: str, processes: int, process_id: int) -> None:
    """Waits for the answer of process 0, which comes when all processes have called.

    Raises:
        UserError: see `connect_processes`.
    """
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + MEETING_SECONDS
    shown = None
    while time.monotonic() < deadline:
        reason = "no answer"
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=NOTICE_SECONDS) as call:
                call.sendall(f"{process_id} {processes}".encode())
                call.settimeout(2 * MEETING_SECONDS)
                name, _, refusal = call.makefile(errors="replace").read().partition(" ")
            if name == "recjax" and refusal:
                raise UserError(problem=refusal)
            if name == "recjax":
                return
        except (OSError, OverflowError) as error:
            reason = str(error)
        if reason != shown:
            logger.info("waiting for process 0 at %s (%s)", coordinator, reason)
            shown = reason
        time.sleep(0.5)
    raise UserError(
        problem=f"process 0 did not answer at {coordinator} within {MEETING_SECONDS} s ({shown})", remedy=_CHECK
    )


@contextlib.contextmanager
def connected(coordinator: str | None, processes: int | None, process_id: int | None) -> Iterator[None]:
    """A context for a command's processes: they connect first, and if one is lost, the others end at once.

    Args:
        (all): see `connect_processes`.
    """
    connect_processes(coordinator, processes, process_id)
    if not jax.distributed.is_initialized():
        yield
        return
    name = f"error: process {jax.process_index()} of {jax.process_count()}"
    # Without process 0, JAX aborts the other processes before their code runs. This small process then prints the
    # reason.
    reporter = subprocess.Popen(
        [sys.executable, "-ISc", _REPORTER, f"{name} ended without a message of its own; it probably {_LOST}"],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield
        wait_for_all("the end")  # the first process may still write, and JAX's own wait at the end is short
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        late = "was more than 30 s slower or faster than another process, or " if "Gloo context" in reason else ""
        reporter.communicate(b"known")
        _end(f"{name} {late}{_LOST} ({reason})")
    finally:
        reporter.communicate(b"known")


def _end(message: str) -> NoReturn:
    """Ends this process; an ordinary exit would wait for all processes."""
    print(message, file=sys.stderr, flush=True)
    os._exit(1)


def is_first() -> bool:
    """True in the process that writes files and reports."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Returns when every process has called it."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def any_says(yes: bool) -> bool:
    """True if `yes` is true in any process; every process must call this."""
    if jax.process_count() == 1:
        return yes
    return bool(multihost_utils.process_allgather(np.array(yes)).any())


class LateAnswers:
    """`any_says` with the answer one step later, so that no process waits for its devices.

    All processes get the same answer at the same step. A single process gets it at once.
    """

    def __init__(self):
        """Starts without a question."""
        self._asked: jax.Array | None = None

    def any_says(self, yes: bool) -> bool:
        """True if `yes` was true in any process at the call before this one; every process must call this.

        The devices compute the answer after the step's update; the call returns the previous step's answer.
        """
        if jax.process_count() == 1:
            return yes
        mesh = Mesh(np.array(jax.devices()), ("devices",))
        flags = np.full(jax.local_device_count(), yes, np.int32)
        split = NamedSharding(mesh, PartitionSpec("devices"))
        before = self._asked
        with jax.set_mesh(mesh):
            self._asked = _greatest(jax.make_array_from_process_local_data(split, flags))
        return before is not None and bool(before)


_greatest = jax.jit(jnp.max, out_shardings=PartitionSpec())


def smallest_of_all(number: int) -> int:
    """The smallest of all processes' numbers, to about seven digits; every process must call it."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.process_allgather(np.float32(number)).min())


def share(count: int) -> np.ndarray:
    """Indices of this process's share of `count` items; shares have equal sizes, so they may overlap."""
    size = -(-count // jax.process_count())
    return (jax.process_index() * size + np.arange(size)) % count


def gathered(tree: Any, count: int) -> Any:
    """Arrays with the rows of all processes, from each process's `share`; every process must call it."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(lambda x: x[:count], multihost_utils.process_allgather(tree, tiled=True))


def all_names(names: Iterable[str]) -> list[str]:
    """The names of all processes, sorted; a single process keeps its order. Every process must call it."""
    if jax.process_count() == 1:
        return list(names)
    known_names: set[str] = set()
    for pickled in bytes_of_all(pickle.dumps(list(names))):
        known_names.update(pickle.loads(pickled))
    return sorted(known_names)


def bytes_of_all(value: bytes) -> list[bytes]:
    """The values of all processes, in the processes' order; every process must call it."""
    lengths = multihost_utils.process_allgather(np.int32(len(value)))
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: len(value)] = np.frombuffer(value, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def agree(what: str, values: Mapping[str, Any]) -> None:
    """Compares named values over all processes; every process must call it.

    Raises:
        UserError: in all processes, with each name whose values differ, and the values.
    """
    if jax.process_count() == 1:
        return
    by_process = [pickle.loads(pickled) for pickled in bytes_of_all(pickle.dumps(dict(values)))]
    first = by_process[0]
    differences = []
    for number, other in enumerate(by_process[1:], 1):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                differences.append(f"{name}: {other.get(name)!r} in process {number}, {first.get(name)!r} in process 0")
    if differences:
        raise UserError(
            problem=f"the processes of this run differ in {what} ({'; '.join(differences)})",
            remedy="make them the same",
        )


@functools.cache  # a mesh is connected once
def connect_devices(mesh: Mesh) -> None:
    """Connects CPU devices along each set of a mesh's axes; every process must call it.

    Devices that connect when a program first needs them wait only 30 s for the other processes, which may still compile
    that program. Connected devices wait for half an hour.
    """
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return
    wait_for_all("connecting devices")
    axes = [name for name, size in mesh.shape.items() if size > 1]
    axis_sets: list[tuple[str, ...]] = []
    for count in range(1, len(axes) + 1):
        axis_sets += itertools.combinations(axes, count)

    def sums(values: jax.Array) -> list[jax.Array]:
        return [jax.lax.psum(values, axis_set) for axis_set in axis_sets]

    program = jax.shard_map(
        sums, mesh=mesh, in_specs=PartitionSpec(tuple(axes)), out_specs=PartitionSpec(), check_vma=False
    )
    jax.block_until_ready(jax.jit(program)(np.arange(mesh.size)))


def shared_out(compute: Callable[[Sequence[T], int], list[R]], things: Sequence[T]) -> list[R]:
    """`compute(items, 0)`, one result an item, in shares; every process must call it.

    Args:
        compute: function of consecutive items and the index of the first one.
    Raises:
        UserError: raised in all processes if any process raises it.
    """
    agree("problems or demonstrations", {"number": len(things)})
    if jax.process_count() == 1 or len(things) < WORTH_SHARING:
        return compute(things, 0)
    size = -(-len(things) // jax.process_count())
    first = jax.process_index() * size
    results = []
    refused = None
    try:
        results = compute(things[first : first + size], first)
    except UserError as error:
        refused = error
    message = None if refused is None else str(refused)
    all_results = []
    for pickled in bytes_of_all(pickle.dumps((results, message))):
        share_results, share_message = pickle.loads(pickled)
        if share_message:
            raise UserError(problem=share_message) from refused
        all_results += share_results
    return all_results


def from_first(act: Callable[[], T]) -> T:
    """Returns or raises the result of the first process's `act()` in every process; every process must call it.

    The result travels over the connections to the coordinator and not over devices, so that no process waits for them.

    Args:
        act: called only in the first process, with no time limit; its result can be pickled.
    Raises:
        UserError: `act` raised it. The first process raises any other error too; other processes raise a RuntimeError.
    """
    if jax.process_count() == 1:
        return act()
    # Orbax has the client that JAX hides.
    client = multihost.get_jax_distributed_client()
    folder = f"recjax/from_first/{next(_calls)}"
    if is_first():
        try:
            result = act()
        except Exception as error:
            message = pickle.dumps((None, isinstance(error, UserError), str(error)))
            client.key_value_set_bytes(f"{folder}/result", message)
            raise
        client.key_value_set_bytes(f"{folder}/result", pickle.dumps((result, None, None)))
        return result
    content = None
    while content is None:
        try:
            content = client.blocking_key_value_get_bytes(f"{folder}/result", SIGNAL_SECONDS * 1000)
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("DEADLINE_EXCEEDED"):
                raise
    result, is_user_error, message = pickle.loads(content)
    if client.key_value_increment(f"{folder}/read", 1) == jax.process_count() - 1:
        client.key_value_delete(folder)
    if message is None:
        return result
    if is_user_error:
        raise UserError(problem=message)
    raise RuntimeError(message)


_calls = itertools.count()
