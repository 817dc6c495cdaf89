"""Records the completions that a run's policy samples in the store of the run folder."""

import logging
from collections.abc import Collection, Sequence

from recjax.experience.group import Group
from recjax.runtime import hosts
from recjax.sources.setup import Setup
from recjax.store.store import Store

logger = logging.getLogger(__name__)


class BatchRecorder:
    """Writes graded batches to `Config.record_file`; does nothing in runs without one, and in all processes but one."""

    def __init__(self, setup: Setup):
        """Opens no store yet."""
        self._setup = setup
        self._file = None
        if hosts.is_first():
            self._file = setup.config.record_file
        self._batches: list[list[Group]] = []

    def restore(self, issued: int, in_flight: Collection[int]) -> None:
        """Deletes the batches that a resumed run samples again, maybe differently.

        Args:
            issued: number of the last batch that was issued before the checkpoint.
            in_flight: numbers of the batches that were in flight at the checkpoint.
        """
        file = self._file
        if file is None:
            return
        if not file.exists():
            if issued:
                logger.warning("%s is gone; the record has only batches after number %d", file, issued)
            return
        with Store(file, create=True) as store:
            sampled_again = []
            for completion_id, numbers in store.numbers("id").items():
                batch = int(completion_id.split("/")[0])  # `BatchSampler.sample` begins ids with the batch's number
                if batch > issued or batch in in_flight:
                    sampled_again += numbers
            store.delete(sampled_again)

    def take(self, batches: Sequence[list[Group]]) -> None:
        """Keeps graded batches until the next `write`."""
        if self._file is not None:
            self._batches += batches

    def write(self) -> None:
        """Adds the batches that `take` has kept to the store."""
        batches = self._batches
        self._batches = []
        if self._file is None or not batches:
            return
        with Store(self._file, create=True) as store:
            for groups in batches:
                records = self._setup.sampler.records(groups)
                # A batch that was in the queue at the checkpoint is in the record already.
                if records and not store.numbers("id", [records[0].completion.id]):
                    store.append(records)
