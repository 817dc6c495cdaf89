"""Replies of servers that are nearly right: dropped choices, older weights, log-probs of another distribution."""

import itertools
from pathlib import Path

import pytest

from recjax.config.experience import EngineConfig
from recjax.models.sampling import Sampling
from recjax.remote import dialects, server
from recjax.remote.client import LostWeightsError, RemoteEngine
from recjax.remote.server import Address
from recjax.tasks.problems import Problem
from tests.remote.test_remote_engine import (
    RIGHT,
    choice_of,
    engine_of,
    prompts_of,
    scripted_engine,
    sglang_reply,
    vllm_choice,
)
from tests.test_remote_experience import config, fake, policy_of

__all__ = ["config"]

NAMES = {"name": "1", "source": "policy", "version": 5}
ROUTES = {"vllm": dialects.GENERATE, "sglang": "/generate"}


def sampled_with(config, **changes):
    """The config with another sampling distribution; engine=… are keys of rollout.engine."""
    if "engine" in changes:
        changes["engine"] = EngineConfig(url="http://localhost:1", **changes["engine"])
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=changes)})


@pytest.mark.parametrize("indices", [[6, 7], [7], [0, 0, 1, 2, 3, 4, 5, 6], [*range(1, 9)], [*range(9)]])
def test_a_server_that_drops_choices_gets_single_requests(config, indices):
    """vLLM before 0.31 gives only the choices that end last, so that long completions are too frequent."""
    policy = policy_of(config)
    tokens = choice_of(policy)["token_ids"]
    calls = []

    def answer(body):
        count = body["sampling_params"]["n"]
        return 200, {"choices": [vllm_choice(tokens, RIGHT, place) for place in (indices if count == 8 else [0])]}

    with scripted_engine("vllm", config, policy, {dialects.GENERATE: answer}, calls, has_tokens=True) as url:
        with engine_of(url, config, policy) as engine:
            for _ in range(2):
                groups = engine.sample_tokens(prompts_of(config, policy), 8, 0, **NAMES)
                assert [len(group.completions) for group in groups] == [8, 8]
            assert engine.left_out.total() == 1, "the kind of server is known after its first reply"
    asked = [body["sampling_params"] for _, body in calls]
    assert [one["n"] for one in asked].count(1) == len(asked) - 1
    seeds = [seed for one in asked[1:17] for seed in range(one["seed"], one["seed"] + one["n"])]
    assert len({*seeds}) == 16 and not {*seeds[:8]} & {*range(8)}, "another seed than that of the refused choices"


def test_falling_back_to_single_requests_costs_no_retry(config):
    policy = policy_of(config)

    def answer(path, body):
        return 200, {"choices": [choice_of(policy)]}

    with fake(answer) as url, engine_of(url, config, policy, retries=0) as engine:
        groups = engine.sample_tokens(prompts_of(config, policy), 2, 0, **NAMES)
        assert [len(group.completions) for group in groups] == [2, 2]
        assert engine.left_out == {"1 of 2 choices": 1}


def labelled(api, tokens, spans, place=0):
    """A completion whose tokens are from labelled weights."""
    spans = [{"version": label, "start": start, "end": end} for label, start, end in spans]
    if api == "vllm":
        return vllm_choice(tokens, RIGHT, place) | {"weight_versions": spans}
    reply = sglang_reply(tokens, RIGHT, tag=spans[-1]["version"])
    reply["meta_info"]["weight_versions"] = spans
    return reply


