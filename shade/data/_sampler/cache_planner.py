"""Takes the sampler's knowledge of the future to the cache.

Every rank runs the same policy over the same global order, so ranks agree without talking. They talk only if the cache
may differ from the plan (`CachePlanner.settle`). While other jobs use the cache, too, the exact plan rests, and
`shade.cache.sharing` decides. A disk below memory (`SampleCache.disk`) has a planner of its own.

Legend: G global batch · N data set · W ranks.
"""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import torch
import xxhash

from shade.cache.cache import SampleCache
from shade.cache.coordinated_read import BEAT_SECONDS as COORDINATED_BEAT_SECONDS
from shade.cache.coordinated_read import CoordinatedRead
from shade.cache.job_registry import BEAT_SECONDS, JobRegistry
from shade.cache.sharing import Sharing
from shade.data._sampler.locality import Locality
from shade.errors import ConfigError, StoreError
from shade.policy import POLICIES
from shade.policy.base import EpochPlan
from shade.process import this_machine
from shade.rank_group import RankGroup, agreed_name, check_alike
from shade.types import Bools, Floats, Indices, Order

logger = logging.getLogger("shade.data")

ENDING_BATCHES = 32
"""More batches than workers hold: in the last ones of an epoch, an arrival without space waits for it at once."""
_DISTURBANCES = ("surprises", "declined", "store_errors", "skipped", "yielded")


