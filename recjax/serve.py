"""Serves a policy with OpenAI's API, and records completions in an experience store.

    python -m recjax.serve --run runs/NAME [--step N]
    python -m recjax.serve --model FOLDER
    python -m recjax.serve --follow runs/NAME

With --follow the server loads each new checkpoint of a run between two rounds of tokens. The server listens on
127.0.0.1 unless --host sets another address, and stops at SIGTERM or Ctrl-C. See docs/serving.md for details.
"""

import dataclasses
import importlib.util
import logging
import math
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import jax
from absl import flags

from recjax.config import Config
from recjax.errors import UserError
from recjax.hub.policy import Policy
from recjax.hub.weights import load_pretrained, read_config, warn_beyond_context
from recjax.models.decoder import abstract_params
from recjax.models.placement import put_params
from recjax.remote.server import KEY_VARIABLE, read_keys
from recjax.rollout.requests import Weights
from recjax.runs.followed_run import FollowedRun
from recjax.runs.policies import for_sampling, open_policy
from recjax.runs.stored_runs import run_config
from recjax.runtime.cache import keep_compiled_programs
from recjax.runtime.console import command, start
from recjax.store.database import store_name
from recjax.training.mesh import make_mesh

FLAGS = flags.FLAGS
LOOPBACK = ("127.0.0.1", "localhost", "::1")

logger = logging.getLogger(__name__)


def load(
    run: str | None, step: int | None, model: str | None, follow: str | None
) -> tuple[str, Policy, Weights, Callable[[], Weights | None] | None]:
    """Loads a run's checkpoint, a model, or a followed run's newest checkpoint, and waits for its first one.

    Returns:
        A name, the policy, its weights on the devices, and a function that returns newer weights if there are any; None
        instead of the function if the command follows no run.
    Raises:
        UserError: not exactly one of `run`, `model` and `follow` is given, or it cannot be read.
    """
    named = [name for name, value in (("--run", run), ("--model", model), ("--follow", follow)) if value is not None]
    if len(named) != 1:
        listed = " and ".join(named) or "none"
        raise UserError(problem="give exactly one of --run, --model and --follow", remedy=f"found {listed}")
    if step is not None and run is None:
        raise UserError("--step", f"applies only to --run, not to {named[0]}", "remove it, or give --run", value=step)
    if model is not None:
        opened = open_policy(model, Config.model_construct(output=""))
        return opened.name, opened.policy, Weights(opened.params, opened.version), None
    name = Path(str(run or follow)).resolve().name
    if run is not None:
        opened = open_policy(run, run_config(Path(run)), step)
        return name, opened.policy, Weights(opened.params, opened.version), None
    checkpoints = FollowedRun(Path(str(follow)))
    mesh = jax.sharding.get_mesh()

    def on_devices(weights: Weights) -> Weights:
        with jax.set_mesh(mesh):  # each thread has its own current mesh
            params = for_sampling(checkpoints.policy, put_params(weights.params))
        return weights._replace(params=params)

    def newer() -> Weights | None:
        weights = checkpoints.newer()
        return None if weights is None else on_devices(weights)

    weights = on_devices(checkpoints.first())
    return name, checkpoints.policy, weights, newer


def pushed_reader(root: Path, policy: Policy) -> Callable[[str], dict]:
    """A function that reads the parameters in a folder within `root` with weights of the same model.

    The function raises a UserError if the folder is elsewhere, too large, damaged, or has a different model.
    """
    mesh = jax.sharding.get_mesh()
    root = root.resolve()
    plain = dataclasses.replace(policy.decoder.config, lora=None)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(plain)))
    most_bytes = 4 * parameters * 21 // 20 + 2**26  # float32, and some space for headers and other files

    def read(name: str) -> dict:
        folder = Path(name).resolve()  # follows links
        if not (folder.is_relative_to(root) and folder.is_dir()):
            raise UserError(f"{name!r:.200}", "is no folder in this server's --push_root", "write the weights there")
        files = list(folder.rglob("*"))
        if any(file.is_symlink() for file in files):
            raise UserError(f"{name!r:.200}", "contains links", "write the files themselves")
        size = sum(file.stat().st_size for file in files)
        if size > most_bytes:
            raise UserError(
                f"{name!r:.200}", f"has {size} bytes, and this model {most_bytes} at most", "push only its weights"
            )
        pushed = read_config(folder)
        if pushed != plain:
            raise UserError(f"{name!r:.200}", f"is another model, {pushed}, than the served {plain}", "push that")
        with jax.set_mesh(mesh):  # each thread has its own current mesh
            return for_sampling(policy, load_pretrained(folder)[1])

    return read


