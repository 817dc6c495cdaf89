"""Two processes train as one does; when one is killed the other says so and ends, and the same command goes on."""

import contextlib
import json
import logging
import pickle
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pandas as pd
import pytest
from jax.experimental import multihost_utils

from recjax.config import load_config, to_yaml
from recjax.errors import UserError
from recjax.evaluate import evaluate
from recjax.generate_experience import generate
from recjax.hub.tokenizers import character_tokenizer
from recjax.logs.metrics import read_metrics
from recjax.runs.folder import check_processes
from recjax.runtime import hosts
from recjax.tasks.problems import Problem
from recjax.tasks.prompts import encode_problems
from tests.closeness import assert_same_logprobs
from tests.commands import said, two_of
from tests.experience.rows import read_columns
from tests.training.tiny_run import TINY, train, without_times

# Five prompts: neither two processes nor four devices divide them. Evaluation takes the program that training draws by.
OPTIONS = ["rollout.prompts_per_step=5", "evaluation.every=0", "evaluation.samples=4", "training.checkpoint_every=5"]

# Two tasks, of which a batch has four prompts and one.
SUMS = 'reward: "tests.training.tiny_run:digit_share", arithmetic: {problems: ["1..9 + 1..9"], template: "{a}{op}{b}="}'
MIXTURE = ["task.arithmetic=null", "task.reward=null", f"task.mixture.sums={{{SUMS}, weight: 4}}"]
MIXTURE += [f"task.mixture.more={{{SUMS.replace('1..9', '2..8')}}}"]

FLAGS = ("--coordinator", "--processes", "--process_id")


# A command that counts a silent process as lost after a quarter of the time.
IMPATIENT = """
import runpy, sys
from recjax.runtime import hosts
hosts.LOST_SECONDS = 15
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def start(tmp_path, *options, command="train", flags=()):
    """Two processes of a command with two devices each; what they say goes to files."""
    arguments = ["-c", IMPATIENT, f"recjax.{command}", "--config", str(tmp_path / "tiny.yaml"), *OPTIONS, *options]
    return two_of(tmp_path, [*arguments, *flags, "mesh.data=2", "mesh.fsdp=2"], FLAGS)


def last_line(tmp_path, number):
    """The error at the end of a log; the process that writes it for an aborted one may need a moment."""
    deadline = time.monotonic() + 30
    while "\n" in (line := said(tmp_path, number).rpartition("\nerror: ")[2].strip()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return line


@pytest.mark.parametrize("coordinator", ["localhost", "localhost:", "10.0.0.1:port"])
def test_a_coordinator_without_a_port_is_refused(coordinator):
    with pytest.raises(ValueError, match=f"--coordinator {coordinator}: has no port; give HOST:PORT"):
        hosts.connect_processes(coordinator, 2, 0)


def errors_of(port, *calls):
    """The error of `meet` in each of several processes, which are threads here; None without one."""

    def error_of(call):
        try:
            return hosts.connect_processes(f"127.0.0.1:{port}", *call)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(error_of, calls))


@pytest.fixture
def port(monkeypatch):
    """A free port, for processes that wait for two seconds."""
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments, **timeouts: None)
    monkeypatch.setattr(hosts, "MEETING_SECONDS", 2)
    monkeypatch.setattr(hosts, "NOTICE_SECONDS", 0.5)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_processes_meet_in_any_order_and_ignore_other_programs(port, caplog):
    caplog.set_level(logging.INFO, "recjax")
    with ThreadPoolExecutor() as pool:
        others = pool.submit(errors_of, port, (3, 2), (3, 1))
        time.sleep(0.2)
        first = pool.submit(errors_of, port, (3, 0))
        with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1")
        assert first.result() == [None] and others.result() == [None, None]
    assert f"waiting for process 0 at 127.0.0.1:{port} ([Errno 111] Connection refused)" in caplog.text


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([(4, 0), (4, 2)], "processes 1, 3 of 4 did not come within 2 s; check --coordinator"),
        ([(2, 0), (3, 1)], "came with --processes 3 --process_id 1, to process 0 with --processes 2; give all the"),
        ([(3, 0), (3, 1), (3, 1)], "came with --processes 3 --process_id 1, to process 0"),
        pytest.param(
            [(2, 1)],
            "process 0 did not answer at 127.0.0.1:PORT within 2 s ([Errno 111] Connection refused); check",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_processes_that_wait_for_another_one_learn_which(port, calls, message):
    errors = errors_of(port, *calls)
    assert all(error and message.replace("PORT", str(port)) in error for error in errors), errors


def test_a_port_in_use_is_refused(port):
    with socket.create_server(("127.0.0.1", port)):
        (error,) = errors_of(port, (2, 0))
    assert "process 0 cannot listen at this port ([Errno 98] Address already in use" in error


def test_missing_processes_end_with_one_line(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments, **timeouts: ended.wait(20))
    monkeypatch.setattr(hosts, "MEETING_SECONDS", 0.1)
    monkeypatch.setattr(hosts, "_end", lambda message: (messages.append(message), ended.set()))
    messages = []
    hosts.connect_processes(None, None, None)
    assert len(messages) == 1 and messages[0].startswith("error: not all processes came within 0.1 s; check")


# Trains; process 1 has another version of JAX if the first argument says so.
DIFFERENT = """
import runpy, sys
from recjax.runs import provenance

