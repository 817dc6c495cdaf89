"""Completions from a server with an OpenAI-compatible API, with or without token ids and log-probs."""

import contextlib
import functools
import itertools
import logging
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from recjax.config import Config
from recjax.errors import UserError
from recjax.experience.group import Completion, Group, Row
from recjax.experience.recorded import LOWEST_LOGPROB, sets_from_lists, top_from_lists
from recjax.experience.records import CHAT_TEMPLATE
from recjax.hub.policy import Policy
from recjax.remote import dialects
from recjax.remote.dialects import Draw
from recjax.remote.server import (
    Address,
    MissingChoicesError,
    RemoteServer,
    UnusableError,
    error_of,
    read_keys,
    whole_choices,
)
from recjax.rollout.collecting import problem_groups, sampled_completions
from recjax.rollout.requests import Sampled
from recjax.tasks.problems import Problem
from recjax.tasks.prompts import Prompts

logger = logging.getLogger(__name__)

_ENDED = ("stop", "eos", "eos_token", "stop_sequence", "end_turn")  # finish reasons of complete completions
_CUT = ("length", "max_tokens", "model_length")
_HIGHEST = 1e-3  # rounding can lift a log-prob slightly above 0
_RESEED = 7_368_787  # the seeds of two tries differ by more than a batch has completions


class LostWeightsError(Exception):
    """The server does not have the weights that were pushed last, for example after a restart."""


