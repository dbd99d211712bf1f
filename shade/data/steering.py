"""Steering: what the sampler knows of the future, told to the cache.

Every rank runs the same policy over the same global order, so ranks agree without talking. They talk only where the
world may differ from the plan: at the start, on resume, after an epoch that was left early, and after one in which the
cache lost or refused something. Then rank 0 looks what the store really holds and tells the others, and the plan starts
afresh from there.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from shade.cache.cache import SampleCache
from shade.errors import ConfigError
from shade.policy import POLICIES
from shade.policy.base import EpochWindow
from shade.types import Bools, Indices

ENDING_BATCHES = 32
"""More than workers hold under way: an epoch's last batches, in which what finds no room at once waits for it."""
_DISTURBANCES = ("surprises", "declined", "store_errors", "skipped", "yielded")


class Steering:
    """Drives one cache through the epochs of one sampler.

    Args:
        cache: The data set's cache.
        policy: Name of the policy.
        draws_ahead: Whether the next epoch's order will be known.
        rank: This rank.
        num_replicas: W; above 1 with torch.distributed initialised, its ranks take part in `begin_epoch` together.

    Raises:
        ConfigError: Unknown policy, one that needs the next epoch's order from a mode that does not draw ahead, or
            ranks that see different data sets.
    """

    def __init__(self, cache: SampleCache, policy: str, draws_ahead: bool, rank: int, num_replicas: int) -> None:
        policy_class = POLICIES.get(policy)
        if policy_class.needs_next_order and not draws_ahead:
            raise ConfigError.of(
                "a policy that does without the next epoch's order, since this sampling mode does not draw ahead",
                policy,
                "use policy 'shade' or 'lru' with pads",
            )
        self._cache, self._rank, self._num_replicas = cache, rank, num_replicas
        cache.use_policy(policy_class)
        self._group: dist.ProcessGroup | None = None
        if num_replicas > 1 and dist.is_available() and dist.is_initialized():
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup), "every rank of the world takes part"
            self._group = group
            self._check_same_data()
        self._started = False
        self._is_settled = False
        self._seen = cache.board.totals()

    def _check_same_data(self) -> None:
        """Ranks that look for each other's entries under different names would all read the origin, in silence."""
        assert self._group is not None
        mine = torch.tensor([xxhash.xxh32_intdigest(self._cache.keys.namespace.encode())])
        found = [torch.zeros_like(mine) for _ in range(self._num_replicas)]
        dist.all_gather(found, mine, group=self._group)
        names = [f"{int(each):08x}" for each in found]
        if len(set(names)) > 1:
            raise ConfigError.of(
                "the same data set on every rank (same files, sizes and times; same items)",
                names,
                "mount one copy, or copy with times kept (cp -p, rsync -t); items must not be random",
            )

    @property
    def resident_N(self) -> Bools | None:
        """What the policy holds resident, or None before the first epoch."""
        policy = self._cache.policy
        return policy.resident_N if policy is not None and self._started else None

    def begin_epoch(self, window: EpochWindow) -> None:
        """Plans an epoch; `settle` comes first.

        Args:
            window: What is left of its global order, the next one's if drawn, and the scores.
        """
        self._cache.begin_epoch(window, remove_leaving=self._rank == 0)
        self._is_settled = False

    def end_epoch(self) -> None:
        """Every batch of the epoch was handed out; an epoch that is left early leaves the plan in doubt."""
        self._is_settled = True

    def doubt(self) -> None:
        """The residents may not be what the policy believes: count them before the next epoch."""
        self._is_settled = False

    def settle(self) -> None:
        """Makes the plan's idea of the residents true again, where it may have become false. Collective."""
        totals = self._cache.board.totals()
        disturbed = not self._is_settled or any((totals - self._seen)[name] for name in _DISTURBANCES)
        self._seen = totals
        if self._group is not None:
            flag = torch.tensor([int(disturbed)])
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
            disturbed = bool(flag.item())
        if disturbed:
            self._cache.adopt(self._find_residents(), remove_refused=self._rank == 0)
        self._started = True

    def _find_residents(self) -> Indices:
        if self._group is None:
            return self._cache.find_residents()
        held_N = torch.zeros(len(self._cache.board.flag_N), dtype=torch.uint8)
        if self._rank == 0:
            held_N[torch.from_numpy(self._cache.find_residents())] = 1
        dist.broadcast(held_N, src=dist.get_global_rank(self._group, 0), group=self._group)
        return np.flatnonzero(held_N.numpy())

    def dispatch(self, index_G: Indices, mine: slice, *, num_left: int) -> None:
        """One global batch, just before this rank's share is fetched.

        Args:
            index_G: Its samples.
            mine: This rank's share.
            num_left: Batches of the epoch that come after it.
        """
        self._cache.dispatch(index_G, mine, self._rank, self._num_replicas, ending=num_left < ENDING_BATCHES)
