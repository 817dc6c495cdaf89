"""The methods of everything that samples numbered batches for a source: `PolicySampler`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from recjax.experience.group import Grade, Group
from recjax.experience.queue import ToCome

SampledBatch = tuple[list[Group], Sequence[Grade] | ToCome]  # groups and their grades, which may still be computed


class PolicySampler(Protocol):
    """Samples numbered batches for a source; a context for the time of a run.

    Prompts and random keys of a batch follow from its number. A batch starts with the weights of the last
    `offer_weights` before its `issue`; a sampler may use newer weights for its later tokens, or if it has to sample the
    batch again. `receive` gives each issued batch once, in any order, and until then it is in flight. A checkpoint
    holds the numbers of these batches, and a resumed run issues them again.

    All processes of a trainer make the same calls in the same order and receive the same batches.

    The package has three: `recjax.sources.local.LocalSampler`, `recjax.sources.generators.Generators` and
    `recjax.remote.sampler.EngineSampler`.
    """

    @property
    def in_flight(self) -> Mapping[int, int]:
        """Batches that were issued and not received: number to version of the weights, in order of issue."""
        ...

    @property
    def counts(self) -> Mapping[str, float]:
        """The sampler's own metrics, by name, while it is open."""
        ...

    def __enter__(self) -> Any:
        """Connects to what samples."""

    def __exit__(self, *exception: object) -> Any:
        """Stops sampling."""

    def offer_weights(self, weights: Callable[[], dict], version: int) -> None:
        """Offers the weights of batches issued from here on. A sampler that has this version need not read them.

        Args:
            weights: returns the trained parameters in the compute dtype, which the next update may overwrite. Before
                that, a sampler copies them, or has used them and forgets them.
            version: their policy version.
        """

    def issue(self, number: int, rates: Mapping[str, float | None] | None = None) -> None:
        """Takes on a batch, and returns without waiting for it.

        Args:
            rates: see `BatchSampler.batch_prompts`.
        """

    def receive(self, wait: bool) -> list[tuple[int, SampledBatch]]:
        """Returns the number and content of every batch that is done.

        Args:
            wait: True to wait for at least one batch if any is in flight.
        Raises:
            UserError: the sampler cannot sample a batch that is in flight.
        """
        ...
