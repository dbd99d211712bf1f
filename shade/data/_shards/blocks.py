"""Blocks: neighbouring pieces of a shard that are read together, and whose samples are kept on this machine's disk.

A block is read as a whole when its first sample is wanted, and all of its samples are kept in a `disk` store, for this
epoch, the next ones, other processes and later jobs. Where the capacity is smaller than the data set, a part of the
blocks is kept; the samples of the others are read one by one. What is damaged is read again.

Race: *two processes want one block.* The one that gets its lock reads it; the other waits, and finds the samples. No
process waits for a lock while it holds one.

`ReadAhead` brings the blocks of an order in which neighbours stay near each other (`shade.sampling.window`), in the
sequence in which they are wanted. Blocks that the disk does not keep lie in the machine's memory (`memory_tier`) until
their last sample is used.

Invariant: a payload that is returned is one that was kept for that sample.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import heapq
import logging
import multiprocessing
import os
import shutil
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from shade.cache.entry import FORMAT_ITEM, HEADER_BYTES, seal, unseal
from shade.errors import ConfigError, CorruptEntryError, ShadeError, StoreError
from shade.process import enter_folder, leave_folder, remove_unused
from shade.sampling.window import BlockUses, block_uses
from shade.store import StoreURL, open_store
from shade.store.keys import SampleKeys
from shade.types import Order

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
_READERS: Final = 4
"""Blocks that a process reads ahead at once. On one link, more of them would make the first one late."""
_AHEAD_BYTES: Final = 64 << 20
"""How far ahead of the samples that are handed out blocks are read."""
_MEMORY: Final = "/dev/shm"
_WAIT_SECONDS: Final = 0.005
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
        self.leave: Callable[[], Any] = bool  # of a tier in memory: removes it
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
        # By the block's hash, so that it is always the same part of them.
        is_mine = xxhash.xxh3_64_intdigest(struct.pack("<QQ", *block)) < self._share
        return is_mine and not self._is_full and time.monotonic() >= self._rests_until

    @property
    def keeps_all(self) -> bool:
        """Returns whether the capacity is that of the data set."""
        return self._share >= 2**64

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
                    found[index] = unseal(index, entry, FORMAT_ITEM, is_checked=self._store.checks_values)
        return found

    def remove(self, indices: Sequence[int]) -> None:
        """Removes samples."""
        try:
            self._store.delete_many(self._keys.many(indices))
        except StoreError as error:
            self._failed(error)

    def keep(self, payloads: Mapping[int, bytes]) -> dict[int, bytes]:
        """Writes samples, as far as there is room, and returns the others."""
        short = {index: payload for index, payload in payloads.items() if len(payload) < _MOST_BYTES}
        names = self._keys.many(list(short))
        sealed = (seal(index, payload, FORMAT_ITEM) for index, payload in short.items())
        try:
            written = self._store.set_many(dict(zip(names, sealed, strict=True)))
        except StoreError as error:
            self._failed(error)
            return dict(payloads)
        if not all(written) and not self._is_full:
            self._is_full = True
            url = self._store.url
            logger.warning("%s is full; samples that are not there are read from their shards, one by one", url)
        kept = {index for index, is_written in zip(short, written, strict=True) if is_written}
        return {index: payload for index, payload in payloads.items() if index not in kept}

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
            # A lock of the process: threads are kept apart by `_taken`. The system frees it if the process dies.
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
            # Closing the tier freed all locks.
            if self._lock_file >= 0:
                fcntl.lockf(self._lock_file, fcntl.LOCK_UN, 1, block[0] * _LOCK_STRIDE + block[1])
            self._taken.discard(block)

    def wait(self, block: Block, *, takes: bool = False) -> None:
        """Returns when nothing holds a block's lock, or when this caller holds it."""
        while not self.take(block):
            time.sleep(_WAIT_SECONDS)
        if not takes:
            self.release(block)

    def close(self) -> None:
        """Closes the store, and removes it if it lies in memory. Safe to call twice."""
        self._store.close()
        with self._changing:
            if self._lock_file >= 0:
                # This gives up the locks that are left.
                os.close(self._lock_file)
                self._lock_file = -1
        self.leave()


