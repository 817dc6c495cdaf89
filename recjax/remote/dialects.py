"""The APIs of each server's software for tokens and weights: its requests, and its replies in a common form.

`DIALECTS` has them by the name that the software gives itself. `rollout.engine.dialect` names one of them or your own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from recjax.agents import named_agents
from recjax.errors import UserError
from recjax.models.sampling import Sampling

GENERATE = "/inference/v1/generate"  # vLLM's route for tokens
# Each request says these values: vLLM fills missing ones from the model's generation_config.json, SGLang from
# --preferred-sampling-params, llama.cpp from its flags.
PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
_LLAMACPP_VALUES = {"mirostat": 0, "dynatemp_range": 0.0, "repeat_penalty": 1.0, "post_sampling_probs": False}


class Draw(NamedTuple):
    """Completions to request for a prompt.

    prefix: token ids of the prompt.
    count: number of completions.
    seed: seed of the first completion; completion i has seed + i.
    limit: most tokens of a completion, end token included.
    stop_ids: token ids that end a completion.
    sampling: the distribution.
    top_k: number of most likely tokens whose log-probs the reply should have for each token.
    """

    prefix: list[int]
    count: int
    seed: int
    limit: int
    stop_ids: list[int]
    sampling: Sampling
    top_k: int = 0


def explicit_values(api: str, sampling: Sampling, stop_ids: list[int]) -> dict[str, Any]:
    """Every value of the sampling distribution that a server with OpenAI's or vLLM's routes could fill in by itself."""
    values = sampling._asdict() | PENALTIES
    if api == "recjax":  # refuses unknown keys, and has no other defaults
        return values
    # Older versions of vLLM and SGLang have no 0 for all tokens.
    values |= {
        "top_k": sampling.top_k or -1,
        "stop_token_ids": stop_ids,
        "min_tokens": 0,
        "ignore_eos": False,
        "skip_special_tokens": True,
    }
    if api == "llamacpp":
        values |= _LLAMACPP_VALUES
    return values


def token_request(api: str, draw: Draw, model: str, adapter: str | None, has_route: bool) -> tuple[str, dict[str, Any]]:
    """The path and body of a request for tokens to vLLM, recjax and servers with only OpenAI's API.

    Args:
        model: the server's model.
        adapter: adapter of the model that samples; None: the model itself.
        has_route: True if the server has vLLM's route for tokens.
    """
    values = explicit_values(api, draw.sampling, draw.stop_ids)
    values |= {"n": draw.count, "seed": draw.seed, "max_tokens": draw.limit, "logprobs": 0}
    named: dict[str, Any] = {"model": adapter or model}
    if draw.top_k and api == "vllm":
        # One more, as vLLM's list begins with the sampled token: which tokens are recorded must not depend on it.
        values["logprobs"] = draw.top_k + 1
        if not has_route:
            named["return_tokens_as_token_ids"] = True
    if has_route:
        return GENERATE, named | {"token_ids": draw.prefix, "sampling_params": values}
    return "completions", named | values | {"prompt": draw.prefix, "return_token_ids": True}


def _sglang_request(
    api: str, draw: Draw, model: str, adapter: str | None, has_route: bool
) -> tuple[str, dict[str, Any]]:
    values = explicit_values(api, draw.sampling, draw.stop_ids)
    # A list, as SGLang gives the n completions of one prompt the same seed. It reads seeds only with
    # --enable-deterministic-inference.
    del values["min_tokens"]
    values |= {"n": 1, "min_new_tokens": 0, "max_new_tokens": draw.limit}
    rows = [values | {"sampling_seed": draw.seed + number} for number in range(draw.count)]
    body = {
        "input_ids": [draw.prefix] * draw.count,
        "sampling_params": rows,
        "return_logprob": True,
        "lora_path": adapter,
    }
    if draw.sampling.has_cuts:
        body["return_sampling_mask"] = True
    return "/generate", body


def _llamacpp_request(
    api: str, draw: Draw, model: str, adapter: str | None, has_route: bool
) -> tuple[str, dict[str, Any]]:
    body = {"prompt": draw.prefix, "n_predict": draw.limit, "seed": draw.seed % 2**32}
    constant = {"n_probs": 1, "return_tokens": True, "samplers": ["temperature"]}
    return "/completion", explicit_values(api, draw.sampling, draw.stop_ids) | body | constant


def labeled_choices(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply to `token_request`, with the label of its weights in each choice."""
    label = reply.get("weight_version")
    choices = [choice for choice in reply.get("choices") or () if isinstance(choice, dict)]
    return {**reply, "choices": [{"weight_version": label, **choice} for choice in choices]}


