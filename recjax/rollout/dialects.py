"""The APIs of each server's software for tokens and weights: its requests, and its replies in a common form."""

from pathlib import Path
from typing import Any, NamedTuple

from recjax.models.sampling import Sampling

GENERATE = "/inference/v1/generate"  # vLLM's route for tokens
# Each request says these values: vLLM fills missing ones from the model's generation_config.json, SGLang from
# --preferred-sampling-params, llama.cpp from its flags.
PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
_SHARED = "the engine must see the folder under the same path (rollout.engine.folder)"
REMEDIES = {
    "recjax": f"start recjax.serve with --push_root and a key; {_SHARED}",
    "vllm": "start vLLM with VLLM_SERVER_DEV_MODE=1, or for model.lora with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True,"
    f" --enable-lora and --max-lora-rank; {_SHARED}",
    "sglang": f"with model.lora, start SGLang with --enable-lora, --max-lora-rank and --lora-target-modules; {_SHARED}",
}
# Log-probs of another distribution than the request's, and what gives the right ones.
OTHER_LOGPROBS = {
    "vllm": "start vLLM with --logprobs-mode processed_logprobs and set rollout.engine.processed_logprobs=true; under"
    " cuts also --return-sampling-mask, and rollout.top_k above 0",
    "sglang": "use a version of SGLang that returns sampling masks, or remove rollout.top_k, top_p and min_p",
    "llamacpp": "set rollout.temperature=1, and remove rollout.top_k, top_p and min_p",
}
# Ways to get the log-probs of the most likely tokens.
TOP_LOGPROBS_FROM = {
    "recjax": "start recjax.serve with the same rollout.recorded_top_k",
    "vllm": "start vLLM with --max-logprobs above rollout.recorded_top_k",
}
# Routes that may report a server's release, and the key of the release in their replies.
RELEASES = {
    "vllm": [("/version", "version")],
    "sglang": [("/server_info", "version"), ("/get_server_info", "version")],
    "llamacpp": [("/props", "build_info")],
}
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


def most_choices(api: str) -> int | None:
    """Largest number of completions that a request for tokens may ask for; None: any."""
    return 1 if api == "llamacpp" else None


def explicit_values(api: str, sampling: Sampling, stop_ids: list[int]) -> dict[str, Any]:
    """Every value of the sampling distribution that a server with OpenAI's or vLLM's routes could fill in by itself."""
    values = sampling._asdict() | PENALTIES
    if api == "recjax":  # refuses keys that it does not know, and has no defaults of its own
        return values
    # Older versions of vLLM and SGLang have no 0 for all tokens.
    values |= {"top_k": sampling.top_k or -1, "stop_token_ids": stop_ids}
    values |= _LLAMACPP_VALUES if api == "llamacpp" else {}
    return values | {"min_tokens": 0, "ignore_eos": False, "skip_special_tokens": True}


def token_request(api: str, draw: Draw, model: str, adapter: str | None, has_route: bool) -> tuple[str, dict[str, Any]]:
    """The path and body of a request for tokens.

    Args:
        model: the server's model.
        adapter: adapter of the model that samples; None: the model itself.
        has_route: True if the server has vLLM's route for tokens.
    """
    values = explicit_values(api, draw.sampling, draw.stop_ids)
    if api == "sglang":
        # A list, as SGLang gives the n completions of one prompt the same seed. It reads seeds only with
        # --enable-deterministic-inference.
        del values["min_tokens"]
        values |= {"n": 1, "min_new_tokens": 0, "max_new_tokens": draw.limit}
        rows = [values | {"sampling_seed": draw.seed + place} for place in range(draw.count)]
        body = {"input_ids": [draw.prefix] * draw.count, "sampling_params": rows}
        body |= {"return_logprob": True, "lora_path": adapter}
        return "/generate", body | ({"return_sampling_mask": True} if draw.sampling.has_cuts else {})
    if api == "llamacpp":
        more = {"prompt": draw.prefix, "n_predict": draw.limit, "seed": draw.seed % 2**32}
        more |= {"n_probs": 1, "return_tokens": True, "samplers": ["temperature"]}
        return "/completion", values | more
    values |= {"n": draw.count, "seed": draw.seed, "max_tokens": draw.limit, "logprobs": 0}
    named = {"model": adapter or model}
    if draw.top_k and api == "vllm":
        # One more, as vLLM's list begins with the sampled token: which tokens are recorded must not depend on it.
        values |= {"logprobs": draw.top_k + 1}
        named |= {} if has_route else {"return_tokens_as_token_ids": True}
    if has_route:
        return GENERATE, named | {"token_ids": draw.prefix, "sampling_params": values}
    return "completions", named | values | {"prompt": draw.prefix, "return_token_ids": True}


