"""Residency planned one epoch ahead: the default.

When epoch e begins, its order and the order of e+1 are both known, so nothing has to be guessed:

1. A resident that comes again, in the rest of e or in e+1, stays.
2. A resident used in e but not in e+1 leaves at its last use in e; one used in neither leaves at once.
3. A non-resident that e reads and e+1 uses again *arrives* at its last use in e, into room that departures before it
   have freed: as many bytes as can, each as late as possible.
4. Space that is still left keeps what would leave, the latest first, and then takes what else e reads.
5. A sample that e+1 uses only close to its end gets room after the others.

Invariants: the same residents, sizes and orders give the same plan on every rank; a plan recomputed within the epoch is
the rest of the old one; with equal sizes and no duplicates no policy that knows just these two orders gets more hits.
Decision 0003 has the proof and the price.

Legend: B batch · N data set · K accesses of one epoch · C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from shade.errors import ConfigError
from shade.policy.base import EMPTY, POLICIES, CachePolicy, EpochPlan, Verdict
from shade.types import Bools, Indices, Order

Bytes64 = npt.NDArray[np.int64]

MAX_PASSES = 64
"""Each pass leaves a fraction of the space of the one before; only contrived sizes would need more."""
PART = 1 << 16
"""Candidates that are looked at one by one at a time."""


@POLICIES.register("plan")
class PlanPolicy(CachePolicy):
    """Plans residency exactly over the rest of this epoch and the next.

    Without a next epoch (``next_order_K`` empty) no sample leaves or arrives: the cache is left as it is for a
    later run. With an unknown one (None) every sample counts as wanted, which fills the free space once and keeps it,
    as `static` does.
    """

    needs_next_order = True

    def _restart(self, kept: Indices) -> None:
        self._order_K: Order = EMPTY
        self._next_order_K: Order | None = None
        self._change_K = np.empty(0, dtype=np.int8)
        self._cursor = 0
        self._has_tier_below = False

    @override
    def begin_epoch(self, plan: EpochPlan) -> Indices:
        """Plans the epoch; residents that neither epoch uses and whose space is needed leave now."""
        order_K, resident_N, size_bytes_N = plan.rest_K, self.resident_N, self.size_bytes_N
        num_accesses = len(order_K)
        self._next_order_K = plan.next_order_K
        self._has_tier_below = plan.has_tier_below
        self._order_K, self._change_K, self._cursor = order_K, np.zeros(num_accesses, dtype=np.int8), 0
        if not num_accesses or (plan.next_order_K is not None and not len(plan.next_order_K)):
            return EMPTY

        wanted_N, late_N = self._wanted(plan.next_order_K)
        copy_N = np.zeros(len(resident_N), dtype=bool)
        if plan.held_above_N is not None and plan.next_order_K is not None:
            # What the faster cache above will hold is not needed here: it gets the room that all others leave.
            copy_N |= plan.held_above_N
            wanted_N &= ~copy_N
            late_N &= ~copy_N
        used_N = np.zeros(len(resident_N), dtype=bool)
        used_N[order_K] = True
        useless, useless_copies = (
            np.flatnonzero(resident_N & ~wanted_N & ~used_N & group_N) for group_N in (~copy_N, copy_N)
        )
        # Where each sample is used last: only there may it leave, or arrive without being in the way of an earlier use.
        arriving, late_resident, late_arriving, unwanted, stranger, unwanted_copy, stranger_copy = last_uses(
            order_K,
            (
                wanted_N & ~late_N & ~resident_N,
                late_N & resident_N,
                late_N & ~resident_N,
                resident_N & ~wanted_N & ~copy_N,
                ~(resident_N | wanted_N | copy_N),
                resident_N & copy_N,
                ~resident_N & copy_N,
            ),
        )
        del wanted_N, late_N, used_N, copy_N

        # Bytes free after each access, if every sample that may leave does so and none arrives …
        room_K = np.zeros(num_accesses, dtype=np.int64)
        for leaving in (late_resident, unwanted, unwanted_copy):
            room_K[leaving] = size_bytes_N[order_K[leaving]]
            self._change_K[leaving] = -1
        np.cumsum(room_K, out=room_K)
        room_K += self.capacity_bytes - self.used_bytes
        room_K += int(size_bytes_N[useless].sum()) + int(size_bytes_N[useless_copies].sum())
        # … then given away, to the most useful candidates first.
        self._give(room_K, ((arriving, 1), (late_resident, 0), (late_arriving, 1), (unwanted, 0)))
        useless = self._not_kept(room_K, useless)
        self._give(room_K, ((stranger, 1), (unwanted_copy, 0)))
        useless = np.concatenate([useless, self._not_kept(room_K, useless_copies)])
        self._give(room_K, ((stranger_copy, 1),))

        resident_N[useless] = False
        self.used_bytes -= int(size_bytes_N[useless].sum())
        return useless

    def _give(self, room_K: Bytes64, groups: Sequence[tuple[npt.NDArray[np.int32], int]]) -> None:
        """Gives space to groups of candidates, one after the other; a change of 0 lets a resident stay, 1 arrive."""
        for group, change in groups:
            size_bytes = self.size_bytes_N[self._order_K[group]]
            # In the cache above another one the earliest arrive: each is one that the lower cache need not take,
            # and the lower cache has departures until late in the epoch.
            chosen = reserve(room_K, group, size_bytes, earliest=self._has_tier_below and change > 0)
            self._change_K[group[chosen]] = change

    def _not_kept(self, room_K: Bytes64, samples: Indices) -> Indices:
        """Returns which of these residents, unused in this epoch, find no space."""
        return samples[~reserve(room_K, np.zeros(len(samples), dtype=np.int32), self.size_bytes_N[samples])]

    @override
    def resident_at_end(self) -> Bools:
        order_K, change_K = self._order_K[self._cursor :], self._change_K[self._cursor :]
        resident_N = self.resident_N.copy()
        resident_N[order_K[change_K > 0]] = True
        resident_N[order_K[change_K < 0]] = False
        return resident_N

    def _wanted(self, next_order_K: Order | None) -> tuple[Bools, Bools]:
        """Returns (N,) which samples the next epoch uses, and (N,) which of them it first uses close to its end."""
        num_samples = len(self.resident_N)
        late_N = np.zeros(num_samples, dtype=bool)
        if next_order_K is None:
            return ~late_N, late_N
        wanted_N = np.zeros(num_samples, dtype=bool)
        wanted_N[next_order_K] = True
        if len(next_order_K) < num_samples:
            # The end is the last 32nd, at least 64 accesses unless that is more than a quarter. A sample that e+2 does
            # not use leaves there, when few candidates are left to take its room, and the room is lost.
            start = len(next_order_K) - max(len(next_order_K) // 32, min(len(next_order_K) // 4, 64))
            late_N[next_order_K[start:]] = True
            # A sample used both early and late counts as early.
            late_N[next_order_K[:start]] = False
        return wanted_N, late_N

    @override
    def access_many(self, index_B: Indices) -> Verdict:
        """Carries out the plan for the next batch of the planned order; raises ConfigError if it is another batch.
        There are no victims, because samples leave at a use or as the epoch begins."""
        end = self._cursor + len(index_B)
        planned_B = self._order_K[self._cursor : end]
        if not np.array_equal(planned_B, index_B):
            expected = f"the accesses {self._cursor} … {end - 1} of the planned epoch, {planned_B[:4].tolist()} …"
            cure = "call begin_epoch with the order that is walked, and walk it batch after batch"
            raise ConfigError.of(expected, index_B[:4].tolist(), cure)
        change_B = self._change_K[self._cursor : end]
        self._cursor = end
        hit_B = self.resident_N[index_B]
        moved = change_B.nonzero()[0]
        if not moved.size:
            return Verdict(hit_B, hit_B.copy(), EMPTY)
        index_moved, change_moved = index_B[moved], change_B[moved]
        # Departures and arrivals happen at the use itself, so the bytes in use follow the plan access by access.
        self.resident_N[index_moved] = change_moved > 0
        self.used_bytes += int(self.size_bytes_N[index_moved] @ change_moved)
        return Verdict(hit_B, self.resident_N[index_B], EMPTY)

    @override
    def resize(self, capacity_bytes: int) -> Indices:
        """Plans the rest of the epoch again, with the new capacity.

        Those with the farthest next use leave first, then those that the new plan does not want.
        """
        rest_K, next_order_K = self._order_K[self._cursor :], self._next_order_K
        again = EpochPlan(0, rest_K, next_order_K, has_tier_below=self._has_tier_below)
        # Below the new capacity first, by foresight; the plan then decides about all that is left.
        farthest = super().resize(capacity_bytes)
        return np.concatenate([farthest, self.begin_epoch(again)])

    @override
    def _least_useful_first(self) -> Indices:
        """Puts the farthest next use first; among samples that are not used again the highest index."""
        known = [self._order_K[self._cursor :], *([] if self._next_order_K is None else [self._next_order_K])]
        ahead = np.concatenate(known)
        next_use_N = np.full(len(self.resident_N), len(ahead), dtype=np.int64)
        next_use_N[ahead[::-1]] = np.arange(len(ahead))[::-1]
        resident = np.flatnonzero(self.resident_N)
        return resident[np.argsort(next_use_N[resident], kind="stable")[::-1]]

    @override
    def _touch(self, index: int) -> Sequence[int]:
        """Processes one access of the planned order through `access_many`."""
        self.access_many(np.array([index], dtype=np.int64))
        return ()


def last_uses(order_K: Order, groups_N: Sequence[Bools]) -> list[npt.NDArray[np.int32]]:
    """Returns where each sample of some disjoint groups is used last, by group, ascending.

    A pass over the order, which is ascending already: nothing is sorted.
    """
    group_N = np.full(len(groups_N[0]), -1, dtype=np.int8)
    for number, members_N in enumerate(groups_N):
        group_N[members_N] = number
    last_N = np.empty(len(group_N), dtype=np.int32)
    position_K = np.arange(len(order_K), dtype=np.int32)
    last_N[order_K] = position_K
    group_K = np.where(last_N[order_K] == position_K, group_N[order_K], np.int8(-1))
    return [np.flatnonzero(group_K == number).astype(np.int32) for number in range(len(groups_N))]


def reserve(
    room_bytes_K: Bytes64, position_C: npt.NDArray[np.int32], size_bytes_C: Bytes64, *, earliest: bool = False
) -> Bools:
    """Gives space to the latest candidates that fit, or to the earliest, from their position to the end of the epoch.

    Args:
        room_bytes_K: (K,) bytes free after each access; never falls. What is given away is subtracted in place.
        position_C: (C,) where the candidates come in the epoch, ascending.
        size_bytes_C: (C,) their sizes.
        earliest: Whether the earliest candidates come first.

    Returns:
        (C,) True for those that got space.
    """
    if not len(size_bytes_C) or size_bytes_C.min() > room_bytes_K[-1]:
        return np.zeros(len(size_bytes_C), dtype=bool)
    room_bytes_C = room_bytes_K[position_C]
    chosen_C = (earliest_that_fit if earliest else latest_that_fit)(size_bytes_C, room_bytes_C)
    taken_K = np.zeros_like(room_bytes_K)
    np.add.at(taken_K, position_C[chosen_C], size_bytes_C[chosen_C])
    np.cumsum(taken_K, out=taken_K)
    room_bytes_K -= taken_K
    # Space promised to a later position is not free at an earlier one.
    room_bytes_K[:] = np.minimum.accumulate(room_bytes_K[::-1])[::-1]
    return chosen_C


def earliest_that_fit(size_bytes_C: Bytes64, room_bytes_C: Bytes64) -> Bools:
    """Chooses arrivals, the earliest first: each that fits when it comes. Otherwise as `latest_that_fit`."""
    chosen_C = np.zeros(len(size_bytes_C), dtype=bool)
    taken_bytes = 0
    for start in range(0, len(chosen_C), PART):  # a list of all would take ten times the bytes of the arrays
        part = slice(start, start + PART)
        both = zip(size_bytes_C[part].tolist(), room_bytes_C[part].tolist(), strict=True)
        for position, (size, room) in enumerate(both, start):
            if taken_bytes + size <= room:
                chosen_C[position] = True
                taken_bytes += size
    return chosen_C


def latest_that_fit(size_bytes_C: Bytes64, room_bytes_C: Bytes64) -> Bools:
    """Chooses arrivals, the latest first, so that those up to each candidate fit the space there is by then.

    Args:
        size_bytes_C: (C,) sizes of the candidates, in the order in which they come.
        room_bytes_C: (C,) bytes free by then if none arrived; never falls.

    Returns:
        (C,) True for the chosen: each candidate, from the last to the first, that still fits together with those
        chosen before it.
    """
    chosen_C = np.zeros(len(size_bytes_C), dtype=bool)
    left = np.arange(len(size_bytes_C), dtype=np.int32)
    size, room = size_bytes_C, room_bytes_C
    for _ in range(MAX_PASSES):
        fits = size <= room
        if not fits.all():
            left, size, room = left[fits], size[fits], room[fits]
        if not left.size:
            break
        # Late arrivals leave memory free longest, and do not race with the reader of the next epoch. It costs nothing:
        # any feasible choice moves at most room(i) + after(i), where after(i) is what comes behind candidate i, and the
        # latest candidates that total the least of these sums are feasible.
        with_later = np.cumsum(size[::-1])[::-1]
        with_later -= size  # in place, for 10 MB less: now after(i)
        with_later += room
        budget = int(with_later.min())
        with_later -= room
        with_later += size
        start = int(np.count_nonzero(with_later > budget))
        del with_later
        chosen_C[left[start:]] = True
        if start == 0:
            break
        # The tail ended at a candidate that is too large; the next pass continues before it, so that all passes
        # together take whatever still fits, from the last candidate to the first.
        room_behind = int((room[start:] - np.cumsum(size[start:])).min())
        left, size, room = left[:start], size[:start], np.minimum(room[:start], room_behind)
    return chosen_C
