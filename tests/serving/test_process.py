"""The server as a process: started, killed, told to end; a run that trains on what it left; SmolLM2."""

import contextlib
import itertools
import re
import shutil
import signal
import socket
import subprocess
import threading
import time

import httpx
import numpy as np
import pytest

from recjax.config import load_config
from recjax.generate_experience import generate_remotely
from recjax.remote.server import Address
from recjax.runs.policies import open_policy
from recjax.store.missing_logprobs import with_logprobs
from recjax.store.stored_groups import load_groups
from tests import commands
from tests.batch_shapes import shape_of
from tests.commands import Command
from tests.experience.rows import read, read_columns
from tests.training.tiny_run import TINY, train

pytestmark = pytest.mark.slow
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained run's folder and the file of its config."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "tiny.yaml").write_text(TINY)
    train(load_config(folder / "tiny.yaml", [f"output={folder / 'tiny'}", "training.steps=2"]))
    return folder / "tiny", folder / "tiny.yaml"


def started(*flags):
    """A server's process, and its address when it answers."""
    command = ["-m", "recjax.serve", "--port=0", *flags]
    process = Command(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    line = process.stdout.readline()
    if not line:
        raise AssertionError(process.communicate()[1])
    return process, re.search(r"http://[^/]*", line).group()


@contextlib.contextmanager
def running(*flags):
    """A client of a process that is told to end with the block."""
    process, address = started(*flags)
    try:
        with httpx.Client(base_url=address, timeout=120) as client:
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, process.communicate()[1]


def post(client, path, **body):
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def kill_under_load(flags, ask, answered):
    """Starts a server three times and kills it while four clients run `ask(client)` again and again."""
    random = np.random.default_rng(0)
    for _ in range(3):
        process, address = started(*flags)
        stop = threading.Event()

        def asks(address=address, stop=stop):
            with httpx.Client(base_url=address, timeout=30) as client, contextlib.suppress(httpx.HTTPError):
                while not stop.is_set():
                    ask(client)

        askers = [threading.Thread(target=asks) for _ in range(4)]
        for asker in askers:
            asker.start()
        before = len(answered)
        while len(answered) < before + 5:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 1.5))
        process.kill()
        process.wait()
        stop.set()
        for asker in askers:
            asker.join()


def test_killed_servers_lose_no_reply(run, tmp_path):
    answered, rewarded = {}, set()

    def ask(client):
        reply = post(client, TEXT, prompt="1+2=", n=2, max_tokens=4, return_token_ids=True)
        answered[reply["id"]] = [choice["token_ids"] for choice in reply["choices"]]
        post(client, "/v1/feedback", id=reply["id"], index=0, reward=1.5)
        rewarded.add(f"{reply['id']}/0")

    kill_under_load(["--run", run[0], "--record", tmp_path / "store.db", "--reward_seconds=0.5"], ask, answered)
    read_columns(tmp_path / "store.db")  # whatever was being written
    with running("--run", run[0], "--record", tmp_path / "store.db"):
        pass
    rows = {row.id: row for row in read_columns(tmp_path / "store.db")}
    for reply, tokens in answered.items():
        assert [rows[f"{reply}/{index}"].completion_tokens.tolist() for index in range(2)] == tokens
    assert all(rows[name].reward == 1.5 for name in rewarded) and len(rewarded) > 10
    for name in rows:  # a reply that nobody got is whole as well
        assert f"{name[:-1]}0" in rows and f"{name[:-1]}1" in rows


@pytest.mark.campaign
def test_killed_servers_lose_no_turn_reward(run, tmp_path):
    """Sessions of turns that are rewarded one by one, and end after the last kill."""
    rewarded, numbers, flags = {}, itertools.count(), ["--run", run[0], "--record", tmp_path / "store.db"]

    def ask(client):
        name = f"s{next(numbers)}"
        for turn in range(4):
            reply = post(client, f"/sessions/{name}{TEXT}", prompt=f"{turn}+2=", max_tokens=2)
            assert post(client, "/v1/feedback", id=reply["id"], reward=turn + 0.5)["turn"] == turn
            rewarded[name] = turn + 1

    kill_under_load(flags, ask, rewarded)
    assert {*rewarded.values()} > {4}, "some sessions were in the middle"
    with running(*flags) as client:
        for name in rewarded:
            assert post(client, f"/sessions/{name}/reward")["new"]
    grades = {record.completion.id: record.completion.grade for record in read(tmp_path / "store.db")}
    for name, count in rewarded.items():
        turns = grades[f"session/{name}"].turns
        assert turns[:count] == tuple(turn + 0.5 for turn in range(count)), name
        assert grades[f"session/{name}"].reward == sum(turns)