@pytest.mark.parametrize("api", ROUTES)
def test_each_token_has_the_version_of_its_weights(config, api):
    policy, calls, labels = policy_of(config), [], []
    tokens = choice_of(policy)["token_ids"]
    spans = []

    def took(body):
        labels.append(body.get("new_version") or body["weight_version"])
        return 200, {"success": True}

    def answer(body):
        named = [(labels[number] if isinstance(number, int) else number, *rest) for number, *rest in spans]
        choices = [labelled(api, tokens, named, place) for place in range(2)]
        return 200, {"choices": choices} if api == "vllm" else choices

    replies = dict.fromkeys(("/update_weights_from_disk", "/update_weight_version"), took)
    replies |= {"/collective_rpc": {}, "/reset_prefix_cache?reset_running_requests=true": {}, ROUTES[api]: answer}
    with scripted_engine(api, config, policy, replies, calls, has_tokens=api == "vllm") as url:
        with engine_of(url, config, policy, retries=0) as engine:
            engine.push(Path("/there/4"), 4, False)
            old = len(labels) - 1
            engine.push(Path("/there/5"), 5, False)
            sample = lambda: engine.sample_tokens(prompts_of(config, policy), 2, 0, **NAMES)  # noqa: E731
            spans[:] = [(-1, 0, 3)]
            assert sample()[0].completions[0].policy_version == 5
            spans[:] = [(old, 0, 2), (-1, 2, 3)]  # it got new weights on the way
            completion = sample()[0].completions[0]
            assert (completion.policy_version, completion.version_runs) == (4, ((4, 2), (5, 1)))
            lost = {
                "version 4, older than 5": [(old, 0, 3)],
                "'default', which this run did not push": [("default", 0, 3)],
                "did not push": [(f"{labels[-1]}-loading", 0, 3)],
            }
            for words, spans[:] in lost.items():
                with pytest.raises(LostWeightsError, match=words):
                    sample()
            for spans[:] in ([(-1, 0, 2)], [(-1, 1, 3)], [(-1, 0, 2), (-1, 1, 2)], [(-1, 0, 3), (-1, 3, 4)]):
                with pytest.raises(ValueError, match="versions that do not fit the tokens"):
                    sample()


def test_vllm_without_labels_says_its_weights_once_a_batch(config):
    policy, calls, labels, reads = policy_of(config), [], [], []
    tokens = choice_of(policy)["token_ids"]

    def info(body):
        reads.append(labels[-1])
        return 200, {"weight_version": labels[-1]}

    replies = {
        "/update_weight_version": lambda body: labels.append(body["new_version"]) or (200, {}),
        "/collective_rpc": {},
        "/reset_prefix_cache?reset_running_requests=true": {},
        "/weight_info": info,
        "/v1/completions": lambda body: (200, {"choices": [choice_of(policy) for _ in range(body["n"])]}),
    }
    with scripted_engine("vllm", config, policy, replies, calls) as url, engine_of(url, config, policy) as engine:
        engine.push(Path("/there/5"), 5, False)
        groups = engine.sample_tokens(prompts_of(config, policy), 2, 0, **NAMES)
        assert len(reads) == 1 and groups[0].completions[0].rows[0].tokens.tolist() == tokens
        labels.append("default")
        with pytest.raises(LostWeightsError, match="'default', which this run did not push"):
            engine.sample_tokens(prompts_of(config, policy), 2, 0, **NAMES)


@pytest.mark.parametrize("status", [400, 500])
def test_a_push_that_fails_leaves_no_trusted_weights(config, monkeypatch, status):
    """vLLM 0.32 ends after an error in its workers, for example where it does not see the folder."""
    monkeypatch.setattr(server.time, "sleep", lambda seconds: None)
    policy, calls = policy_of(config), []
    replies = {path: {"success": True} for path in ("/update_weight_version", "/pause?mode=wait", "/resume")}
    replies["/pause"] = lambda body: (405, None)
    loads = itertools.count()

    def load(body):
        if next(loads):
            return 503, {"error": {"message": "the engine is dead"}}
        return status, {"error": {"message": "a tensor is missing"}}

    replies["/collective_rpc"] = load
    with scripted_engine("vllm", config, policy, replies, calls) as url, engine_of(url, config, policy) as engine:
        words = "a tensor is missing.*may have any weights.*the same path.*start the run again"
        with pytest.raises(ValueError, match=words):
            engine.push(Path("/there/5"), 5, False)
        assert engine.version is None
    paths = [path for path, _ in calls]
    assert [*dict.fromkeys(paths)] == ["/pause?mode=wait", "/update_weight_version", "/collective_rpc", "/resume"]


def test_a_push_to_a_failing_server_is_repeated(config, monkeypatch):
    """A server that restarts before the last request would have the label of weights that it does not have."""
    monkeypatch.setattr(server.time, "sleep", lambda seconds: None)
    policy, calls, resets = policy_of(config), [], itertools.count()
    replies = {"/update_weight_version": {"success": True}, "/collective_rpc": {}}
    replies["/reset_prefix_cache?reset_running_requests=true"] = lambda body: (200 if next(resets) else 503, {})
    with scripted_engine("vllm", config, policy, replies, calls) as url, engine_of(url, config, policy) as engine:
        with pytest.raises(LostWeightsError, match="failed during a push"):
            engine.push(Path("/there/5"), 5, False)
        assert engine.version is None
        engine.push(Path("/there/5"), 5, False)
        assert engine.version == 5


COLD, CUT = {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "kept_ids": 8}
PROCESSED = {"engine": {"processed_logprobs": True}}


