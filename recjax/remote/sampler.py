"""Samples batches on a server, which gets the weights of each."""

import concurrent.futures
import contextlib
import dataclasses
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp

from recjax.errors import UserError
from recjax.experience.group import Group
from recjax.hub.export import export_model, write_adapters, write_base
from recjax.hub.tokenizers import model_folder
from recjax.models.placement import params_on_host
from recjax.models.trainable import combine, merged
from recjax.remote.client import LostWeightsError, RemoteEngine
from recjax.rollout.collecting import submit
from recjax.runtime.files import digest, whole_folder
from recjax.sources.sampling import BatchSampler, SampledBatch
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
        takes_adapters = engine.api == "vllm" and config.model.lora is not None and config.model.path is not None
        self.takes_weights = engine.takes_folders or takes_adapters
        if not (self.takes_weights or config.regime.offline):
            engine.__exit__()
            assert config.rollout.engine is not None
            remedy = "start vLLM with VLLM_SERVER_DEV_MODE=1, or train adapters (model.lora and model.path), or "
            raise UserError(
                "rollout.engine.url",
                f"{engine.api or 'this server'} cannot take whole weights over HTTP",
                f"{remedy * (engine.api == 'vllm')}set regime.offline=true to train on samples from its own weights",
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

    def replace_weights(self, version: int, weights: Callable[[], dict]) -> None:
        """Copies the weights to the host; see `PolicySampler`."""
        if version != self._version:
            self._version = version
            self._params = params_on_host(combine(weights(), self._frozen)) if self.takes_weights else {}

    def issue(self, number: int, rates: Mapping[str, float | None] | None = None) -> None:
        """See `PolicySampler`."""
        assert self._version is not None
        self._issued[number] = self._thread.submit(self._batch, number, self._version, self._params, rates)
        self.in_flight[number] = self._version

    def _batch(self, number: int, version: int, params: dict, rates: Mapping[str, float | None] | None) -> SampledBatch:
        prompts = self._sampler.batch_prompts(number, rates)
        groups = self.sample(prompts, params, version, number)
        return groups, submit(groups, prompts, self._sampler.grading)

    def receive(self, wait: bool) -> list[tuple[int, SampledBatch]]:
        """See `PolicySampler`."""
        if wait:
            concurrent.futures.wait(self._issued.values(), return_when=FIRST_COMPLETED)
        done = [number for number, batch in self._issued.items() if batch.done()]
        self.in_flight = {number: version for number, version in self.in_flight.items() if number not in done}
        return [(number, self._issued.pop(number).result()) for number in done]

    def sample(self, prompts: Prompts, params: dict, version: int, number: int) -> list[Group]:
        """The groups of a batch, without grades; see `BatchSampler.sample`.

        Raises:
            ValueError: the server keeps losing the weights, or sends no usable replies.
        """
        config = self._sampler.config
        count, group_size = config.own_counts
        engine = self.engine
        # Batches have ranges of seeds of their own, so that no two completions of a run are drawn alike.
        seed = (config.seed * 1_000_003 + number) * count * group_size % 2**31
        assert config.rollout.engine is not None
        retries = config.rollout.engine.retries
        for tries in range(retries, -1, -1):
            try:
                if self.takes_weights and engine.version != version:
                    self.push(params, version)
                return engine.sample_tokens(
                    prompts, group_size, seed, name=f"{number:06d}", source="policy", version=version
                )
            except LostWeightsError as error:
                if not tries:
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
        began = time.monotonic()
        config = self._sampler.config
        decoder = self._sampler.policy.decoder.config
        # recjax.serve computes with norm scales in float32, as this process does; other servers round them.
        dtype = "float32" if self.engine.api == "recjax" else jnp.dtype(self._sampler.policy.decoder.dtype).name
        output = Path(config.output).absolute()
        shared_folder = output / "pushed"
        assert config.rollout.engine is not None
        if config.rollout.engine.folder:  # other runs may push there as well
            shared_folder = Path(config.rollout.engine.folder).absolute() / f"{output.name}-{digest(bytes(output))[:8]}"
        folder = shared_folder / str(version)
        path = config.model.path
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was interrupted
        # Before adapters are merged: a sum in the compute dtype would round twice.
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        is_adapter = config.model.lora is not None and self.engine.api != "recjax" and path is not None
        if is_adapter:
            with whole_folder(folder) as partial:
                write_adapters(partial, decoder, params, str(model_folder(path)))
        else:
            params = merged(decoder, params) if config.model.lora else params
            decoder = dataclasses.replace(decoder, lora=None)
            if self.engine.api == "vllm" and decoder.tie_embeddings and decoder.attention_cap is None:
                # vLLM's build for CPUs packs weights as it loads them, and keeps the former output layer of tied
                # embeddings unless the folder has one. Gemma 2, which alone bounds attention scores, takes none.
                params = params | {"head": {"kernel": params["embedding"]["embedding"].T}}
                decoder = dataclasses.replace(decoder, tie_embeddings=False)
            with tempfile.TemporaryDirectory() as base:
                if path is None:
                    write_base(Path(base), decoder, self._sampler.policy.tokenizer, self._sampler.policy.stop_ids)
                export_model(folder, decoder, params, model_folder(path) if path else Path(base), dtype)
        self.engine.push(folder, version, is_adapter)
        self._pushes += 1
        self._push_seconds = time.monotonic() - began
        for older in shared_folder.glob("*"):  # the server has acknowledged the newest
            if older != folder and older.name.isdecimal():
                shutil.rmtree(older, ignore_errors=True)
