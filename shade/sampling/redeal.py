"""Deals a global batch so that ranks get what is kept near them; what the batch contains does not change.

A step's gradient is a sum over its global batch, so which rank computes which part of it is free: SGD does not notice
(statistics of unsynchronised batch norms do, as they do of any order). A cluster keeps each sample on one host, its
home, so of the hits a rank gets by position only every H-th is at home with it; dealt by home, nearly all are.

::

    batch    a0 b1 c0 d1 e1 f1       letter: sample, number: its home;  two hosts of one rank, shares of 3
    by place [a0 b1 c0] [d1 e1 f1]   4 of 6 at home
    by home  [a0 c0 f1] [b1 d1 e1]   5 of 6; host 1 has one too many

Those that are in the cache come first, then those that may get there; who finds no place at home fills what is left, in
the order of the batch. Every share keeps its size. A pure function of what all ranks know, so all deal alike.

What this is worth (R ranks on as many hosts, global batch 256): at f = 0.2 the local share of a batch grows from f / R
to nearly f, at f = 1 and R = 4 to 0.96: the 4 % are what binomial counts overflow by.

Legend: G global batch · W ranks · H hosts.

References:
    Yang & Cong, "Accelerating Data Loading in Deep Neural Network Training", HiPC 2019.
"""

from __future__ import annotations

import numpy as np

from shade.types import Bools, Indices

NOWHERE = -1
"""The home of a sample whose server is unknown, or stands where no rank runs."""


def redeal(home_G: Indices, hit_G: Bools, size_W: Indices, host_W: Indices) -> Indices:
    """Rearranges a global batch.

    Args:
        home_G: Host of each sample, 0 ≤ home < H, or `NOWHERE`.
        hit_G: Whether it is in the cache now: these have the first choice.
        size_W: Share of each rank; they sum to G.
        host_W: Host of each rank.

    Returns:
        int64 (G,): places of the batch, rank 0's share first, each share in the order of the batch.
    """
    num_hosts = int(host_W.max()) + 1
    room_H = np.bincount(host_W, weights=size_W, minlength=num_hosts).astype(np.int64)
    chosen_G = np.full(len(home_G), NOWHERE, dtype=np.int64)
    for host in range(num_hosts):
        at_home = np.flatnonzero(home_G == host)
        at_home = at_home[np.argsort(~hit_G[at_home], kind="stable")][: room_H[host]]
        chosen_G[at_home] = host
        room_H[host] -= len(at_home)
    chosen_G[chosen_G == NOWHERE] = np.repeat(np.arange(num_hosts), room_H)
    rank_G = np.empty(len(home_G), dtype=np.int64)
    for host in range(num_hosts):
        ranks = np.flatnonzero(host_W == host)
        rank_G[chosen_G == host] = np.repeat(ranks, size_W[ranks])
    return np.argsort(rank_G, kind="stable")