def _sglang_choices(reply: Any) -> dict[str, Any]:
    if not isinstance(reply, list):
        reply = [reply]
    return {"choices": [_sglang_choice(sampled) for sampled in reply]}


def top_pairs(choice: dict[str, Any]) -> list[list[tuple[int, float]]] | None:
    """The most likely tokens of each token in a choice, as pairs of id and log-prob; None unless all tokens have some.

    recjax has a list of its own, vLLM's route for tokens has objects with ids, and its other routes have texts
    "token_id:5".
    """
    pairs = choice.get("token_top_logprobs")
    if pairs:
        return pairs
    reported = choice.get("logprobs") or {}
    pairs = []
    try:
        content = reported.get("content")
        if content is not None:
            for token in content:
                pairs.append([(top["token_id"], top["logprob"]) for top in token["top_logprobs"]])
        else:
            for token_logprobs in reported["top_logprobs"]:
                named = token_logprobs.items()
                pairs.append([(int(text.removeprefix("token_id:")), logprob) for text, logprob in named])
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return pairs


def _sglang_choice(reply: dict[str, Any]) -> dict[str, Any]:
    meta = reply.get("meta_info") or {}
    sampled = meta.get("output_token_logprobs") or []
    reason = meta.get("finish_reason")
    mask = meta.get("output_token_sampling_mask")
    if mask is None:
        logprobs = [token[0] for token in sampled]
    else:
        logprobs = meta.get("output_token_sampling_logprobs")
    if isinstance(reason, dict):
        reason = reason.get("type")
    return {
        "token_ids": [token[1] for token in sampled],
        "token_logprobs": logprobs,
        "sampling_mask": mask,
        "finish_reason": reason,
        "weight_version": meta.get("weight_version"),
        "weight_versions": meta.get("weight_versions"),
    }


def _llamacpp_choices(reply: dict[str, Any]) -> dict[str, Any]:
    # Tokens that end within a character have no log-prob; such a completion is unusable.
    values = [token.get("logprob") for token in reply.get("completion_probabilities") or ()]
    reason = reply.get("stop_type")
    if reason == "limit":
        reason = "length"
    return {"choices": [{"token_ids": reply.get("tokens"), "token_logprobs": values, "finish_reason": reason}]}


def weight_labels(choice: dict[str, Any], count: int) -> list[str | None] | None:
    """The label of the weights that sampled each token; None for a reply without labels.

    Raises:
        UserError: the spans of labels have gaps.
    """
    spans = choice.get("weight_versions")
    label = choice.get("weight_version")
    if spans is None:
        if label is None:
            return None
        return [label] * count
    labels = []
    for span in spans:
        if span["start"] != len(labels) or not span["start"] < span["end"] <= count:
            raise ValueError
        labels += [span["version"]] * (span["end"] - span["start"])
    return labels


class Push(NamedTuple):
    """Requests that give a server new weights.

    before: path that stops the server's work; None: the server needs none.
    steps: paths and bodies in order; each must be acknowledged.
    after: path that lets the server continue, also after a failure.
    unload: path that removes the adapter of an earlier push.
    """

    before: str | None
    steps: list[tuple[str, dict[str, Any]]]
    after: str | None = None
    unload: str = "/unload_lora_adapter"


def disk_push(folder: Path, label: str, is_adapter: bool, pauses: bool) -> Push:
    """The requests that give SGLang or recjax, which wait for the requests that they run, the weights in a folder.

    Args:
        label: name of the weights, which replies then have.
        pauses: True if the server has routes to pause and resume its work.
    """
    if is_adapter:
        return Push(None, [("/load_lora_adapter", {"lora_name": label, "lora_path": str(folder)})])
    return Push(None, [("/update_weights_from_disk", {"model_path": str(folder), "weight_version": label})])


def _vllm_push(folder: Path, label: str, is_adapter: bool, pauses: bool) -> Push:
    if is_adapter:
        steps = [("/v1/load_lora_adapter", {"lora_name": label, "lora_path": str(folder)})]
        return Push(None, steps, unload="/v1/unload_lora_adapter")
    steps = [
        # A reply with this label is from weights that were only half there.
        ("/update_weight_version", {"new_version": f"{label}-loading"}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}),
        ("/reset_prefix_cache?reset_running_requests=true", {}),
        ("/update_weight_version", {"new_version": label}),
    ]
    if pauses:
        return Push("/pause?mode=wait", steps, "/resume")
    return Push(None, steps)