class CachePlanner:
    """Plans one cache through the epochs of one sampler.

    Args:
        cache: The data set's cache.
        policy: Name of the policy.
        draws_ahead: Whether the next epoch's order will be known.
        rank: This rank.
        num_replicas: W.
        group: The ranks, which call `settle` together; this rank alone where torch.distributed does not connect them.
        global_batch: G.
        follow: The common name of jobs that take one stream.

    Raises:
        ConfigError: An unknown policy, one that needs more of the future than the mode knows, ranks with different data
            sets, or a stream to share on a store that other jobs cannot see.
    """

    def __init__(
        self,
        cache: SampleCache,
        policy: str,
        draws_ahead: bool,
        rank: int,
        num_replicas: int,
        group: RankGroup,
        *,
        global_batch: int,
        follow: str | None = None,
    ) -> None:
        policy_class = POLICIES.get(policy)
        if policy_class.offline:
            raise ConfigError.of(
                "a policy for a running job; this one must see all epochs before the first", policy, "use 'plan'"
            )
        if policy_class.needs_next_order and not draws_ahead:
            raise ConfigError.of(
                "a policy that does without the next epoch's order, since this sampling mode does not draw ahead",
                policy,
                "use policy 'shade' or 'lru' with pads",
            )
        self._cache, self._rank, self._num_replicas = cache, rank, num_replicas
        self._disk: CachePlanner | None = None
        self.policy_name = policy
        self._plans_exactly = policy_class.needs_next_order
        self._group = group
        self._check_same_data()
        self._share_server()
        # Ranks that see different disks plan none of them: each disk keeps what its ranks read until it is full.
        self._is_one_store = cache.store.medium != "disk" or len(set(self._digests(cache.store.identity()))) == 1
        if self._is_one_store:
            check_alike(group, {"policy": policy, "capacity of the cache in bytes": cache.capacity_bytes})
        if cache.disk is not None:
            self._disk = CachePlanner(cache.disk, "plan", True, rank, num_replicas, group, global_batch=global_batch)
        self._coordinated: CoordinatedRead | None = None
        self.sharing = self._join(follow, global_batch)
        """The other jobs on this cache; None if no other job can see it."""
        self._locality = Locality(cache, rank, num_replicas, group)
        cache.use_policy(policy_class)
        self._started = False
        self._is_settled = False
        self._seen = cache.residency.totals()

    def _join(self, follow: str | None, global_batch: int) -> Sharing | None:
        """Takes this job's place among those that use the cache. Collective."""
        cache = self._cache
        is_private = not cache.store.shared or self._num_replicas > self._group.world_size
        is_private |= not self._is_one_store
        if follow is not None and (is_private or self._num_replicas > 1):
            raise ConfigError.of(
                "one rank and a cache that other jobs can see, to follow one stream",
                f"{self._num_replicas} ranks, {cache.store.url}",
                "give each job one rank and the same server, or leave follow out",
            )
        if is_private:
            return None
        jobs = JobRegistry(cache.store, cache.keys.namespace, agreed_name(self._group), follow or "")
        beat_seconds = BEAT_SECONDS if follow is None else COORDINATED_BEAT_SECONDS
        sharing = Sharing(cache, jobs, self._rank, self._num_replicas, beat_seconds=beat_seconds)
        if self._rank == 0:
            sharing.start()
        # The others start when rank 0 has.
        self._group.gather(None)
        if self._rank > 0:
            sharing.start()
        if follow is not None:
            self._coordinated = CoordinatedRead(cache, jobs, sharing, global_batch)
        return sharing

    def _check_same_data(self) -> None:
        # Ranks with different data would look for each other's entries under different names and all read the origin,
        # in silence.
        names = self._digests(self._cache.keys.namespace)
        if len(set(names)) > 1:
            raise ConfigError.of(
                "the same data set on every rank (same files, sizes and times; same items)",
                names,
                "mount one copy, or copy with times kept (cp -p, rsync -t); items must not be random",
            )

    def _share_server(self) -> None:
        """Makes ranks of one machine, each of which started a server of its own, use that of rank 0. Collective."""
        store, group = self._cache.store, self._group
        said = group.gather([store.is_private, store.shared, this_machine(), store.url])
        if not all(is_shared for _, is_shared, _, _ in said) and group.world_size > 1 and group.rank == 0:
            logger.warning(
                "%s keeps what this rank reads for this rank alone, so most planned hits are read from the data set; "
                "pass cache='local://' on one machine, or start a server for all (shade cache up)",
                store.url,
            )
        if not any(is_private for is_private, *_ in said) or len({url for *_, url in said}) == 1:
            return
        reached = all(is_private for is_private, *_ in said) and len({machine for _, _, machine, _ in said}) == 1
        if reached and group.rank > 0:
            try:
                store.use_server_of(said[0][3])
            except StoreError as error:
                logger.warning("%s", error)
                reached = False
        if not self._all(reached):
            raise ConfigError.of(
                "one cache that all ranks reach",
                sorted({f"{url} on this machine" if machine == this_machine() else url for _, _, machine, url in said}),
                "start one server (shade cache up) and pass its address on every rank: cache='redis://host:port'",
            )
        logger.info("all ranks use the server of rank 0, which ends with it")

    def _digests(self, text: str) -> list[str]:
        """Returns a digest of every rank's text. Collective."""
        return list(map(str, self._group.gather(xxhash.xxh32_hexdigest(text.encode()))))

    @property
    def resident_N(self) -> Bools | None:
        """Returns what the policy holds resident, or None before the first epoch."""
        policy = self._cache.policy
        return policy.resident_N if policy is not None and self._started else None

    def draw_of_leader(self, epoch: int) -> tuple[Order, Floats | None] | None:
        """Returns the draw of the job whose stream this one takes (`CoordinatedRead.draw_of`); None if it draws for
        itself."""
        return None if self._coordinated is None else self._coordinated.draw_of(epoch)

    def publish_draw(self, epoch: int, order_K: Order, weight_N: Floats | None) -> None:
        """Publishes a draw for the jobs that take this job's stream."""
        if self._coordinated is not None:
            self._coordinated.publish(epoch, order_K, weight_N)

    def begin_epoch(self, plan: EpochPlan, above: SampleCache | None = None) -> None:
        """Plans an epoch; `settle` comes first. ``above`` is the faster cache in front of this one."""
        if self._disk is not None:
            plan = dataclasses.replace(plan, has_tier_below=True)
        if self.sharing is not None:
            self.sharing.begin_epoch(plan)
        if not self._cache.residency.is_shared and self._is_one_store:
            below = plan if above is None else _plan_below(above, plan)
            self._cache.begin_epoch(below, remove_leaving=self._rank == 0)
        self._is_settled = False
        # The disk's plan follows from memory's, which is made by now.
        if self._disk is not None:
            self._disk.begin_epoch(plan, self._cache)

    def end_epoch(self) -> None:
        """Marks the epoch as complete."""
        # An epoch that is left early never comes here, and leaves the plan in doubt.
        self._is_settled = True
        if self._disk is not None:
            self._disk.end_epoch()

    def doubt(self) -> None:
        """Marks the plan as doubtful: the residents are counted before the next epoch."""
        self._is_settled = False
        if self._disk is not None:
            self._disk.doubt()

    def settle(self) -> None:
        """Counts the residents if they may differ from the plan. Collective."""
        if self._disk is not None:
            self._disk.settle()
        if not self._is_one_store:
            return
        cache, sharing = self._cache, self.sharing
        totals = cache.residency.totals()
        # The cache may differ from the plan at the start, on resume, after an epoch that was left early, and after one
        # in which it lost or refused something.
        disturbed = not self._is_settled or any((totals - self._seen)[name] for name in _DISTURBANCES)
        self._seen = totals
        company = self._plans_exactly and sharing is not None and sharing.has_company
        disturbed, company, quota = self._agree(disturbed or cache.needs_count, company)
        assert cache.policy is not None
        was_shared = cache.residency.is_shared
        cache.quota_bytes = quota
        is_stale = not company and cache.policy.capacity_bytes != cache.residency.capacity_bytes
        # One rank may notice other jobs before the epoch's end, another not yet.
        if self._any(disturbed or company != was_shared or is_stale):
            cache.needs_count = False
            cache.residency.is_shared = False
            cache.adopt(self._find_residents(), remove_refused=self._rank == 0)
            if company and sharing is not None:
                sharing.enter(cache.policy.resident_N)
        self._locality.refresh()
        self._started = True

    def _all(self, flag: bool) -> bool:
        """Returns whether the flag is set on every rank."""
        return bool(self._group.gather_fields(np.array([flag], dtype=np.int64)).all())

    def _any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank."""
        return bool(self._group.gather_fields(np.array([flag], dtype=np.int64)).any())

    def _agree(self, disturbed: bool, company: bool) -> tuple[bool, bool, int]:
        """Returns both flags as set on any rank, and the quota of rank 0."""
        said_W3 = self._group.gather_fields(np.array([disturbed, company, self._cache.quota_bytes], dtype=np.int64))
        return bool(said_W3[:, 0].any()), bool(said_W3[:, 1].any()), int(said_W3[0, 2])

    def _find_residents(self) -> Indices:
        if self._group.world_size == 1:
            return self._count()
        held_N = torch.zeros(len(self._cache.residency.flag_N), dtype=torch.uint8)
        if self._group.rank == 0:
            held_N[torch.from_numpy(self._count())] = 1
        self._group.broadcast(held_N, 0)
        return np.flatnonzero(held_N.numpy())

    def _count(self) -> Indices:
        found = self._cache.find_residents()
        # Slots that were taken over and are empty by now are given back.
        if self.sharing is not None:
            try:
                self.sharing.release(self._cache.empty_slots)
            except StoreError as error:
                logger.debug("empty slots are kept: %s", error)
        return found

    def dispatch(self, index_G: Indices, mine: slice, *, num_left: int) -> Indices:
        """Plans one global batch, just before this rank's part of it is fetched; returns this rank's samples.

        ``mine`` are this rank's places by position, ``num_left`` the batches of the epoch that come after this one.
        """
        cache, sharing, ending = self._cache, self.sharing, num_left < ENDING_BATCHES
        if self._disk is not None:
            self._disk.dispatch(index_G, mine, num_left=num_left)
        if not self._is_one_store:
            return index_G[mine]
        if self._coordinated is not None and sharing is not None:
            self._coordinated.wait(*sharing.place_after(len(index_G)))
        if sharing is not None and self._plans_exactly and sharing.has_company and not cache.residency.is_shared:
            assert cache.policy is not None
            sharing.enter(cache.policy.resident_N)
        if sharing is not None and cache.residency.is_shared:
            index_B = index_G[self._locality.deal(index_G, np.zeros(len(index_G), dtype=bool), mine)]
            sharing.dispatch(index_B, len(index_G), self._locality.near(index_B), ending=ending)
            return index_B
        if sharing is not None:
            sharing.advance(len(index_G))
        verdict = cache.decide(index_G)
        places = self._locality.deal(index_G, verdict.hit_B, mine)
        near_G = self._locality.near(index_G)
        cache.post(verdict, index_G, places, self._rank, self._num_replicas, near_G=near_G, ending=ending)
        return index_G[places]

    def leave(self) -> None:
        """Leaves the cache to the other jobs; waits for a second at most."""
        if self.sharing is not None:
            self.sharing.leave()

    def close(self) -> None:
        """Leaves the cache to the other jobs. Safe to call twice."""
        if self.sharing is not None:
            self.sharing.close()
        if self._disk is not None:
            self._disk.close()


def _plan_below(above: SampleCache, plan: EpochPlan) -> EpochPlan:
    """Returns what a disk plans by, below a faster cache."""
    # After the last epoch every sample counts as wanted, for the next job.
    if plan.next_order_K is not None and not len(plan.next_order_K):
        return dataclasses.replace(plan, next_order_K=None)
    if above.policy is None or above.residency.is_shared:
        return plan
    # For the next epoch the disk keeps what memory will not hold as this one ends. So the two hold different samples
    # where room is short: what leaves memory and is used again goes to the disk, and what enters memory leaves it.
    return dataclasses.replace(plan, held_above_N=above.policy.resident_at_end(), has_tier_below=False)
