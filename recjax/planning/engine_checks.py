"""Checks of another server as the engine of a run: tokens, log-probs, sampling, ends, weights and speed."""

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
MOST_TOKENS = 32  # of a completion
TOGETHER = 16  # completions of a request
LOWEST_P = 1e-4  # a correct server fails the sampling test once in 10,000 times
LEAST_EXPECTED = 5  # tokens with fewer expected draws are counted together
CONTEXT = 6  # tokens of the repeated text; a server runs three times as many for each completion
FOLLOWING = 3  # tokens of a completion of the repeated text, which cost less than completions of one token
LOADS = (1, 8, 64)  # concurrent requests
# Largest and mean difference of log-probs in nats, by compute dtype; bfloat16 rounds logits near 16 by up to 0.06.
LIMITS = {"float32": (1e-3, 1e-4), "bfloat16": (1.0, 0.05), "float16": (0.2, 0.02)}
_LATER = "rollout.engine pushes the run's weights before the first batch"


class Line(NamedTuple):
    """The result of a check.

    what: the property that training needs.
    measured, limit: numbers in words.
    verdict: PASS, NOTE or FAIL.
    remedy: what to do, for FAIL.
    """

    what: str
    measured: str
    limit: str
    verdict: str
    remedy: str = ""


def check_config(config: Config) -> Config:
    """The config of a check: a small batch from the server, whether or not it takes weights."""
    engine = config.rollout.engine
    sizes: dict[str, Any] = {"prompts_per_step": PROMPTS, "group_size": GROUP}
    # Another folder than the run's, which may be in use.
    assert engine is not None
    folder = Path(engine.folder or Path(config.output) / "pushed") / "check"
    # Few retries, as a check that fails says why.
    limits = {"folder": str(folder), "concurrency": max(LOADS), "retries": min(engine.retries, 2)}
    sizes["engine"] = engine.model_copy(update=limits)
    sizes["max_completion_tokens"] = min(config.rollout.max_completion_tokens, MOST_TOKENS)
    changes = {"rollout": config.rollout.model_copy(update=sizes), "regime": RegimeConfig(offline=True)}
    # The whole model is pushed, also where a run would push adapters.
    model = config.model.model_copy(update={"lora": None})
    return config.model_copy(update=changes | {"experience": None, "model": model})


