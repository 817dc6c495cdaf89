"""Checks of a server as a run's engine: tokens, log-probs, sampling, end tokens, weights and speed."""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import chi2

from recjax.config import Config, RegimeConfig
from recjax.errors import UserError
from recjax.experience.batch import Shape, pad
from recjax.experience.group import Group
from recjax.experience.layout import Layout, score
from recjax.models.unrolling import unrolled_for_training
from recjax.remote import dialects
from recjax.remote.client import LostWeightsError, RemoteEngine
from recjax.remote.dialects import Draw
from recjax.remote.sampler import EngineSampler
from recjax.remote.server import UnusableError
from recjax.rollout.requests import Sampled
from recjax.runs.policies import OpenedPolicy
from recjax.sources.sampling import BatchSampler
from recjax.tasks.loading import load_task
from recjax.tasks.prompts import encode_problems

PASS = "PASS"
NOTE = "note"  # training stays exact
FAIL = "FAIL"
PROMPTS = 4
GROUP = 4  # completions of each prompt
MOST_TOKENS = 32  # a completion has at most so many tokens
TOGETHER = 16  # a request asks for so many completions
LOWEST_P = 1e-4  # a correct server fails the sampling test once in 10,000 times
LEAST_EXPECTED = 5  # tokens with fewer expected draws are counted together
CONTEXT = 6  # the repeated text has so many tokens; a server runs three times as many for each completion
FOLLOWING = 3  # a completion of the repeated text has so many tokens, which cost less than completions of one token
LOADS = (1, 8, 64)  # the throughput check has so many concurrent requests
# Compute dtype → largest and mean difference of log-probs in nats; bfloat16 rounds logits near 16 by up to 0.06.
LIMITS = {"float32": (1e-3, 1e-4), "bfloat16": (1.0, 0.05), "float16": (0.2, 0.02)}
_LATER = "rollout.engine pushes the run's weights before the first batch"


class Line(NamedTuple):
    """The result of a check.

    name: the property that training needs.
    measured, limit: numbers in words.
    verdict: PASS, NOTE or FAIL.
    remedy: the user's next step, for FAIL.
    """

    name: str
    measured: str
    limit: str
    verdict: str
    remedy: str = ""


def check_config(config: Config) -> Config:
    """The config for a check: a small batch from the server, whether or not it takes weights."""
    engine = config.rollout.engine
    assert engine is not None
    # The run's own folder may be in use.
    folder = Path(engine.folder or Path(config.output) / "pushed") / "check"
    # Few retries, as a check that fails says why.
    retries = min(engine.retries, 2)
    engine = engine.model_copy(update={"folder": str(folder), "concurrency": max(LOADS), "retries": retries})
    rollout = config.rollout.model_copy(
        update={
            "prompts_per_step": PROMPTS,
            "group_size": GROUP,
            "engine": engine,
            "max_completion_tokens": min(config.rollout.max_completion_tokens, MOST_TOKENS),
        }
    )
    return config.model_copy(
        update={
            "rollout": rollout,
            "regime": RegimeConfig(offline=True),
            "experience": None,
            # A check pushes the complete model, also where a run would push adapters.
            "model": config.model.model_copy(update={"lora": None}),
        }
    )


