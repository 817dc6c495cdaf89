"""Two processes train as one does; when one is killed the other says so and ends, and the same command goes on."""

import json
import pickle
import re
import signal
import time

import jax
import numpy as np
import pandas as pd
import pytest
from jax.experimental import multihost_utils

from recjax import hosts
from recjax.config import load_config
from recjax.evaluate import evaluate
from recjax.generate_experience import generate
from recjax.hub.tokenizers import character_tokenizer
from recjax.tasks.problems import Problem
from recjax.tasks.prompts import encode_problems
from recjax.training.metrics import read_metrics
from tests.commands import said, two_of
from tests.experience.rows import read_columns
from tests.training.tiny_run import TINY, train, without_times

# Five prompts: neither two processes nor four devices divide them. Evaluation takes the program that training draws by.
OPTIONS = ["rollout.prompts_per_step=5", "evaluation.every=0", "evaluation.samples=4", "training.checkpoint_every=5"]

# Two tasks, of which a batch has four prompts and one.
SUMS = 'reward: "tests.training.tiny_run:digit_share", arithmetic: {problems: ["1..9 + 1..9"], template: "{a}{op}{b}="}'
MIXTURE = ["task.arithmetic=null", "task.reward=null", f"task.mixture.sums={{{SUMS}, weight: 4}}"]
MIXTURE += [f"task.mixture.more={{{SUMS.replace('1..9', '2..8')}}}"]


# A command that counts a silent process as lost after a quarter of the time.
IMPATIENT = """
import runpy, sys
from recjax import hosts
hosts.LOST_SECONDS = 15
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def start(tmp_path, *options, command="train", flags=()):
    """Two processes of a command with two devices each; what they say goes to files."""
    arguments = ["-c", IMPATIENT, f"recjax.{command}", "--config", str(tmp_path / "tiny.yaml"), *OPTIONS, *options]
    names = ("--coordinator", "--processes", "--process_id")
    return two_of(tmp_path, [*arguments, *flags, "mesh.data=2", "mesh.fsdp=2"], names)


@pytest.mark.parametrize("coordinator", ["localhost", "localhost:", "10.0.0.1:port"])
def test_a_coordinator_without_a_port_is_refused(coordinator):
    with pytest.raises(ValueError, match=f"--coordinator {coordinator}: has no port; give HOST:PORT"):
        hosts.meet(coordinator, 2, 0)


@pytest.mark.slow
def test_two_processes_are_as_one_and_go_on_after_one_was_killed(tmp_path, ended):
    (tmp_path / "tiny.yaml").write_text(TINY)
    metrics = tmp_path / "two" / "metrics.jsonl"
    first, second = started = start(tmp_path, *MIXTURE, "training.steps=4000", f"output={tmp_path / 'two'}")
    ended += started
    deadline = time.monotonic() + 240
    while len(read_metrics(metrics)) < 7 and time.monotonic() < deadline and first.poll() is None:
        time.sleep(0.02)
    second.send_signal(signal.SIGKILL)
    assert first.wait(hosts.LOST_SECONDS + 30) not in (0, -signal.SIGKILL), said(tmp_path, 0)
    # Where both were writing a checkpoint, it is JAX that finds out, and ends the process itself.
    assert re.search("error: process 0 of 2 lost contact|indicates that another task died", said(tmp_path, 0))
    assert len(read_metrics(metrics)) >= 7 and "step/s" not in said(tmp_path, 1)

    ended += (again := start(tmp_path, *MIXTURE, "training.steps=8", f"output={tmp_path / 'two'}"))
    assert [process.wait(240) for process in again] == [0, 0], said(tmp_path, 0) + said(tmp_path, 1)
    assert "held-out accuracy" in said(tmp_path, 0) and "held-out accuracy" not in said(tmp_path, 1)
    options = [*OPTIONS, *MIXTURE, "training.steps=8", f"output={tmp_path / 'one'}"]
    alone = train(load_config(tmp_path / "tiny.yaml", options))
    together = read_metrics(metrics)
    assert [row["step"] for row in together] == list(range(9)) and "reward/more" in together[-1]
    for one, two in zip(without_times(alone), without_times(together), strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            near = value if isinstance(value, dict) else pytest.approx(value, rel=2e-3, abs=1e-5)
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
def test_two_processes_evaluate_and_fill_a_store_as_one_does(tmp_path, ended):
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
        np.testing.assert_allclose(ours.behavior_logprobs, theirs.behavior_logprobs, atol=1e-5)


# Exchanges things in every way, and prints what came of it.
EXCHANGES = """
import sys, time
from recjax import hosts