class EngineCheck:
    """Checks a server against a policy.

    Args:
        config: see `check_config`.
        opened: the policy and the weights that the server should have.
        needs_weights: True for a run that pushes whole weights.
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
        releases = (release_at(self.engine, *route) for route in self.engine.dialect.releases)
        release = next((release for release in releases if release), "")
        routes = {"sglang": "/generate", "llamacpp": "/completion"}
        route = routes.get(api) or (dialects.GENERATE if self.engine.takes_tokens else "/v1/completions")
        measured = f"{api or 'unknown software'} {release}, model {self.engine.server.model}, tokens by {route}"
        is_known = api in dialects.DIALECTS
        remedy = "" if is_known else "recjax knows recjax.serve, vLLM, SGLang and llama.cpp; read the lines below"
        return Line(name, measured, "known software", PASS if is_known else NOTE, remedy)

    def _weights(self, name: str) -> Line:
        """Gives the server the weights, as a run does before its first batch."""
        limit = "takes whole weights"
        if not self.engine.takes_folders:
            self._pushes = False
            remedy = f"{self.engine.dialect.push_remedy}; or set regime.offline=true"
            return Line(
                name, "takes none; adapters are not checked", limit, FAIL if self._needs_weights else NOTE, remedy
            )
        if not self._pushes:
            return Line(name, "not pushed (--nopush)", limit, NOTE, _LATER)
        self._version = 1
        self._sampler.push(self._opened.params, self._version)
        return Line(name, f"pushed in {self._seconds:.1f} s", limit, PASS)

    @property
    def _seconds(self) -> float:
        return self._sampler.counts["engine/push_seconds"]

    def _sample(self, params: dict, is_new: bool = True) -> list[Group]:
        """The groups of a batch, from these weights if the server takes weights."""
        self._version += is_new
        self._sampler.takes_weights = self._pushes
        return self._sampler.sample(params, self._version, self._version, self._prompts)

    def _logprobs(self, name: str) -> Line:
        groups = self._sample(self._opened.params, is_new=False)
        sizes, positions = self._differences(groups, self._opened.params)
        ranges = ((0, 1), (1, 4), (4, 16), (16, MOST_TOKENS))
        shown = [
            f"{first + 1}–{last}: {sizes[inside].max():.1g}"
            for first, last in ranges
            if (inside := (positions >= first) & (positions < last)).any()
        ]
        measured = (
            f"largest {sizes.max():.2g}, mean {sizes.mean():.2g} of {len(sizes)} tokens; by position {', '.join(shown)}"
        )
        remedy = ""
        if not self._pushes:
            later = f" ({_LATER})" if self.engine.takes_folders else ""
            remedy = f"the server has other weights than the config's model{later}, or "
        remedy += "start it in the run's dtype, without quantization; see rollout.engine.processed_logprobs"
        return self._judged(name, measured, self._fits(sizes), remedy)

    def _differences(self, groups: Sequence[Group], params: dict) -> tuple[np.ndarray, np.ndarray]:
        """Absolute differences of the server's log-probs from recjax's in nats, and the tokens' positions."""
        rows = [completion.rows[0] for group in groups for completion in group.completions]
        # Always the same shape, so that XLA compiles a single program.
        longest = max(len(row.prompt_tokens) for row in rows), self._config.rollout.max_completion_tokens
        batch = pad(groups, Shape(len(groups), len(groups[0].completions), *longest))
        decoder = unrolled_for_training(self._opened.policy.decoder)
        sampling = self._config.rollout.sampling()
        scored = score(decoder, params, batch, sampling, self._config.model.logprob_chunk, Layout())
        assert batch.behavior_logprobs is not None
        sizes = np.abs(np.float64(scored) - batch.behavior_logprobs)[batch.completion_mask]
        return sizes, np.broadcast_to(np.arange(scored.shape[1]), scored.shape)[batch.completion_mask]

    def _fits(self, sizes: np.ndarray) -> bool:
        largest, mean = LIMITS[self._dtype]
        return bool(sizes.max() <= largest and sizes.mean() <= mean)

    def _judged(self, name: str, measured: str, passes: bool, remedy: str) -> Line:
        largest, mean = LIMITS[self._dtype]
        limit = f"largest {largest:g}, mean {mean:g} ({self._dtype})"
        return Line(name, measured, limit, PASS if passes else FAIL, "" if passes else remedy)

    def _draw(self, count: int, seed: int, limit: int | None = None, prefix: np.ndarray | None = None) -> Draw:
        stops = np.atleast_1d(self._opened.policy.stop_ids).tolist()
        prefix = self._prefixes[0] if prefix is None else prefix
        rollout = self._config.rollout
        return Draw(prefix.tolist(), count, seed, limit or rollout.max_completion_tokens, stops, rollout.sampling())

    @property
    def _prefixes(self) -> list[np.ndarray]:
        return [tokens[real] for tokens, real in zip(self._prompts.tokens, self._prompts.mask, strict=True)]

    def _choices(self, name: str) -> Line:
        """A request for several completions."""
        sampled, wrong = self.engine.try_draw(self._draw(8, 11), self._version)
        texts = {tuple(each.tokens.tolist()) for each in sampled}
        limit = "8 choices that differ"
        if wrong:
            handled = "of 8 choices" in wrong[0] or "indices" in wrong[0]
            remedy = "recjax requests completions one by one" if handled else wrong[0]
            return Line(name, Counter(wrong).most_common(1)[0][0], limit, NOTE if handled else FAIL, remedy)
        # Equal completions are right where the policy is nearly sure of them.
        surprise = -float(statistics.fmean(each.logprobs.sum() for each in sampled))
        is_wrong = len(texts) == 1 and surprise > 1
        remedy = "the server gives all choices of a request the same seed; correct it" if is_wrong else ""
        return Line(
            name, f"{len(sampled)} choices, {len(texts)} of them distinct", limit, FAIL if is_wrong else PASS, remedy
        )

    def _seeds(self, name: str) -> Line:
        draws = [self.engine.draw(self._draw(4, seed), self._version) for seed in (21, 21, 121)]
        tokens = [[each.tokens.tolist() for each in draw] for draw in draws]
        surprise = -float(statistics.fmean(each.logprobs.sum() for each in draws[0]))
        is_wrong = tokens[0] == tokens[2] and surprise > 1
        words = "repeat" if tokens[0] == tokens[1] else "do not repeat (timing decides, or the server reads no seeds)"
        measured = f"equal seeds {words}; other seeds give {'the same' if is_wrong else 'other'} completions"
        verdict = FAIL if is_wrong else PASS if tokens[0] == tokens[1] else NOTE
        remedy = "remove the server's own --seed, or a cache of whole replies" if is_wrong else ""
        return Line(name, measured, "other seeds differ", verdict, remedy)

    def _distribution(self, name: str) -> Line:
        """A χ² test: the frequencies of tokens against the log-probs that the server reports for them."""
        prefix = self._prefixes[0]
        cells: list[tuple[float, float]] = []
        freedom = 0
        wrong = Counter()
        # Many tokens follow a single one, which shows cuts. After repeated text the likely tokens are in the context,
        # which shows penalties.
        tests = (1, self._draws // 2, prefix[:1]), (FOLLOWING, self._draws // 4, np.tile(prefix[-CONTEXT:], 3)[:-1])
        for length, count, context in tests:
            sampled, refused = self._tried(self._draw(count, 10_000 * length, length, context))
            wrong.update(refused)
            for following in tokens_by_context(sampled).values():
                added = cells_of(following)
                if len(added) > 1:
                    cells += added
                    freedom += len(added) - 1
        limit = f"p ≥ {LOWEST_P:g}"
        requested = sum(count for _, count, _ in tests)
        if wrong.total() > requested / 50 or not freedom:
            reason = wrong.most_common(1)[0][0] if wrong else "one certain token"
            measured = f"{wrong.total()} of {requested} completions refused: {reason}"
            return Line(name, measured, limit, FAIL, "see the reason")
        observed, expected = np.array(cells).T
        statistic = float(((observed - expected) ** 2 / expected).sum())
        p = float(chi2.sf(statistic, freedom))
        remedy = "the server samples otherwise than it reports; start vLLM with --generation-config vllm, and state the"
        remedy += " kind of log-probs (rollout.engine.processed_logprobs)"
        measured = f"p = {p:.2g} (χ² {statistic:.0f} of {len(cells)} cells, {observed.sum():.0f} tokens)"
        return Line(name, measured, limit, PASS if p >= LOWEST_P else FAIL, "" if p >= LOWEST_P else remedy)

    def _requests(self, draw: Draw) -> list[Draw]:
        """The draw as requests that the server answers with all choices."""
        together = self.engine.most_choices or TOGETHER
        return [
            draw._replace(count=min(together, draw.count - start), seed=draw.seed + start)
            for start in range(0, draw.count, together)
        ]

    def _tried(self, draw: Draw) -> tuple[list[Sampled], list[str]]:
        """Completions of a draw, and the reason of each refused completion."""
        with ThreadPoolExecutor(8) as threads:
            calls = [
                (request.count, threads.submit(self.engine.try_draw, request, self._version))
                for request in self._requests(draw)
            ]
            results = [(count, *call.result()) for count, call in calls]
        wrong = []
        for count, sampled, whys in results:
            # A request that is refused as a whole has one reason for all its completions.
            wrong += whys + whys[:1] * (count - len(sampled) - len(whys))
        return [each for _, sampled, _ in results for each in sampled], wrong

    def _ends(self, name: str) -> Line:
        """A further end token, the most frequent first token, must end completions."""
        limit = "completions end only there, or at the limit"
        draw = self._draw(8, 31)
        sampled, wrong = self._tried(draw)
        if wrong:
            return Line(name, wrong[0], limit, FAIL, "make the server's end tokens those of the config's model")
        measured = f"{sum(not each.truncated for each in sampled)} of {len(sampled)} ended"
        if self.engine.api in ("recjax", "llamacpp"):
            return Line(name, f"{measured}; the server has fixed end tokens", limit, PASS)
        token = Counter(each.tokens[0].item() for each in sampled).most_common(1)[0][0]
        requests = self._requests(draw._replace(stop_ids=[*draw.stop_ids, token]))
        choices = [choice for request in requests for choice in self.engine.choices(request)]
        tokens = [choice.get("token_ids") or [] for choice in choices]
        after = sum(token in ids[:-1] for ids in tokens)
        measured += f"; {sum(token in ids for ids in tokens)} with another end token, {after} went on after it"
        remedy = "the server ignores stop_token_ids; use a newer version" if after else ""
        return Line(name, measured, limit, FAIL if after else PASS, remedy)

    def _push(self, name: str) -> Line:
        """Pushes other weights and the first ones again; log-probs must follow, and replies must name them."""
        if not self._pushes:
            return Line(name, "not checked", "log-probs change and return", NOTE)
        opened = self._opened
        changed = jax.tree.map(lambda leaf: (leaf * 1.02).astype(leaf.dtype), opened.params)
        groups = self._sample(changed)
        here, _ = self._differences(groups, changed)
        before, _ = self._differences(groups, opened.params)
        seconds = self._seconds
        labels = {completion.policy_version for group in groups for completion in group.completions}
        back, _ = self._differences(self._sample(opened.params), opened.params)
        measured = f"after the push {here.max():.2g} from its weights and {before.max():.2g} from the former; "
        measured += f"back {back.max():.2g}; replies of version {labels} (pushed {self._version - 1}); {seconds:.1f} s"
        passes = self._fits(here) and self._fits(back) and bool(before.mean() > here.mean())
        remedy = "the server answers with other weights than it acknowledged; use another build or version; "
        remedy += self.engine.dialect.push_remedy
        return self._judged(name, measured, passes and labels == {self._version - 1}, remedy)

    def _throughput(self, name: str) -> Line:
        rates = []
        for load in LOADS:
            began = time.monotonic()
            with ThreadPoolExecutor(load) as threads:
                prefixes = [self._prefixes[number % len(self._prefixes)] for number in range(load)]
                draws = [self._draw(1, 50_000 + number, None, prefix) for number, prefix in enumerate(prefixes)]
                sampled = list(threads.map(lambda draw: self.engine.draw(draw, self._version), draws))
            tokens = sum(len(each.tokens) for draw in sampled for each in draw)
            rates.append(f"{tokens / (time.monotonic() - began):.0f}")
        return Line(name, f"{' / '.join(rates)} tokens/s at {' / '.join(map(str, LOADS))} requests", "", NOTE)


def release_at(engine: RemoteEngine, path: str, key: str) -> Any:
    """The release that a route reports; None if it reports none."""
    reply = engine.server.sent("GET", path)
    return reply.json().get(key) if reply.is_success else None


def tokens_by_context(sampled: Sequence[Sampled]) -> dict[tuple, list[tuple[int, float]]]:
    """Tokens with their log-probs, by the tokens of the completion before them."""
    following = defaultdict(list)
    for each in sampled:
        tokens = tuple(each.tokens.tolist())
        for position, token in enumerate(tokens):
            following[tokens[:position]].append((token, float(each.logprobs[position])))
    return following


def cells_of(tokens: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """Observed and expected counts of tokens after a context; the last cell has all rare and all other tokens."""
    counts = Counter(token for token, _ in tokens)
    expected = {token: len(tokens) * float(np.exp(logprob)) for token, logprob in tokens}
    cells: list[tuple[float, float]] = [
        (counts[token], number) for token, number in expected.items() if number >= LEAST_EXPECTED
    ]
    remaining = len(tokens) - sum(number for _, number in cells)
    others = len(tokens) - sum(count for count, _ in cells)
    if remaining > LEAST_EXPECTED or others > LEAST_EXPECTED:
        cells.append((others, max(remaining, 0.1)))
    return cells