def memory_tier(namespace: str, owner: str, num_samples: int, payload_bytes: float) -> BlockTier:
    """Makes a tier in this machine's memory, which the processes of one job share, and which ends with the last.

    Args:
        namespace: Names the samples' content.
        owner: Names the job.
        num_samples: Samples that must have room at once.
        payload_bytes: Estimated bytes of a sample.

    Returns:
        The tier, whose `BlockTier.leave` removes it.

    Raises:
        ConfigError: The machine has no shared memory, or too little.
    """
    stem = f"{_MEMORY}/shade-{os.getuid()}-window-"
    for path in glob.glob(f"{glob.escape(stem)}*"):
        remove_unused(path)
    wanted_bytes = int(2 * num_samples * (payload_bytes + 1024))
    free_bytes = shutil.disk_usage(_MEMORY).free if os.path.isdir(_MEMORY) else 0
    if free_bytes < wanted_bytes // 2:
        raise ConfigError.of(
            f"{wanted_bytes >> 21} MiB of shared memory for a window of {num_samples} samples",
            f"{free_bytes >> 20} MiB free in {_MEMORY}",
            "give the Shards a disk=, or choose a smaller shuffle_window; in a container: --shm-size",
        )
    folder = f"{stem}{owner}"
    enter_folder(folder)
    url = StoreURL.parse(f"disk://{quote(folder)}?capacity={min(wanted_bytes, free_bytes)}")
    tier = BlockTier(url, namespace, num_samples, payload_bytes)
    tier.leave = weakref.finalize(tier, leave_folder, folder, os.getpid())
    return tier


_UNKNOWN, _COMING, _HERE, _CAME = range(4)
"""States of a block, shared by the processes of a rank: nothing is known; it is on its way; it is here, or should be;
it came in this pass."""


