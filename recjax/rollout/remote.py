"""Completions from a server with an OpenAI-compatible API, with or without token ids and log-probs."""

import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from recjax.config import Config
from recjax.experience.group import Completion, Group, Row, sets_from_lists
from recjax.experience.store import CHAT_TEMPLATE
from recjax.hub.policy import Policy
from recjax.models.sampling import Sampling
from recjax.rollout.collecting import problem_groups
from recjax.tasks.problems import Problem

logger = logging.getLogger(__name__)

_MOST_WAIT = 30.0  # seconds before a request is tried again
_ENDED = ("stop", "eos", "eos_token", "stop_sequence", "end_turn")  # finish reasons of complete completions
_CUT = ("length", "max_tokens", "model_length")
_PASSING = (408, 409, 425, 429, 500, 502, 503, 504)  # statuses that may not recur when the request is sent again


class Address(NamedTuple):
    """A server's location, and limits for requests to it.

    url: URL of the server, with or without /v1.
    model: name of the model on the server; None: its only model.
    api_key: key of the server; None: the server needs no key.
    concurrency: largest number of parallel requests.
    seconds: time limit for a whole reply.
    retries: number of retries of a request that fails for a temporary reason.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    concurrency: int = 8
    seconds: float = 600.0
    retries: int = 6


class RemoteEngine(contextlib.AbstractContextManager):
    """A server that samples completions; a context."""

    def __init__(self, address: Address, policy: Policy, config: Config):
        """Connects to the server and requests its list of models.

        Args:
            policy: policy whose tokenizer decides if the server's token ids belong to the same vocabulary.
            config: sampling distribution, length limits and template variables.
        Raises:
            ValueError: the server does not answer, or lacks the model.
        """
        self._address, self._policy, self._rollout = address, policy, config.rollout
        self._template = config.model.chat_template_kwargs
        base = address.url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {address.api_key}"} if address.api_key else {}
        self._client = httpx.Client(base_url=f"{base}/v1/", headers=headers, timeout=address.seconds)
        self._place, self._gives_ids, self._warned = base, True, set()
        self.left_out, self.missing = Counter(), 0
        self._threads = ThreadPoolExecutor(address.concurrency, thread_name_prefix="remote")
        try:
            self.model = self._chosen_model()
        except BaseException:
            self.__exit__()
            raise

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
        asked = [
            self._threads.submit(self._completions, problem, seed + place, source)
            for place, problem in enumerate(problems)
        ]
        try:
            replies = [future.result() for future in asked]
        finally:
            for future in asked:
                future.cancel()
        for completions, wrong in replies:
            self.left_out.update(wrong)
            self.missing += self._rollout.group_size - len(completions)
        return problem_groups(name, problems, [completions for completions, _ in replies])

    # --- Requests.

    def _completions(self, problem: Problem, seed: int, source: str) -> tuple[list[Completion], list[str]]:
        """Completions of a problem, still without ids, and the reasons why other replies are unusable."""
        found, unusable, asked, retries = [], [], 0, self._address.retries
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
        rollout, template = self._rollout, dict(self._template) | dict(problem.template)
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
        wait, tries = 0.5, self._address.retries
        for left in range(tries, -1, -1):
            try:
                reply = self._client.request(method, path, json=body)
                if reply.status_code not in _PASSING:
                    return reply
                failure = f"answers with status {reply.status_code}: {_error(reply)[0]}"
                asked = reply.headers.get("retry-after", "")
                wait = max(wait, float(asked)) if asked.isdecimal() else wait
            except httpx.UnsupportedProtocol as error:
                raise ValueError(f"--engine {self._address.url}: {error}; give http://HOST:PORT") from error
            except httpx.HTTPError as error:
                failure = f"does not answer ({error or type(error).__name__})"
            if left:
                logger.debug("%s %s; tried again in %.1f s", self._place, failure, wait)
                time.sleep(min(wait, _MOST_WAIT))
                wait *= 2
        raise ValueError(
            f"--engine {self._address.url}: the server {failure}, after {tries + 1} tries; start the same command again"
            " when the server is available"
        )

    def _read(self, reply: httpx.Response) -> dict[str, Any]:
        words, code = _error(reply)
        if reply.status_code == 400 and code == "content_filter":  # Azure refuses a prompt
            return {"choices": [{"finish_reason": code}]}
        if reply.status_code in (401, 403):
            raise ValueError(f"{self._place} refuses the request ({words}); give --api_key_file, a file with one key")
        if not reply.is_success:
            raise ValueError(f"{self._place} refuses the request with status {reply.status_code}: {words}")
        try:
            found = reply.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ValueError(f"{self._place}: a reply must be a JSON object: {words}")
        return found

    def _chosen_model(self) -> str:
        reply = self._sent("GET", "models")
        asked = self._address.model
        if reply.status_code == 404 and asked is not None:
            return asked  # the server does not list models
        listed = self._read(reply).get("data")
        names = [one["id"] for one in listed if "id" in one] if isinstance(listed, list) else []
        if asked is None and len(names) == 1:
            return names[0]
        if asked not in names:
            said = f"--model {asked!r}: unknown" if asked else "give --model"
            raise ValueError(f"{self._place}: {said}; the server has {', '.join(names[:20]) or 'no models'}")
        return asked

    # --- Replies.

    def _rows(self, reply: dict[str, Any], choice: dict[str, Any], text: str) -> tuple[Row, ...]:
        """The row of a choice; none unless the server sends tokens that certainly belong to the policy's vocabulary."""
        tokenizer, vocabulary = self._policy.tokenizer, self._policy.vocabulary
        prompt, tokens = choice.get("prompt_token_ids") or reply.get("prompt_token_ids"), choice.get("token_ids")
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
        logprobs = logprobs and np.array(logprobs, np.float32)
        columns = np.array(tokens, np.int32), np.ones(len(tokens), bool), logprobs, recorded
        return (Row(np.array(prompt, np.int32), *columns),)

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
        # Servers other than recjax report log-probs of the plain softmax, regardless of the sampling settings; a server
        # that sends the sets of possible tokens (vLLM's sampling_mask) normalizes over them.
        if "policy_version" not in reply and not has_sets and self._rollout.sampling() != Sampling():
            self._warn("sampling", "dropped the log-probs, which may belong to another distribution than rollout's")
            return None
        return [min(float(value), 0.0) for value in values]

    def _warn(self, kind: str, words: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s: %s", self._place, words)


def _wrong_with(choice: dict[str, Any]) -> str | None:
    """The reason why a choice is not a completion of the policy; None if it is one."""
    message, reason = choice.get("message"), choice.get("finish_reason")
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


def read_keys(file: str | None, most: int | None = None) -> tuple[str, ...]:
    """The API keys in the file of --api_key_file, one per line; none without a file.

    Args:
        most: largest number of keys; None: no limit.
    Raises:
        ValueError: the file cannot be read, has no keys or too many, or has an invalid key.
    """
    if file is None:
        return ()
    try:
        keys = tuple(filter(None, map(str.strip, Path(file).read_text(encoding="utf-8").splitlines())))
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--api_key_file {file} cannot be read ({error}); give one key per line") from error
    if not 0 < len(keys) <= (most or len(keys)) or any(not key.isascii() or len(key.split()) > 1 for key in keys):
        number = "one key" if most == 1 else "one or more keys, one per line"
        raise ValueError(f"--api_key_file {file}: takes {number}, in ASCII without spaces")
    return keys
