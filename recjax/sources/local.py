"""Samples the batches of a synchronous run in the trainer's own process."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from recjax.models.trainable import combine
from recjax.sources.policy_sampler import SampledBatch
from recjax.sources.sampling import BatchSampler


class LocalSampler(AbstractContextManager):
    """A `PolicySampler` in this process: it samples in `receive`, after which nothing is in flight."""

    counts: Mapping[str, float] = {}

    def __init__(self, sampler: BatchSampler, frozen: dict, sample: Callable | None = None):
        """Takes the parameters that are not trained, in the compute dtype.

        Args:
            sample: a function that samples instead of `BatchSampler.sample`, with its first four arguments and results;
                with a curriculum also `rates`.
        """
        self._other_sample = sample
        self._sampler = sampler
        self._frozen = frozen
        self._rates: dict[int, Mapping[str, float | None] | None] = {}
        self.in_flight: dict[int, int] = {}

    def __exit__(self, *exception: object) -> None:
        """A batch ends before `receive` returns, so nothing remains to stop."""

    def offer_weights(self, weights: Callable[[], dict], version: int) -> None:
        """See `PolicySampler`; `receive` reads the weights."""
        self._weights: Callable[[], dict] | None = weights
        self._version = version

    def issue(self, number: int, rates: Mapping[str, float | None] | None = None) -> None:
        """See `PolicySampler`."""
        self.in_flight[number] = self._version
        self._rates[number] = rates

    def receive(self, wait: bool) -> list[tuple[int, SampledBatch]]:
        """Samples all issued batches; their grades may still be computed."""
        weights = self._weights
        self._weights = None  # the update needs the memory of the weights
        params = {}
        if self.in_flight:
            assert weights is not None
            params = combine(weights(), self._frozen)
        received = []
        for number, version in self.in_flight.items():
            options: dict[str, Any] = {}
            rates = self._rates.pop(number)
            if rates is not None:
                options["rates"] = rates
            if self._other_sample is None:
                batch = self._sampler.sample(params, version, number, **options)
            else:
                batch = self._other_sample(self._sampler, params, version, number, **options)
            received.append((number, batch))
        self.in_flight = {}
        return received
