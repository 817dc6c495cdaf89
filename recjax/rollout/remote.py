"""Completions from a server with an OpenAI-compatible API, with or without token ids and log-probs."""

import contextlib
import functools
import json
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from recjax.config import Config
from recjax.experience.group import Completion, Group, Row, sets_from_lists
from recjax.experience.records import CHAT_TEMPLATE
from recjax.hub.policy import Policy
from recjax.models.sampling import Sampling
from recjax.rollout.collecting import problem_groups, sampled_completion
from recjax.rollout.requests import Sampled
from recjax.tasks.problems import Problem
from recjax.tasks.prompts import Prompts

logger = logging.getLogger(__name__)

_MOST_WAIT = 30.0  # seconds before a request is tried again
_ENDED = ("stop", "eos", "eos_token", "stop_sequence", "end_turn")  # finish reasons of complete completions
_CUT = ("length", "max_tokens", "model_length")
# Servers write -9999 for a log-prob of minus infinity. Rounding can lift a log-prob slightly above 0.
_LOWEST = -9000.0
_HIGHEST = 1e-3
KEY_VARIABLE = "RECJAX_API_KEY"  # environment variable with the API key, for clients and servers without a key file
_SHARED = "the engine must see the folder under the same path (rollout.engine.folder)"
_REMEDIES = {
    "recjax": f"start recjax.serve with --push_root and a key; {_SHARED}",
    "vllm": "start vLLM with VLLM_SERVER_DEV_MODE=1, or for model.lora with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True,"
    f" --enable-lora and --max-lora-rank; {_SHARED}",
    "sglang": f"with model.lora, start SGLang with --enable-lora, --max-lora-rank and --lora-target-modules; {_SHARED}",
}
_GENERATE = "/inference/v1/generate"
_PASSING = (408, 409, 425, 429, 500, 502, 503, 504)  # statuses that may not recur when the request is sent again