class RemoteEngine(contextlib.AbstractContextManager):
    """A server that samples completions; a context.

    Attributes:
        server: the connection.
        dialect: the API of its software.
        api: the dialect's name: recjax, vllm, sglang or llamacpp, or another name.
        most_choices: largest number of completions that a request may ask for; None: any.
        version: policy version of the weights that the server has acknowledged; None: nothing was pushed.
        left_out, missing: see `sample_groups`.
    """

    def __init__(self, address: Address, policy: Policy, config: Config):
        """Connects to the server and requests its list of models.

        Args:
            policy: policy whose tokenizer decides if the server's token ids belong to the same vocabulary.
            config: sampling distribution, length limits and template variables.
        Raises:
            UserError: the server does not answer, or lacks the model.
        """
        self.server = RemoteServer(address)
        self._retries = address.retries
        self._policy = policy
        self._rollout = config.rollout
        engine = config.rollout.engine
        dialect_name = self.server.api
        self._is_processed = False
        if engine:
            self._is_processed = engine.processed_logprobs
            if engine.dialect:
                dialect_name = engine.dialect
        self._pusher = uuid.uuid4().hex[:12]
        self._template = config.model.chat_template_kwargs
        self._adapter = None
        self._gives_ids = True
        self.dialect = dialects.dialect_of(dialect_name)
        self.api = self.dialect.name
        self.most_choices = self.dialect.most_choices
        self._has_unlabeled = False
        self.version = None
        self.left_out = Counter()
        self.missing = 0
        self._threads = ThreadPoolExecutor(address.concurrency, thread_name_prefix="remote")

    @classmethod
    def of_config(cls, config: Config, policy: Policy) -> "RemoteEngine":
        """Connects to the server in `rollout.engine`."""
        engine = config.rollout.engine
        assert engine is not None
        api_key = None
        keys = read_keys(engine.api_key_file, most=1, key="rollout.engine.api_key_file")
        if keys:
            api_key = keys[0]
        address = Address(
            url=engine.url,
            model=engine.model,
            api_key=api_key,
            concurrency=engine.concurrency,
            seconds=engine.reply_seconds,
            retries=engine.retries,
            key="rollout.engine.url",
        )
        return cls(address, policy, config)

    def __exit__(self, *exception: object) -> None:
        """Waits for replies to current requests, then logs how many replies were skipped, by reason."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self.left_out:
            counts = ", ".join(f"{why} {number}" for why, number in self.left_out.most_common())
            words = "%s: %d replies were not completions of the policy (%s); after retries %d completions are missing"
            logger.warning(words, self.server.url, self.left_out.total(), counts, self.missing)
        self.server.close()

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
            UserError: the server refuses, or does not answer after all retries.
        """
        calls = []
        for number, problem in enumerate(problems):
            calls.append((self._completions, problem, seed + number * self._rollout.group_size, source))
        sampled = []
        for completions, wrong in self._in_parallel(calls):
            sampled.append(completions)
            self.left_out.update(wrong)
            self.missing += self._rollout.group_size - len(completions)
        return problem_groups(name, problems, sampled)

    # --- The trained policy: weights out, tokens in.

    @functools.cached_property
    def takes_folders(self) -> bool:
        """True if the server takes whole weights from a folder, and says later which weights it has."""
        route = self.dialect.weights_route
        # Some of these routes take only POST requests.
        return route is not None and self.server.sent("GET", route).status_code in (200, 405)

    @functools.cached_property
    def takes_tokens(self) -> bool:
        """True if the server has vLLM's route for tokens; warns if vLLM has none."""
        # vLLM has the route also where it refuses every request; an empty body is refused in another way.
        has_route = self.server.sent("POST", dialects.GENERATE, {}).status_code in (400, 422)
        if self.api == "vllm" and not has_route:
            words = "so recjax samples by /v1/completions, whose replies do not name their weights and have no sampling"
            self.server.warn(
                "route", f"vLLM does not serve {dialects.GENERATE}, {words} masks; start vLLM with --enable-scale-out"
            )
        return has_route

    def push(self, folder: Path, version: int, is_adapter: bool) -> None:
        """Gives the server new weights from a folder on a disk that both share; the server must acknowledge them.

        Args:
            folder: a complete model, or adapters in PEFT's format.
            version: policy version of the weights.
        Raises:
            LostWeightsError: the server may have restarted between two requests of the push.
            UserError: the server refuses the weights or does not answer.
        """
        # No other push has this label. Where replies or the adapter's name carry it, a server that restarted shows.
        label = f"{self._pusher}-{version}"
        push = self.dialect.push(folder, label, is_adapter, self.server.takes_posts("/pause"))
        self.version = None  # whatever happens, no reply counts as one of the earlier weights
        failures = self.server.failures
        try:
            if push.before:
                self._acknowledged(push.before, {})
            for path, body in push.steps:
                self._acknowledged(path, body)
        except BaseException:
            if push.after:
                with contextlib.suppress(UserError):  # the first error has the reason
                    self._acknowledged(push.after, {})
            raise
        if push.after:
            self._acknowledged(push.after, {})
        if len(push.steps) > 1 and self.server.failures > failures:
            # A server that restarted before the last step has the label of weights that it does not have.
            raise LostWeightsError(f"{self.server.named}: the server failed during a push of weights")
        if is_adapter:
            if self._adapter:
                self.server.sent("POST", push.unload, {"lora_name": self._adapter})
            self._adapter = label
        self.version = version

    def _acknowledged(self, path: str, body: dict[str, Any]) -> None:
        unknown = (
            f"it may have any weights now; {self.dialect.push_remedy}; then start the run again, which gives the"
            " server its weights"
        )
        try:
            reply = self.server.sent("POST", path, body)
        except UserError as error:  # vLLM ends after an error in its workers
            raise UserError(
                problem=str(error), remedy=f"{path} with {body} is part of a push of weights, so {unknown}"
            ) from error
        words = error_of(reply)[0]
        try:
            parsed = reply.json()
        except ValueError:
            # vLLM's replies are no JSON.
            is_accepted = not reply.text or "success" in reply.text.lower()
        else:
            is_accepted = True
            if isinstance(parsed, dict):
                is_accepted = parsed.get("success") is not False
                words = str(parsed.get("message", words))[:300]
        if reply.is_success and is_accepted:
            return
        raise UserError(
            self.server.named,
            f"the server did not take new weights ({path} with {body}, status {reply.status_code}: {words}), so"
            f" {unknown}",
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
            LostWeightsError: a reply is from other weights than the pushed ones.
            UserError: the server does not answer, or keeps sending unusable replies.
        """
        prefixes = [tokens[real] for tokens, real in zip(prompts.tokens, prompts.mask, strict=True)]
        # Each request has its own thread, so that completions one by one are requested at the same time too.
        size = min(self.most_choices or group_size, group_size)
        draws = []
        for prefix in prefixes:
            for start in range(0, group_size, size):
                draws.append(
                    Draw(
                        prefix=prefix.tolist(),
                        count=min(size, group_size - start),
                        seed=seed + len(draws) * size,
                        limit=self._rollout.max_completion_tokens,
                        stop_ids=np.atleast_1d(self._policy.stop_ids).tolist(),
                        sampling=self._rollout.sampling(),
                        top_k=self._policy.recording.top_k,
                    )
                )
        drawn = self._in_parallel((self.draw, draw, version) for draw in draws)
        if self._has_unlabeled:
            # Only this run pushes: its weights after the replies were also the weights of the replies.
            self._has_unlabeled = False
            label = self.server.read(self.server.sent("GET", "/weight_info")).get("weight_version")
            server_version = self._version_of(label)
            if server_version != self.version:
                raise LostWeightsError(f"{self.server.named}: the server has weights of version {server_version}")
        sampled = list(itertools.chain.from_iterable(drawn))
        row_prefixes = []
        for prefix in prefixes:
            row_prefixes += [prefix] * group_size
        completions = sampled_completions(row_prefixes, sampled, self._policy, self._rollout.sampling(), source)
        groups = [completions[start : start + group_size] for start in range(0, len(completions), group_size)]
        return problem_groups(name, prompts.problems, groups)

    def draw(self, draw: Draw, version: int) -> list[Sampled]:
        """Samples the completions of a draw, and samples unusable ones again.

        Raises:
            LostWeightsError, UserError: see `sample_tokens`.
        """
        completions = []
        retries = self._retries
        tries = 0
        while len(completions) < draw.count:
            count = draw.count - len(completions)
            if self.most_choices:
                count = min(count, self.most_choices)
            seed = (draw.seed + tries * _RESEED + len(completions)) % 2**31
            sampled, wrong = self.try_draw(draw._replace(count=count, seed=seed), version)
            completions += sampled
            self.left_out.update(wrong)
            tries += 1
            # Some servers always send a single choice; a request for each completion is no retry.
            needs_single_requests = count > 1 and self.most_choices == 1
            if wrong and not needs_single_requests:
                retries -= 1
            if retries < 0:
                raise UserError(
                    self.server.named,
                    f"a prompt has {len(completions)} of {draw.count} completions after {self._retries + 1}"
                    f" unusable replies, the last with {wrong[-1]}",
                    "correct the server, or raise rollout.engine.retries if it recovers by itself",
                )
        return completions

    def try_draw(self, draw: Draw, version: int) -> tuple[list[Sampled], list[str]]:
        """Requests a draw once: the completions that are certainly the policy's, and why others are not.

        Raises:
            LostWeightsError, UserError: see `sample_tokens`.
        """
        sampled = []
        wrong = []
        try:
            choices = self.choices(draw)
        except UnusableError as error:
            return [], [str(error)]
        for choice in choices:
            try:
                sampled.append(self._sampled(choice, draw, version))
            except UnusableError as error:
                wrong.append(str(error))
        return sampled, wrong

    def choices(self, draw: Draw) -> list[dict[str, Any]]:
        """The choices of a reply, as many as the draw has, in the form of vLLM's choices.

        Raises:
            UnusableError: choices are missing.
            LostWeightsError, UserError: see `sample_tokens`.
        """
        path, body = self.dialect.request(self.api, draw, self.server.model, self._adapter, self.takes_tokens)
        reply = self.server.sent("POST", path, body)
        if reply.status_code == 404 and self._adapter:
            raise LostWeightsError(f"{self.server.named}: the server does not have adapter {self._adapter}")
        if self.api == "sglang" and self._adapter and reply.status_code == 400 and "lora" in reply.text.lower():
            raise LostWeightsError(f"{self.server.named}: {error_of(reply)[0]}")
        if reply.is_success and reply.text.lstrip().startswith("["):
            parsed = reply.json()
        else:
            parsed = self.server.read(reply)
        try:
            return whole_choices(self.dialect.choices(parsed), draw.count, self.server.url)
        except MissingChoicesError as error:
            # A server that gives only some of n completions gives those that end last, which are the longest.
            self.most_choices = 1
            self.server.warn("choices", f"a reply has {error}, so recjax requests completions one by one")
            raise

    def _sampled(self, choice: dict[str, Any], draw: Draw, version: int) -> Sampled:
        """The completion in a choice, up to its first token that ends completions of the draw.

        Raises:
            UnusableError: the choice is not certainly a completion of the policy.
            LostWeightsError: it is from other weights than the pushed ones.
        """
        reason = choice.get("finish_reason")
        tokens = choice.get("token_ids")
        if reason not in _ENDED and reason not in _CUT:
            raise UnusableError(f"finish_reason {reason!s:.50}")
        if not isinstance(tokens, list) or not tokens:
            raise UnusableError("no token ids")
        if not self._are_known(tokens):
            raise UnusableError("token ids outside the policy's vocabulary")
        if len(tokens) > draw.limit:
            raise UnusableError(f"{len(tokens)} tokens, more than rollout.max_completion_tokens = {draw.limit}")
        versions = self._token_versions(choice, len(tokens), version)
        recorded = sets_from_lists(choice.get("sampling_mask"), tokens, self._policy.recording.kept_ids)
        if draw.top_k:
            top = top_from_lists(dialects.top_pairs(choice), len(tokens), draw.top_k)
            if not top:
                remedy = self.dialect.top_logprobs_remedy
                raise UnusableError(f"no log-probs of the most likely tokens ({remedy})")
            recorded |= top
        logprobs = _logprobs(choice, choice, len(tokens))
        if logprobs is None:
            raise UnusableError(f"no log-prob of each of {len(tokens)} tokens")
        if not self._describes_sampling(choice, bool(recorded)):
            raise UnusableError(f"log-probs of another distribution than the tokens ({self.dialect.logprobs_remedy})")
        ends = np.flatnonzero(np.isin(tokens, draw.stop_ids))
        has_end = len(ends) > 0
        reached_limit = reason in _CUT and len(tokens) >= draw.limit
        if has_end:
            count = int(ends[0]) + 1
        elif reached_limit:
            count = len(tokens)
        else:
            raise UnusableError(
                f"finish_reason {reason} after {len(tokens)} of {draw.limit} tokens, without an end token of the policy"
            )
        sampled = Sampled(
            tokens=np.array(tokens, np.int32),
            logprobs=np.array(logprobs, np.float32),
            versions=np.array(versions, np.int32),
            truncated=False,
            recorded=recorded,
        )
        return sampled.up_to(count)._replace(truncated=not has_end)

    def _token_versions(self, choice: dict[str, Any], count: int, version: int) -> list[int]:
        """The policy version of the weights that sampled each token.

        Raises:
            UnusableError: the reply's versions do not fit its tokens.
            LostWeightsError: the newest token is from other or older weights than the pushed ones.
        """
        misfit = UnusableError("policy versions that do not fit the tokens")
        try:
            labels = dialects.weight_labels(choice, count)
        except (ValueError, KeyError, TypeError):
            raise misfit from None
        versions = choice.get("token_policy_versions")
        if self.version is not None and not self._adapter:
            if labels is None and self.api == "vllm":
                self._has_unlabeled = True
            else:
                if not labels:
                    labels = [None]  # no version, so `_version_of` refuses the reply
                pushed = [self._version_of(label) for label in labels]
                if pushed[-1] < self.version:
                    words = f"a reply is from pushed weights of version {pushed[-1]}, older than {self.version}"
                    raise LostWeightsError(f"{self.server.named}: {words}")
                if not versions:
                    versions = pushed
        if not versions:
            versions = [version] * count
        if len(versions) != count:
            raise misfit
        for token_version in versions:
            if not isinstance(token_version, int) or token_version > version:
                raise misfit
        return versions

    def _version_of(self, label: Any) -> int:
        """The policy version in the label of pushed weights."""
        pusher, _, version = str(label).partition("-")
        if pusher != self._pusher or not version.isdecimal():
            raise LostWeightsError(
                f"{self.server.named}: a reply is from weights {label!r:.60}, which this run did not push"
            )
        return int(version)

    def _are_known(self, tokens: Iterable[Any]) -> bool:
        return all(type(token) is int and 0 <= token < self._policy.vocabulary for token in tokens)

    def _describes_sampling(self, reply: dict[str, Any], has_sets: bool) -> bool:
        """True if log-probs belong to the distribution that sampled.

        A server that sends the sets of possible tokens (`sampling_mask`) normalizes over these sets.
        """
        is_recjax = "policy_version" in reply or "token_policy_versions" in reply
        fits = self.dialect.logprobs_fit(self._rollout.sampling(), self._is_processed)
        return is_recjax or has_sets or fits

    def _in_parallel(self, calls: Iterable[tuple]) -> list[Any]:
        """The results of calls that run in threads; none starts after one has failed."""
        futures = [self._threads.submit(*call) for call in calls]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    # --- Texts.

    def _completions(self, problem: Problem, seed: int, source: str) -> tuple[list[Completion], list[str]]:
        """Completions of a problem, still without ids, and the reasons why other replies are unusable."""
        completions = []
        unusable = []
        retries = self._retries
        failed = 0
        size = self._rollout.group_size
        while len(completions) < size and retries >= 0:
            count = min(size - len(completions), self.most_choices or size)
            reply: dict[str, Any] = {}
            try_seed = (seed + failed * _RESEED + len(completions)) % 2**31
            try:
                reply = self._reply(self._body(problem, count, try_seed))
                choices = whole_choices(reply, count, self.server.url)
                wrong = [_wrong_with(choice) for choice in choices]
            except UnusableError as error:
                choices = []
                wrong = [str(error)]
                if isinstance(error, MissingChoicesError) and count > 1:
                    # Some servers always send a single choice; a request for each completion is no retry.
                    retries += 1
                    self.most_choices = 1
            for choice, reason in zip(choices, wrong, strict=False):  # `wrong` is longer if there are no choices
                if reason is None:
                    completions.append(self._text_completion(problem, reply, choice, source))
            reasons = [reason for reason in wrong if reason is not None]
            unusable += reasons
            if reasons:
                failed += 1
                retries -= 1
        # All completions of a prompt need tokens, or none: otherwise they would have no common prompt.
        if not all(completion.rows for completion in completions):
            completions = [completion._replace(rows=()) for completion in completions]
        return completions, unusable

    def _text_completion(
        self, problem: Problem, reply: dict[str, Any], choice: dict[str, Any], source: str
    ) -> Completion:
        if "message" in choice:
            text = choice["message"]["content"]
        else:
            text = choice["text"]
        metadata = {}
        if problem.template:
            metadata[CHAT_TEMPLATE] = dict(problem.template)
        return Completion(
            id="",
            source=source,
            text=text,
            rows=self._rows(reply, choice, text),
            sampling=self._rollout.sampling(),
            policy_version=None,
            truncated=choice["finish_reason"] in _CUT,
            metadata=metadata,
        )

    def _body(self, problem: Problem, count: int, seed: int) -> dict[str, Any]:
        rollout = self._rollout
        template = dict(self._template) | dict(problem.template)
        fields: dict[str, Any] = {
            "model": self.server.model,
            "n": count,
            "seed": seed,
            "max_tokens": rollout.max_completion_tokens,
        }
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
        # Chats request log-probs by a flag, texts by the number of most likely tokens.
        path = "completions"
        logprobs = 0
        if "messages" in body:
            path = "chat/completions"
            logprobs = True
        extra = {}
        if self._gives_ids:
            stops = np.atleast_1d(self._policy.stop_ids).tolist()
            extra = dialects.explicit_values(self.api, self._rollout.sampling(), stops)
            extra |= {"logprobs": logprobs, "return_token_ids": True}
        reply = self.server.sent("POST", path, body | extra)
        if extra and reply.status_code in (400, 422):
            reply = self.server.sent("POST", path, body)
            if reply.is_success and self._gives_ids:  # the server refused only the extra fields
                self._gives_ids = False
                self.server.warn(
                    "ids",
                    "the server does not support return_token_ids or a sampling value, so the store gets only texts,"
                    " sampled with the server's own defaults",
                )
        return self.server.read(reply)

    def _rows(self, reply: dict[str, Any], choice: dict[str, Any], text: str) -> tuple[Row, ...]:
        """The row of a choice; none unless the server sends tokens that certainly belong to the policy's vocabulary."""
        prompt = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
        tokens = choice.get("token_ids")
        if not tokens or not prompt:
            if self._gives_ids:
                self.server.warn("none", "the server sends no token ids, so the store gets only texts")
            return ()
        are_known = self._are_known(prompt) and self._are_known(tokens)
        if not are_known or not self._decodes_to(tokens, text):
            self.server.warn("vocabulary", "token ids are not of the policy's vocabulary, so the store gets only texts")
            return ()
        recorded = sets_from_lists(choice.get("sampling_mask"), tokens, self._policy.recording.kept_ids)
        logprobs = _logprobs(reply, choice, len(tokens))
        if logprobs and not self._describes_sampling(reply, bool(recorded)):
            words = "dropped the log-probs, which may belong to another distribution than rollout's"
            self.server.warn("sampling", words)
            logprobs = None
        behavior_logprobs = None
        if logprobs is not None:
            behavior_logprobs = np.array(logprobs, np.float32)
        row = Row(
            prompt_tokens=np.array(prompt, np.int32),
            tokens=np.array(tokens, np.int32),
            mask=np.ones(len(tokens), bool),
            behavior_logprobs=behavior_logprobs,
            recorded=recorded,
        )
        return (row,)

    def _decodes_to(self, tokens: list[int], text: str) -> bool:
        """True if the tokens are a completion within the length limit that reads as the text."""
        if len(tokens) > self._rollout.max_completion_tokens:
            return False
        written = tokens
        if tokens[-1] in self._policy.stop_ids:
            written = tokens[:-1]
        reply = text.strip().rstrip("\ufffd")
        for skips_special in (False, True):  # some servers include special tokens in the text
            decoded = str(self._policy.tokenizer.decode(written, skip_special_tokens=skips_special))
            decoded = decoded.strip().rstrip("\ufffd")
            if decoded == reply:
                return True
            # No server includes the stop string, which the tokens have.
            if self._rollout.stop and decoded.startswith(reply):
                return True
        return False


def _logprobs(reply: dict[str, Any], choice: dict[str, Any], count: int) -> list[float] | None:
    """The log-prob of each token; None unless all are possible."""
    values = choice.get("token_logprobs")
    if values is None:
        reported = choice.get("logprobs") or {}
        content = reported.get("content")
        if content is None:
            values = reported.get("token_logprobs")
        else:
            values = [token.get("logprob") for token in content]
    if not values or len(values) != count:
        return None
    if not all(isinstance(value, int | float) for value in values):
        return None
    if not all(LOWEST_LOGPROB < value < _HIGHEST for value in values):  # also false for NaN
        return None
    return [min(float(value), 0.0) for value in values]


def _wrong_with(choice: dict[str, Any]) -> str | None:
    """The reason why a choice is not a completion of the policy; None if it is one."""
    message = choice.get("message")
    if not isinstance(message, dict):
        message = {}
    if message.get("refusal"):
        return "refusal"
    reason = choice.get("finish_reason")
    if reason is None:
        return "no finish_reason"
    if reason not in _ENDED and reason not in _CUT:
        return f"finish_reason {reason!s:.50}"
    text = choice.get("text")
    if "message" in choice:
        text = message.get("content")
    if not text and (message.get("reasoning_content") or message.get("reasoning")):
        return "only reasoning"
    if not isinstance(text, str):
        return "no text"
    return None