def test_told_to_end_it_finishes_what_runs(run, tmp_path):
    process, address = started("--run", run[0], "--record", tmp_path / "store.db", "--max_completion_tokens=1500")
    with httpx.Client(base_url=address, timeout=120) as client:
        options = {"prompt": "1+2=", "max_tokens": 1500, "n": 8, "stream": True}
        with client.stream("POST", TEXT, json=options) as reply:
            events = reply.iter_lines()
            next(events)
            process.send_signal(signal.SIGTERM)
            lines = [line for line in events if line]
    assert lines[-1] == "data: [DONE]" and process.wait(60) == 0
    assert len(read_columns(tmp_path / "store.db")) == 8


@pytest.mark.campaign
def test_a_run_trains_on_what_was_served(run, tmp_path):
    with running("--run", run[0], "--record", tmp_path / "store") as client:
        for first in range(1, 9):
            reply = post(client, TEXT, prompt=f"{first}+2=", n=4, max_tokens=3)
            for choice in reply["choices"]:
                reward = sum(character.isdigit() for character in choice["text"]) / 3
                post(client, "/v1/feedback", id=reply["id"], index=choice["index"], reward=reward)
        post(client, TEXT, prompt="1+1=", max_tokens=3)  # nobody rewards this one
    settings = [f"output={tmp_path / 'trained'}", f"experience.store={tmp_path / 'store'}", "training.steps=4"]
    metrics = train(load_config(run[1], settings))
    assert metrics[0]["experience/left_out/pending_rows"] == 1
    losses = [row["loss"] for row in metrics if "loss" in row]
    assert len(losses) == 4 and np.isfinite(losses).all()
    for command in (["recjax.inspect_experience", str(tmp_path / "store"), f"--figure={tmp_path / 'a.png'}"],):
        done = commands.run(["-m", *command])
        assert done.returncode == 0 and "pending rows" in done.stdout, done.stderr


@pytest.mark.campaign
def test_a_run_follows_a_database_of_two_servers(run, database_url, tmp_path):
    store = database_url()

    def ask(name):
        with running("--run", run[0], "--record", store, "--server_name", name) as client:
            for first in range(1, 9):
                reply = post(client, TEXT, prompt=f"{first}+2=", n=4, max_tokens=3)
                for choice in reply["choices"]:
                    post(client, "/v1/feedback", id=reply["id"], index=choice["index"], reward=choice["index"])

    askers = [threading.Thread(target=ask, args=(name,)) for name in ("a", "b")]
    for asker in askers:
        asker.start()
    options = ["experience.follow=true", "rollout.max_context_tokens=16", "evaluation.every=0", "training.steps=4"]
    metrics = train(load_config(run[1], [f"output={tmp_path / 'follows'}", f"experience.store={store}", *options]))
    for asker in askers:
        asker.join()
    # The last group may arrive in a poll of its own.
    assert [row["reward"] for row in metrics[1:]] == [1.5] * 4 and 1 <= metrics[-1]["follow/rewarded_groups"] <= 4
    rows = read_columns(store)
    assert len({row.id for row in rows}) == 2 * 8 * 4 and all(row.reward is not None for row in rows)