def listen(host: str, port: int, seconds: float) -> socket.socket:
    """Opens a listening socket.

    Args:
        seconds: time after which the system closes a connection whose client does not take its reply.
    Raises:
        UserError: the address is in use, or does not belong to this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port}", error.strerror or str(error), "give another --port, or 0 for any free port"
        ) from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux has it; connections inherit it
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(min(1000 * seconds, 2**31 - 1)))
    return listening


def check_extra() -> None:
    """Checks that the packages for serving are installed.

    Raises:
        UserError: a package is missing.
    """
    for package in ("starlette", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise UserError(problem=f"the server needs the package {package}", remedy='pip install -e ".[serve]"')


@command
def main(argv: list[str]) -> None:
    """Reads the flags, loads the policy and serves it."""
    if len(argv) > 1:
        raise UserError(f"{argv[1]!r}", "unknown argument", "give only flags, such as --run runs/NAME")
    if FLAGS.push_root and FLAGS.follow:
        raise UserError("--push_root", "the weights are those of the run of --follow", "remove one of the two")
    check_extra()
    # Not at module level: these modules need the packages of the extra.
    from recjax.serving.guards import Guarded
    from recjax.serving.recorder import Recording
    from recjax.serving.running import Serving, address, answering_not_ready, build_server, serve
    from recjax.serving.sampler import Limits

    keys = read_keys(FLAGS.api_key_file)
    if FLAGS.push_root and not keys:
        raise UserError(f"--push_root {FLAGS.push_root}", f"needs --api_key_file, or a key in ${KEY_VARIABLE}")
    if FLAGS.host not in LOOPBACK and not keys:
        logger.warning("--host %s without --api_key_file: anyone who reaches this machine can use it", FLAGS.host)
    hosts = LOOPBACK if FLAGS.host in LOOPBACK else None  # None: requests may name any host
    guarded = Guarded(keys, hosts, FLAGS.max_body_bytes, FLAGS.client_seconds)
    listening = listen(FLAGS.host, FLAGS.port, FLAGS.client_seconds)
    keep_compiled_programs()
    startup = f"waits for the first checkpoint of {FLAGS.follow}" if FLAGS.follow else "loads its model"
    with jax.set_mesh(make_mesh(Config.model_construct(output="").mesh)):
        with answering_not_ready(startup, guarded, listening):
            name, policy, weights, newer = load(FLAGS.run, FLAGS.step, FLAGS.model, FLAGS.follow)
            name = FLAGS.name or name
            recording = None
            recording_note = "recording is off"
            if FLAGS.recording:
                recording = Recording(
                    store=FLAGS.record or f"served/{name}.db",
                    source=name,
                    prompts=FLAGS.record_prompts,
                    reward_seconds=FLAGS.reward_seconds,
                    keep_days=FLAGS.keep_days,
                    sessions=FLAGS.max_sessions,
                    server=FLAGS.server_name,
                )
                recording_note = f"recording in {store_name(recording.store)}"
            warn_beyond_context(policy.tokenizer.name_or_path, FLAGS.max_context_tokens, "--max_context_tokens")
            limits = Limits(
                context=FLAGS.max_context_tokens,
                completion=FLAGS.max_completion_tokens,
                slots=FLAGS.slots,
                queue=FLAGS.queue,
                distributions=FLAGS.distributions,
            )
            serving = Serving(
                name=name,
                policy=policy,
                weights=weights,
                limits=limits,
                guarded=guarded,
                recording=recording,
                seed=secrets.randbits(64) if FLAGS.seed is None else FLAGS.seed,
                newer=newer,
                pushed=pushed_reader(Path(FLAGS.push_root), policy) if FLAGS.push_root else None,
            )
            server = build_server(
                serving, f"serving {name}, version {weights.version}, at {address(listening)}; {recording_note}"
            )
        serve(server, guarded, listening)


def define_flags() -> None:
    """Defines the command's flags."""
    flags.DEFINE_string("run", None, "Folder of a training run whose checkpoint to serve.")
    flags.DEFINE_integer("step", None, "Checkpoint to serve; default: the newest.")
    flags.DEFINE_string("model", None, "Hugging Face folder or hub name, instead of a run.")
    flags.DEFINE_string("follow", None, "Folder of a run in training; serves its newest checkpoint.")
    flags.DEFINE_string("push_root", None, "Folder from which clients with a key may load new weights; default: none.")
    flags.DEFINE_string("name", None, "Name of the model in requests; default: the name of the run or folder.")
    flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0: all addresses of the machine.")
    flags.DEFINE_integer("port", 8000, "Port; 0: any free port.", lower_bound=0, upper_bound=65535)
    flags.DEFINE_string("api_key_file", None, "File of API keys, one per line; each request then needs a key.")
    flags.DEFINE_integer("slots", 16, "Completions that are sampled together.", lower_bound=1)
    flags.DEFINE_integer("queue", 256, "Completions that may wait for a slot; more are refused.", lower_bound=0)
    flags.DEFINE_integer("max_context_tokens", 2048, "Most tokens of a prompt with its completion.", lower_bound=2)
    flags.DEFINE_integer("max_completion_tokens", 1024, "Most tokens of a completion.", lower_bound=1)
    flags.DEFINE_integer(
        "distributions", 16, "Most combinations of temperature, top_k, top_p and min_p; each compiles programs.", 1
    )
    flags.DEFINE_integer("max_body_bytes", 1_048_576, "Most bytes of a request's body.", lower_bound=1)
    flags.DEFINE_float(
        "client_seconds",
        60,
        "Time limit for a client to send its request, and to receive each piece of a reply.",
        lower_bound=0.1,
    )
    flags.DEFINE_integer("max_sessions", 1024, "Most active sessions.", lower_bound=1)
    flags.DEFINE_integer("seed", None, "Seed for requests without one; default: random at each start.", lower_bound=0)
    flags.DEFINE_bool("recording", True, "True to record all completions.")
    flags.DEFINE_string("record", None, "File or URL of the experience store; default: served/NAME.db.")
    flags.DEFINE_bool("record_prompts", True, "True to record prompts; training needs them.")
    flags.DEFINE_float(
        "reward_seconds", 3600, "Seconds that a session waits for its reward after its last turn.", lower_bound=0
    )
    flags.DEFINE_float("keep_days", None, "Age in days at which completions are deleted.", lower_bound=0)
    flags.DEFINE_string("server_name", "", "Name of this server, if several servers record into one database.")


if __name__ == "__main__":
    define_flags()
    start(main)
