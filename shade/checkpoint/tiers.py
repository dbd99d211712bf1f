"""The tiers of one run, as one rank has them: opened, checked, leased, served by a flusher, and closed.

Own memory is always there. With a store comes cluster memory, with a path comes storage; with both, a flusher process
takes what is in memory to storage, and this process writes there only what memory would not take. Rank 0 alone holds
the lease on the run id, starts the flusher where none serves the store, and retires old snapshots where none does.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from shade.checkpoint.courier import Landing
from shade.checkpoint.flush import serving, start_flusher
from shade.checkpoint.group import Group
from shade.checkpoint.lease import Lease
from shade.checkpoint.memory_tier import MemoryTier
from shade.checkpoint.reader import Reader
from shade.checkpoint.retention import Keep
from shade.checkpoint.stage import Stage
from shade.checkpoint.storage_tier import StorageTier
from shade.checkpoint.tier import Tier
from shade.errors import ConfigError, ShadeError, StorageError, StoreUnavailableError
from shade.storage import Volume, open_volume
from shade.store import Store, open_store

STORE_TIMEOUT_SECONDS = 5.0
"""Of a wait for the next bytes: a snapshot can wait longer than a batch of samples."""

logger = logging.getLogger("shade.checkpoint")


class Tiers:
    """What a Checkpointer keeps snapshots in.

    Args:
        stage: Own memory.
        memory: Cluster memory, or None.
        storage: Durable storage, or None.
        keep: What stays in storage.
        is_first: Whether this is rank 0.
        resources: Closed at the end, in reverse.
    """

    def __init__(
        self,
        stage: Stage,
        memory: MemoryTier | None,
        storage: StorageTier | None,
        keep: Keep,
        *,
        is_first: bool,
        resources: contextlib.ExitStack,
    ) -> None:
        self.stage, self.memory, self.storage = stage, memory, storage
        self._keep, self._is_first, self._resources = keep, is_first, resources
        self.reader = Reader([tier for tier in (stage, memory, storage) if tier is not None])

    def landed(self, landing: Landing) -> None:
        """Tidies up after a save; called in the courier's thread.

        Args:
            landing: Where it has come to.
        """
        if landing.tier is self.storage and self._is_first:
            self._retire()

    def _retire(self) -> None:
        """Removes from storage what the keep rules let go of."""
        assert self.storage is not None
        try:
            held = self.storage.held()
            leaving = {record.digest for record in self._keep.discardable(held.values())}
            for place, record in held.items():
                if record.digest in leaving:
                    self.storage.discard(place)
        except StorageError as error:
            logger.warning("old snapshots stay in storage: %s", error)

    def is_durable(self, landing: Landing, step: int) -> bool:
        """Whether a save is in storage.

        Args:
            landing: Where it has come to.
            step: Its step.

        Returns:
            False while a flusher has still to bring it there, or the store does not say.
        """
        if landing.tier is self.storage:
            return True
        assert self.memory is not None
        try:
            return not self.memory.is_dirty(landing.place, step)
        except StoreUnavailableError:
            return False

    def close(self, *, keep_buffers: bool) -> None:
        """Lets go of everything.

        Args:
            keep_buffers: Leave own memory for a process that comes after.
        """
        if keep_buffers or (self.memory is None and self.storage is None):
            self.stage.close()
        else:
            self.stage.remove()
        self._resources.close()
