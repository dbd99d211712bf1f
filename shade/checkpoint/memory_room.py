"""Whether a snapshot fits into the cluster's memory, before anything there is changed for it.

The servers know how full they are; what a snapshot occupies follows from its length, its layout and the allocator's
rounding. Counted in is what is under way at once: a server reads a large value into a buffer of its own, which is as
long and counts as memory in use. The fullest server decides. Price: one INFO a save.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shade.checkpoint.manifest import CHUNK_BYTES
from shade.checkpoint.slots import Layout, Slot
from shade.errors import StoreFullError, StoreUnavailableError
from shade.store.base import NodeStats, Store

_KEY_LENGTH: Final = 80
_BUFFERS: Final = 2
"""Copies of a value that a server holds while it comes in."""
_EDGE: Final = 64
"""A server is filled up to this part of its limit: its tables grow in leaps, and its clients' buffers count."""


def needed_bytes(store: Store, layout: Layout, shard_bytes: Sequence[int]) -> int:
    """What a snapshot occupies on all servers together.

    Args:
        store: Knows the allocator's rounding.
        layout: Copies and parity.
        shard_bytes: Length of each rank's shard.

    Returns:
        Bytes, rounding included.
    """
    whole = store.stored_bytes(_KEY_LENGTH, CHUNK_BYTES)
    total = 0
    for size in shard_bytes:
        num_whole, rest = divmod(size, CHUNK_BYTES)
        copies = num_whole * whole + (store.stored_bytes(_KEY_LENGTH, rest) if rest else 0)
        num_parity = layout.num_stripes(num_whole + bool(rest)) * layout.num_parity
        total += copies * (1 + layout.replicas) + num_parity * min(whole, copies)
    return total


def spare_bytes(
    store: Store, layout: Layout, shard_bytes: Sequence[int], given_up: Sequence[Slot], rank_bytes: int
) -> int | None:
    """What a snapshot would leave to others, if it were saved now: the fullest server's, times the servers.

    Args:
        store: The servers.
        layout: Of the snapshot to come.
        shard_bytes: Length of each rank's shard; empty for no snapshot.
        given_up: Slots whose content goes first.
        rank_bytes: What one rank has under way at once.

    Returns:
        Bytes, less what keeps the servers from the very edge; negative: so much is missing. None: they have no limit.
    """
    primaries = [node for node in store.stats().nodes if node.role == "primary" and node.max_bytes]
    num_servers = len(layout.tags)
    uneven = store.stored_bytes(_KEY_LENGTH, CHUNK_BYTES) if shard_bytes and num_servers > 1 else 0
    wanted = needed_bytes(store, layout, shard_bytes) + sum(_BUFFERS * min(size, rank_bytes) for size in shard_bytes)
    wanted += min(sum(shard_bytes), rank_bytes)  # a flusher that reads another one meanwhile
    freed = sum(needed_bytes(store, slot.layout, slot.shard_bytes) for slot in given_up)
    share = (wanted - freed) // num_servers + uneven
    left = [_left_bytes(node) - node.max_bytes // _EDGE - share for node in primaries]
    return num_servers * min(left) if left else None


def _left_bytes(node: NodeStats) -> int:
    return node.max_bytes - node.used_bytes - node.overhead_bytes


def check_room(
    store: Store, layout: Layout, shard_bytes: Sequence[int], given_up: Sequence[Slot], rank_bytes: int
) -> None:
    """Compares what the fullest server has left with its share of a snapshot.

    Args:
        store: The servers.
        layout: Of the snapshot to come.
        shard_bytes: Length of each rank's shard.
        given_up: Slots whose content goes first.
        rank_bytes: What one rank has under way at once.

    Raises:
        StoreFullError: It does not fit.
        StoreUnavailableError: A server does not answer.
    """
    primaries = [node for node in store.stats().nodes if node.role == "primary"]
    num_servers = len(layout.tags)
    if len(primaries) < num_servers:
        raise StoreUnavailableError(f"only {len(primaries)} of {num_servers} servers of {store.url} answer")
    needed = needed_bytes(store, layout, shard_bytes)
    freed = sum(needed_bytes(store, slot.layout, slot.shard_bytes) for slot in given_up)
    under_way = sum(_BUFFERS * min(size, rank_bytes) for size in shard_bytes)
    for node in primaries:
        left = _left_bytes(node) + freed // num_servers
        if node.max_bytes and left < (needed + under_way) // num_servers:
            wanted = (needed + under_way) / num_servers
            raise StoreFullError(
                f"expected room for {wanted / 2**20:.0f} MiB of snapshot on {node.address}, got "
                f"{max(0, left) / 2**20:.0f} MiB; raise its maxmemory or lower what samples may use"
            )