class EngineCheck:
    """Checks a server against a policy.

    Args:
        config: see `check_config`.
        opened: the policy and the weights that the server should have.
        needs_weights: True for a run that pushes complete weights.
        pushes: True to push weights; the server then keeps those of `opened`.
        draws: number of tokens, about, for the test of the sampling distribution.
    """

    def __init__(self, config: Config, opened: OpenedPolicy, needs_weights: bool, pushes: bool, draws: int):
        self._config = config
        self._opened = opened
        self._needs_weights = needs_weights
        self._pushes = pushes
        self._draws = draws
        self._version = 0
        self._dtype = jnp.dtype(opened.policy.decoder.dtype).name
        nothing: Any = None  # a check reads no problems and grades nothing
        self._sampler = EngineSampler(BatchSampler(config, opened.policy, nothing, nothing, nothing), {})

    def lines(self) -> Iterator[Line]:
        """The results of all checks, in order.

        Raises:
            UserError: the server does not answer, or the task cannot be read.
        """
        policy = self._opened.policy
        problems = load_task(self._config, "held_out").evaluation[:PROMPTS]
        self._prompts = encode_problems(problems, policy.tokenizer, None, policy.vocabulary)
        with self._sampler:
            checks = {
                "server": self._server,
                "weights": self._weights,
                "log-probs": self._logprobs,
                "n": self._choices,
                "seeds": self._seeds,
                "sampling": self._distribution,
                "end tokens": self._ends,
                "push": self._push,
                "throughput": self._throughput,
            }
            for name, check in checks.items():
                try:
                    yield check(name)
                except (UserError, UnusableError, LostWeightsError) as error:
                    yield Line(name, str(error), "", FAIL, "see the message")

    @property
    def engine(self) -> RemoteEngine:
        """The connection to the server."""
        return self._sampler.engine

    def _server(self, name: str) -> Line:
        api = self.engine.api
        release = ""
        for path, key in self.engine.dialect.releases:
            release = _release_at(self.engine, path, key)
            if release:
                break
        if api == "sglang":
            route = "/generate"
        elif api == "llamacpp":
            route = "/completion"
        else:
            route = dialects.GENERATE if self.engine.takes_tokens else "/v1/completions"
        software = api or "unknown software"
        measured = f"{software} {release or ''}, model {self.engine.server.model}, tokens by {route}"
        if api in dialects.DIALECTS:
            return Line(name, measured, "known software", PASS)
        remedy = "recjax knows recjax.serve, vLLM, SGLang and llama.cpp; read the lines below"
        return Line(name, measured, "known software", NOTE, remedy)

    def _weights(self, name: str) -> Line:
        """Gives the server the weights, as a run does before its first batch."""
        limit = "takes whole weights"
        if not self.engine.takes_folders:
            self._pushes = False
            verdict = FAIL if self._needs_weights else NOTE
            remedy = f"{self.engine.dialect.push_remedy}; or set regime.offline=true"
            return Line(name, "takes none; adapters are not checked", limit, verdict, remedy)
        if not self._pushes:
            return Line(name, "not pushed (--nopush)", limit, NOTE, _LATER)
        self._version = 1
        self._sampler.push(self._opened.params, self._version)
        return Line(name, f"pushed in {self._seconds:.1f} s", limit, PASS)

    @property
    def _seconds(self) -> float:
        return self._sampler.counts["engine/push_seconds"]

    def _sample(self, params: dict, is_new: bool = True) -> list[Group]:
        """A batch's groups, from these weights if the server takes weights."""
        if is_new:
            self._version += 1
        self._sampler.takes_weights = self._pushes
        return self._sampler.sample(params, self._version, self._version, self._prompts)

    def _logprobs(self, name: str) -> Line:
        groups = self._sample(self._opened.params, is_new=False)
        sizes, positions = self._differences(groups, self._opened.params)
        by_position = []
        for first, end in ((0, 1), (1, 4), (4, 16), (16, MOST_TOKENS)):
            is_inside = (positions >= first) & (positions < end)
            if is_inside.any():
                by_position.append(f"{first + 1}–{end}: {sizes[is_inside].max():.1g}")
        measured = (
            f"largest {sizes.max():.2g}, mean {sizes.mean():.2g} of {len(sizes)} tokens;"
            f" by position {', '.join(by_position)}"
        )
        remedy = "start it in the run's dtype, without quantization; see rollout.engine.processed_logprobs"
        if not self._pushes:
            later = f" ({_LATER})" if self.engine.takes_folders else ""
            remedy = f"the server has other weights than the config's model{later}, or {remedy}"
        return self._judged(name, measured, self._fits(sizes), remedy)

    def _differences(self, groups: Sequence[Group], params: dict) -> tuple[np.ndarray, np.ndarray]:
        """Absolute differences of the server's log-probs from recjax's in nats, and the tokens' positions."""
        rows = [completion.rows[0] for group in groups for completion in group.completions]
        # Always the same shape, so that XLA compiles a single program.
        shape = Shape(
            len(groups),
            len(groups[0].completions),
            max(len(row.prompt_tokens) for row in rows),
            self._config.rollout.max_completion_tokens,
        )
        batch = pad(groups, shape)
        decoder = unrolled_for_training(self._opened.policy.decoder)
        sampling = self._config.rollout.sampling()
        chunk = self._config.model.logprob_chunk
        scored = score(decoder, params, batch, sampling, chunk, layout=Layout())
        assert batch.behavior_logprobs is not None
        sizes = np.abs(np.float64(scored) - batch.behavior_logprobs)
        positions = np.broadcast_to(np.arange(scored.shape[1]), scored.shape)
        return sizes[batch.completion_mask], positions[batch.completion_mask]

    def _fits(self, sizes: np.ndarray) -> bool:
        largest, mean = LIMITS[self._dtype]
        return bool(sizes.max() <= largest and sizes.mean() <= mean)

    def _judged(self, name: str, measured: str, passes: bool, remedy: str) -> Line:
        largest, mean = LIMITS[self._dtype]
        return _verdict(name, measured, f"largest {largest:g}, mean {mean:g} ({self._dtype})", passes, remedy)

    def _draw(self, count: int, seed: int, limit: int | None = None, prefix: np.ndarray | None = None) -> Draw:
        """A draw with the config's settings; by default of the longest completions, after the first prompt."""
        rollout = self._config.rollout
        if prefix is None:
            prefix = self._prefixes[0]
        return Draw(
            prefix.tolist(),
            count,
            seed,
            limit or rollout.max_completion_tokens,
            np.atleast_1d(self._opened.policy.stop_ids).tolist(),
            sampling=rollout.sampling(),
        )

    @property
    def _prefixes(self) -> list[np.ndarray]:
        return [tokens[real] for tokens, real in zip(self._prompts.tokens, self._prompts.mask, strict=True)]

    def _choices(self, name: str) -> Line:
        """Checks a request for several completions."""
        limit = "8 choices that differ"
        sampled, refusals = self.engine.try_draw(self._draw(8, 11), self._version)
        if refusals:
            first = refusals[0]
            most_common = Counter(refusals).most_common(1)[0][0]
            if "of 8 choices" in first or "indices" in first:
                return Line(name, most_common, limit, NOTE, "recjax requests completions one by one")
            return Line(name, most_common, limit, FAIL, first)
        texts = {tuple(completion.tokens.tolist()) for completion in sampled}
        measured = f"{len(sampled)} choices, {len(texts)} of them distinct"
        # Equal completions are right where the policy is nearly sure of them.
        passes = len(texts) > 1 or _surprise(sampled) <= 1
        remedy = "the server gives all choices of a request the same seed; correct it"
        return _verdict(name, measured, limit, passes, remedy)

    def _seeds(self, name: str) -> Line:
        """Checks that completions depend on the seed, and notes whether equal seeds repeat them."""
        limit = "other seeds differ"
        first = self.engine.draw(self._draw(4, 21), self._version)
        repeated = self.engine.draw(self._draw(4, 21), self._version)
        other = self.engine.draw(self._draw(4, 121), self._version)
        repeats = _token_lists(first) == _token_lists(repeated)
        measured = "equal seeds do not repeat (timing decides, or the server reads no seeds)"
        if repeats:
            measured = "equal seeds repeat"
        if _token_lists(first) == _token_lists(other) and _surprise(first) > 1:
            remedy = "remove the server's own --seed, or a cache of whole replies"
            return Line(name, f"{measured}; other seeds give the same completions", limit, FAIL, remedy)
        return Line(name, f"{measured}; other seeds give other completions", limit, PASS if repeats else NOTE)

    def _distribution(self, name: str) -> Line:
        """A χ² test: the frequencies of tokens against the log-probs that the server reports for them."""
        limit = f"p ≥ {LOWEST_P:g}"
        prompt = self._prefixes[0]
        # Many tokens follow a single one, which shows cuts. After repeated text the likely tokens are in the context,
        # which shows penalties.
        repeated_text = np.tile(prompt[-CONTEXT:], 3)[:-1]
        draws = [
            self._draw(self._draws // 2, 10_000, 1, prompt[:1]),
            self._draw(self._draws // 4, 10_000 * FOLLOWING, FOLLOWING, repeated_text),
        ]
        cells: list[tuple[float, float]] = []
        freedom = 0
        refusals = Counter()
        for draw in draws:
            sampled, refused = self._tried(draw)
            refusals.update(refused)
            for following in _tokens_by_context(sampled).values():
                context_cells = _cells(following)
                if len(context_cells) > 1:
                    cells += context_cells
                    freedom += len(context_cells) - 1
        requested = sum(draw.count for draw in draws)
        if refusals.total() > requested / 50 or not freedom:
            reason = refusals.most_common(1)[0][0] if refusals else "one certain token"
            measured = f"{refusals.total()} of {requested} completions refused: {reason}"
            return Line(name, measured, limit, FAIL, "see the reason")
        observed, expected = np.array(cells).T
        statistic = float(((observed - expected) ** 2 / expected).sum())
        p = float(chi2.sf(statistic, freedom))
        measured = f"p = {p:.2g} (χ² {statistic:.0f} of {len(cells)} cells, {observed.sum():.0f} tokens)"
        remedy = (
            "the server samples otherwise than it reports; start vLLM with --generation-config vllm, and state the"
            " kind of log-probs (rollout.engine.processed_logprobs)"
        )
        return _verdict(name, measured, limit, p >= LOWEST_P, remedy)

    def _requests(self, draw: Draw) -> list[Draw]:
        """The draw as requests that the server answers with all choices."""
        together = self.engine.most_choices or TOGETHER
        requests = []
        for start in range(0, draw.count, together):
            count = min(together, draw.count - start)
            requests.append(draw._replace(count=count, seed=draw.seed + start))
        return requests

    def _tried(self, draw: Draw) -> tuple[list[Sampled], list[str]]:
        """A draw's completions, and the reason of each refused completion."""
        requests = self._requests(draw)
        sampled = []
        reasons = []
        with ThreadPoolExecutor(8) as threads:
            results = threads.map(lambda request: self.engine.try_draw(request, self._version), requests)
            for request, (completions, refusals) in zip(requests, results, strict=True):
                sampled += completions
                reasons += refusals
                # If the server refuses a complete request, it gives one reason for all its completions.
                reasons += refusals[:1] * (request.count - len(completions) - len(refusals))
        return sampled, reasons

    def _ends(self, name: str) -> Line:
        """Checks that a further end token, the most frequent first token, ends completions."""
        limit = "completions end only there, or at the limit"
        draw = self._draw(8, 31)
        sampled, refusals = self._tried(draw)
        if refusals:
            return Line(name, refusals[0], limit, FAIL, "make the server's end tokens those of the config's model")
        ended = [completion for completion in sampled if not completion.truncated]
        measured = f"{len(ended)} of {len(sampled)} ended"
        if self.engine.api in ("recjax", "llamacpp"):
            return Line(name, f"{measured}; the server has fixed end tokens", limit, PASS)
        first_tokens = Counter(completion.tokens[0].item() for completion in sampled)
        end = first_tokens.most_common(1)[0][0]
        with_end = 0
        continued = 0
        for request in self._requests(draw._replace(stop_ids=[*draw.stop_ids, end])):
            for choice in self.engine.choices(request):
                tokens = choice.get("token_ids") or []
                with_end += end in tokens
                continued += end in tokens[:-1]
        measured += f"; {with_end} with another end token, {continued} went on after it"
        remedy = "the server ignores stop_token_ids; use a newer version"
        return _verdict(name, measured, limit, not continued, remedy)

    def _push(self, name: str) -> Line:
        """Pushes other weights and the first ones again; log-probs must follow, and replies must name them."""
        if not self._pushes:
            return Line(name, "not checked", "log-probs change and return", NOTE)
        params = self._opened.params
        changed = jax.tree.map(lambda leaf: (leaf * 1.02).astype(leaf.dtype), params)
        groups = self._sample(changed)
        from_changed, _ = self._differences(groups, changed)
        from_former, _ = self._differences(groups, params)
        seconds = self._seconds
        changed_version = self._version
        versions = {completion.policy_version for group in groups for completion in group.completions}
        from_restored, _ = self._differences(self._sample(params), params)
        measured = (
            f"after the push {from_changed.max():.2g} from its weights and {from_former.max():.2g} from the former;"
            f" back {from_restored.max():.2g}; replies of version {versions} (pushed {changed_version});"
            f" {seconds:.1f} s"
        )
        passes = (
            self._fits(from_changed)
            and self._fits(from_restored)
            and bool(from_former.mean() > from_changed.mean())
            and versions == {changed_version}
        )
        remedy = (
            "the server answers with other weights than it acknowledged; use another build or version;"
            f" {self.engine.dialect.push_remedy}"
        )
        return self._judged(name, measured, passes, remedy)

    def _throughput(self, name: str) -> Line:
        rates = []
        prefixes = self._prefixes
        for load in LOADS:
            draws = []
            for number in range(load):
                draws.append(self._draw(1, 50_000 + number, prefix=prefixes[number % len(prefixes)]))
            start = time.monotonic()
            with ThreadPoolExecutor(load) as threads:
                drawn = list(threads.map(lambda draw: self.engine.draw(draw, self._version), draws))
            seconds = time.monotonic() - start
            tokens = sum(len(completion.tokens) for completions in drawn for completion in completions)
            rates.append(f"{tokens / seconds:.0f}")
        loads = " / ".join(str(load) for load in LOADS)
        return Line(name, f"{' / '.join(rates)} tokens/s at {loads} requests", "", NOTE)


def _verdict(name: str, measured: str, limit: str, passes: bool, remedy: str) -> Line:
    """A line that passes, or fails with its remedy."""
    if passes:
        return Line(name, measured, limit, PASS)
    return Line(name, measured, limit, FAIL, remedy)


def _token_lists(sampled: Sequence[Sampled]) -> list[list[int]]:
    return [completion.tokens.tolist() for completion in sampled]


def _surprise(sampled: Sequence[Sampled]) -> float:
    """The mean negative log-prob of completions, in nats."""
    return -float(statistics.fmean(completion.logprobs.sum() for completion in sampled))


def _release_at(engine: RemoteEngine, path: str, key: str) -> Any:
    """The release that a route reports; None if it reports none."""
    reply = engine.server.sent("GET", path)
    if not reply.is_success:
        return None
    return reply.json().get(key)


def _tokens_by_context(sampled: Sequence[Sampled]) -> dict[tuple, list[tuple[int, float]]]:
    """Tokens with their log-probs, by the completion's tokens before them."""
    following = defaultdict(list)
    for completion in sampled:
        tokens = tuple(completion.tokens.tolist())
        for position, token in enumerate(tokens):
            following[tokens[:position]].append((token, float(completion.logprobs[position])))
    return following


def _cells(tokens: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """Observed and expected counts of tokens after a context; the last cell has all rare and all other tokens."""
    counts = Counter(token for token, _ in tokens)
    expected = {token: len(tokens) * float(np.exp(logprob)) for token, logprob in tokens}
    cells: list[tuple[float, float]] = []
    for token, expected_count in expected.items():
        if expected_count >= LEAST_EXPECTED:
            cells.append((counts[token], expected_count))
    other_count = len(tokens) - sum(count for count, _ in cells)
    other_expected = len(tokens) - sum(expected_count for _, expected_count in cells)
    if other_expected > LEAST_EXPECTED or other_count > LEAST_EXPECTED:
        cells.append((other_count, max(other_expected, 0.1)))
    return cells