version = provenance.version
if sys.argv.pop(1) == "resumed" and sys.argv[-1] == "1":
    provenance.version = lambda package: "9.9" if package == "jax" else version(package)
runpy.run_module("recjax.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        (
            "resumed",
            (
                "optimizer.learning_rate: 0.5 in process 1, 0.01 in process 0",
                f"packages.jax: '9.9' in process 1, '{jax.__version__}' in process 0",
                "rewards_here: '.*' in process 1, '.*' in process 0",
            ),
        ),
        ("no module", ("rewards_here: None in process 1, '.*' in process 0",)),
        (
            "answer",
            (r"problems of task.file = 'sums.jsonl': '\d+ with .*' in process 1, '\d+ with .*' in process 0",),
        ),
        ("rows", (r"problems of task.file = 'sums.jsonl': '\d+ with .*' in process 1, '\d+ with .*' in process 0",)),
    ],
)
def test_processes_that_differ_end_with_one_error(tmp_path, ended, kind, messages):
    (tmp_path / "tiny.yaml").write_text(TINY)
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder, other in zip(folders, ("", kind), strict=True):
        folder.mkdir()
        rows = [
            {"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(60 if other == "rows" else 40)
        ]
        rows[3]["answer"] = "5" if other == "answer" else "4"
        (folder / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        if other != "no module":
            code = f"def same(completions, **columns):\n    return [{int(other != 'resumed')}] * len(completions)\n"
            (folder / "rewards_here.py").write_text(code)
    options = [f"output={tmp_path / 'two'}", "task.arithmetic=null", "task.file.train=sums.jsonl", "mesh.data=4"]
    options += ["task.reward=rewards_here:same"]
    if kind == "resumed":
        (tmp_path / "two").mkdir()
        (tmp_path / "two" / "config.yaml").write_text(to_yaml(load_config(tmp_path / "tiny.yaml", options)))
    own = ((), ("optimizer.learning_rate=0.5",) if kind == "resumed" else ())
    arguments = ["-c", DIFFERENT, kind, "--config", str(tmp_path / "tiny.yaml"), *options]
    ended += (started := two_of(tmp_path, arguments, FLAGS, own, folders))
    assert [process.wait(120) for process in started] == [1, 1], said(tmp_path, 0) + said(tmp_path, 1)
    errors = [said(tmp_path, number).splitlines()[-1] for number in range(2)]
    assert errors[0] == errors[1] and errors[0].startswith("error: the processes of this run differ in ")
    assert all(re.search(message, errors[0]) for message in messages), errors[0]


# Process 1 is late for a program, or waits while process 0 is killed.
LATE = """
import os, signal, sys, time

import jax
import numpy as np
from jax.sharding import PartitionSpec

from recjax.runtime import hosts
from recjax.config import MeshConfig
from recjax.training.mesh import make_mesh

what, coordinator, _, number = sys.argv[1:]
with hosts.connected(coordinator, 2, int(number)):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2))
    if what != "unconnected":
        hosts.connect_devices(mesh)
    if what == "killed" and number == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if number == "1":
        time.sleep(35)
    options = {"mesh": mesh, "in_specs": PartitionSpec(("data", "fsdp")), "out_specs": PartitionSpec()}
    total = jax.jit(jax.shard_map(lambda values: jax.lax.psum(values, ("data", "fsdp")), **options))
    print("found", total(np.arange(4.0)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["connected", "unconnected", "killed"])
def test_late_processes_are_awaited_and_lost_ones_named(tmp_path, ended, what):
    ended += (started := two_of(tmp_path, ["-c", LATE, what]))
    codes = [process.wait(120) for process in started]
    if what == "connected":
        assert codes == [0, 0] and all("found [6.]" in said(tmp_path, number) for number in range(2))
        return
    if what == "unconnected":
        assert codes[0] == 1 and "process 0 of 2 was more than 30 s slower or faster" in said(tmp_path, 0)
    assert codes[1] != 0
    assert re.match("process 1 of 2 .*lost contact with another process", last_line(tmp_path, 1))


@pytest.mark.slow
def test_two_processes_equal_one_and_resume_after_kills(tmp_path, ended):
    (tmp_path / "tiny.yaml").write_text(TINY)
    metrics = tmp_path / "two" / "metrics.jsonl"
    # Small steps: Adam turns rounding into steps, which add up.
    options = [*MIXTURE, "optimizer.learning_rate=1e-4"]
    first, second = started = start(tmp_path, *options, "training.steps=4000", f"output={tmp_path / 'two'}")
    ended += started
    deadline = time.monotonic() + 240
    while len(read_metrics(metrics)) < 7 and time.monotonic() < deadline and first.poll() is None:
        time.sleep(0.02)
    second.send_signal(signal.SIGKILL)
    assert first.wait(hosts.LOST_SECONDS + 30) not in (0, -signal.SIGKILL), said(tmp_path, 0)
    # Where both were writing a checkpoint, it is JAX that finds out, and ends the process itself.
    assert re.match("process 0 of 2 .*lost contact with another process", last_line(tmp_path, 0))
    assert len(read_metrics(metrics)) >= 7 and "step/s" not in said(tmp_path, 1)

    ended += (again := start(tmp_path, *options, "training.steps=8", f"output={tmp_path / 'two'}"))
    assert [process.wait(240) for process in again] == [0, 0], said(tmp_path, 0) + said(tmp_path, 1)
    assert "held-out accuracy" in said(tmp_path, 0) and "held-out accuracy" not in said(tmp_path, 1)
    alone = train(
        load_config(tmp_path / "tiny.yaml", [*OPTIONS, *options, "training.steps=8", f"output={tmp_path / 'one'}"])
    )
    together = read_metrics(metrics)
    assert [row["step"] for row in together] == list(range(9)) and "reward/more" in together[-1]
    for one, two in zip(without_times(alone), without_times(together), strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            near = value if isinstance(value, dict) else pytest.approx(value, rel=2e-3, abs=1e-4)
            assert two[name] == near, (name, one["step"])
    for name in ("before", "after"):
        one, two = ((tmp_path / run / "samples" / f"{name}.jsonl").read_text() for run in ("one", "two"))
        assert [json.loads(line) for line in one.splitlines()] == [json.loads(line) for line in two.splitlines()]
    assert json.loads((tmp_path / "two" / "summary.json").read_text())["steps"] == 8


@pytest.mark.slow
def test_sigterm_to_one_process_stops_both_after_one_step(tmp_path, ended):
    (tmp_path / "tiny.yaml").write_text(TINY)
    output, options = tmp_path / "two", ["training.checkpoint_every=400", "regime.sync_interval=3"]
    ended += (started := start(tmp_path, "training.steps=400", f"output={output}", *options))
    deadline = time.monotonic() + 240
    while len(read_metrics(output / "metrics.jsonl")) < 7 and time.monotonic() < deadline:
        time.sleep(0.02)
    started[1].send_signal(signal.SIGTERM)
    assert [process.wait(60) for process in started] == [128 + signal.SIGTERM] * 2, said(tmp_path, 0)
    done = read_metrics(output / "metrics.jsonl")[-1]["step"]
    assert 6 <= done < 400 and (output / "checkpoints" / str(done)).is_dir()
    assert all(f"stopped after step {done};" in said(tmp_path, number) for number in range(2))

    ended += (again := start(tmp_path, f"training.steps={done + 3}", f"output={output}", *options))
    assert [process.wait(240) for process in again] == [0, 0], said(tmp_path, 0) + said(tmp_path, 1)
    assert [row["step"] for row in read_metrics(output / "metrics.jsonl")] == list(range(done + 4))


@pytest.mark.campaign
def test_two_processes_evaluate_and_sample_as_one(tmp_path, ended):
    (tmp_path / "tiny.yaml").write_text(TINY)
    config = load_config(tmp_path / "tiny.yaml", OPTIONS)

    def run(command, *flags):
        ended.extend(started := start(tmp_path, command=command, flags=flags))
        assert [process.wait(240) for process in started] == [0, 0], said(tmp_path, 0) + said(tmp_path, 1)

    run("evaluate", "--output", str(tmp_path / "two"))
    evaluate(config, None, str(tmp_path / "one"))
    one, two = (pd.read_parquet(tmp_path / name / "samples.parquet") for name in ("one", "two"))
    pd.testing.assert_frame_equal(one, two, check_like=True)
    one, two = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two"))
    assert one == two
    assert "always answering" in said(tmp_path, 0) and "always answering" not in said(tmp_path, 1)

    generated = [tmp_path / f"store_{name}" for name in ("one", "two")]
    run("generate_experience", "--output", str(generated[1]), "--steps", "3")
    assert "3 new batches" in said(tmp_path, 0) and "new batches" not in said(tmp_path, 1)
    generate(config, generated[0], 3, None, None, "initial")
    rows = [read_columns(folder) for folder in generated]
    assert len(rows[0]) == 3 * 5 * config.rollout.group_size
    for ours, theirs in zip(*rows, strict=True):
        assert (ours.id, ours.completion, ours.reward) == (theirs.id, theirs.completion, theirs.reward)
        assert_same_logprobs(ours.behavior_logprobs, theirs.behavior_logprobs)


# Exchanges things in every way, and prints what came of it.
EXCHANGES = """
import sys, time
from recjax.runtime import hosts
from recjax.errors import UserError

coordinator, _, number = sys.argv[1:]
hosts.connect_processes(coordinator, 2, int(number))
hosts.SIGNAL_SECONDS = 1

def slowly():
    time.sleep(2.5)
    return number

def fails(error):
    def act():
        raise error
    try:
        hosts.from_first(act)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"

late = hosts.LateAnswers()
found = [
    hosts.bytes_of_all(b"ab" * 3 ** int(number)),
    [late.any_says(yes) for yes in (False, number == "1", False, False)],
    hosts.from_first(slowly),
    len(hosts.from_first(lambda: bytes(20_000_000))),
    [fails(error) for error in (UserError("wrong"), ValueError("broken"))],
]
print("found", found)
"""


@pytest.mark.slow
def test_two_processes_exchange_what_they_have(tmp_path, ended):
    ended += (started := two_of(tmp_path, ["-c", EXCHANGES]))
    assert [process.wait(120) for process in started] == [0, 0], said(tmp_path, 0) + said(tmp_path, 1)
    expected = [[b"ab", b"ababab"], [False, False, True, False], "0", 20_000_000]
    for number, fault in enumerate(("ValueError: broken", "RuntimeError: broken")):
        found = [*expected, ["UserError: wrong", fault]]
        assert f"found {found}" in said(tmp_path, number), said(tmp_path, number)


# Encodes many problems, of which the last lacks what `fault` says, and writes what came of it.
ENCODES = """
import pickle, sys
from recjax.runtime import hosts
from recjax.hub.tokenizers import character_tokenizer
from recjax.tasks import prompts
from recjax.tasks.problems import Problem
from tests.closeness import assert_same_logprobs

output, fault, coordinator, _, number = sys.argv[1:]
hosts.connect_processes(coordinator, 2, int(number))
hosts.WORTH_SHARING = 7
tokenizer = character_tokenizer("0123456789+=")
tokenizer.chat_template = "{{ messages[0].content }}="
problems = [Problem([{"role": "user", "content": f"1+{i}"}] if i % 2 else f"1+{i}=", str(i)) for i in range(85, 112)]
problems[-1] = Problem("?" if fault == "vocabulary" else "2=", "2")
encoded, encode = [], prompts.encode_prompts
def counted(tokenizer, texts, first, **options):
    encoded.append(len(texts))
    return encode(tokenizer, texts, first, **options)


prompts.encode_prompts = counted
try:
    fitting = [problem.answer for problem in prompts.fitting(problems, tokenizer, 5)]
    tokens, mask, texts, *_ = everything = prompts.encode_problems(problems, tokenizer, None)
    found = fitting, tokens, mask, texts, everything.answers
except ValueError as error:
    found = str(error)
pickle.dump((encoded, found), open(f"{output}/{number}.pickle", "wb"))
"""


@pytest.mark.campaign
@pytest.mark.parametrize("fault", ["", "vocabulary"])
def test_two_processes_share_out_the_problems_that_they_encode(tmp_path, ended, fault):
    ended += (started := two_of(tmp_path, ["-c", ENCODES, str(tmp_path), fault]))
    assert [process.wait(120) for process in started] == [0, 0], said(tmp_path, 0) + said(tmp_path, 1)
    (one, found), (two, also) = (pickle.loads((tmp_path / f"{number}.pickle").read_bytes()) for number in range(2))
    if fault:
        assert found == also == "prompt 26, '?' has text outside the tokenizer's vocabulary: '?'"
        return
    assert one == [14, 14] and two == [13, 13]
    tokenizer = character_tokenizer("0123456789+=")
    answers = [*map(str, range(85, 111)), "2"]
    prompts = [*(f"1+{answer}=" for answer in answers[:-1]), "2="]
    expected = encode_problems([Problem(prompt, "") for prompt in prompts], tokenizer, None)
    for fitting, tokens, mask, texts, those_of_all in (found, also):
        assert fitting == [*answers[:15], "2"] and texts == prompts and those_of_all == answers
        np.testing.assert_array_equal(tokens, expected.tokens)
        np.testing.assert_array_equal(mask, expected.mask)


def in_each_of_two(monkeypatch, compute):
    """What `compute` gives or raises in each of two processes, which exchange bytes."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    given, found = [], []

    def gives(own):
        given.append(own)
        raise InterruptedError

    for exchange in (gives, lambda own: given):
        monkeypatch.setattr(hosts, "bytes_of_all", exchange)
        for number in range(2):
            monkeypatch.setattr(jax, "process_index", lambda number=number: number)
            try:
                found.append(compute())
            except (InterruptedError, ValueError) as error:
                found.append(error)
    return found[2:]


def test_processes_may_differ_in_output_alone(monkeypatch, tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    monkeypatch.setattr(hosts, "connect_devices", lambda mesh: None)

    def compared(*options):
        def compare():
            own = [option.format(jax.process_index()) for option in options]
            return check_processes(load_config(tmp_path / "tiny.yaml", own))

        return [error and str(error) for error in in_each_of_two(monkeypatch, compare)]

    assert compared("output=runs/{}", "grading.workers=1{}") == [None, None]
    expected = (
        "config, versions or code (rollout.group_size: 41 in process 1, 40 in process 0; seed: 1 in process 1, 0 in"
    )
    errors = compared("seed={}", "rollout.group_size=4{}")
    assert errors[0] == errors[1] and expected in errors[0]


def test_shared_work_is_computed_once_and_in_order(monkeypatch):
    computed = []

    def squares(numbers, first):
        computed.append((first, len(numbers)))
        if 49 in numbers:
            raise UserError(f"{first + numbers.index(49)} is wrong")
        return [number**2 for number in numbers]

    monkeypatch.setattr(hosts, "WORTH_SHARING", 5)
    monkeypatch.setattr(hosts, "agree", lambda what, own: None)
    things = [3, 1, 4, 1, 5]
    assert in_each_of_two(monkeypatch, lambda: hosts.shared_out(squares, things)) == [[9, 1, 16, 1, 25]] * 2
    assert computed == [(0, 3), (3, 2)] * 2
    errors = in_each_of_two(monkeypatch, lambda: hosts.shared_out(squares, [*things, 49]))
    assert [str(error) for error in errors] == ["5 is wrong"] * 2
    assert hosts.shared_out(squares, things[:4]) == [9, 1, 16, 1] and computed[-1] == (0, 4)


def test_shares_have_equal_sizes_and_cover_everything(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    things, shares = np.arange(5) * 10, []
    for number in range(3):
        monkeypatch.setattr(jax, "process_index", lambda number=number: number)
        shares.append(things[hosts.share(5)])
    assert {len(share) for share in shares} == {2}
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda tree, tiled: np.concatenate(shares))
    np.testing.assert_array_equal(hosts.gathered(shares[0], 5), things)


def test_late_answers_arrive_one_call_later(monkeypatch):
    """What is read has been asked for before the update that is under way, so nobody waits for that."""
    done = []

    class OnDevices:
        def __init__(self, yes):
            self.yes = yes
            done.append(f"asks {yes}")

        def __bool__(self):
            done.append(f"reads {self.yes}")
            return self.yes

    alone = hosts.LateAnswers()
    assert [alone.any_says(yes) for yes in (False, True)] == [False, True]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts, "_greatest", lambda flags: OnDevices(bool(np.asarray(flags).max())))
    late = hosts.LateAnswers()
    assert [late.any_says(yes) for yes in (False, True, False)] == [False, False, True]
    assert done == ["asks False", "asks True", "reads False", "asks False", "reads True"]


def test_one_process_shares_with_nobody():
    hosts.connect_processes(None, 1, None)
    assert hosts.is_first() and hosts.any_says(True) and not hosts.any_says(False)
    np.testing.assert_array_equal(hosts.share(3), [0, 1, 2])


def test_half_of_the_flags_is_refused(monkeypatch):
    def initialize(*arguments, **timeouts):
        raise ValueError("The process id of the current process must be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    hosts.connect_processes(None, None, None)
    with pytest.raises(ValueError, match="--processes 2 --process_id None: .* Give all three"):
        hosts.connect_processes("127.0.0.1:1", 2, None)


@pytest.mark.parametrize(
    ("coordinator", "bound"),
    [("127.0.0.1:{}", "127.0.0.1"), ("localhost:{}", "127.0.0.1"), ("[::1]:{}", "::1"), ("cluster-head:{}", "")],
)
def test_a_loopback_coordinator_listens_on_loopback_alone(monkeypatch, coordinator, bound):
    create, places, arguments = socket.create_server, [], {}
    coordinator = coordinator.format(free_port())

    def created(place, **options):
        places.append(place[0])
        return create(place, **options)

    def initialize(*_, **named):
        arguments.update(named)
        raise RuntimeError("enough")

    monkeypatch.setattr(socket, "create_server", created)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    meeting = threading.Thread(target=lambda: hosts._call_first(coordinator.replace("cluster-head", "127.0.0.1"), 2, 1))
    meeting.start()
    with pytest.raises(RuntimeError, match="enough"):
        hosts.connect_processes(coordinator, 2, 0)
    meeting.join(20)
    assert places == [bound]
    assert arguments["coordinator_bind_address"] == (coordinator if bound else None)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
