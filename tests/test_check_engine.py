"""check_engine: a right server passes, and each wrong one fails by name."""

from pathlib import Path

import jax
import numpy as np
import pytest

from recjax import check_engine
from recjax.config import load_config
from recjax.models.decoder import Decoder, init_params
from recjax.planning import engine_checks
from recjax.planning.engine_checks import FAIL, NOTE, PASS, EngineCheck, check_config
from recjax.remote import dialects
from recjax.remote.sampler import EngineSampler
from recjax.runs.policies import OpenedPolicy
from recjax.serve import pushed_reader
from recjax.serving.guards import Guarded
from tests.marks import slow_except
from tests.serving.some_server import LIMITS, listening
from tests.test_remote_experience import config, fake, policy_of
from tests.training.tiny_run import TINY

__all__ = ["config"]

CHECKS = ("server", "weights", "log-probs", "n", "seeds", "sampling", "end tokens", "push", "throughput")


class Unigrams:
    """A server with vLLM's routes whose tokens do not depend on their context, with one fault."""

    def __init__(self, policy, fault):
        self.policy = policy
        self.fault = fault or "none"
        self.params = self.served = {"logits": np.random.default_rng(0).normal(size=policy.vocabulary)}
        self.label = "default"

    def answer(self, path, body):
        """The reply to a request."""
        if path == "/version":
            return 200, {"version": "0.32.0"}
        if path == "/weight_info":
            return (404, None) if "takes no weights" in self.fault else (200, {"weight_version": self.label})
        if path == "/update_weight_version":
            self.label = body["new_version"]
            return 200, {"success": True}
        if path in ("/collective_rpc", "/reset_prefix_cache?reset_running_requests=true"):
            return 200, {}
        if path == dialects.GENERATE:
            return 200, {"choices": self.choices(body["sampling_params"])}
        return 404, {"detail": "Not Found"}

    def choices(self, values):
        """The choices of a request, with logits / temperature as the log-probs."""
        cold = self.served["logits"] / values["temperature"]
        logprobs = cold - np.log(np.exp(cold).sum())
        weights = np.exp(logprobs)
        if self.fault == "top_k of its own":
            weights = np.where(weights >= np.sort(weights)[-4], weights, 0)
        if self.fault == "a penalty of its own":
            weights = weights * np.where(weights == weights.max(), 0.4, 1)
        reported = logprobs
        if self.fault == "log-probs of the plain softmax":
            reported = self.served["logits"] - np.log(np.exp(self.served["logits"]).sum())
        if "rough arithmetic" in self.fault:
            reported = np.minimum(logprobs + np.random.default_rng(1).normal(size=len(logprobs)) / 20, 0)
        made = []
        for index in range(values["n"]):
            seed = values["seed"] + (0 if self.fault == "one seed for all choices" else index)
            seed = index if self.fault == "a seed of its own" else seed
            draws = np.random.default_rng(seed).choice(len(weights), values["max_tokens"], p=weights / weights.sum())
            stops = [] if self.fault == "ignores further end tokens" else values["stop_token_ids"]
            stops = [*stops, *self.policy.stop_ids]
            ends = np.flatnonzero(np.isin(draws, stops))
            tokens = draws[: ends[0] + 1].tolist() if len(ends) else draws.tolist()
            content = [{"logprob": float(reported[token])} for token in tokens]
            spans = [{"version": self.label, "start": 0, "end": len(tokens)}]
            choice = {"index": index, "token_ids": tokens, "logprobs": {"content": content}, "weight_versions": spans}
            made.append(choice | {"finish_reason": "stop" if len(ends) else "length"})
        return made[-1:] if self.fault == "drops choices" else made


@pytest.fixture
def checked(config, tmp_path, monkeypatch):
    """A function from a fault of a server to the lines of its check by name."""

    def scores(policy, params, batch, sampling, *_, layout):
        cold = params["logits"] / sampling.temperature
        return (cold - np.log(np.exp(cold).sum()))[batch.completions]

    def check(fault, settings=(), draws=600):
        path = tmp_path / "run.yaml"
        path.write_text(TINY)
        policy = policy_of(config)
        server = Unigrams(policy, fault)

        def push(sampler, weights, version):
            if fault != "takes weights and keeps its own" or version == 1:
                server.served = weights
            label = server.label
            sampler.engine.push(Path(f"/there/{version}"), version, False)
            server.label = label if fault == "an older label" and version > 1 else server.label

        monkeypatch.setattr(engine_checks, "score", scores)
        monkeypatch.setattr(EngineSampler, "push", push)
        with fake(server.answer, owner="vllm", posts=(dialects.GENERATE,)) as url:
            limits = "rollout.engine.retries=1", f"output={tmp_path}", "rollout.max_completion_tokens=6"
            of_run = load_config(path, [f"rollout.engine.url={url}", "model.dtype=float32", *limits, *settings])
            opened = OpenedPolicy("tiny", policy, server.params)
            of_check = check_config(of_run)
            return {line.name: line for line in EngineCheck(of_check, opened, True, True, draws).lines()}

    return check


