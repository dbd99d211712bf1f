"""ElasticEngine: a `GradientEngine` whose ranks may be lost, come and leave while it trains.

::

    membership = Membership("10.0.0.1:29600", num_members=3)      # see shade.gradient._elastic.rendezvous
    with ElasticEngine(model, optimizer, membership, density=0.01, staleness=1) as engine:
        while engine.step_count < 100_000:
            if engine.step_count % 1000 == 0:                     # what is done now and then: first, by the step
                engine.finish()
                evaluate(model)
            batch = batch_of(engine.step_count, engine.rank, engine.world_size)
            loss(model(batch)).backward()
            engine.step()

**Lost.** A rank dies, stands still, or its line is cut: `step` notices within the membership's timeout, forms the next
generation with whom is left, and returns. The gradient of the step that failed is in the residuals and goes out with
the next ones. What the lost rank had kept back is lost with it; its share is logged, and in `changes`.

**One step apart.** A rank that is lost in the middle of a vote leaves some with all votes, who apply the step, and some
without, who do not. All have the merged step. So when they meet each says which step it has applied last; if anybody
has applied one, so do the others now (with that one's norm, which decides clipping), and what they had taken back into
their residuals for it goes out of them again. Invariant: after a generation has formed, all have applied the same
steps, each its own part of each exactly once.

**Joins.** A process that makes an `ElasticEngine` while the others train is let in after their next step, and gets
weights, buffers, the optimizer's state and settings, the plan of densities, the loss scale and the step from the lowest
rank that has them; thresholds need no giving, since they are found anew each step. It begins with an empty residual.
So does a rank that comes back after it had been taken for dead, except that its residual is still its own.

**Leaves.** `leave` announces it; after the next step the rank hands what it has kept back to one of the others.

Whenever a generation forms, all flush their optimizers (who was about to may be lost, and a flush rounds), and compare
all weights and states by their hashes, and repair what differs: to be counted, and never seen (``changes``).

Ranks of one node cannot be summed densely first (``local_size``): a node that has lost a rank is no node.

A learning rate schedule is the script's: one that joins makes it with ``last_epoch=engine.step_count - 1``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from torch import nn

from shade.errors import ConfigError, PeerLostError
from shade.gradient._comm import message, sparse_all_reduce
from shade.gradient._comm.step import CALLS, LEAVES, STAYS, GradientStep, StepState
from shade.gradient._comm.topology import FlatTopology
from shade.gradient._comm.transport import Transport
from shade.gradient._compress.compressor import Sparse
from shade.gradient._elastic.membership import Generation, Membership
from shade.gradient._elastic.reconcile import MembershipChange, lagging_ranks, plain_groups, residual_norm, source_rank
from shade.gradient._engine.engine import GradientEngine
from shade.gradient._engine.replica import broadcast_replica, broadcast_untrained, broadcast_weights, check_same_setup
from shade.gradient._kernels.choice import prepare
from shade.gradient._optim import base
from shade.gradient._optim.base import SparseOptimizer

_PUBLISH_SECONDS = 1.0
_REFUSED_SETTINGS = ("group", "generation", "timeout_seconds", "local_size")

logger = logging.getLogger("shade.gradient")


class ElasticEngine(GradientEngine):
    """One rank's part; making it waits for the others, or for those who train already to let this one in.

    Args:
        model: As of `GradientEngine`.
        optimizer: As there.
        membership: Made for this engine, and closed with it.
        **settings: As there, without ``group``, ``generation``, ``timeout_seconds`` and ``local_size``.

    Raises:
        ConfigError: Something of this cannot be, or differs between ranks; on all ranks.
        PeerLostError: A rank was lost before this one was in; try again.
        GradientError: Nobody came, or the meeting place is silent.
    """

    def __init__(self, model: nn.Module, optimizer: SparseOptimizer, membership: Membership, **settings: Any) -> None:
        refused = [name for name in _REFUSED_SETTINGS if name in settings]
        if refused:
            raise ConfigError.of("settings without these", refused, "the membership says who, which and how long")
        self._membership = membership
        self._is_leaving = False
        self.has_left = False
        """Whether `leave` is done: this engine is closed."""
        self.changes: list[MembershipChange] = []
        """What has become of the group since this rank came."""
        self._published_at = float("-inf")
        self._is_whole = True
        """Whether weights and optimizer state are of one moment."""
        try:
            _compile()
            generation = membership.form({})
            super().__init__(model, optimizer, **settings)
            self._resume(generation)
            if source_rank(generation) is not None:
                self._consistency.check()  # as those do who let this rank in
        except BaseException:
            membership.close()
            raise

    @property
    def rank(self) -> int:
        """This process's, until the next change."""
        return self._topology.world.rank

    @property
    def world_size(self) -> int:
        """Ranks, until the next change."""
        return self._topology.world.world_size

    def step(self) -> None:
        """As `GradientEngine.step`; and goes on where that raises `PeerLostError`, with whom is left.

        Raises:
            NonFiniteGradientError: As there.
            PayloadError: As there.
            GradientError: As there; or nobody can be met any more.
        """
        try:
            super().step()
            self._follow_notices()
        except PeerLostError as error:
            self._recover(error)
        if not self.has_left and time.monotonic() - self._published_at > _PUBLISH_SECONDS:
            self._published_at = time.monotonic()
            self._membership.publish(step=self.step_count, kept=residual_norm(self._bucket_states))

    def finish(self) -> None:
        """As `GradientEngine.finish`; goes on without ranks that are lost meanwhile."""
        while True:
            try:
                super().finish()
                self._follow_notices()
                return
            except PeerLostError as error:
                self._recover(error)

    def leave(self) -> None:
        """Announces that this rank goes after the next step: that `step` hands over what is kept back, and closes."""
        self._is_leaving = True

    def close(self) -> None:
        """As `GradientEngine.close`; the others do not wait for this rank any more."""
        super().close()
        self._membership.close()

    # ── what the engine asks ────────────────────────────────────────────────────────────────────────────────────────

    def _connect(self, purpose: str) -> Transport:
        return self._membership.connect(purpose)

    def _synchronise(self, world: Transport) -> None:
        """Those who lack something get it from the lowest rank that has it; if all do, from rank 0."""
        check_same_setup(world, self._model, self._buckets, self._settings)
        generation = self._membership.generation
        source, lagging = source_rank(generation), lagging_ranks(generation)
        if not lagging and source is not None:
            return
        if source is None:
            broadcast_weights(world, self._model, self._buckets)
            return
        self._is_whole = generation.rank not in lagging
        broadcast_untrained(world, self._model, self._buckets, source)
        given = generation.members[source].status
        if generation.rank in lagging:
            for group, reason in zip(self._optimizer.param_groups, given["groups"], strict=True):
                group.update({name: tuple(each) if isinstance(each, list) else each for name, each in reason.items()})
        for bucket, names in zip(self._buckets, given["moments"], strict=True):
            self._optimizer.add_moments(bucket, names)
            broadcast_replica(world, self._optimizer, bucket, source)
        self._is_whole = True

    def _begin(self, step: int) -> GradientStep:
        work = super()._begin(step)
        work.notice = LEAVES if self._is_leaving else CALLS if self._membership.is_join_requested else STAYS
        return work

    # ── changes ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _follow_notices(self) -> None:
        """After a step with which somebody said something: all ranks have heard the same, so all do the same."""
        settled = self._settled
        if settled is None or not any(settled.notices):
            return
        late, self._late = self._late, None
        if late is not None:
            self._settle(late)
        leaving = [rank for rank, notice in enumerate(settled.notices) if notice == LEAVES]
        if leaving:
            self._hand_over(leaving)
        if self.rank in leaving:
            self.has_left = True
            self.close()
        else:
            self._form_generation()

    def _hand_over(self, leaving: Sequence[int]) -> None:
        """What ranks that go have kept back becomes that of others, in turns."""
        world, handed = self._topology.world, []
        staying = [rank for rank in range(world.world_size) if rank not in leaving]
        self._pipeline.reclaim()
        for source in leaving:
            for bucket_state in self._bucket_states:
                state = {
                    name: each.detach().to("cpu", copy=True)
                    for name, each in bucket_state.feedback.state_dict().items()
                }
                for tensor in state.values():
                    world.broadcast(tensor, source)
                if staying and world.rank == staying[source % len(staying)]:
                    handed.append((bucket_state, state))
        for bucket_state, state in handed:  # all of it, or nothing
            bucket_state.feedback.merge_from(state)

    def _recover(self, error: PeerLostError) -> None:
        logger.warning("rank %d of %d: %s", self.rank, self.world_size, error)
        self._form_generation()

    def _form_generation(self) -> None:
        """Forms the next generation, as often as it takes."""
        began, world_size = time.monotonic(), self.world_size
        late, self._late = self._late, None
        if late is not None:
            late.wait(StepState.MERGED)  # the group is lost, so it has failed: what it had chosen comes back
        while True:
            self._detach()
            self._pipeline.reclaim()
            generation = self._membership.form(self._status())
            try:
                self._catch_up(generation)
                self._optimizer.flush()
                world, check_transport = self._connect("gradients"), self._connect("looks")
                self._attach(FlatTopology(world), check_transport)
                self._synchronise(world)
                self._resume(generation)
                repaired = self._consistency.check()
                break
            except (PeerLostError, ConfigError) as error:  # lost meanwhile, or one that joins with another model
                logger.warning("generation %d did not come about: %s", generation.number, error)
        self._settled = None  # what was said in the generation before has been followed
        self._record(generation, world_size, len(repaired), time.monotonic() - began)

    def _status(self) -> dict[str, Any]:
        """What the others have to know of this rank, and what one of them might lack."""
        kept = residual_norm(self._bucket_states)
        if not self._is_whole:
            return {"kept": kept}
        settled = self._settled
        step, norm = self._applied
        return {
            "kept": kept,
            "applied": step,
            "norm": norm,
            "unvoted": settled.step if settled is not None and settled.unvoted is not None else None,
            "next": self._open.step,
            "plan": self._plan.state_dict(),
            "scaling": self._scale.status(),
            "groups": plain_groups(self._optimizer.param_groups),
            "moments": [self._optimizer.moments_of(bucket) for bucket in self._buckets],
        }

    def _catch_up(self, generation: Generation) -> None:
        """Applies the step that others have applied and this rank has not, for want of their votes."""
        source, work = source_rank(generation), self._settled
        if source is None or work is None or work.unvoted is None:
            return
        given = generation.members[source].status
        merged, work.unvoted = work.unvoted, None
        if given["applied"] != work.step:
            return  # nobody has: what was chosen has been taken back, and goes out later
        work.merged, work.norm = merged, given["norm"]
        self._apply(work)
        for number, sparse in work.chosen.items():
            sent = Sparse(sparse.indices_K, -sparse.values_K, sparse.size)
            self._bucket_states[number].feedback.absorb(sent)
        self._meter.count("caught_up_steps")

    def _resume(self, generation: Generation) -> None:
        """Goes on where the others are."""
        self._meter.rank = generation.rank
        source = source_rank(generation)
        if source is None:
            return
        given = generation.members[source].status
        self._plan.load_state_dict(given["plan"], generation.world_size)
        self._scale.load_status(given["scaling"])
        self._applied = given["applied"], given["norm"]
        proposal = self._proposal or self._open.proposal
        self._proposal = proposal if generation.rank == 0 and not (proposal and proposal.batch_sizes) else None
        self._open.abandon()
        self._open = self._begin(max(each.status.get("next", 0) for each in generation.members))
        self._stepped_at = time.perf_counter()

    def _record(self, generation: Generation, size_before: int, num_repaired: int, seconds: float) -> None:
        change = MembershipChange.of(generation, size_before, self.step_count, num_repaired, seconds)
        self.changes.append(change)
        for name, amount in (("generations", 1), ("lost_ranks", change.num_lost), ("repaired_buckets", num_repaired)):
            self._meter.count(name, amount)
        logger.warning(
            "generation %d: %d ranks go on from step %d (%d lost, and with them %.0f %% of the squared norm of what "
            "was kept back; %d left, %d joined); it took %.1f s",
            *(change.generation, change.world_size, change.step, change.num_lost, 100 * change.lost_share),
            *(change.num_left, change.num_joined, change.seconds),
        )


def _compile() -> None:
    """Makes ready whatever is compiled at first use: before the others wait for this rank, and not while they do."""
    for compiled in (prepare, message.loops, sparse_all_reduce.loops, base.loops):
        compiled()
