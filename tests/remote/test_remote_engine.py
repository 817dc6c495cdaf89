"""Another server as the rollout engine: unusable replies, lost weights, pushed weights, and a real server."""

import dataclasses
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import venv
from pathlib import Path

import jax
import numpy as np
import pytest

from recjax.config import RegimeConfig, load_config
from recjax.config.experience import EngineConfig
from recjax.experience.group import Row
from recjax.hub.export import export_model, write_base
from recjax.logs.metrics import read_metrics
from recjax.models.decoder import Decoder, abstract_params
from recjax.remote import dialects, pushing, server
from recjax.remote import sampler as engine_sampler
from recjax.remote.client import LostWeightsError, RemoteEngine
from recjax.remote.sampler import EngineSampler
from recjax.remote.server import Address
from recjax.serve import pushed_reader
from recjax.serving.guards import Guarded
from recjax.sources.sampling import BatchSampler
from recjax.tasks.loading import load_task
from recjax.tasks.prompts import encode_problems
from tests.commands import ROOT
from tests.serving.some_server import POLICY, SHAPE, listening, post, serve
from tests.test_remote_experience import config, fake, policy_of
from tests.tiny import params_of
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
def test_unusable_replies_are_requested_again(config, name):
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
    monkeypatch.setattr(server.time, "sleep", lambda seconds: None)
    policy, gate = policy_of(config), threading.Event()

    def answer(path, body):
        if fault == "slow":
            gate.wait(2)
        return (500, {"error": {"message": "it broke"}}) if fault == "500" else (200, "text")

    with fake(answer) as url, engine_of(url, config, policy, seconds=0.1) as engine:
        if fault == "refused":
            engine.server._client = server.httpx.Client(base_url="http://127.0.0.1:9/v1/")
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
        engine.dialect = dialects.DIALECTS["recjax"]
        engine.push(Path("/somewhere"), 5, False)
        assert engine.version == 5 and len(engine.sample_tokens(prompts_of(config, policy), 2, 0, **names)) > 0
        tags.append("another-5")
        with pytest.raises(LostWeightsError, match="this run did not push"):
            engine.sample_tokens(prompts_of(config, policy), 2, 0, **names)
        status[0] = 400
        with pytest.raises(ValueError, match="did not take new weights.*why.*--push_root"):
            engine.push(Path("/somewhere"), 6, False)
        assert engine.version is None, "no reply may pass for one of the earlier weights"


def test_a_push_that_reports_failure_is_refused(config):
    policy, success = policy_of(config), [True]

    def answer(path, body):
        return 200, {"success": success[0], "message": "why"}

    with fake(answer) as url, engine_of(url, config, policy) as engine:
        engine.dialect = dialects.DIALECTS["recjax"]
        engine.push(Path("/somewhere"), 5, False)
        success[0] = False
        with pytest.raises(ValueError, match="did not take new weights.*status 200: why"):
            engine.push(Path("/somewhere"), 6, False)
        assert engine.version is None


@pytest.mark.slow
def test_a_server_takes_only_complete_pushed_weights(tmp_path):
    root, base, other = tmp_path / "root", tmp_path / "base", params_of(SHAPE, 1)
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


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    """A function from settings to the config of a run that a second server, with other weights, samples for."""
    monkeypatch.setenv("RECJAX_API_KEY", KEY)
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    policy = policy_of(load_config(path, ["model.dtype=float32"]))
    policy = policy._replace(decoder=Decoder(policy.decoder.config))
    params = params_of(policy.decoder.config, 5)
    options = {"policy": policy, "params": params, "pushed": pushed_reader(tmp_path, policy)}
    with listening(None, guarded=Guarded((KEY,)), **options) as (port, _):
        settings = [f"output={tmp_path / 'run'}", "model.dtype=float32", f"rollout.engine=http://127.0.0.1:{port}"]
        yield lambda *more: load_config(path, [*settings, *more])


@pytest.mark.slow
def test_another_recjax_server_is_an_exact_engine(loaded):
    rows = train(loaded("training.steps=4"))
    assert [row["engine/pushes"] for row in rows[1:]] == [1, 2, 3, 4]
    for row in rows[1:]:
        assert row["staleness"] == 0
        assert abs(row["ratio/max"] - 1) < 1e-4 and abs(row["ratio/q01"] - 1) < 1e-4
    # A resumed run gives its weights again.
    rows = train(loaded("training.steps=6"))
    assert rows[5]["engine/pushes"] == 1 and abs(rows[5]["ratio/max"] - 1) < 1e-4