COLD = "rollout.temperature=0.5", "rollout.engine.processed_logprobs=true"
WRONG = {
    "takes no weights": ((), ["weights"], "VLLM_SERVER_DEV_MODE"),
    "rough arithmetic": ((), ["log-probs", "push"], "quantization"),
    "log-probs of the plain softmax": (COLD, ["log-probs", "sampling", "push"], "processed_logprobs"),
    "one seed for all choices": ((), ["n", "sampling"], "the same seed"),
    "a seed of its own": ((), ["seeds", "sampling"], "--seed"),
    "top_k of its own": ((), ["sampling"], "--generation-config vllm"),
    "a penalty of its own": ((), ["sampling"], "--generation-config vllm"),
    "ignores further end tokens": ((), ["end tokens"], "stop_token_ids"),
    "takes weights and keeps its own": ((), ["push"], "other weights than it acknowledged"),
    "an older label": ((), ["push", "throughput"], "see the message"),
}


def test_a_right_server_passes(checked):
    for settings in ((), COLD):
        lines = checked(None, settings)
        assert tuple(lines) == CHECKS
        verdicts = {name: line.verdict for name, line in lines.items()}
        assert verdicts == dict.fromkeys(CHECKS, PASS) | {"throughput": NOTE}, lines
        assert "vllm 0.32.0" in lines["server"].measured and dialects.GENERATE in lines["server"].measured


@pytest.mark.slow
def test_a_server_that_drops_choices_is_noted(checked):
    lines = checked("drops choices")
    assert lines["n"].verdict == NOTE and lines["n"].measured == "1 of 8 choices"
    assert FAIL not in {line.verdict for line in lines.values()}


@pytest.mark.parametrize("fault", slow_except(WRONG, "one seed for all choices", "an older label"))
def test_each_wrong_server_fails_by_name(checked, fault):
    settings, names, remedy = WRONG[fault]
    lines = checked(fault, settings)
    assert [name for name, line in lines.items() if line.verdict == FAIL] == names, lines
    assert remedy in lines[names[0]].remedy


def test_a_server_with_fixed_weights_gets_no_push(checked):
    line = checked("takes no weights, rough arithmetic", draws=100)["log-probs"]
    assert line.verdict == FAIL and "other weights than the config's model, or" in line.remedy


def test_log_probs_that_nobody_vouches_for_fail(checked):
    lines = checked(None, COLD[:1])
    for name in ("log-probs", "sampling"):
        assert lines[name].verdict == FAIL and "--logprobs-mode processed_logprobs" in lines[name].measured
    assert lines["sampling"].measured.startswith("450 of 450 completions refused")
    assert lines["weights"].verdict == PASS


@pytest.mark.slow
def test_recjax_serve_is_an_exact_engine(tmp_path, monkeypatch, capsys):
    key = "a-key"
    monkeypatch.setenv("RECJAX_API_KEY", key)
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    settings = [f"output={tmp_path / 'run'}", "model.dtype=float32"]
    policy = policy_of(load_config(path, settings))
    policy = policy._replace(decoder=Decoder(policy.decoder.config))
    options = {"policy": policy, "params": init_params(policy.decoder.config, jax.random.key(5))}
    options["limits"] = LIMITS._replace(slots=16, queue=256)  # as by default
    for sampling in ([], ["rollout.temperature=0.7", "rollout.top_k=5"]):
        with listening(None, guarded=Guarded((key,)), pushed=pushed_reader(tmp_path, policy), **options) as (port, _):
            lines = check_engine.check_server(path, f"http://127.0.0.1:{port}", [*settings, *sampling], draws=400)
        assert [line.name for line in lines if line.verdict == FAIL] == [], capsys.readouterr().out
        assert [line.name for line in lines if line.verdict == NOTE] == ["throughput"]
        assert "exact engine" in capsys.readouterr().out and not (tmp_path / "run" / "pushed" / "check").exists()