# --- Dialects by name.


class Dialect(NamedTuple):
    """The API of a server's software. The defaults are OpenAI's API and plain log-probs.

    name: the software's name in its list of models, as `owned_by`.
    request: path and body of a request for tokens, see `token_request`; its first argument is the name.
    choices: a reply to such a request with `choices` as in vLLM's replies, see `labeled_choices`.
    logprobs_fit: True if log-probs without sampling masks belong to the distribution that sampled. Its arguments are
        the distribution and `rollout.engine.processed_logprobs`.
    push: requests that give the server new weights, see `disk_push`.
    weights_route: a route of servers that take whole weights from a folder; None: this software takes none.
    most_choices: largest number of completions that a request may ask for; None: any.
    releases: routes that may report the release, each with the key of the release in the reply.
    push_remedy, logprobs_remedy, top_logprobs_remedy: advice for weights that are not taken, for log-probs that do not
        fit, and for missing log-probs of the most likely tokens.
    """

    name: str
    request: Callable[[str, Draw, str, str | None, bool], tuple[str, dict[str, Any]]] = token_request
    choices: Callable[[Any], dict[str, Any]] = labeled_choices
    logprobs_fit: Callable[[Sampling, bool], bool] = lambda sampling, processed: sampling == Sampling() or processed
    push: Callable[[Path, str, bool, bool], Push] = disk_push
    weights_route: str | None = None
    most_choices: int | None = None
    releases: tuple[tuple[str, str], ...] = ()
    push_remedy: str = "use another server"
    logprobs_remedy: str = "set rollout.engine.processed_logprobs if they are right"
    top_logprobs_remedy: str = "sample with recjax's engine, recjax.serve or vLLM"


_SHARED = "the engine must see the folder under the same path (rollout.engine.folder)"
_ALL = [
    Dialect(
        "recjax",
        logprobs_fit=lambda sampling, processed: True,
        weights_route="/update_weights_from_disk",
        push_remedy=f"start recjax.serve with --push_root and a key; {_SHARED}",
        top_logprobs_remedy="start recjax.serve with the same rollout.recorded_top_k",
    ),
    Dialect(
        "vllm",  # reports log-probs of the plain softmax
        push=_vllm_push,
        weights_route="/weight_info",
        releases=(("/version", "version"),),
        push_remedy="start vLLM with VLLM_SERVER_DEV_MODE=1, or for model.lora with"
        f" VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and --max-lora-rank; {_SHARED}",
        logprobs_remedy="start vLLM with --logprobs-mode processed_logprobs and set"
        " rollout.engine.processed_logprobs=true; under cuts also --return-sampling-mask, and rollout.top_k above 0",
        top_logprobs_remedy="start vLLM with --max-logprobs above rollout.recorded_top_k",
    ),
    Dialect(
        "sglang",  # divides the logits by the temperature, but cuts nothing
        _sglang_request,
        _sglang_choices,
        lambda sampling, processed: not sampling.has_cuts,
        weights_route="/update_weights_from_disk",  # sglang-jax calls itself sglang, and has no such route
        releases=(("/server_info", "version"), ("/get_server_info", "version")),
        push_remedy="with model.lora, start SGLang with --enable-lora, --max-lora-rank and --lora-target-modules; "
        + _SHARED,
        logprobs_remedy="use a version of SGLang that returns sampling masks, or remove rollout.top_k, top_p and min_p",
    ),
    Dialect(
        "llamacpp",
        _llamacpp_request,
        _llamacpp_choices,
        most_choices=1,
        releases=(("/props", "build_info"),),
        logprobs_remedy="set rollout.temperature=1, and remove rollout.top_k, top_p and min_p",
    ),
]
DIALECTS = {dialect.name: dialect for dialect in _ALL}


def dialect_of(name: str) -> Dialect:
    """The dialect of a server's software, or the user's own as module:name.

    Raises:
        UserError: the module has no such dialect.
    """
    if ":" not in name:
        return DIALECTS.get(name, Dialect(name))
    dialect = named_agents.named("rollout.engine.dialect", name)
    if not isinstance(dialect, Dialect):
        raise UserError(
            "rollout.engine.dialect", f"must be a recjax.remote.dialects.Dialect, not {dialect!r:.60}", value=name
        )
    return dialect
