"""Deals the global order of an epoch to the ranks: by position, or so that a rank gets what is cached near it.

::

    order   [ 0 1 2 3 4 5 | 6 7 8 9 10 11 | 12 13 14 ]        K = 15, G = 6, W = 2, B = 3
    rank 0    0 1 2         6 7 8           12 13
    rank 1          3 4 5         9 10 11         14

Step t is ``order[t*G : (t+1)*G]``; rank r takes its r-th piece of B, and all ranks take the same number of steps. The
content of a step depends on G alone, so a run resumed with other ranks (same G) takes the same steps. Invariant:
without padding, the ranks' positions partition ``range(cursor, K)``. `redeal` rearranges a global batch within a step
(Yang & Cong, HiPC 2019); decision 0023 says what that gains.

Legend: K drawn in one epoch · G global batch · W ranks · H hosts.
"""

from __future__ import annotations

import numpy as np

from shade.errors import ConfigError
from shade.types import Bools, Indices, Order

NOWHERE = -1
"""The home of a sample whose server is unknown, or on a host without a rank."""


def num_steps(num_drawn: int, global_batch: int, *, drop_last: bool = False) -> int:
    """Returns the steps that every rank takes in an epoch of ``num_drawn`` samples."""
    return num_drawn // global_batch if drop_last else -(-num_drawn // global_batch)


def rank_slice(step: int, rank: int, *, num_drawn: int, global_batch: int, world_size: int) -> range:
    """Returns the positions that one rank takes in one step.

    Args:
        step: 0 ≤ step < `num_steps`.
        rank: 0 ≤ rank < world_size.
        num_drawn: K.
        global_batch: G, a multiple of world_size.
        world_size: W.

    Returns:
        A range of positions. Those at or beyond K are padding and mean ``position % K``.

    Raises:
        ConfigError: G is not a multiple of W, or there is no such rank.
    """
    _check(rank, global_batch, world_size)
    start = step * global_batch
    size = min(global_batch, num_drawn - start)
    if size < global_batch:
        # A tail smaller than the ranks is padded: a rank without a sample would miss the collective.
        size = max(size, world_size)
    # The tail is split into W contiguous pieces whose sizes differ by one at most.
    each, extra = divmod(size, world_size)
    first = start + rank * each + min(rank, extra)
    return range(first, first + each + (rank < extra))


def rank_positions(
    rank: int, *, num_drawn: int, global_batch: int, world_size: int, drop_last: bool = False, cursor: int = 0
) -> Indices:
    """Returns the positions that one rank takes in the whole epoch, or from a cursor on.

    Args:
        rank: 0 ≤ rank < world_size.
        num_drawn: K.
        global_batch: G, a multiple of world_size.
        world_size: W.
        drop_last: Whether the tail is dropped.
        cursor: Global position to continue from: a multiple of G, or K when the epoch is done.

    Returns:
        int64, each in [0, K); step after step.

    Raises:
        ConfigError: As `rank_slice`, or a cursor between steps.
    """
    _check(rank, global_batch, world_size)
    if cursor < 0 or (cursor % global_batch and cursor < num_drawn):
        cure = "resume with the global batch (batch size × ranks) of the run that was saved"
        raise ConfigError.of(f"a cursor that is a multiple of the global batch {global_batch}", cursor, cure)
    whole_steps = num_drawn // global_batch
    batch = global_batch // world_size
    starts = np.arange(cursor // global_batch, whole_steps, dtype=np.int64) * global_batch + rank * batch
    positions = (starts[:, None] + np.arange(batch, dtype=np.int64)).ravel()
    if drop_last or num_drawn % global_batch == 0 or cursor >= num_drawn:
        return positions
    tail = rank_slice(whole_steps, rank, num_drawn=num_drawn, global_batch=global_batch, world_size=world_size)
    # Padding takes the first samples of the epoch, as torch's DistributedSampler does.
    return np.concatenate([positions, np.arange(tail.start, tail.stop, dtype=np.int64) % num_drawn])


def rank_order(
    order_K: Order, rank: int, *, global_batch: int, world_size: int, drop_last: bool = False, cursor: int = 0
) -> Order:
    """Returns the samples that one rank takes, step after step; arguments as for `rank_positions`."""
    division = {"global_batch": global_batch, "world_size": world_size, "cursor": cursor}
    return order_K[rank_positions(rank, num_drawn=len(order_K), drop_last=drop_last, **division)]


def _check(rank: int, global_batch: int, world_size: int) -> None:
    """Raises ConfigError for a division that would leave ranks unequal."""
    if world_size < 1 or global_batch % world_size:
        expected = f"a global batch that {world_size} ranks can share equally"
        raise ConfigError.of(expected, global_batch, "make it batch size × ranks")
    if not 0 <= rank < world_size:
        raise ConfigError.of(f"a rank in [0, {world_size})", rank, "check RANK and WORLD_SIZE")


def redeal(home_G: Indices, hit_G: Bools, size_W: Indices, host_W: Indices) -> Indices:
    """Rearranges a global batch by the samples' homes.

    Args:
        home_G: Host of each sample, 0 ≤ home < H, or `NOWHERE`.
        hit_G: Whether it is in the cache now: cached samples choose first.
        size_W: Share of each rank; they sum to G.
        host_W: Host of each rank.

    Returns:
        int64 (G,): positions in the batch, rank 0's share first, each share in the order of the batch.
    """
    num_hosts = int(host_W.max()) + 1
    room_H = np.bincount(host_W, weights=size_W, minlength=num_hosts).astype(np.int64)
    # The step's gradient is a sum, so which rank computes which part of it is free (statistics of unsynchronised batch
    # norms see other parts, as with any order).
    chosen_G = np.full(len(home_G), NOWHERE, dtype=np.int64)
    for host in range(num_hosts):
        at_home = np.flatnonzero(home_G == host)
        # Cached samples choose first: only for those does it matter whose host reads them.
        at_home = at_home[np.argsort(~hit_G[at_home], kind="stable")][: room_H[host]]
        chosen_G[at_home] = host
        room_H[host] -= len(at_home)
    # A sample without room at home fills what is left, in the order of the batch, so every share keeps its size.
    chosen_G[chosen_G == NOWHERE] = np.repeat(np.arange(num_hosts), room_H)
    rank_G = np.empty(len(home_G), dtype=np.int64)
    for host in range(num_hosts):
        ranks = np.flatnonzero(host_W == host)
        rank_G[chosen_G == host] = np.repeat(ranks, size_W[ranks])
    return np.argsort(rank_G, kind="stable")