@pytest.mark.slow
def test_an_engine_samples_while_the_run_trains(loaded, tmp_path):
    regime = "regime.mode=async", "regime.max_staleness=2"
    rows = train(loaded("training.steps=8", *regime))[1:]
    assert len(rows) == 8 and all(0 <= row["staleness"] <= 2 for row in rows)
    assert max(row["staleness"] for row in rows) > 0 and rows[-1]["engine/pushes"] > 1
    # A fresh batch has ratio 1, as each completion is from the pushed weights that its version names.
    assert all(abs(row["ratio/max"] - 1) < 1e-4 for row in rows if row["staleness"] == 0)
    rows = train(loaded("training.steps=10", *regime))[9:]  # resumed
    assert len(rows) == 2 and rows[0]["engine/pushes"] == 1 and all(row["staleness"] <= 2 for row in rows)
    waiting = train(loaded("training.steps=2", *regime[:1], "regime.max_staleness=0", f"output={tmp_path / 'waiting'}"))
    assert all(row["staleness"] == 0 and abs(row["ratio/max"] - 1) < 1e-4 for row in waiting[1:])


def scripted_engine(api, config, policy, replies, calls, has_tokens=False):
    """A server of the given software; `replies` by path, in the shapes that its documentation has."""

    def answer(path, body):
        if body is not None:
            calls.append((path, body))
        reply = replies.get(path, lambda body: (404, {"detail": "Not Found"}))
        return reply(body) if callable(reply) else (200, reply)

    return fake(answer, owner=api, posts=(dialects.GENERATE,) if has_tokens else ())


def vllm_choice(tokens, logprobs, index=0, reason="stop"):
    """A choice of vLLM's /inference/v1/generate: log-probs as in chats, whose tokens are named by id."""
    content = [
        {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
        for token, value in zip(tokens, logprobs, strict=True)
    ]
    more = {"logprobs": {"content": content}, "finish_reason": reason, "routed_experts": None}
    return {"index": index, "token_ids": tokens} | more


def sglang_reply(tokens, logprobs, reason="stop", tag="default"):
    """One completion of SGLang's /generate."""
    finish = {"type": "length", "length": 3} if reason == "length" else {"type": "stop", "matched": tokens[-1]}
    values = [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)]
    meta = {"id": "1", "finish_reason": finish, "prompt_tokens": 4, "weight_version": tag, "cached_tokens": 0}
    return {"text": "", "output_ids": tokens, "meta_info": meta | {"output_token_logprobs": values}}


def llamacpp_reply(tokens, logprobs, reason="eos"):
    """A reply of llama.cpp's /completion; `logprobs` may be short, as llama.cpp gives none to half a character."""
    values = [
        {"id": token, "token": "", "bytes": [], "logprob": value, "top_logprobs": []}
        for token, value in zip(tokens, logprobs, strict=False)
    ]
    more = {"stop": True, "stop_type": reason, "truncated": False, "tokens_predicted": len(tokens)}
    return {"index": 0, "content": "", "tokens": tokens, "completion_probabilities": values} | more


RIGHT, BROKEN = [-1.0, -2.0, -3.0], [-1.0, -9999.0, -3.0]
FORMS = {  # software: a path, a reply with two completions from tokens and log-probs, and a reply without ids
    "vllm": (
        dialects.GENERATE,
        lambda *values: {"request_id": "1", "choices": [vllm_choice(*values, place) for place in range(2)]},
        {"request_id": "1", "choices": [vllm_choice([], [], place) for place in range(2)]},
    ),
    "sglang": ("/generate", lambda *values: [sglang_reply(*values)] * 2, [{"text": "7", "meta_info": {}}] * 2),
    "llamacpp": ("/completion", llamacpp_reply, {"content": "7", "stop_type": "eos"}),
}


