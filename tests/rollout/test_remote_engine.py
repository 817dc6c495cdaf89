"""Another server as the rollout engine: unusable replies, lost weights, pushed weights, and a real server."""

import itertools
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from recjax.experience.group import Row
from recjax.hub.export import export_model, write_base
from recjax.models.decoder import init_params
from recjax.rollout import remote
from recjax.rollout.remote import Address, LostWeightsError, RemoteEngine
from recjax.serve import pushed_reader
from recjax.serving.guards import Guarded
from recjax.tasks.loading import load_task
from recjax.tasks.prompts import encode_problems
from tests.serving.some_server import POLICY, SHAPE, listening, post, serve
from tests.test_remote_experience import config, fake, policy_of
from tests.training.tiny_run import TINY, train

__all__ = ["config"]

KEY = "a-key"


def prompts_of(config, policy):
    prompts = encode_problems(load_task(config).train, policy.tokenizer, None, policy.vocabulary)
    return prompts.take(np.arange(2))


def choice_of(policy, **changes):
    """A right choice, of two tokens and the end token, with some keys replaced; None removes a key."""
    tokens = [policy.stop_ids[0] + 1, policy.stop_ids[0] + 2, policy.stop_ids[0]]
    right = {
        "text": "",
        "token_ids": tokens,
        "logprobs": {"token_logprobs": [-1.0, -2.0, -3.0]},
        "finish_reason": "stop",
    }
    return {name: value for name, value in (right | changes).items() if value is not None}


def engine_of(url, config, policy, **limits):
    limits = {"concurrency": 1, "seconds": 0.5, "retries": 1} | limits
    return RemoteEngine(Address(url, key="rollout.engine.url", **limits), policy, config)