@pytest.mark.parametrize(
    ("api", "changes", "has_masks", "is_right"),
    [
        ("vllm", COLD, False, False),  # vLLM reports the plain softmax by default
        ("vllm", COLD | PROCESSED, False, True),
        ("vllm", CUT, True, True),
        ("vllm", CUT, False, False),
        ("sglang", COLD, False, True),  # SGLang divides by the temperature
        ("sglang", COLD | PROCESSED, False, True),
        ("sglang", CUT, False, False),  # but cuts nothing, whatever the config says
        ("sglang", CUT | PROCESSED, False, False),
        ("sglang", CUT, True, True),
    ],
)
def test_log_probs_of_another_distribution_are_refused(config, api, changes, has_masks, is_right):
    config = sampled_with(config, **changes)
    policy, calls = policy_of(config), []
    tokens = choice_of(policy)["token_ids"]
    masks = [[token, 3] for token in tokens]

    def answer(body):
        if api == "vllm":
            more = {"sampling_mask": masks} if has_masks else {}
            return 200, {"choices": [vllm_choice(tokens, RIGHT, place) | more for place in range(2)]}
        replies = [sglang_reply(tokens, RIGHT if not has_masks else [-9.0] * 3) for _ in range(2)]
        for reply in replies if has_masks and body["return_sampling_mask"] else ():
            more = {"output_token_sampling_mask": masks, "output_token_sampling_logprobs": RIGHT}
            reply["meta_info"] |= more
        return 200, replies

    with scripted_engine(api, config, policy, {ROUTES[api]: answer}, calls, has_tokens=api == "vllm") as url:
        with engine_of(url, config, policy, retries=0) as engine:
            if is_right:
                groups = engine.sample_tokens(prompts_of(config, policy), 2, 0, **NAMES)
                assert groups[0].completions[0].rows[0].behavior_logprobs.tolist() == RIGHT
            else:
                remedy = "processed_logprobs" if api == "vllm" else "returns sampling masks"
                with pytest.raises(ValueError, match=f"log-probs of another distribution.*{remedy}"):
                    engine.sample_tokens(prompts_of(config, policy), 2, 0, **NAMES)


@pytest.mark.parametrize("has_route", [True, False])
def test_vllms_most_likely_tokens_are_requested_and_recorded(config, has_route):
    config = sampled_with(config, recorded_top_k=2)
    policy, calls = policy_of(config), []
    tokens = choice_of(policy)["token_ids"]
    # The sampled token comes first, then the most likely ones.
    top = [(5, -0.5), (6, -1.25)]
    lists = [[(token, -3.0), *top] for token in tokens]

    def answer(body):
        named = body["sampling_params"] if has_route else body
        assert named["logprobs"] == 3
        choices = [vllm_choice(tokens, RIGHT, place) for place in range(2)]
        for choice in choices:
            if has_route:
                for token, pairs in zip(choice["logprobs"]["content"], lists, strict=True):
                    token["top_logprobs"] = [{"token_id": one, "logprob": value, "rank": 1} for one, value in pairs]
            else:
                assert body["return_tokens_as_token_ids"] is True
                texts = [{f"token_id:{one}": value for one, value in pairs} for pairs in lists]
                choice["logprobs"] = {"token_logprobs": RIGHT, "top_logprobs": texts}
        return 200, {"choices": choices if not lacks else [choice_of(policy)] * 2}

    path = dialects.GENERATE if has_route else "/v1/completions"
    with scripted_engine("vllm", config, policy, {path: answer}, calls, has_tokens=has_route) as url:
        with engine_of(url, config, policy, retries=0) as engine:
            lacks = False
            groups = engine.sample_tokens(prompts_of(config, policy), 2, 0, **NAMES)
            recorded = groups[0].completions[0].rows[0].recorded
            assert recorded["top_ids"].tolist() == [[5, 6]] * 3
            assert recorded["top_logprobs"].tolist() == [[-0.5, -1.25]] * 3
            lacks = True
            with pytest.raises(ValueError, match="no log-probs of the most likely tokens .*--max-logprobs"):
                engine.sample_tokens(prompts_of(config, policy), 2, 0, **NAMES)


def test_sglang_without_a_weights_route_takes_none(config):
    policy = policy_of(config)  # sglang-jax
    for replies, takes in (({}, False), ({"/update_weights_from_disk": lambda body: (405, None)}, True)):
        with scripted_engine("sglang", config, policy, replies, []) as url, engine_of(url, config, policy) as engine:
            assert engine.takes_folders == takes