@pytest.mark.parametrize("api", FORMS)
def test_replies_of_each_dialect_are_read(config, api):
    policy, (path, form, without_ids), calls = policy_of(config), FORMS[api], []
    tokens = choice_of(policy)["token_ids"]
    bad = [without_ids, form(tokens, BROKEN), form(tokens * 2, RIGHT * 2)]
    bad += [form([10**6, *tokens[1:]], RIGHT), form(tokens[:1], RIGHT[:1])]
    bad += [form(tokens, RIGHT[:2])] if api == "llamacpp" else []
    replies = iter(bad)
    reply = {path: lambda body: (200, next(replies, form(tokens, RIGHT)))}
    prompts = prompts_of(config, policy).take(np.arange(1))
    names = {"name": "1", "source": "policy", "version": 4}
    with scripted_engine(api, config, policy, reply, calls, has_tokens=api == "vllm") as url:
        with engine_of(url, config, policy, retries=len(bad)) as engine:
            (group,) = engine.sample_tokens(prompts, 2, 7, **names)
            assert engine.api == api and sum(engine.left_out.values()) >= len(bad)
    assert {called for called, _ in calls} == {path}
    for one in group.completions:
        assert one.rows[0].tokens.tolist() == tokens and one.rows[0].behavior_logprobs.tolist() == RIGHT
    prefix, body = prompts.tokens[0][prompts.mask[0]].tolist(), calls[0][1]
    values = body.get("sampling_params", body)
    assert body.get("token_ids", body.get("input_ids", body.get("prompt"))) in (prefix, [prefix] * 2)
    for asked in values if api == "sglang" else [values]:
        assert asked.get("max_tokens", asked.get("max_new_tokens", asked.get("n_predict"))) == 3
        neutral = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": False}
        neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "top_k": -1}
        assert asked.items() >= neutral.items(), "a server's own defaults would change the distribution"
        assert asked["stop_token_ids"] == list(policy.stop_ids)
        assert api != "llamacpp" or (asked["repeat_penalty"] == 1.0 and asked["mirostat"] == 0)
    seeds = [call["sampling_params"] for _, call in calls] if api == "sglang" else []
    assert all([one["sampling_seed"] - group[0]["sampling_seed"] for one in group] == [0, 1] for group in seeds[:1])
    assert len({group[0]["sampling_seed"] for group in seeds}) == len(seeds)


PAUSES = ("/pause?mode=wait", "/resume")


@pytest.mark.parametrize(("api", "pauses"), [("vllm", False), ("vllm", True), ("sglang", False)])
def test_other_software_gets_weights_and_may_lose_them(config, api, pauses):
    policy, calls, tags = policy_of(config), [], ["default"]
    tokens = choice_of(policy)["token_ids"]
    (path, form, _), prompts = FORMS[api], prompts_of(config, policy)

    def took(body):
        tags.append(body.get("new_version") or body["weight_version"])
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def sampled(body):
        return 200, [sglang_reply(tokens, RIGHT, tag=tags[-1])] * 2 if api == "sglang" else form(tokens, RIGHT)

    replies = {
        "/collective_rpc": {"results": [None]},
        "/reset_prefix_cache?reset_running_requests=true": lambda body: (200, None),
        "/update_weight_version": took,
        "/update_weights_from_disk": lambda body: (405, None) if body is None else took(body),
        "/weight_info": lambda body: (200, {"weight_version": tags[-1]}),
        path: sampled,
    }
    if pauses:
        replies |= {path: lambda body: (405 if body is None else 200, None) for path in ("/pause", *PAUSES)}
    names = {"name": "1", "source": "policy", "version": 5}
    with scripted_engine(api, config, policy, replies, calls, has_tokens=api == "vllm") as url:
        with engine_of(url, config, policy) as engine:
            assert engine.takes_folders
            engine.push(Path("/there/5"), 5, False)
            assert len(engine.sample_tokens(prompts, 2, 0, **names)) == 2
            tags.append("default")  # it restarted
            with pytest.raises(LostWeightsError, match="'default', which this run did not push"):
                engine.sample_tokens(prompts, 2, 0, **names)
    bodies = dict(reversed(calls))
    if api == "vllm":
        assert bodies["/collective_rpc"] == {"method": "reload_weights", "kwargs": {"weights_path": "/there/5"}}
        steps = ["/update_weight_version", *[*replies][:3]]
        steps = [PAUSES[0], *steps, PAUSES[1]] if pauses else steps
        assert [called for called, _ in calls[: len(steps)]] == steps
        assert bodies["/update_weight_version"]["new_version"].endswith("-5-loading")
    else:
        assert bodies["/update_weights_from_disk"]["model_path"] == "/there/5"