def reply_with_choices(api: str, reply: Any) -> dict[str, Any]:
    """A reply to `token_request` with `choices` as in vLLM's replies, whatever the server's software."""
    if api == "sglang":
        replies = reply if isinstance(reply, list) else [reply]
        return {"choices": [_sglang_choice(each) for each in replies]}
    if api == "llamacpp":
        # Tokens that end within a character have no log-prob; such a completion is unusable.
        values = [token.get("logprob") for token in reply.get("completion_probabilities") or ()]
        reason = {"limit": "length"}.get(reply.get("stop_type"), reply.get("stop_type"))
        return {"choices": [{"token_ids": reply.get("tokens"), "token_logprobs": values, "finish_reason": reason}]}
    label = reply.get("weight_version")
    choices = [choice for choice in reply.get("choices") or () if isinstance(choice, dict)]
    return {**reply, "choices": [{"weight_version": label, **choice} for choice in choices]}


def top_pairs(choice: dict[str, Any]) -> list[list[tuple[int, float]]] | None:
    """The most likely tokens of each token in a choice, as pairs of id and log-prob; None unless all tokens have some.

    recjax has a list of its own, vLLM's route for tokens has objects with ids, and its other routes have texts
    "token_id:5".
    """
    if pairs := choice.get("token_top_logprobs"):
        return pairs
    reported = choice.get("logprobs") or {}
    try:
        if (content := reported.get("content")) is not None:
            return [[(top["token_id"], top["logprob"]) for top in token["top_logprobs"]] for token in content]
        return [
            [(int(text.removeprefix("token_id:")), logprob) for text, logprob in of_token.items()]
            for of_token in reported["top_logprobs"]
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _sglang_choice(reply: dict[str, Any]) -> dict[str, Any]:
    meta = reply.get("meta_info") or {}
    sampled = meta.get("output_token_logprobs") or []
    reason = meta.get("finish_reason")
    mask = meta.get("output_token_sampling_mask")
    logprobs = [token[0] for token in sampled] if mask is None else meta.get("output_token_sampling_logprobs")
    return {
        "token_ids": [token[1] for token in sampled],
        "token_logprobs": logprobs,
        "sampling_mask": mask,
        "finish_reason": reason.get("type") if isinstance(reason, dict) else reason,
        "weight_version": meta.get("weight_version"),
        "weight_versions": meta.get("weight_versions"),
    }


def logprobs_fit(api: str, sampling: Sampling, is_processed: bool) -> bool:
    """True if a server's log-probs without sampling masks belong to the distribution that sampled.

    recjax reports log-probs of this distribution. vLLM and llama.cpp report those of the plain softmax; SGLang divides
    the logits by the temperature, but cuts nothing.

    Args:
        is_processed: the user's word for vLLM's --logprobs-mode processed_logprobs, or its like.
    """
    if api == "sglang":
        return not sampling.has_cuts
    return sampling == Sampling() or api == "recjax" or is_processed


def weight_labels(choice: dict[str, Any], count: int) -> list[str | None] | None:
    """The label of the weights that sampled each token; None for a reply without labels.

    Raises:
        ValueError: the spans of labels have gaps.
    """
    spans = choice.get("weight_versions")
    label = choice.get("weight_version")
    if spans is None:
        return None if label is None else [label] * count
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
    """

    before: str | None
    steps: list[tuple[str, dict[str, Any]]]
    after: str | None = None


def push_requests(api: str, folder: Path, label: str, is_adapter: bool, pauses: bool) -> Push:
    """The requests that give a server the weights in a folder.

    Args:
        label: name of the weights, which replies then have.
        pauses: True if the server has routes to pause and resume its work.
    """
    if is_adapter:
        prefix = "/v1" if api == "vllm" else ""
        return Push(None, [(f"{prefix}/load_lora_adapter", {"lora_name": label, "lora_path": str(folder)})])
    if api != "vllm":  # SGLang and recjax wait for the requests that they run
        body = {"model_path": str(folder), "weight_version": label}
        return Push(None, [("/update_weights_from_disk", body)])
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    steps = [
        # A reply with this label is from weights that were only half there.
        ("/update_weight_version", {"new_version": f"{label}-loading"}),
        ("/collective_rpc", call),
        ("/reset_prefix_cache?reset_running_requests=true", {}),
        ("/update_weight_version", {"new_version": label}),
    ]
    return Push("/pause?mode=wait", steps, "/resume") if pauses else Push(None, steps)


def unload_request(api: str, adapter: str) -> tuple[str, dict[str, Any]]:
    """The path and body of a request that removes an adapter."""
    return f"{'/v1' if api == 'vllm' else ''}/unload_lora_adapter", {"lora_name": adapter}
