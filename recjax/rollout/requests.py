"""Input and output of the engine: requests and completions."""

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int, UInt32

from recjax.models.logprobs import Sampling


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
        ValueError: with the request's place, the problem and the remedy.
    """
    for place, request in enumerate(requests):
        leader = requests[place - place % (group_size or 1)]
        prefix = request.prefix
        if request.limit < 1:
            raise ValueError(f"request {place}: limit = {request.limit}: takes 1 or more")
        if not len(prefix):
            raise ValueError(f"request {place}: its prefix is empty; give at least one token, such as the BOS")
        if leader.prefix is not prefix and not np.array_equal(leader.prefix, prefix):
            raise ValueError(f"request {place}: its prefix differs from its group's; change group_size, or give None")
        if leader is request and (prefix.min() < 0 or prefix.max() >= vocabulary):
            wrong = prefix[(prefix < 0) | (prefix >= vocabulary)][0]
            words = f"token {wrong} is outside the vocabulary of {vocabulary}; use the policy's tokenizer"
            raise ValueError(f"request {place}: {words}")
    if group_size and len(requests) % group_size:
        raise ValueError(f"{len(requests)} requests: not a multiple of group_size = {group_size}; change group_size")


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


@dataclasses.dataclass(eq=False)
class EngineJob:
    """A request in the engine, from its place in line to its completion.

    Attributes:
        rounds: tokens, log-probs, versions and recorded arrays of each round so far.
        row: row of the keys and values of its prefix, after they have been run.
        slot: slot whose contents it continues; -1 for none. After its first token, also its slot if its batch has a
            slot for each completion.
    """

    request: Request
    ticket: int
    rounds: list[tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]] = dataclasses.field(
        default_factory=list
    )
    row: int = 0
    slot: int = -1


def completions_of(jobs: Sequence[EngineJob], stop_ids: Container[int]) -> dict[int, Sampled]:
    """The completions so far, by ticket; a completion is truncated if its last token does not end it."""
    if not len(jobs):
        return {}
    # The rounds of all jobs end to end: few calls of NumPy, however many jobs there are.
    *columns, records = zip(*[each for job in jobs for each in job.rounds], strict=True)
    counts = np.cumsum([len(job.rounds) for job in jobs])
    ends = np.cumsum([len(tokens) for tokens in columns[0]])[counts - 1].tolist()
    columns = [np.concatenate(column) for column in columns]
    last_tokens = columns[0][np.array(ends) - 1].tolist()
    completions = {}
    start = 0
    first = 0
    for job, end, count, last in zip(jobs, ends, counts.tolist(), last_tokens, strict=True):
        # Copies: a view would keep the arrays of all jobs in memory as long as this completion.
        tokens, logprobs, versions = [column[start:end].copy() for column in columns]
        recorded = {name: np.concatenate([record[name] for record in records[first:count]]) for name in records[first]}
        completions[job.ticket] = Sampled(tokens, logprobs, versions, last not in stop_ids, recorded)
        start = end
        first = count
    return completions


class Admitted(NamedTuple):
    """A request in line, or a batch of groups of `group_size`, which has the engine for itself."""

    jobs: list[EngineJob]
    group_size: int | None


class Begun(NamedTuple):
    """Completions with their first token that wait for slots.

    Attributes:
        cache: keys and values of the tokens that were run; each row has `lengths` tokens.
        continues: True if the tokens follow the contents of the completions' slots; False: they are whole prefixes.
        group_size: consecutive completions of each prompt in a batch; None: other requests.
        current: True if the weights that ran the tokens are still the engine's.
    """

    jobs: list[EngineJob]
    cache: tuple
    lengths: Int[np.ndarray, " prompts"]
    continues: bool
    group_size: int | None
    current: bool = True


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