@pytest.mark.parametrize(
    ("api", "changes", "has_head"),
    [("vllm", {}, True), ("vllm", {"attention_cap": 50.0}, False), ("sglang", {}, False)],
)
def test_vllm_gets_the_output_layer_of_tied_embeddings(config, tmp_path, monkeypatch, api, changes, has_head):
    """Without it, vLLM's build for CPUs keeps the former one. Its Gemma 2 has no such layer."""
    policy, folders = policy_of(config), []
    shape = dataclasses.replace(policy.decoder.config, **changes)
    policy = policy._replace(decoder=Decoder(shape))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), abstract_params(shape))
    monkeypatch.setattr(pushing, "write_base", lambda *_: None)
    monkeypatch.setattr(pushing, "export_model", lambda *values: folders.append(values))
    replies = {"/update_weights_from_disk": lambda body: (405, None), "/weight_info": {}}
    with scripted_engine(api, config, policy, replies, []) as url:
        rollout = config.rollout.model_copy(update={"engine": EngineConfig(url=url, folder=str(tmp_path))})
        batches = BatchSampler(config.model_copy(update={"rollout": rollout}), policy, None, None, None)
        with EngineSampler(batches, {}) as sampler:
            monkeypatch.setattr(sampler.engine, "push", lambda *_: None)
            sampler.push(params, 1)
            assert sampler.counts["engine/pushes"] == 1 and sampler.counts["engine/push_seconds"] > 0
    ((folder, written, leaves, _, dtype),) = folders
    assert (folder.parent.parent, folder.name) == (tmp_path, "1"), "each run has a folder of its own"
    assert (not written.tie_embeddings, "head" in leaves, dtype) == (has_head, has_head, "float32")
    if has_head:
        assert leaves["head"]["kernel"].T.shape == leaves["embedding"]["embedding"].shape


def test_sglang_and_vllm_name_the_adapter_in_each_request(config):
    policy = policy_of(config)
    tokens, prompts = choice_of(policy)["token_ids"], prompts_of(config, policy).take(np.arange(1))
    for api, prefix in (("vllm", "/v1"), ("sglang", "")):
        path, form, _ = FORMS[api]
        calls, done = [], "Success: LoRA adapter 'a' added successfully." if api == "vllm" else {"success": True}
        replies = {f"{prefix}/{name}_lora_adapter": done for name in ("load", "unload")}
        replies |= {path: form(tokens, RIGHT), "/weight_info": lambda body: (404, {"detail": "Not Found"})}
        replies["/update_weights_from_disk"] = lambda body: (405, None)
        with scripted_engine(api, config, policy, replies, calls, has_tokens=api == "vllm") as url:
            with engine_of(url, config, policy) as engine:
                assert engine.takes_folders == (api == "sglang")
                for version in (5, 6):
                    engine.push(Path(f"/there/{version}"), version, True)
                    engine.sample_tokens(prompts, 2, 0, name="1", source="policy", version=version)
        loads = [body for called, body in calls if called.endswith("/load_lora_adapter")]
        assert [body["lora_path"] for body in loads] == ["/there/5", "/there/6"]
        sampled = [body for called, body in calls if called == path]
        named = [body["model"] if api == "vllm" else body["lora_path"] for body in sampled]
        assert named == [body["lora_name"] for body in loads]
        assert [body["lora_name"] for called, body in calls if "unload" in called] == named[:1]


@pytest.mark.parametrize(
    ("api", "remedy"), [("vllm", "DEV_MODE=1, or train .*, or set regime"), ("llamacpp", "; set regime")]
)
def test_an_engine_without_new_weights_needs_offline_runs(config, api, remedy):
    def answer(path, body):
        return 404, {"detail": "Not Found"}

    with fake(answer, owner=api) as url:
        engine = EngineConfig(url=url, retries=0)
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})
        batches = BatchSampler(config, policy_of(config), None, None, None)
        with pytest.raises(ValueError, match=f"{api} cannot take whole weights over HTTP.*{remedy}"):
            EngineSampler(batches, {}).__enter__()
        offline = config.model_copy(update={"regime": RegimeConfig(offline=True)})
        with EngineSampler(batches._replace(config=offline), {}) as sampler:
            assert sampler.counts == {"engine/pushes": 0, "engine/push_seconds": 0, "engine/unusable": 0}


