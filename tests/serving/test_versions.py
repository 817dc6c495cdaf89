"""New weights while requests are answered: no request is dropped, and every token says which weights sampled it."""

import time

import numpy as np

from recjax.experience.group import runs_of, token_staleness
from recjax.experience.records import groups_of
from recjax.rollout.engine import Engine
from recjax.rollout.requests import Weights
from recjax.serving import running, sampler, versions
from tests.closeness import assert_same_logprobs
from tests.experience.rows import read_columns
from tests.serving.some_server import SHAPE, TestClient, initial, post, serve, serving
from tests.tiny import params_of

TEXT = "/v1/completions"


def test_a_completion_continues_with_newer_weights_and_names_them(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "LOOK_SECONDS", 0.01)
    begun, up_to_stop = [], sampler.up_to_stop
    monkeypatch.setattr(sampler, "up_to_stop", lambda *arguments: begun.append(1) or up_to_stop(*arguments))
    one_step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: time.sleep(0.05) or one_step(engine))
    coming = [Weights(params_of(SHAPE, 1), 7, "the run")]

    def newer():
        return coming.pop() if coming and begun else None

    server = running.build_server(serving(tmp_path, newer=newer), "ready")
    with TestClient(server.app) as client:
        reply = post(client, TEXT, prompt="abc", max_tokens=100, seed=1, n=4, return_token_ids=True)
        found = [choice["token_policy_versions"] for choice in reply["choices"]]
        assert reply["policy_version"] == 3 and all(each == sorted(each) and each[0] == 3 for each in found)
        assert any(each[-1] == 7 for each in found)
        after = post(client, TEXT, prompt="abc", max_tokens=20, seed=1, return_token_ids=True)
        assert after["policy_version"] == 7 and {*after["choices"][0]["token_policy_versions"]} == {7}
        assert client.get("/v1/models").json()["data"][0]["policy_version"] == 7
    rows = {row.id: row for row in read_columns(tmp_path / "store.db")}
    assert rows[f"{after['id']}/0"].metadata["run"] == "the run"
    assert [rows[f"{reply['id']}/{place}"].policy_version for place in range(4)] == [3] * 4
    runs = [rows[f"{reply['id']}/{place}"].version_runs for place in range(4)]
    assert runs == [runs_of(np.array(each)) for each in found] and any(runs)
    groups = groups_of(row.record for row in rows.values())
    swapped = next(one for one in groups[0].completions if one.version_runs)
    group = groups[0]._replace(completions=(swapped,))
    (_, before), (_, since) = swapped.version_runs
    assert token_staleness([group], 11) == (7 * before + 3 * since) / (before + since)
    fresh = serve(tmp_path / "fresh", params=params_of(SHAPE, 1))
    with fresh as client:  # what came after is what these weights alone sample
        again = post(client, TEXT, prompt="abc", max_tokens=20, seed=1, return_token_ids=True)
    assert again["choices"][0]["token_ids"] == after["choices"][0]["token_ids"]
    assert_same_logprobs(again["choices"][0]["token_logprobs"], after["choices"][0]["token_logprobs"])


def test_unreadable_weights_leave_the_current_ones(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(versions, "LOOK_SECONDS", 0.01)
    asked = []

    def newer():
        asked.append(1)
        if len(asked) == 1:
            raise ValueError("the disk is gone")
        return Weights(initial(), 8) if len(asked) == 2 else None

    with serve(tmp_path, newer=newer) as client:
        while len(asked) < 4:
            time.sleep(0.01)
        assert post(client, TEXT, prompt="abc", max_tokens=2)["policy_version"] == 8
