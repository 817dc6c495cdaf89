"""The served weights: the weights at the start, or the newest checkpoint of a run as it arrives."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from recjax.errors import UserError
from recjax.rollout.live import LiveEngine
from recjax.rollout.requests import Weights
from recjax.serving.refusals import Refused

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # time between two checks for newer weights


class Versions:
    """The engine's current weights; an asynchronous context that looks for newer weights.

    Attributes:
        version: number of optimizer updates in the current weights.
        run: id of the run that produced the weights, if it has one.
        tag: the client's name of weights that it pushed; None: the weights were not pushed.
    """

    def __init__(
        self,
        live: LiveEngine,
        weights: Weights,
        newer: Callable[[], Weights | None] | None,
        pushed: Callable[[str], dict] | None = None,
    ):
        """Takes the engine and its weights; `newer` and `pushed` of `Serving` run in threads and may block."""
        self._live = live
        self._newer = newer
        self._looking = None
        self.version = weights.version
        self.run = weights.run
        self.tag = None
        self._pushed = pushed
        self._pushing = asyncio.Lock()

    async def push(self, folder: str, tag: str) -> None:
        """Serves the weights in a client's folder, either all or none.

        Args:
            tag: name of the weights, which ends with their version.
        Raises:
            Refused: clients may not push weights, or these weights cannot be used; the server keeps its weights.
        """
        if self._pushed is None:
            raise Refused(403, "this server takes no weights; start it with --push_root FOLDER and an API key")
        async with self._pushing:
            try:
                params = await asyncio.to_thread(self._pushed, folder)
            except UserError as error:
                raise Refused(400, f"model_path: {error}", param="model_path") from error
            run, _, version = tag.rpartition("-")
            await self._live.replace_weights(params, int(version))
            self.version = int(version)
            self.run = run or None
            self.tag = tag
        logger.info("serving pushed weights %s", tag)

    async def __aenter__(self) -> "Versions":
        """Starts looking for newer weights."""
        if self._newer:
            self._looking = asyncio.get_running_loop().create_task(self._look())
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Ends after the current check."""
        if self._looking:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                assert self._newer is not None
                weights = await asyncio.to_thread(self._newer)
                if weights is None:
                    continue
                # Between two rounds: open completions continue, and each token records the version that sampled it.
                await self._live.replace_weights(weights.params, weights.version)
            except Exception:  # the current weights can still be served if new ones are invalid
                logger.exception("newer weights cannot be used; the server keeps version %d", self.version)
                continue
            self.version = weights.version
            self.run = weights.run
            logger.info("serving version %d", self.version)
