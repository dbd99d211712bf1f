"""Blocks: neighbouring pieces of a shard that are read together, and whose samples are kept on this machine's disk.

A block is read as a whole when its first sample is wanted, and all of its samples are kept in a `disk` store, for this
epoch, the next ones, other processes and later jobs. Where the capacity is smaller than the data set, a part of the
blocks is kept, always the same; the samples of the others are read one by one.

Entries are sealed like those of a cache: what is damaged is read again. A disk that fails is left alone for a while.

Races: 1. *Two processes want one block.* The one that gets its lock reads it; the other waits, and finds the samples.
No process waits for a lock while it holds one. 2. *A process dies with a lock.* The system frees it.

Invariant: a payload that is returned is one that was kept for that sample.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import xxhash

from shade.cache.entry import FORMAT_ITEM, HEADER_BYTES, seal, unseal
from shade.errors import CorruptEntryError, StoreError
from shade.store import StoreURL, open_store
from shade.store.keys import SampleKeys

logger = logging.getLogger("shade.data")

BLOCK_BYTES: Final = 8 << 20
"""Pieces that begin in one such part of a shard are a block (decision 0041)."""
_REST_SECONDS: Final = 30.0
"""A disk that failed is left alone for so long."""
_ROOM: Final = 0.95
"""The part of the capacity that is planned with; sizes are estimates."""
_MOST_BYTES: Final = 1 << 32
"""An entry has room for payloads that are shorter."""
_LOCK_STRIDE: Final = 1 << 24
Block: TypeAlias = "tuple[int, int]"
"""A shard, and the number of a part of `BLOCK_BYTES` of it."""


def coalesced(ranges: Iterable[tuple[int, int]], gap_bytes: int) -> list[tuple[int, int]]:
    """Returns ranges (start, stop) that hold all of these, where those no further apart than the gap are one."""
    merged = list[tuple[int, int]]()
    for start, stop in sorted(ranges):
        if merged and start - merged[-1][1] <= gap_bytes:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


class BlockTier:
    """Samples of whole blocks, kept on this machine's disk.

    Args:
        url: The folder and its capacity.
        namespace: Names the samples' content.
        num_samples: Samples of the data set.
        payload_bytes: Estimated bytes of a sample.
    """

    def __init__(self, url: StoreURL, namespace: str, num_samples: int, payload_bytes: float) -> None:
        self._store, self._keys = open_store(url), SampleKeys(namespace)
        self._store.ping()
        entry_bytes = self._store.stored_bytes(self._keys.key_length, int(payload_bytes) + HEADER_BYTES)
        capacity_bytes, wanted_bytes = url.capacity_bytes or 0, entry_bytes * num_samples
        self._store.enter(namespace, min(capacity_bytes, wanted_bytes))
        self._share = int(min(1.0, _ROOM * capacity_bytes / wanted_bytes) * 2**64)
        self._lock_path = os.path.join(url.path, f"{namespace}.blocks")
        self._per_process()

    def _per_process(self) -> None:
        self._pid, self._lock_file = os.getpid(), -1
        self._taken = set[Block]()
        self._changing = threading.Lock()
        self._rests_until = 0.0
        self._is_full = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("_store", "_keys", "_share", "_lock_path")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._per_process()

    def keeps(self, block: Block) -> bool:
        """Returns whether a block is one of those that are kept."""
        if self._pid != os.getpid():
            self._per_process()
        is_mine = xxhash.xxh3_64_intdigest(struct.pack("<QQ", *block)) < self._share
        return is_mine and not self._is_full and time.monotonic() >= self._rests_until

    def look_up(self, indices: Sequence[int]) -> dict[int, Any]:
        """Returns the payloads of those samples that are here."""
        if not indices or time.monotonic() < self._rests_until:
            return {}
        try:
            entries = self._store.get_many(self._keys.many(indices))
        except StoreError as error:
            self._failed(error)
            return {}
        found = {}
        for index, entry in zip(indices, entries, strict=True):
            if entry is not None:
                with contextlib.suppress(CorruptEntryError):
                    found[index] = unseal(index, entry, FORMAT_ITEM)
        return found

    def keep(self, payloads: Mapping[int, bytes]) -> None:
        """Writes samples, as far as there is room."""
        payloads = {index: payload for index, payload in payloads.items() if len(payload) < _MOST_BYTES}
        names = self._keys.many(list(payloads))
        sealed = (seal(index, payload, FORMAT_ITEM) for index, payload in payloads.items())
        entries = dict(zip(names, sealed, strict=True))
        try:
            written = self._store.set_many(entries)
        except StoreError as error:
            self._failed(error)
            return
        if not all(written) and not self._is_full:
            self._is_full = True
            url = self._store.url
            logger.warning("%s is full; samples that are not there are read from their shards, one by one", url)

    def _failed(self, error: StoreError) -> None:
        self._rests_until = time.monotonic() + _REST_SECONDS
        logger.warning("%s; samples are read from their shards for %.0f s", error, _REST_SECONDS)

    def take(self, block: Block) -> bool:
        """Takes a block's lock against all threads and processes; returns False if another has it."""
        with self._changing:
            if block in self._taken:
                return False
            if self._lock_file < 0:
                self._lock_file = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.lockf(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, block[0] * _LOCK_STRIDE + block[1])
            except OSError:
                return False
            self._taken.add(block)
            return True

    def release(self, block: Block) -> None:
        """Frees a block's lock. Safe to call twice."""
        with self._changing:
            if block not in self._taken:
                return
            fcntl.lockf(self._lock_file, fcntl.LOCK_UN, 1, block[0] * _LOCK_STRIDE + block[1])
            self._taken.discard(block)

    def wait(self, block: Block) -> None:
        """Returns when nothing holds a block's lock."""
        while not self.take(block):
            time.sleep(0.005)
        self.release(block)

    def close(self) -> None:
        """Closes the store. Safe to call twice."""
        self._store.close()
