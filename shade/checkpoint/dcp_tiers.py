"""The tiers that a process writes DCP checkpoints to, opened when first needed and shared by all writers of one run.

DCP makes the ranks agree, so nothing here is collective. Writers are made anew for every save by many scripts, and are
pickled to another process by some, so what is opened (connections, the lease on the run id, the flusher of a store)
does not belong to a writer but to the process; it is closed by `release`, or when the process ends.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from multiprocessing import util
from typing import Any, Final

import torch
import torch.distributed as dist

from shade.checkpoint.codecs.base import standing_alone
from shade.checkpoint.group import Alone
from shade.checkpoint.own_memory import check_run_name
from shade.checkpoint.retention import Keep
from shade.checkpoint.tiers import Tiers, open_tiers
from shade.errors import ConfigError


@dataclass(frozen=True)
class Address:
    """Where a run's snapshots go, as typed; see `shade.checkpoint.manager.Checkpointer` for each word.

    Raises:
        ConfigError: It cannot be; nothing has been opened yet.
    """

    store: str | None
    persist_to: str | None
    run: str
    keep: str
    slots: int
    replicas: int
    parity: tuple[int, int] | None
    codec: str

    def __post_init__(self) -> None:
        check_run_name(self.run)
        Keep.parse(self.keep)
        standing_alone(self.codec)
        if self.store is None and self.persist_to is None:
            raise ConfigError.of("a place for snapshots", "neither store nor persist_to", "name at least one")


class Opened:
    """The tiers of an address, in this process.

    Args:
        address: Which.
        is_coordinator: Whether this process leads: holds the lease, prepares, commits, removes.
    """

    def __init__(self, address: Address, is_coordinator: bool) -> None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 1
        self.tiers: Tiers = open_tiers(
            address.run,
            _Apart(0 if is_coordinator else max(1, rank)),
            address.store,
            address.persist_to,
            keep=address.keep,
            slots=address.slots,
            replicas=address.replicas,
            parity=address.parity,
            buffers=1,
        )
        self.ways = [tier for tier in (self.tiers.memory, self.tiers.storage) if tier is not None]
        self.sequence = 0
        """Of the save begun last; on the coordinator."""
        self.written = 0
        """Sequence of the save that this process wrote last."""
        self.troubled: set[str] = set()
        """Tiers that have failed, by name, and were told of."""
        self._room = torch.empty(0, dtype=torch.uint8)

    def room(self, num_bytes: int) -> torch.Tensor:
        """Memory that stays warm between saves."""
        if len(self._room) < num_bytes:
            self._room = torch.empty(num_bytes, dtype=torch.uint8)
        return self._room

    def next_sequence(self) -> int:
        """Counts the saves of the run on; on the coordinator."""
        if not self.sequence:
            self.sequence = max((found.record.sequence for found in self.tiers.reader.snapshots()), default=0)
        self.sequence += 1
        return self.sequence

    def close(self) -> None:
        """Closes; own memory, which is not used here, is left as it was found."""
        self.tiers.close(keep_buffers=True)


class _Apart(Alone):
    """One rank of several that open their tiers without a word to each other."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


_opened: Final[dict[tuple[int, Address, bool], Opened]] = {}
_lock: Final = threading.Lock()


def opened(address: Address, is_coordinator: bool) -> Opened:
    """The tiers of an address, opened if they are not yet.

    Args:
        address: Which.
        is_coordinator: Whether this process leads.

    Returns:
        The tiers, the same for equal arguments.

    Raises:
        ConfigError: A store or storage does not answer, or cannot be written.
        RunInUseError: Another live process saves under this id.
    """
    key = (os.getpid(), address, is_coordinator)
    with _lock:
        if key not in _opened:
            if not any(pid == os.getpid() for pid, _, _ in _opened):
                util.Finalize(None, _release_all, exitpriority=10)
            _opened[key] = Opened(address, is_coordinator)
        return _opened[key]


def release(address: Address) -> None:
    """Closes what this process has opened of an address. Nothing is no error."""
    with _lock:
        for key in [key for key in _opened if key[:2] == (os.getpid(), address)]:
            _opened.pop(key).close()


def _release_all(*_: Any) -> None:
    for address in {address for _, address, _ in _opened}:
        release(address)
