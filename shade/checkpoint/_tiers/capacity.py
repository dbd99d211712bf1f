"""Says whether a snapshot fits into the memory of the servers, before anything is changed.

It counts the allocator's rounding and what is in flight: a server reads a large value into a buffer of the same length
first. The fullest server decides, because chunks go to all of them alike. Cost: one INFO of every server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shade.checkpoint._format.manifest import CHUNK_BYTES
from shade.checkpoint._tiers.slot_table import Slot, SlotLayout
from shade.errors import StoreFullError, StoreUnavailableError
from shade.store.base import NodeStats, Store

_KEY_LENGTH: Final = 80
_BUFFERS: Final = 2
"""Copies of a value that a server holds while it receives it."""
_EDGE: Final = 64
"""One part in so many of a server's limit stays unused: its tables grow in leaps, and client buffers count."""


def needed_bytes(store: Store, layout: SlotLayout, shard_bytes: Sequence[int]) -> int:
    """Returns the bytes that a snapshot occupies on all servers together, with the allocator's rounding."""
    chunk_bytes = store.stored_bytes(_KEY_LENGTH, CHUNK_BYTES)
    total = 0
    for size in shard_bytes:
        num_whole, rest = divmod(size, CHUNK_BYTES)
        copies = num_whole * chunk_bytes + (store.stored_bytes(_KEY_LENGTH, rest) if rest else 0)
        num_parity = layout.num_stripes(num_whole + bool(rest)) * layout.num_parity
        total += copies * (1 + layout.replicas) + num_parity * min(chunk_bytes, copies)
    return total


def spare_bytes(
    store: Store, layout: SlotLayout, shard_bytes: Sequence[int], reused: Sequence[Slot], rank_bytes: int
) -> int | None:
    """Returns the bytes that the store has left after a snapshot, less a reserve: those of the fullest server, times
    the servers; negative if so much is missing, None if the servers have no limit. ``reused`` slots are erased first;
    ``rank_bytes`` is what one rank has in flight at once; without ``shard_bytes`` there is no snapshot."""
    primaries = [node for node in store.stats().nodes if node.role == "primary" and node.max_bytes]
    num_servers = len(layout.tags)
    uneven = store.stored_bytes(_KEY_LENGTH, CHUNK_BYTES) if shard_bytes and num_servers > 1 else 0
    wanted = needed_bytes(store, layout, shard_bytes) + sum(_BUFFERS * min(size, rank_bytes) for size in shard_bytes)
    wanted += min(sum(shard_bytes), rank_bytes)  # for a flusher that reads another snapshot meanwhile
    freed = sum(needed_bytes(store, slot.layout, slot.shard_bytes) for slot in reused)
    share = (wanted - freed) // num_servers + uneven
    left = [_left_bytes(node) - node.max_bytes // _EDGE - share for node in primaries]
    return num_servers * min(left) if left else None


def _left_bytes(node: NodeStats) -> int:
    return node.max_bytes - node.used_bytes - node.overhead_bytes


def check_capacity(
    store: Store, layout: SlotLayout, shard_bytes: Sequence[int], reused: Sequence[Slot], rank_bytes: int
) -> None:
    """Raises StoreFullError if the fullest server has less left than its share of a snapshot, or StoreUnavailableError
    if a server does not answer."""
    primaries = [node for node in store.stats().nodes if node.role == "primary"]
    num_servers = len(layout.tags)
    if len(primaries) < num_servers:
        raise StoreUnavailableError(f"only {len(primaries)} of {num_servers} servers of {store.url} answer")
    needed = needed_bytes(store, layout, shard_bytes)
    freed = sum(needed_bytes(store, slot.layout, slot.shard_bytes) for slot in reused)
    under_way = sum(_BUFFERS * min(size, rank_bytes) for size in shard_bytes)
    for node in primaries:
        left = _left_bytes(node) + freed // num_servers
        if node.max_bytes and left < (needed + under_way) // num_servers:
            wanted = (needed + under_way) / num_servers
            raise StoreFullError(
                f"expected room for {wanted / 2**20:.0f} MiB of snapshot on {node.address}, got "
                f"{max(0, left) / 2**20:.0f} MiB; raise its maxmemory or lower what samples may use"
            )