def test_a_server_without_a_checkpoint_reports_its_wait(run, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = [f"--follow={tmp_path / 'later'}", f"--port={port}", f"--record={tmp_path / 'store.db'}"]
    process = Command(["-m", "recjax.serve", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:

            def health():
                with contextlib.suppress(httpx.TransportError):
                    return client.get("/health")
                assert process.poll() is None, process.communicate()[1]

            while (reply := health()) is None:
                time.sleep(0.1)
            waits = f"waits for the first checkpoint of {tmp_path / 'later'}"
            assert reply.status_code == 503 and reply.json()["status"] == waits
            reply = client.post(TEXT, json={"prompt": "1+2="})
            assert reply.status_code == 503 and waits in reply.json()["error"]["message"]
            shutil.copytree(run[0], tmp_path / "copy")
            (tmp_path / "copy").rename(tmp_path / "later")
            assert process.stdout.readline().startswith("serving later, version 2")
            assert health().status_code == 200
            post(client, TEXT, prompt="1+2=", max_tokens=2)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, process.communicate()[1]


def test_what_it_cannot_begin_with(run, tmp_path):
    def error(*flags):
        done = commands.run(["-m", "recjax.serve", *flags], cwd=tmp_path)
        assert done.returncode == 1, done.stderr
        return done.stderr.splitlines()[-1]

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert re.search(f"--port {port}: .*in use.*another --port", error("--run", run[0], f"--port={port}"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text((run[0] / "config.yaml").read_text())
    assert "holds no checkpoint yet" in error("--run", "empty", "--port=0")
    assert "give exactly one of --run, --model and --follow; found none" in error("--port=0")
    assert "--api_key_file none: cannot be read" in error("--run", run[0], "--api_key_file=none")
    block = (
        "import sys; sys.modules['uvicorn'] = None; import runpy; runpy.run_module('recjax.serve', run_name='__main__')"
    )
    done = commands.run(["-c", block, "--run=x"])
    assert done.returncode == 1 and 'pip install -e ".[serve]"' in done.stderr.splitlines()[-1]


@pytest.mark.campaign
def test_greedy_replies_of_smollm2_are_those_of_transformers(smollm2_folder, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder)
    questions = ["What is the capital of France?", "Name three colors.", "Write a line about the sea."]
    with running("--model", smollm2_folder, "--record", tmp_path / "store.db") as client:
        for question in questions:
            messages = [{"role": "user", "content": question}]
            options = {"temperature": 0, "max_tokens": 24, "return_token_ids": True}
            reply = post(client, CHAT, messages=messages, model="smollm2", **options)
            asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
            asked = asked["input_ids"] if not torch.is_tensor(asked) else asked
            assert reply["prompt_token_ids"] == asked[0].tolist()
            found = model.generate(asked, attention_mask=torch.ones_like(asked), do_sample=False, max_new_tokens=24)
            assert reply["choices"][0]["token_ids"] == found[0, asked.shape[1] :].tolist()
    row = read_columns(tmp_path / "store.db")[0]
    assert row.metadata["endpoint"] == "chat" and row.messages[0]["content"] == questions[0]


@pytest.mark.campaign
def test_generating_from_a_server_stores_tokens_and_log_probs(run, tmp_path):
    config = load_config(run[1], ["rollout.temperature=0.7", "rollout.prompts_per_step=4"])
    with running("--run", run[0], "--norecording") as client:
        assert generate_remotely(config, tmp_path / "store.db", 2, Address(str(client.base_url)), None) == 2
    _, policy, params, version, *_ = open_policy(run[0])
    groups = load_groups(tmp_path / "store.db", policy)
    assert version == 2 and len(groups) == 8 and {one.source for one in groups[0].completions} == {"tiny"}
    unknown = [
        group._replace(
            completions=tuple(
                one._replace(rows=tuple(row._replace(behavior_logprobs=None) for row in one.rows))
                for one in group.completions
            )
        )
        for group in groups
    ]
    shape, sampling = shape_of(groups, 4), config.rollout.sampling()
    for ours, theirs in zip(groups, with_logprobs(unknown, shape, policy, params, sampling, 64), strict=True):
        for sent, known in zip(ours.completions, theirs.completions, strict=True):
            (row,), (its,) = sent.rows, known.rows
            np.testing.assert_allclose(row.behavior_logprobs, its.behavior_logprobs, atol=1e-4)


@pytest.mark.campaign
def test_a_following_server_takes_each_checkpoint_of_its_run(run, tmp_path):
    command = ["-m", "recjax.serve", "--follow", tmp_path / "run", "--record", tmp_path / "store", "--port=0"]
    process = Command(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while "waits for the first checkpoint" not in process.stderr.readline():
            pass
        train(load_config(run[1], [f"output={tmp_path / 'run'}", "training.steps=3", "training.checkpoint_every=3"]))
        address = re.search(r"http://[^/]*", process.stdout.readline()).group()
        with httpx.Client(base_url=address, timeout=120) as client:
            assert served_version(client, 3) == 3
            train(load_config(run[1], [f"output={tmp_path / 'run'}", "training.steps=6"]))
            assert served_version(client, 6) == 6
            (tmp_path / "run" / "checkpoints" / "6").rename(tmp_path / "aside")
            assert served_version(client, 3) == 3  # the run goes on from there, and so does the server
            said = tmp_path / "aside" / "progress" / "metadata"
            said.write_bytes(said.read_bytes() + b" ")  # can be read, and is not as it was written
            (tmp_path / "aside").rename(tmp_path / "run" / "checkpoints" / "6")
            time.sleep(3)
            assert post(client, TEXT, prompt="1+2=", max_tokens=2)["policy_version"] == 3  # it is damaged
    finally:
        process.kill()
        assert "the checkpoint of step 6 is not taken" in process.communicate()[1]


def served_version(client, wanted):
    """The version of a reply, when that is the one that is wanted, or after a while."""
    for _ in range(60):
        found = post(client, TEXT, prompt="1+2=", max_tokens=2)["policy_version"]
        if found == wanted:
            break
        time.sleep(0.5)
    return found