def test_vllm_without_its_route_for_tokens_is_named(config, caplog):
    policy = policy_of(config)
    for has_tokens in (True, False):
        with scripted_engine("vllm", config, policy, {}, [], has_tokens=has_tokens) as url:
            with engine_of(url, config, policy) as engine:
                assert engine.takes_tokens == has_tokens
        assert ("--enable-scale-out" in caplog.text) != has_tokens


@pytest.mark.parametrize("owner", ["vllm", "recjax"])
@pytest.mark.parametrize("prompt", ["3+4=", [{"role": "user", "content": "3+4="}]])
def test_texts_are_sampled_with_every_value_given(config, owner, prompt):
    """vLLM fills missing values from the model's generation_config.json: penalties, top_k, top_p."""
    policy, bodies = policy_of(config), []

    def answer(path, body):
        bodies.append(body)
        content = {"message": {"content": "7"}} if "messages" in body else {"text": "7"}
        return 200, {"choices": [content | {"finish_reason": "stop", "index": place} for place in range(body["n"])]}

    with fake(answer, owner=owner) as url, RemoteEngine(Address(url), policy, config) as engine:
        engine.sample_groups([Problem(prompt, "7")], 7, name="b", source="server")
    (body,) = bodies
    neutral = Sampling()._asdict() | {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    neutral |= {} if owner == "recjax" else {"top_k": -1, "stop_token_ids": list(policy.stop_ids), "min_tokens": 0}
    assert body.items() >= neutral.items()


def test_a_server_of_single_choices_costs_one_reply(config):
    seeds = itertools.count()

    def answer(path, body):
        next(seeds)
        return 200, {"choices": [{"text": "7", "finish_reason": "stop", "index": 0}]}

    with fake(answer) as url, RemoteEngine(Address(url, concurrency=1, retries=0), policy_of(config), config) as engine:
        groups = engine.sample_groups([Problem("3", ""), Problem("4", "")], 7, name="b", source="server")
        assert [len(group.completions) for group in groups] == [2, 2] and not engine.missing
        assert engine.left_out == {"1 of 2 choices": 1} and next(seeds) == 5


def test_keys_of_the_sampling_distribution_are_all_sent():
    """A new field of `Sampling` that a request leaves out would be filled in by the server."""
    draw = dialects.Draw([1], 2, 0, 3, [0], Sampling(0.7, 5, 0.9, 0.1))
    for api in ("recjax", "vllm", "sglang", "llamacpp", ""):
        _, body = dialects.dialect_of(api).request(api, draw, "model", None, False)
        values = body["sampling_params"][0] if api == "sglang" else body
        assert values.items() >= draw.sampling._asdict().items() and values.items() >= dialects.PENALTIES.items()


SGLANG = dialects.DIALECTS["sglang"]
MINE = SGLANG._replace(name="mine", request=lambda *draw: ("/mine", SGLANG.request(*draw)[1]))
CHOSEN = {None: None, "sglang": "/generate", f"{__name__}:MINE": "/mine"}


@pytest.mark.parametrize("dialect", CHOSEN)
def test_a_server_without_a_name_gets_the_chosen_dialect(config, dialect):
    policy = policy_of(config)
    reply = [sglang_reply(choice_of(policy)["token_ids"], RIGHT)] * 2
    calls = []

    def answer(path, body):
        calls.append(path)
        return (200, reply) if path == CHOSEN[dialect] else (404, {"detail": "Not Found"})

    config = sampled_with(config, engine={"dialect": dialect})
    with fake(answer) as url, engine_of(url, config, policy) as engine:
        if dialect is None:
            with pytest.raises(ValueError, match="status 404"):
                engine.sample_tokens(prompts_of(config, policy), 2, 0, **NAMES)
            assert "/v1/completions" in calls
        else:
            groups = engine.sample_tokens(prompts_of(config, policy), 2, 0, **NAMES)
            assert [len(group.completions) for group in groups] == [2, 2]
            assert engine.api == dialect.rpartition(":")[2].lower() and engine.dialect.push is dialects.disk_push


@pytest.mark.parametrize(
    ("name", "problem"), [("no_such:DIALECT", "no_such"), (f"{__name__}:NAMES", "must be a .*Dialect")]
)
def test_a_dialect_that_is_none_is_refused(name, problem):
    with pytest.raises(ValueError, match=f"rollout.engine.dialect = .*{problem}"):
        dialects.dialect_of(name)