class Address(NamedTuple):
    """A server's location, and limits for requests to it.

    url: URL of the server, with or without /v1.
    model: name of the model on the server; None: its only model.
    api_key: key of the server; None: the server needs no key.
    concurrency: largest number of parallel requests.
    seconds: time limit for a whole reply.
    retries: number of retries of a request that fails for a temporary reason.
    key: the flag or config key with the URL, for messages.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    concurrency: int = 8
    seconds: float = 600.0
    retries: int = 6
    key: str = "--engine"


class _UnusableError(Exception):
    """A reply is not certainly a completion of the policy; the message says why."""


class LostWeightsError(Exception):
    """The server no longer has the weights that were pushed, for example after a restart."""


class RemoteEngine(contextlib.AbstractContextManager):
    """A server that samples completions; a context.

    Attributes:
        model: name of the model on the server.
        api: the server's software: recjax, vllm, sglang or llamacpp, or another name.
        version: policy version of the weights that the server has acknowledged; None: nothing was pushed.
        left_out, missing: see `sample_groups`.
    """

    def __init__(self, address: Address, policy: Policy, config: Config):
        """Connects to the server and requests its list of models.

        Args:
            policy: policy whose tokenizer decides if the server's token ids belong to the same vocabulary.
            config: sampling distribution, length limits and template variables.
        Raises:
            ValueError: the server does not answer, or lacks the model.
        """
        self._address = address
        self._policy = policy
        self._rollout = config.rollout
        self._says_sampling = bool(config.rollout.engine and config.rollout.engine.processed_logprobs)
        self.version, self._tag, self._pusher, self._adapter = None, None, uuid.uuid4().hex[:12], None
        self._template = config.model.chat_template_kwargs
        base = address.url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {address.api_key}"} if address.api_key else {}
        self._client = httpx.Client(base_url=f"{base}/v1/", headers=headers, timeout=address.seconds)
        self._place = base
        self._gives_ids = True
        self._warned = set()
        self.left_out = Counter()
        self.missing = 0
        self._threads = ThreadPoolExecutor(address.concurrency, thread_name_prefix="remote")
        try:
            self.model, self.api = self._chosen_model()
        except BaseException:
            self.__exit__()
            raise

    @classmethod
    def of_config(cls, config: Config, policy: Policy) -> "RemoteEngine":
        """Connects to the server in `rollout.engine`."""
        engine = config.rollout.engine
        key = next(iter(read_keys(engine.api_key_file, most=1, key="rollout.engine.api_key_file")), None)
        limits = engine.concurrency, engine.reply_seconds, engine.retries
        return cls(Address(engine.url, engine.model, key, *limits, "rollout.engine.url"), policy, config)

    def __exit__(self, *exception: object) -> None:
        """Waits for replies to current requests, then logs how many replies were skipped, by reason."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self.left_out:
            counts = ", ".join(f"{why} {number}" for why, number in self.left_out.most_common())
            words = "%s: %d replies were not completions of the policy (%s); after retries %d completions are missing"
            logger.warning(words, self._place, self.left_out.total(), counts, self.missing)
        self._client.close()

    def sample_groups(self, problems: Sequence[Problem], seed: int, *, name: str, source: str) -> list[Group]:
        """A group for each problem, with `rollout.group_size` completions without grades.

        A group has fewer completions if the server keeps sending unusable replies. `left_out` counts unusable replies
        by reason, and `missing` counts the missing completions.

        Completions have rows only if the server sends tokens and they certainly belong to the policy's vocabulary.
        Otherwise they have only text.

        Args:
            seed: seed of the completions; servers that use seeds then repeat their completions.
            name, source: see `collecting.sample_groups`.
        Raises:
            ValueError: the server refuses, or does not answer after all retries.
        """
        replies = self._in_parallel(
            (self._completions, problem, seed + place, source) for place, problem in enumerate(problems)
        )
        for completions, wrong in replies:
            self.left_out.update(wrong)
            self.missing += self._rollout.group_size - len(completions)
        return problem_groups(name, problems, [completions for completions, _ in replies])

    # --- The trained policy: weights out, tokens in.

    @functools.cached_property
    def takes_folders(self) -> bool:
        """True if the server takes whole weights from a folder, and says later which weights it has."""
        has_versions = self.api == "vllm" and self._sent("GET", f"{self._place}/weight_info").is_success
        return self.api in ("recjax", "sglang") or has_versions

    @functools.cached_property
    def _takes_tokens(self) -> bool:
        """True if the server has vLLM's endpoint for tokens: its path exists, but takes only POST requests."""
        return self._sent("GET", f"{self._place}{_GENERATE}").status_code == 405

    def push(self, folder: Path, version: int, is_adapter: bool) -> None:
        """Gives the server new weights from a folder on a disk that both share; the server must acknowledge them.

        Args:
            folder: whole model, or adapters in PEFT's format.
            version: policy version of the weights.
        Raises:
            ValueError: the server refuses the weights or does not answer.
        """
        # No other push has this tag. Where replies or the adapter's name carry it, a server that restarted shows.
        tag = f"{self._pusher}-{version}"
        place = "v1/" * (self.api == "vllm")
        if is_adapter:
            self._acknowledged(f"{place}load_lora_adapter", {"lora_name": tag, "lora_path": str(folder)})
            if self._adapter:
                self._sent("POST", f"{self._place}/{place}unload_lora_adapter", {"lora_name": self._adapter})
            self._adapter = tag
        elif self.api == "vllm":
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            self._acknowledged("collective_rpc", call)
            self._acknowledged("reset_prefix_cache?reset_running_requests=true", {})
            self._acknowledged("update_weight_version", {"new_version": tag})
        else:
            self._acknowledged("update_weights_from_disk", {"model_path": str(folder), "weight_version": tag})
        self.version = version
        self._tag = tag

    def _acknowledged(self, path: str, body: dict[str, Any]) -> None:
        reply = self._sent("POST", f"{self._place}/{path}", body)
        said = _error(reply)[0]
        with contextlib.suppress(ValueError):
            parsed = reply.json()
            if reply.is_success and not (isinstance(parsed, dict) and parsed.get("success") is False):
                return
            said = str(parsed.get("message", said))[:300] if isinstance(parsed, dict) else said
        if reply.is_success and (not reply.text or "success" in reply.text.lower()):  # vLLM's replies are no JSON
            return
        raise ValueError(
            f"{self._at}: the server did not take new weights (/{path} with {body}, status {reply.status_code}:"
            f" {said}); {_REMEDIES[self.api]}"
        )

    def sample_tokens(
        self, prompts: Prompts, group_size: int, seed: int, *, name: str, source: str, version: int
    ) -> list[Group]:
        """A whole group for each prompt, of tokens with the server's own log-probs.

        The server reads and returns tokens, so no text is tokenized again. A reply that is not certainly a completion
        of the policy is requested again.

        Args:
            seed: see `sample_groups`.
            name, source: see `collecting.sample_groups`.
            version: policy version that the server has, or may have taken last.
        Raises:
            LostWeightsError: a reply is from other weights than pushed.
            ValueError: the server does not answer, or keeps sending unusable replies.
        """
        prefixes = [tokens[real] for tokens, real in zip(prompts.tokens, prompts.mask, strict=True)]
        replies = self._in_parallel(
            (self._token_completions, prefix, group_size, seed + place * group_size, source, version)
            for place, prefix in enumerate(prefixes)
        )
        return problem_groups(name, prompts.problems, replies)

    def _token_completions(
        self, prefix: np.ndarray, size: int, seed: int, source: str, version: int
    ) -> list[Completion]:
        found = []
        asked = 0
        retries = self._address.retries
        while len(found) < size:
            choices = self._token_choices(prefix, size - len(found), seed + asked)
            asked = asked + max(len(choices), 1)
            wrong = [] if choices else ["no choices"]
            for choice in choices[: size - len(found)]:
                try:
                    sampled = self._sampled(choice, version)
                except _UnusableError as error:
                    wrong.append(str(error))
                else:
                    found.append(sampled_completion(prefix, sampled, self._policy, self._rollout.sampling(), source))
            self.left_out.update(wrong)
            retries -= bool(wrong)
            if retries < 0:
                raise ValueError(
                    f"{self._at}: a prompt has {len(found)} of {size} completions after {self._address.retries + 1}"
                    f" unusable replies, the last with {wrong[-1]}; correct the server, or raise"
                    " rollout.engine.retries if it recovers by itself"
                )
        return found

    def _token_choices(self, prefix: np.ndarray, count: int, seed: int) -> list[dict[str, Any]]:
        """The choices of a reply, each with token_ids, token_logprobs and finish_reason, whatever the server's API."""
        rollout = self._rollout
        tokens = prefix.tolist()
        stops = np.atleast_1d(self._policy.stop_ids).tolist()
        body = rollout.sampling()._asdict()
        if self.api == "sglang":
            body |= {"n": count, "max_new_tokens": rollout.max_completion_tokens, "stop_token_ids": stops}
            body |= {"top_k": rollout.top_k or -1}
            asked = {"input_ids": tokens, "sampling_params": body, "return_logprob": True}
            reply = self._read_tokens(
                self._sent("POST", f"{self._place}/generate", asked | {"lora_path": self._adapter})
            )
            return [_of_sglang(one) for one in (reply if isinstance(reply, list) else [reply])]
        if self.api == "llamacpp":
            asked = {"prompt": tokens, "n_predict": rollout.max_completion_tokens, "seed": seed % 2**32}
            asked |= {"n_probs": 1, "return_tokens": True, "samplers": ["temperature"]}
            reply = self._read_tokens(self._sent("POST", f"{self._place}/completion", body | asked))
            # Tokens that end within a character have no log-prob; such a completion is unusable.
            values = [one.get("logprob") for one in reply.get("completion_probabilities") or ()]
            reason = {"limit": "length"}.get(reply.get("stop_type"), reply.get("stop_type"))
            return [{"token_ids": reply.get("tokens"), "token_logprobs": values, "finish_reason": reason}]
        body |= {"n": count, "seed": seed, "max_tokens": rollout.max_completion_tokens, "logprobs": 0}
        body |= {} if self.api == "recjax" else {"stop_token_ids": stops}
        asked = {"model": self._adapter or self.model}
        if self._takes_tokens:
            path = f"{self._place}{_GENERATE}"
            asked = asked | {"token_ids": tokens, "sampling_params": body}
        else:
            path = "completions"
            asked = asked | body | {"prompt": tokens, "return_token_ids": True}
        reply = self._read_tokens(self._sent("POST", path, asked))
        tag = reply.get("weight_version")
        if self.api == "vllm" and self._tag and not self._adapter:  # vLLM's replies do not name their weights
            tag = self._read(self._sent("GET", f"{self._place}/weight_info")).get("weight_version")
        return [{**choice, "tag": tag} for choice in reply.get("choices") or () if isinstance(choice, dict)]

    def _read_tokens(self, reply: httpx.Response) -> Any:
        if reply.status_code == 404 and self._adapter:
            raise LostWeightsError(f"{self._at}: the server does not have adapter {self._adapter}")
        if self.api == "sglang" and self._adapter and reply.status_code == 400 and "lora" in reply.text.lower():
            raise LostWeightsError(f"{self._at}: {_error(reply)[0]}")
        if reply.is_success and reply.text.lstrip().startswith("["):
            return reply.json()
        return self._read(reply)

    def _sampled(self, choice: dict[str, Any], version: int) -> Sampled:
        """The completion in a choice, up to its first token that ends completions of the policy.

        Raises:
            _UnusableError: the choice is not certainly a completion of the policy.
            LostWeightsError: it is from other weights than pushed.
        """
        reason = choice.get("finish_reason")
        tokens = choice.get("token_ids")
        tag = choice.get("tag")
        limit = self._rollout.max_completion_tokens
        if self._tag and not self._adapter and not str(tag).startswith(self._pusher):
            raise LostWeightsError(f"{self._at}: a reply is from weights {tag!r:.60}, which this run did not push")
        if reason not in (*_ENDED, *_CUT):
            raise _UnusableError(f"finish_reason {reason!s:.50}")
        if not isinstance(tokens, list) or not tokens:
            raise _UnusableError("no token ids")
        if not all(isinstance(token, int) and 0 <= token < self._policy.vocabulary for token in tokens):
            raise _UnusableError("token ids outside the policy's vocabulary")
        if len(tokens) > limit:
            raise _UnusableError(f"{len(tokens)} tokens, more than rollout.max_completion_tokens = {limit}")
        recorded = sets_from_lists(choice.get("sampling_mask"), tokens, self._policy.kept_ids)
        logprobs = self._logprobs(choice, choice, len(tokens), bool(recorded))
        if logprobs is None:
            raise _UnusableError(f"no log-prob of each of {len(tokens)} tokens")
        versions = choice.get("token_policy_versions") or [version] * len(tokens)
        if len(versions) != len(tokens) or not all(isinstance(each, int) and each <= version for each in versions):
            raise _UnusableError("policy versions that do not fit the tokens")
        ends = np.flatnonzero(np.isin(tokens, self._policy.stop_ids))
        count = int(ends[0]) + 1 if len(ends) else len(tokens)
        if not len(ends) and (reason not in _CUT or len(tokens) < limit):
            raise _UnusableError(
                f"finish_reason {reason} after {len(tokens)} of {limit} tokens, without an end token of the policy"
            )
        columns = zip((tokens, logprobs, versions), (np.int32, np.float32, np.int32), strict=True)
        arrays = [np.array(values, dtype) for values, dtype in columns]
        return Sampled(*arrays, False, recorded).up_to(count)._replace(truncated=not len(ends))

    @property
    def _at(self) -> str:
        """The URL, after the flag or key that sets it."""
        return f"{self._address.key}{' ' if self._address.key == '--engine' else ' = '}{self._address.url}"

    def _in_parallel(self, calls: Iterable[tuple]) -> list[Any]:
        """The results of calls that run in threads; none starts after one has failed."""
        futures = [self._threads.submit(*call) for call in calls]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    # --- Requests.

    def _completions(self, problem: Problem, seed: int, source: str) -> tuple[list[Completion], list[str]]:
        """Completions of a problem, still without ids, and the reasons why other replies are unusable."""
        found = []
        unusable = []
        asked = 0
        retries = self._address.retries
        while len(found) < (size := self._rollout.group_size) and retries >= 0:
            # Some servers always send a single choice, for any n.
            reply = self._reply(self._body(problem, size - len(found), seed + asked))
            choices = reply.get("choices")
            if not choices:
                raise ValueError(f"{self._place}: a reply has no choices: {json.dumps(reply):.200}")
            choices = choices[: size - len(found)]
            wrong = [_wrong_with(choice) for choice in choices]
            for choice in (choice for choice, why in zip(choices, wrong, strict=True) if why is None):
                text = choice["message"]["content"] if "message" in choice else choice["text"]
                found.append(
                    Completion(
                        id="",
                        source=source,
                        text=text,
                        rows=self._rows(reply, choice, text),
                        sampling=self._rollout.sampling(),
                        policy_version=None,
                        truncated=choice["finish_reason"] in _CUT,
                        metadata={CHAT_TEMPLATE: dict(problem.template)} if problem.template else {},
                    )
                )
            asked += len(choices)
            retries -= any(wrong)
            unusable += filter(None, wrong)
        # All completions of a prompt need tokens, or none: otherwise they would have no common prompt.
        if not all(one.rows for one in found):
            found = [one._replace(rows=()) for one in found]
        return found, unusable

    def _body(self, problem: Problem, count: int, seed: int) -> dict[str, Any]:
        rollout = self._rollout
        template = dict(self._template) | dict(problem.template)
        fields = {"model": self.model, "n": count, "seed": seed, "max_tokens": rollout.max_completion_tokens}
        fields |= {"temperature": rollout.temperature, "top_p": rollout.top_p}
        optional = {"top_k": rollout.top_k, "min_p": rollout.min_p, "stop": list(rollout.stop)}
        if isinstance(problem.prompt, str):
            fields["prompt"] = problem.prompt
        else:
            fields["messages"] = list(problem.prompt)
            optional |= {"tools": template.pop("tools", None), "chat_template_kwargs": template}
        return fields | {name: value for name, value in optional.items() if value}

    def _reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the reply to a request, with token ids and log-probs if the server supports them."""
        path = "chat/completions" if "messages" in body else "completions"
        extra = {"logprobs": True if "messages" in body else 0, "return_token_ids": True} if self._gives_ids else {}
        reply = self._sent("POST", path, body | extra)
        if extra and reply.status_code in (400, 422):
            reply = self._sent("POST", path, body)
            if reply.is_success and self._gives_ids:  # the server refused only the extra fields
                self._gives_ids = False
                self._warn("ids", "the server does not support return_token_ids, so the store gets only texts")
        return self._read(reply)

    def _sent(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """Sends a request, with retries after temporary failures, and returns the response."""
        wait = 0.5
        tries = self._address.retries
        for left in range(tries, -1, -1):
            try:
                reply = self._client.request(method, path, json=body)
                if reply.status_code not in _PASSING:
                    return reply
                failure = f"answers with status {reply.status_code}: {_error(reply)[0]}"
                asked = reply.headers.get("retry-after", "")
                wait = max(wait, float(asked)) if asked.isdecimal() else wait
            except httpx.UnsupportedProtocol as error:
                raise ValueError(f"{self._at}: {error}; give http://HOST:PORT") from error
            except httpx.HTTPError as error:
                failure = f"does not answer ({error or type(error).__name__})"
            if left:
                logger.debug("%s %s; tried again in %.1f s", self._place, failure, wait)
                time.sleep(min(wait, _MOST_WAIT))
                wait *= 2
        raise ValueError(
            f"{self._at}: the server {failure}, after {tries + 1} tries; start the same command again"
            " when the server is available"
        )

    def _read(self, reply: httpx.Response) -> dict[str, Any]:
        words, code = _error(reply)
        if reply.status_code == 400 and code == "content_filter":  # Azure refuses a prompt
            return {"choices": [{"finish_reason": code}]}
        if reply.status_code in (401, 403):
            file = "--api_key_file" if self._address.key == "--engine" else "rollout.engine.api_key_file"
            remedy = f"give {file}, a file with one key, or set ${KEY_VARIABLE}"
            raise ValueError(f"{self._place} refuses the request ({words}); {remedy}")
        if not reply.is_success:
            raise ValueError(f"{self._place} refuses the request with status {reply.status_code}: {words}")
        try:
            found = reply.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ValueError(f"{self._place}: a reply must be a JSON object: {words}")
        return found

    def _chosen_model(self) -> tuple[str, str]:
        """The model's name, and the owner that the server's list of models gives it."""
        reply = self._sent("GET", "models")
        asked = self._address.model
        if reply.status_code == 404 and asked is not None:
            return asked, ""  # the server does not list models
        listed = self._read(reply).get("data")
        listed = listed if isinstance(listed, list) else []
        owners = {one["id"]: one.get("owned_by", "") for one in listed if "id" in one}
        if asked is None and len(owners) == 1:
            return next(iter(owners.items()))
        if asked not in owners:
            flag = "--model" if self._address.key == "--engine" else "rollout.engine.model ="
            said = f"{flag} {asked!r}: unknown" if asked else f"give {flag.removesuffix(' =')}"
            raise ValueError(f"{self._place}: {said}; the server has {', '.join([*owners][:20]) or 'no models'}")
        return asked, owners[asked]

    # --- Replies.

    def _rows(self, reply: dict[str, Any], choice: dict[str, Any], text: str) -> tuple[Row, ...]:
        """The row of a choice; none unless the server sends tokens that certainly belong to the policy's vocabulary."""
        tokenizer = self._policy.tokenizer
        vocabulary = self._policy.vocabulary
        prompt = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
        tokens = choice.get("token_ids")
        if not tokens or not prompt:
            if self._gives_ids:
                self._warn("none", "the server sends no token ids, so the store gets only texts")
            return ()
        is_known = all(isinstance(token, int) and 0 <= token < vocabulary for token in (*prompt, *tokens))
        if is_known:
            ended = tokens[:-1] if tokens[-1] in self._policy.stop_ids else tokens
            said = text.strip().rstrip("\ufffd")
            # Some servers include special tokens in the text; no server includes the stop string.
            read = [
                tokenizer.decode(ended, skip_special_tokens=skip).strip().rstrip("\ufffd") for skip in (False, True)
            ]
            is_known = any(one.startswith(said) if self._rollout.stop else one == said for one in read)
        if not is_known:
            self._warn("vocabulary", "token ids are not of the policy's vocabulary, so the store gets only texts")
            return ()
        recorded = sets_from_lists(choice.get("sampling_mask"), tokens, self._policy.kept_ids)
        logprobs = self._logprobs(reply, choice, len(tokens), bool(recorded))
        columns = np.ones(len(tokens), bool), logprobs and np.array(logprobs, np.float32), recorded
        return (Row(np.array(prompt, np.int32), np.array(tokens, np.int32), *columns),)

    def _logprobs(
        self, reply: dict[str, Any], choice: dict[str, Any], count: int, has_sets: bool
    ) -> list[float] | None:
        """Log-probs under the distribution that sampled the tokens; None unless they certainly are of this kind."""
        values = choice.get("token_logprobs")
        if values is None:
            said = choice.get("logprobs") or {}
            content = said.get("content")
            values = said.get("token_logprobs") if content is None else [one.get("logprob") for one in content]
        if not values or len(values) != count or not all(isinstance(value, int | float) for value in values):
            return None
        if not all(_LOWEST < value < _HIGHEST for value in values):  # also false for NaN
            return None
        # Servers other than recjax report log-probs of the plain softmax, regardless of the sampling settings; a server
        # that sends the sets of possible tokens (vLLM's sampling_mask) normalizes over them.
        of_sampling = "policy_version" in reply or "token_policy_versions" in reply or self._says_sampling or has_sets
        if not of_sampling and self._rollout.sampling() != Sampling():
            self._warn("sampling", "dropped the log-probs, which may belong to another distribution than rollout's")
            return None
        return [min(float(value), 0.0) for value in values]

    def _warn(self, kind: str, words: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s: %s", self._place, words)


def _of_sglang(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply of SGLang's /generate in the form of a choice."""
    said = reply.get("meta_info") or {}
    sampled = said.get("output_token_logprobs") or []
    reason = said.get("finish_reason")
    return {
        "token_ids": [one[1] for one in sampled],
        "token_logprobs": [one[0] for one in sampled],
        "finish_reason": reason.get("type") if isinstance(reason, dict) else reason,
        "tag": said.get("weight_version"),
    }


def _wrong_with(choice: dict[str, Any]) -> str | None:
    """The reason why a choice is not a completion of the policy; None if it is one."""
    message = choice.get("message")
    reason = choice.get("finish_reason")
    said = message if isinstance(message, dict) else {}
    if said.get("refusal"):
        return "refusal"
    if reason not in (*_ENDED, *_CUT):
        return "no finish_reason" if reason is None else f"finish_reason {reason!s:.50}"
    text = said.get("content") if "message" in choice else choice.get("text")
    if not text and (said.get("reasoning_content") or said.get("reasoning")):
        return "only reasoning"
    return None if isinstance(text, str) else "no text"


def _error(reply: httpx.Response) -> tuple[str, str | None]:
    """The start of the message in a response, and the code of its error, if it has one."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        error = reply.json()["error"]
        return str(error["message"])[:300], error.get("code")
    return reply.text[:300], None


def read_keys(file: str | None, most: int | None = None, key: str = "--api_key_file") -> tuple[str, ...]:
    """The API keys in the file of --api_key_file, one per line; without a file, the key in $RECJAX_API_KEY, if any.

    Args:
        most: largest number of keys; None: no limit.
        key: the flag or config key with the file, for messages.
    Raises:
        ValueError: the file cannot be read, has no keys or too many, or has an invalid key.
    """
    if file is None:
        return tuple(filter(None, [os.environ.get(KEY_VARIABLE, "").strip()]))
    try:
        keys = tuple(filter(None, map(str.strip, Path(file).read_text(encoding="utf-8").splitlines())))
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{key} {file} cannot be read ({error}); give one key per line") from error
    if not 0 < len(keys) <= (most or len(keys)) or any(not key.isascii() or len(key.split()) > 1 for key in keys):
        number = "one key" if most == 1 else "one or more keys, one per line"
        raise ValueError(f"{key} {file}: takes {number}, in ASCII without spaces")
    return keys