WRONG = {
    "missing ids": ({"token_ids": None}, "no token ids"),
    "ids of another vocabulary": ({"token_ids": [10**6, 1, 2]}, "outside the policy's vocabulary"),
    "too few log-probs": ({"logprobs": {"token_logprobs": [-1.0]}}, "no log-prob of each of 3 tokens"),
    "no log-probs": ({"logprobs": None}, "no log-prob of each of 3 tokens"),
    "minus infinity": ({"logprobs": {"token_logprobs": [-1.0, -9999.0, -3.0]}}, "no log-prob"),
    "not a number": ({"logprobs": {"token_logprobs": [-1.0, float("nan"), -3.0]}}, "no log-prob"),
    "a probability": ({"logprobs": {"token_logprobs": [-1.0, 0.4, -3.0]}}, "no log-prob"),
    "too long": ({"token_ids": [5] * 9, "logprobs": {"token_logprobs": [-1.0] * 9}}, "9 tokens, more than"),
    "stopped early": ({"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}}, "without an end token"),
    "cut early": (
        {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"},
        "finish_reason length after 1 of 3 tokens",
    ),
    "aborted": ({"finish_reason": "abort"}, "finish_reason abort"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_unusable_reply_is_requested_again_and_never_trained_on(config, name):
    policy, (changes, problem) = policy_of(config), WRONG[name]
    replies = itertools.count()

    def answer(path, body):
        assert isinstance(body["prompt"], list)
        one = choice_of(policy, **(changes if next(replies) == 0 else {}))
        return 200, {"choices": [one] * body["n"]}

    prompts = prompts_of(config, policy)
    with fake(answer) as url, engine_of(url, config, policy) as engine:
        groups = engine.sample_tokens(prompts, 2, 0, name="1", source="policy", version=4)
        assert [len(group.completions) for group in groups] == [2] * len(prompts.problems)
        assert engine.left_out.total() == 2 and problem in next(iter(engine.left_out))
        completion = groups[0].completions[0]
        right = np.array(choice_of(policy)["token_ids"], np.int32)
        assert isinstance(completion.rows[0], Row) and (completion.rows[0].tokens == right).all()
        assert completion.policy_version == 4 and not completion.truncated
    with fake(lambda path, body: (200, {"choices": [choice_of(policy, **changes)] * body["n"]})) as url:
        with engine_of(url, config, policy) as engine, pytest.raises(ValueError, match="unusable replies") as error:
            engine.sample_tokens(prompts, 2, 0, name="1", source="policy", version=4)
        assert problem in str(error.value) and url in str(error.value) and "rollout.engine" in str(error.value)


@pytest.mark.parametrize("fault", ["500", "slow", "refused", "not json"])
def test_a_failing_server_is_tried_again_within_a_bound(config, monkeypatch, fault):
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    policy, gate = policy_of(config), threading.Event()

    def answer(path, body):
        if fault == "slow":
            gate.wait(2)
        return (500, {"error": {"message": "it broke"}}) if fault == "500" else (200, "text")

    with fake(answer) as url, engine_of(url, config, policy, seconds=0.1) as engine:
        if fault == "refused":
            engine._place, engine._client = "http://127.0.0.1:9", remote.httpx.Client(base_url="http://127.0.0.1:9/v1/")
        with pytest.raises(ValueError) as error:
            engine.sample_tokens(prompts_of(config, policy), 2, 0, name="1", source="policy", version=4)
        gate.set()
    said = {"500": "it broke, after 2 tries", "not json": "must be a JSON object"}.get(fault, "does not answer")
    assert said in str(error.value)


def test_weights_that_are_lost_or_not_acknowledged_are_errors(config):
    policy, tags, status = policy_of(config), [], [200]

    def answer(path, body):
        if path == "/update_weights_from_disk":
            tags.append(body["weight_version"])
            return status[0], {"success": status[0] == 200, "message": "why"}
        return 200, {"choices": [choice_of(policy)] * body["n"], "weight_version": tags[-1]}

    names = {"name": "1", "source": "policy", "version": 5}
    with fake(answer) as url, engine_of(url, config, policy) as engine:
        engine.api = "recjax"
        engine.push(Path("/somewhere"), 5, False)
        assert engine.version == 5 and len(engine.sample_tokens(prompts_of(config, policy), 2, 0, **names)) > 0
        tags.append("another-5")
        with pytest.raises(LostWeightsError, match="this run did not push"):
            engine.sample_tokens(prompts_of(config, policy), 2, 0, **names)
        status[0] = 400
        with pytest.raises(ValueError, match="did not take new weights.*why.*--push_root"):
            engine.push(Path("/somewhere"), 6, False)
        assert engine.version == 5


@pytest.mark.slow
def test_a_server_takes_pushed_weights_whole_or_not_at_all(tmp_path):
    root, base, other = tmp_path / "root", tmp_path / "base", init_params(SHAPE, jax.random.key(1))
    base.mkdir()
    write_base(base, SHAPE, POLICY.tokenizer, POLICY.stop_ids)
    for folder in (root / "new", root / "damaged", tmp_path / "outside"):
        export_model(folder, SHAPE, other, base)
    with open(root / "damaged" / "model.safetensors", "r+b") as file:
        file.truncate(500)
    (root / "link").symlink_to(tmp_path / "outside")
    reader = pushed_reader(root, POLICY)
    with serve(None, pushed=reader, guarded=Guarded((KEY,))) as client:
        url, body = "/update_weights_from_disk", {"model_path": str(root / "new"), "weight_version": "run-9"}
        assert client.post(url, json=body).status_code == 401
        client.headers["authorization"] = f"Bearer {KEY}"
        for name in ("damaged", "link", "missing", "../outside"):
            reply = client.post(url, json=body | {"model_path": str(root / name)})
            assert reply.status_code == 400 and "model_path" in reply.json()["error"]["message"]
            assert KEY not in reply.text
        assert client.post(url, json=body | {"weight_version": "none"}).status_code == 400
        before = post(client, "/v1/completions", prompt="abc", max_tokens=5, seed=1)
        assert before["policy_version"] == 3 and "weight_version" not in before
        assert client.post(url, json=body).json()["success"]
        after = post(client, "/v1/completions", prompt="abc", max_tokens=5, seed=1)
        assert (after["policy_version"], after["weight_version"]) == (9, "run-9")
    with serve(None) as client:
        assert client.post(url, json=body).status_code == 403


@pytest.mark.slow
def test_another_recjax_server_is_an_exact_engine(tmp_path, monkeypatch):
    from recjax.config import load_config
    from recjax.models.decoder import Decoder

    monkeypatch.setenv("RECJAX_API_KEY", KEY)
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    config = load_config(path, [f"output={tmp_path / 'run'}", "model.dtype=float32", "training.steps=4"])
    policy = policy_of(config)
    policy = policy._replace(decoder=Decoder(policy.decoder.config))
    params = init_params(policy.decoder.config, jax.random.key(5))
    options = {"policy": policy, "params": params, "pushed": pushed_reader(tmp_path, policy)}
    with listening(None, guarded=Guarded((KEY,)), **options) as (port, _):
        url = f"rollout.engine=http://127.0.0.1:{port}"
        rows = train(load_config(path, [f"output={tmp_path / 'run'}", "model.dtype=float32", "training.steps=4", url]))
        assert [row["engine/pushes"] for row in rows[1:]] == [1, 2, 3, 4]
        for row in rows[1:]:
            assert row["staleness"] == 0
            assert abs(row["ratio/max"] - 1) < 1e-4 and abs(row["ratio/q01"] - 1) < 1e-4
        # A resumed run gives its weights again.
        rows = train(load_config(path, [f"output={tmp_path / 'run'}", "model.dtype=float32", "training.steps=6", url]))
        assert rows[5]["engine/pushes"] == 1 and abs(rows[5]["ratio/max"] - 1) < 1e-4
