"""Samples batches on a server, which gets the weights of each."""

import concurrent.futures
import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor

from recjax.errors import UserError
from recjax.experience.group import Group
from recjax.models.placement import params_on_host
from recjax.models.trainable import combine
from recjax.remote.client import LostWeightsError, RemoteEngine
from recjax.remote.pushing import pushed_folder, takes_adapters, write_pushed
from recjax.rollout.collecting import submit
from recjax.sources.policy_sampler import SampledBatch
from recjax.sources.sampling import BatchSampler
from recjax.tasks.prompts import Prompts

logger = logging.getLogger(__name__)


class EngineSampler(contextlib.AbstractContextManager):
    """A `PolicySampler` on a server, which samples one batch after another and gets new weights before a batch.

    All tokens of a completion are from one version, as the server gets weights only between two batches.

    Attributes:
        engine: the connection to the server.
        takes_weights: True if the server gets the weights of each batch.
        in_flight, counts: see `PolicySampler`.
    """

    def __init__(self, sampler: BatchSampler, frozen: dict):
        """Takes the parameters that are not trained; connects to no server yet."""
        self._sampler = sampler
        self._frozen = frozen
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._issued: dict[int, Future] = {}
        self._version: int | None = None
        self._pushes = 0
        self._push_seconds = 0.0
        self.in_flight: dict[int, int] = {}

    def __enter__(self) -> "EngineSampler":
        """Connects to the server. Its first batch gets the weights again, also after a resume.

        Raises:
            UserError: the server does not answer, or takes no weights although the sampler's weights change.
        """
        config = self._sampler.config
        self.engine = engine = RemoteEngine.of_config(config, self._sampler.policy)
        is_vllm = engine.api == "vllm"
        self.takes_weights = engine.takes_folders or (is_vllm and takes_adapters(config, engine.api))
        if not self.takes_weights and not config.regime.offline:
            engine.__exit__()
            assert config.rollout.engine is not None
            remedy = "set regime.offline=true to train on samples from its own weights"
            if is_vllm:
                remedy = (
                    "start vLLM with VLLM_SERVER_DEV_MODE=1, or train adapters (model.lora and model.path), or "
                    + remedy
                )
            raise UserError(
                "rollout.engine.url",
                f"{engine.api or 'this server'} cannot take whole weights over HTTP",
                remedy,
                value=config.rollout.engine.url,
            )
        return self

    def __exit__(self, *exception: object) -> None:
        """Waits for replies to current requests, and samples no more batches."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.engine.__exit__(*exception)
        self._thread.shutdown()

    @property
    def counts(self) -> dict[str, float]:
        """The pushes, the seconds of the last one, and the server's unusable replies, as metrics."""
        return {
            "engine/pushes": self._pushes,
            "engine/push_seconds": self._push_seconds,
            "engine/unusable": self.engine.left_out.total(),
        }

    def offer_weights(self, weights: Callable[[], dict], version: int) -> None:
        """Copies the weights to the host; see `PolicySampler`."""
        if version == self._version:
            return
        self._version = version
        self._params = {}
        if self.takes_weights:
            self._params = params_on_host(combine(weights(), self._frozen))

    def issue(self, number: int, rates: Mapping[str, float | None] | None = None) -> None:
        """See `PolicySampler`."""
        assert self._version is not None
        self._issued[number] = self._thread.submit(self._batch, self._params, self._version, number, rates)
        self.in_flight[number] = self._version

    def _batch(self, params: dict, version: int, number: int, rates: Mapping[str, float | None] | None) -> SampledBatch:
        prompts = self._sampler.batch_prompts(number, rates)
        groups = self.sample(params, version, number, prompts)
        return groups, submit(groups, prompts, self._sampler.grading)

    def receive(self, wait: bool) -> list[tuple[int, SampledBatch]]:
        """See `PolicySampler`."""
        if wait:
            concurrent.futures.wait(self._issued.values(), return_when=FIRST_COMPLETED)
        done = [number for number, batch in self._issued.items() if batch.done()]
        self.in_flight = {number: version for number, version in self.in_flight.items() if number not in done}
        return [(number, self._issued.pop(number).result()) for number in done]

    def sample(self, params: dict, version: int, number: int, prompts: Prompts) -> list[Group]:
        """Samples the groups of a batch, without grades; see `BatchSampler.sample`.

        Args:
            prompts: the batch's prompts.
        Raises:
            UserError: the server keeps losing the weights, or sends no usable replies.
        """
        config = self._sampler.config
        count, group_size = config.own_counts
        engine = self.engine
        # Batches have ranges of seeds of their own, so that no two completions of a run are drawn alike.
        seed = (config.seed * 1_000_003 + number) * count * group_size % 2**31
        assert config.rollout.engine is not None
        retries = config.rollout.engine.retries
        for remaining in range(retries, -1, -1):
            try:
                if self.takes_weights and engine.version != version:
                    self.push(params, version)
                return engine.sample_tokens(
                    prompts, group_size, seed, name=f"{number:06d}", source="policy", version=version
                )
            except LostWeightsError as error:
                if not remaining:
                    raise UserError(
                        problem=f"{error}, after {retries + 1} tries",
                        remedy="give this run a server of its own that stays up",
                    ) from error
                logger.warning("%s; recjax gives it the weights again and samples batch %d again", error, number)
                engine.version = None
        raise AssertionError("the last try returns or raises")

    def push(self, params: dict, version: int) -> None:
        """Writes the weights to a folder and gives them to the server.

        Raises:
            UserError: the server does not take them.
        """
        started = time.monotonic()
        config = self._sampler.config
        folder = pushed_folder(config) / str(version)
        write_pushed(folder, config, self._sampler.policy, params, self.engine.api)
        self.engine.push(folder, version, takes_adapters(config, self.engine.api))
        self._pushes += 1
        self._push_seconds = time.monotonic() - started
        for older in folder.parent.glob("*"):  # the server has acknowledged the newest weights
            if older != folder and older.name.isdecimal():
                shutil.rmtree(older, ignore_errors=True)