def test_a_server_samples_batches_in_order_with_their_weights(config, monkeypatch):
    policy = policy_of(config)
    pushed = {}

    def push(sampler, params, version):
        pushed[version] = {name: values.tolist() for name, values in params.items()}
        sampler.engine.version = version

    def answer(path, body):
        label = f"{sampler.engine._pusher}-{sampler.engine.version}"
        return 200, {"choices": [choice_of(policy, index=index) for index in range(body["n"])], "weight_version": label}

    monkeypatch.setattr(EngineSampler, "push", push)
    monkeypatch.setattr(engine_sampler, "submit", lambda groups, prompts, grading: [])
    prompts = encode_problems(load_task(config).train, policy.tokenizer, None, policy.vocabulary)
    with fake(answer, owner="recjax", posts=("/update_weights_from_disk",)) as url:
        changes = {"engine": EngineConfig(url=url, retries=0)}
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update=changes)})
        batches = BatchSampler(config, policy, prompts, None, None)
        with EngineSampler(batches, {"frozen": np.ones(1)}) as sampler:
            sampler.offer_weights(lambda: {"trained": np.zeros(1)}, 0)
            sampler.issue(1)
            sampler.issue(2)
            sampler.offer_weights(lambda: pytest.fail("it has this version"), 0)
            sampler.offer_weights(lambda: {"trained": np.full(1, 3.0)}, 3)
            sampler.issue(3)
            assert sampler.in_flight == {1: 0, 2: 0, 3: 3}
            received = []
            while sampler.in_flight:
                received += sampler.receive(wait=True)
            assert sampler.receive(wait=True) == [] and sampler.counts["engine/unusable"] == 0
    assert pushed == {0: {"trained": [0.0], "frozen": [1.0]}, 3: {"trained": [3.0], "frozen": [1.0]}}
    for (number, (groups, _)), (issued, version) in zip(received, {1: 0, 2: 0, 3: 3}.items(), strict=True):
        assert number == issued and groups[0].id == f"{issued:06d}/00000"
        assert {one.policy_version for group in groups for one in group.completions} == {version}


@pytest.fixture
def llama_cpp(tmp_path):
    """URL of llama.cpp's server on SmolLM2's quantized weights, from an environment of its own."""
    from experiments.smollm2 import packaged_gguf

    venv.create(tmp_path / "llama", with_pip=True)
    python = tmp_path / "llama" / "bin" / "python"
    done = subprocess.run([python, "-m", "pip", "install", "-q", "xllamacpp"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install xllamacpp: {done.stderr.strip()[-300:]}")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [python, ROOT / "experiments" / "llama_cpp_server.py", packaged_gguf(), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


@pytest.mark.campaign
def test_smollm2_learns_from_the_samples_of_llama_cpp(smollm2_folder, llama_cpp, tmp_path):
    """The samples are from quantized weights that never change: the report and the ratios say how far away they are."""
    settings = [f"model.path={smollm2_folder}", f"rollout.engine={llama_cpp}"]
    unset = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")  # set for tests, which compute little
    variables = {name: value for name, value in os.environ.items() if name not in unset} | {"PYTHONPATH": str(ROOT)}
    file = ROOT / "experiments" / "llama_cpp.yaml"
    for name, module in (("numerics", "benchmarks.numerics"), ("train", "recjax.train")):
        flags = ["--config", file, *(["--engine_only"] if name == "numerics" else [])]
        command = [sys.executable, "-m", module, *flags, *settings, f"output={tmp_path / name}"]
        done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    (apart,) = json.loads((tmp_path / "numerics/numerics.json").read_text())["cases"]
    assert apart["case"] == "rollout.engine, llamacpp" and apart["passes"] is None
    assert 1e-4 < apart["kl"] < 0.05 and 0.8 < apart["mean_ratio"] < 1.2
    rows = read_metrics(tmp_path / "train" / "metrics.jsonl")
    assert [row["staleness"] for row in rows[1:]] == [*range(len(rows) - 1)]
    assert rows[-1]["engine/pushes"] == 0 and rows[-1]["engine/unusable"] < 0.05 * 64 * len(rows)
    assert 0.9 < rows[1]["effective_sample_size"] < 0.9999 and rows[1]["ratio/q01"] < 0.95 < 1.05 < rows[1]["ratio/max"]
    assert rows[-1]["evaluation/accuracy"] > rows[0]["evaluation/accuracy"] + 0.05
