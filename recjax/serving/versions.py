"""Which weights are served: those of the start, or of a run's newest checkpoint as it comes."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from recjax.rollout.live import LiveEngine
from recjax.rollout.requests import Weights

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # from one look for newer weights to the next


class Versions:
    """The weights that an engine has, and newer ones; an asynchronous context, in which these are looked for.

    Attributes:
        version: optimizer updates of the weights that tokens are sampled with.
        run: the id of the run that these are of, if it has one.
    """

    def __init__(self, live: LiveEngine, weights: Weights, newer: Callable[[], Weights | None] | None):
        """Takes the engine and the weights that it has.

        Args:
            newer: gives weights that have come since it was asked last, or None, and may take its time; it is called in
                a thread. None: there will be none.
        """
        self._live, self._newer, self._looking = live, newer, None
        self.version, self.run = weights.version, weights.run

    async def __aenter__(self) -> "Versions":
        """Begins to look."""
        if self._newer:
            self._looking = asyncio.get_running_loop().create_task(self._look())
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Ends after the look under way."""
        if self._looking:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                weights = await asyncio.to_thread(self._newer)
                if weights is None:
                    continue
                # Between two rounds: completions under way go on, each token with the version that samples it.
                await self._live.replace_weights(weights.params, weights.version)
            except Exception:  # whatever is wrong with what comes, what is there can be served
                logger.exception("newer weights cannot be taken; those of version %d are served on", self.version)
                continue
            self.version, self.run = weights.version, weights.run
            logger.info("version %d is served", self.version)