coordinator, _, number = sys.argv[1:]
hosts.meet(coordinator, 2, int(number))
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
        return repr(raised)

late = hosts.LateAnswers()
found = [
    hosts.all_of(b"ab" * 3 ** int(number)),
    [late.any_says(yes) for yes in (False, number == "1", False, False)],
    hosts.from_first(slowly),
    len(hosts.from_first(lambda: bytes(20_000_000))),
    [fails(error) for error in (ValueError("wrong"), KeyError("k"))][0],
]
print("found", found)
"""


@pytest.mark.slow
def test_two_processes_exchange_what_they_have(tmp_path, ended):
    ended += (started := two_of(tmp_path, ["-c", EXCHANGES]))
    assert [process.wait(120) for process in started] == [0, 0], said(tmp_path, 0) + said(tmp_path, 1)
    expected = [[b"ab", b"ababab"], [False, False, True, False], "0", 20_000_000, "ValueError('wrong')"]
    assert all(f"found {expected}" in said(tmp_path, number) for number in range(2)), said(tmp_path, 1)


# Encodes many problems, of which the last lacks what `fault` says, and writes what came of it.
ENCODES = """
import pickle, sys
from recjax import hosts
from recjax.hub.tokenizers import character_tokenizer
from recjax.tasks import prompts
from recjax.tasks.problems import Problem

output, fault, coordinator, _, number = sys.argv[1:]
hosts.meet(coordinator, 2, int(number))
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
        assert found == also == "prompt 26, '?' has text outside the tokenizer's vocabulary"
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
        monkeypatch.setattr(hosts, "all_of", exchange)
        for number in range(2):
            monkeypatch.setattr(jax, "process_index", lambda number=number: number)
            try:
                found.append(compute())
            except (InterruptedError, ValueError) as error:
                found.append(error)
    return found[2:]


def test_what_is_shared_out_is_computed_once_and_in_order(monkeypatch):
    computed = []

    def squares(numbers, first):
        computed.append((first, len(numbers)))
        if 49 in numbers:
            raise ValueError(f"{first + numbers.index(49)} is wrong")
        return [number**2 for number in numbers]

    monkeypatch.setattr(hosts, "WORTH_SHARING", 5)
    things = [3, 1, 4, 1, 5]
    assert in_each_of_two(monkeypatch, lambda: hosts.shared_out(squares, things)) == [[9, 1, 16, 1, 25]] * 2
    assert computed == [(0, 3), (3, 2)] * 2
    errors = in_each_of_two(monkeypatch, lambda: hosts.shared_out(squares, [*things, 49]))
    assert [str(error) for error in errors] == ["5 is wrong"] * 2
    assert hosts.shared_out(squares, things[:4]) == [9, 1, 16, 1] and computed[-1] == (0, 4)


def test_shares_are_of_one_size_and_everything_is_in_one(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    things, shares = np.arange(5) * 10, []
    for number in range(3):
        monkeypatch.setattr(jax, "process_index", lambda number=number: number)
        shares.append(things[hosts.share(5)])
    assert {len(share) for share in shares} == {2}
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda tree, tiled: np.concatenate(shares))
    np.testing.assert_array_equal(hosts.gathered(shares[0], 5), things)


def test_late_answers_are_read_a_call_after_they_were_asked_for(monkeypatch):
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
    hosts.meet(None, 1, None)
    assert hosts.is_first() and hosts.any_says(True) and not hosts.any_says(False)
    np.testing.assert_array_equal(hosts.share(3), [0, 1, 2])


def test_half_of_the_flags_is_refused(monkeypatch):
    def initialize(*arguments, **timeouts):
        raise ValueError("The process id of the current process must be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    hosts.meet(None, None, None)
    with pytest.raises(ValueError, match="--processes 2 --process_id None: .* Give all three"):
        hosts.meet("127.0.0.1:1", 2, None)
