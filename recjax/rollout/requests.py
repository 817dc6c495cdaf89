"""Input and output of the engine: requests and completions."""

import dataclasses
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int, UInt32

from recjax.errors import UserError
from recjax.models.layer import Cache
from recjax.models.sampling import Sampling


class Request(NamedTuple):
    """A completion to sample.

    Attributes:
        prefix: tokens before the completion, at least one.
        key: key data; token t, from 0, is sampled with fold_in(key, t).
        limit: most tokens of the completion, end-of-sequence token included.
        sampling: the distribution.
    """

    prefix: Int[np.ndarray, " prefix_time"]
    key: UInt32[np.ndarray, " words"]
    limit: int
    sampling: Sampling


def check_requests(requests: Sequence[Request], group_size: int | None, vocabulary: int) -> None:
    """Refuses requests that cannot be sampled.

    Args:
        group_size: number of consecutive requests that must share a prefix; None: prefixes may all differ.
    Raises:
        UserError: with the request's place, the problem and the remedy.
    """
    for place, request in enumerate(requests):
        where = f"request {place}"
        leader = request
        if group_size:
            leader = requests[place - place % group_size]
        prefix = request.prefix
        if request.limit < 1:
            raise UserError(f"{where}: limit", "takes 1 or more", value=request.limit)
        if not len(prefix):
            raise UserError(where, "its prefix is empty", "give at least one token, such as the BOS")
        if leader.prefix is not prefix and not np.array_equal(leader.prefix, prefix):
            raise UserError(where, "its prefix differs from its group's", "change group_size, or give None")
        if leader is request and (prefix.min() < 0 or prefix.max() >= vocabulary):
            wrong = prefix[(prefix < 0) | (prefix >= vocabulary)][0]
            problem = f"token {wrong} is outside the vocabulary of {vocabulary}"
            raise UserError(where, problem, "use the policy's tokenizer")
    if group_size and len(requests) % group_size:
        problem = f"does not divide the number of requests, {len(requests)}"
        raise UserError("group_size", problem, "change it", value=group_size)


class Weights(NamedTuple):
    """The weights that sample completions.

    Attributes:
        params: all parameters, stacked by layer, in the dtype that they compute in.
        version: number of optimizer updates that produced them.
        run: id of the run that produced them; None: unknown.
    """

    params: dict
    version: int
    run: str | None = None


class Sampled(NamedTuple):
    """A completion.

    Attributes:
        tokens: sampled tokens, including the end-of-sequence token.
        logprobs: log-prob of each token, under the distribution that sampled it.
        versions: policy version whose weights sampled each token.
        truncated: True if the completion reached its limit before it ended.
        recorded: other arrays of each token, see `recjax.experience.group.Row`.
    """

    tokens: Int[np.ndarray, " time"]
    logprobs: Float[np.ndarray, " time"]
    versions: Int[np.ndarray, " time"]
    truncated: bool
    recorded: Mapping[str, np.ndarray] = {}

    def up_to(self, count: int) -> "Sampled":
        """The completion that ends with the first `count` tokens."""
        columns = (self.tokens, self.logprobs, self.versions, dict(self.recorded))
        tokens, logprobs, versions, recorded = jax.tree.map(lambda column: column[:count], columns)
        return Sampled(tokens, logprobs, versions, False, recorded)

    @property
    def row_columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, Mapping[str, np.ndarray]]:
        """The fields of an `experience.group.Row` after its prompt."""
        return self.tokens, np.ones(len(self.tokens), bool), self.logprobs, self.recorded


class Round(NamedTuple):
    """The tokens of one completion in a round of the engine; see `Sampled` for the fields."""

    tokens: Int[np.ndarray, " time"]
    logprobs: Float[np.ndarray, " time"]
    versions: Int[np.ndarray, " time"]
    recorded: Mapping[str, np.ndarray]


@dataclasses.dataclass(eq=False)
class EngineJob:
    """A request in the engine, from its place in the queue to its completion.

    Attributes:
        rounds: all rounds so far; the first token is a round of its own.
        continued_slot: the slot whose contents its prefix continues; None: its complete prefix is run.
        batch_index: index of the request among the requests whose prefixes are run together.
        prefilled_row: row of the keys and values of its prefix, once the prefix has been run.
    """

    request: Request
    ticket: int
    rounds: list[Round] = dataclasses.field(default_factory=list)
    continued_slot: int | None = None
    batch_index: int = 0
    prefilled_row: int = 0

    @property
    def first_token(self) -> int:
        """The first token of the completion."""
        return self.rounds[0].tokens[0].item()


def completions_of(jobs: Sequence[EngineJob], stop_ids: Container[int]) -> dict[int, Sampled]:
    """The completions so far, by ticket; a completion is truncated if its last token does not end it."""
    if not len(jobs):
        return {}
    # The rounds of all jobs end to end: few calls of NumPy, however many jobs there are.
    rounds = list(itertools.chain.from_iterable(job.rounds for job in jobs))
    tokens = np.concatenate([each.tokens for each in rounds])
    logprobs = np.concatenate([each.logprobs for each in rounds])
    versions = np.concatenate([each.versions for each in rounds])
    last_rounds = np.cumsum([len(job.rounds) for job in jobs]) - 1
    ends = np.cumsum([len(each.tokens) for each in rounds])[last_rounds]
    last_tokens = tokens[ends - 1].tolist()
    completions = {}
    start = 0
    for job, end, last_token in zip(jobs, ends.tolist(), last_tokens, strict=True):
        recorded = {}
        for name in job.rounds[0].recorded:
            recorded[name] = np.concatenate([each.recorded[name] for each in job.rounds])
        # Copies: a view would keep the arrays of all jobs in memory as long as this completion.
        completions[job.ticket] = Sampled(
            tokens=tokens[start:end].copy(),
            logprobs=logprobs[start:end].copy(),
            versions=versions[start:end].copy(),
            truncated=last_token not in stop_ids,
            recorded=recorded,
        )
        start = end
    return completions


class Admitted(NamedTuple):
    """A request in the queue, or a batch of groups of `group_size`, which has the engine for itself."""

    jobs: list[EngineJob]
    group_size: int | None


class Prefilled(NamedTuple):
    """Completions with their first token that wait for slots.

    Attributes:
        cache: keys, values and states of the tokens that were run; each row has `lengths` tokens.
        continues: True if the tokens follow the contents of the completions' slots; False: they are complete prefixes.
        group_size: consecutive completions of each prompt in a batch; None: other requests.
        has_current_weights: True if the weights that ran the tokens are still the engine's.
    """

    jobs: list[EngineJob]
    cache: Cache
    lengths: Int[np.ndarray, " prompts"]
    continues: bool
    group_size: int | None
    has_current_weights: bool = True


def by_sampling(jobs: Iterable[EngineJob]) -> dict[Sampling, Int[np.ndarray, " some"]]:
    """Groups places of jobs by the distributions of their requests."""
    samplings = [job.request.sampling for job in jobs]
    # Mostly there is one distribution; `count` compares the same object sooner than a loop here would.
    if samplings and samplings.count(samplings[0]) == len(samplings):
        return {samplings[0]: np.arange(len(samplings))}
    numbers: dict[Sampling, list[int]] = {}
    for number, sampling in enumerate(samplings):
        numbers.setdefault(sampling, []).append(number)
    return {sampling: np.array(chosen) for sampling, chosen in numbers.items()}