class ReadAhead:
    """Reads blocks before their samples are wanted, and removes them after their last use.

    Args:
        first_D: int64 (D,), the first sample of each block.
        block_bytes: Mean bytes of a block.
        bring: A method that is called with the number of a block, in a thread; keeps its samples, and returns whether
            it had to read them, and whether they stay. The threads end when its object is collected.
        drop: A method that is called with the number of a block that does not stay, after its last use; removes its
            samples.
    """

    def __init__(
        self,
        first_D: npt.NDArray[np.int64],
        block_bytes: float,
        bring: Callable[[int], tuple[bool, bool]],
        drop: Callable[[int], None],
    ) -> None:
        self._first_D, self._bring, self._drop = first_D, weakref.WeakMethod(bring), weakref.WeakMethod(drop)
        weakref.finalize(bring.__self__, self.leave).atexit = False  # type: ignore[attr-defined]
        # Blocks are brought in the training process, whose sampler knows the order; the processes that load batches
        # wait for a block until its shared byte says that it came.
        self._state_tensor_D = torch.zeros(len(first_D), dtype=torch.uint8)
        self._state_tensor_D.share_memory_()  # type: ignore[no-untyped-call]
        self.ahead_blocks = max(_READERS, min(2 * _READERS, int(_AHEAD_BYTES / max(1.0, block_bytes))))
        """Blocks that are read ahead of what is handed out, about."""
        self._uses: BlockUses | None = None
        self._ahead = 0
        self._per_process()

    def _per_process(self) -> None:
        self._pid = os.getpid()
        self._state_D = self._state_tensor_D.numpy()
        self._wake = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._held: list[tuple[int, int]] = []
        self._waiting: list[int] = []
        self._num_asked = self._used = 0
        self._is_closed = False

    def __getstate__(self) -> dict[str, Any]:
        return {"_first_D": self._first_D, "_state_tensor_D": self._state_tensor_D}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._uses = None
        self._per_process()

    def wait(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        """Waits for the blocks that are on their way.

        Args:
            indices: Sample indices.

        Returns:
            The samples whose blocks were here before this pass, and those whose blocks have come in it.
        """
        index_B = np.asarray(indices, dtype=np.int64)
        block_B = np.searchsorted(self._first_D, index_B, side="right") - 1
        while np.any(self._state_D[block_B] == _COMING):
            trainer = multiprocessing.parent_process()
            # Else a worker would outlive a training process that was killed.
            if trainer is not None and not trainer.is_alive():
                raise ShadeError("expected the training process, which reads shards ahead, to live; it has ended")
            time.sleep(_WAIT_SECONDS)
        state_B = self._state_D[block_B]
        return index_B[state_B == _HERE].tolist(), index_B[state_B == _CAME].tolist()

    def begin(self, order_K: Order, start: int) -> None:
        """Begins a pass at a place of an order; what was asked for in the pass before, and did not come, is not read
        ahead."""
        uses = block_uses(order_K, self._first_D, start)
        with self._wake:
            self._ahead = self.ahead_blocks * len(order_K) // max(1, len(uses.sequence))
            held = list[tuple[int, int]]()
            for _, block in self._held:
                if uses.first_D[block] < start + self._ahead:
                    held.append((int(uses.last_D[block]), block))
                else:
                    self._state_D[block] = _UNKNOWN
                    drop = self._drop()
                    assert drop is not None, "its data set begins a pass"
                    drop(block)
            self._state_D[self._state_D == _CAME] = _HERE
            self._state_D[self._waiting] = _UNKNOWN
            heapq.heapify(held)
            self._uses, self._held, self._waiting = uses, held, []
            self._num_asked, self._used = 0, start

    def reach(self, handed_out: int, used: int) -> None:
        """Says up to which place samples were handed out, and up to which they were used."""
        with self._wake:
            assert self._uses is not None, "a pass has begun"
            self._used = used
            first_D, sequence = self._uses.first_D, self._uses.sequence
            while self._num_asked < len(sequence) and first_D[sequence[self._num_asked]] < handed_out + self._ahead:
                block = int(sequence[self._num_asked])
                self._num_asked += 1
                if self._state_D[block] == _UNKNOWN:
                    self._state_D[block] = _COMING
                    self._waiting.append(block)
            while len(self._threads) < _READERS:
                self._threads.append(threading.Thread(target=self._work, name="shade-read-ahead", daemon=True))
                self._threads[-1].start()
            self._wake.notify_all()

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._is_closed and not self._waiting and not self._may_drop:
                    self._wake.wait()
                bring, drop = self._bring(), self._drop()
                if self._is_closed or bring is None or drop is None:
                    return
                drops = self._may_drop
                block = heapq.heappop(self._held)[1] if drops else self._waiting.pop(0)
                if drops:
                    self._state_D[block] = _UNKNOWN
            state, stays = _UNKNOWN, True
            try:
                if drops:
                    drop(block)
                    continue
                came, stays = bring(block)
                state = _CAME if came else _HERE
            except Exception as error:  # noqa: BLE001 - who wants the sample reads it, and meets the error
                logger.info("a block was not read ahead: %s", error)
            finally:
                del bring, drop
            with self._wake:
                self._state_D[block] = state
                if not stays and self._uses is not None:
                    heapq.heappush(self._held, (int(self._uses.last_D[block]), block))

    @property
    def _may_drop(self) -> bool:
        return bool(self._held) and self._held[0][0] < self._used

    def leave(self) -> None:
        """Lets the threads end; what is on its way is not waited for by readers. Does nothing in a child."""
        if self._pid != os.getpid():
            return
        with self._wake:
            self._is_closed = True
            self._state_D[self._state_D == _COMING] = _UNKNOWN
            self._wake.notify_all()

    def close(self) -> None:
        """Ends the threads. Safe to call twice, and in a child."""
        self.leave()
        for thread in self._threads if self._pid == os.getpid() else ():
            thread.join()
