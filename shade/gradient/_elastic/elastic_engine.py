"""ElasticEngine is a `GradientEngine` whose ranks may be lost, join and leave while it trains.

::

    membership = Membership("10.0.0.1:29600", num_members=3)      # see shade.gradient.rendezvous
    with ElasticEngine(model, optimizer, membership, density=0.01, staleness=1) as engine:
        while engine.step_count < 100_000:
            if engine.step_count % 1000 == 0:                     # rare collective work comes first, chosen by the step
                engine.finish()
                evaluate(model)
            batch = batch_of(engine.step_count, engine.rank, engine.world_size)
            loss(model(batch)).backward()
            engine.step()

**Lost.** `step` notices within the membership's timeout, forms the next generation with the remaining ranks, and
returns. The gradient of the failed step is in the residuals and is sent with the next ones. The lost rank's residual is
lost with it; the log and `changes` give its share.

**Joins.** A process that makes an `ElasticEngine` while others train is admitted after their next step. It gets all
state from the lowest rank that has it, and starts with an empty residual. A rank that returns after it was taken for
dead keeps its own residual.

**Leaves.** `leave` announces it; after the next step the rank hands its residual to another rank.

The script owns the learning rate schedule: a joining process makes it with ``last_epoch=engine.step_count - 1``.

Invariant: after a generation has formed, all ranks have applied the same steps, each its own part of each exactly once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from torch import nn

from shade.errors import ConfigError, PeerLostError
from shade.gradient._comm.step import CALLS, LEAVES, STAYS, GradientStep, StepState
from shade.gradient._comm.topology import FlatTopology
from shade.gradient._comm.transport import Transport
from shade.gradient._compress.compressor import Sparse
from shade.gradient._elastic.membership import Generation, Membership
from shade.gradient._elastic.membership_change import MembershipChange, lagging_ranks, residual_norm, source_rank
from shade.gradient._engine.consistency import broadcast_replica
from shade.gradient._engine.engine import GradientEngine
from shade.gradient._engine.replica import broadcast_untrained, broadcast_weights, check_same_setup
from shade.gradient._kernels.build import build
from shade.gradient._optim.base import SparseOptimizer, plain_groups

_PUBLISH_SECONDS = 1.0
# Ranks of one node cannot be summed densely first (``local_size``), since a node may lose a rank.
_REFUSED_SETTINGS = ("group", "generation", "timeout_seconds", "local_size")

logger = logging.getLogger("shade.gradient")


class ElasticEngine(GradientEngine):
    """One rank's part. The constructor waits for the other ranks, or for a running training to admit this one.

    Args:
        model: As in `GradientEngine`.
        optimizer: As in `GradientEngine`.
        membership: Made for this engine, and closed with it.
        **settings: As in `GradientEngine`, without ``group``, ``generation``, ``timeout_seconds`` and ``local_size``.

    Raises:
        ConfigError: An argument is out of range, or differs between ranks; raised on all ranks.
        PeerLostError: A rank was lost before this one was admitted; try again.
        GradientError: No other rank came, or the rendezvous server does not answer.
    """

    def __init__(self, model: nn.Module, optimizer: SparseOptimizer, membership: Membership, **settings: Any) -> None:
        refused = [name for name in _REFUSED_SETTINGS if name in settings]
        if refused:
            raise ConfigError.of("settings without these", refused, "the membership has them")
        self._membership = membership
        self._is_leaving = False
        self.has_left = False
        """Whether `leave` has finished: this engine is closed."""
        self.changes: list[MembershipChange] = []
        """Changes of the group since this rank joined."""
        self._published_at = float("-inf")
        self._is_whole = True
        """Whether weights and optimizer state belong to one step."""
        try:
            _compile()
            generation = membership.form({})
            super().__init__(model, optimizer, **settings)
            self._resume(generation)
            if source_rank(generation) is not None:
                self._consistency.check()  # the admitting ranks check too
        except BaseException:
            membership.close()
            raise

    @property
    def rank(self) -> int:
        """This process's rank, until the next change."""
        return self._topology.world.rank

    @property
    def world_size(self) -> int:
        """Ranks, until the next change."""
        return self._topology.world.world_size

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, generation {self._membership.generation.number}>"

    def step(self) -> None:
        """Does what `GradientEngine.step` does; continues with the remaining ranks where that raises `PeerLostError`.

        Raises:
            NonFiniteGradientError: As in `GradientEngine.step`.
            PayloadError: As in `GradientEngine.step`.
            GradientError: As in `GradientEngine.step`; or no other rank can be reached any more.
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
        """Does what `GradientEngine.finish` does; continues without ranks that are lost meanwhile."""
        while True:
            try:
                super().finish()
                self._follow_notices()
                return
            except PeerLostError as error:
                self._recover(error)

    def leave(self) -> None:
        """Announces that this rank leaves: the next `step` hands over its residual, and closes the engine."""
        self._is_leaving = True

    def close(self) -> None:
        """Does what `GradientEngine.close` does; the others do not wait for this rank any more."""
        super().close()
        self._membership.close()

    def _connect(self, purpose: str) -> Transport:
        return self._membership.connect(purpose)

    def _synchronise(self, world: Transport, refusal: Exception | None = None) -> None:
        """Sends what some ranks lack, from the lowest rank that has it; from rank 0 before the first step."""
        check_same_setup(world, self._model, self._buckets, self._settings, refusal)
        generation = self._membership.generation
        source, lagging = source_rank(generation), lagging_ranks(generation)
        if not lagging and source is not None:
            return
        if source is None:
            broadcast_weights(world, self._model, self._buckets)
            return
        self._is_whole = generation.rank not in lagging
        broadcast_untrained(world, self._model, self._buckets, source)
        source_status = generation.members[source].status
        if generation.rank in lagging:
            for group, settings in zip(self._optimizer.param_groups, source_status["groups"], strict=True):
                group.update({name: tuple(each) if isinstance(each, list) else each for name, each in settings.items()})
        for bucket, layout in zip(self._buckets, source_status["layouts"], strict=True):
            self._optimizer.take_layout(bucket, layout)
            broadcast_replica(world, self._optimizer, bucket, source)
        self._is_whole = True

    def _begin(self, step: int) -> GradientStep:
        work = super()._begin(step)
        work.notice = LEAVES if self._is_leaving else CALLS if self._membership.is_join_requested else STAYS
        return work

    # ── changes ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _follow_notices(self) -> None:
        """Acts on the notices of a step. All ranks have the same notices, so all act the same."""
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
        """Gives the residuals of leaving ranks to the others, in turns."""
        world, handed = self._topology.world, []
        staying = [rank for rank in range(world.world_size) if rank not in leaving]
        self._pipeline.reclaim()
        for source in leaving:
            for bucket_state in self._bucket_states:
                live = bucket_state.feedback.state_dict()
                state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in live.items()}
                for tensor in state.values():
                    world.broadcast(tensor, source)
                if staying and world.rank == staying[source % len(staying)]:
                    handed.append((bucket_state, state))
        # Only after all broadcasts: all of it, or nothing.
        for bucket_state, state in handed:
            bucket_state.feedback.merge_from(state)

    def _recover(self, error: PeerLostError) -> None:
        logger.warning("rank %d of %d: %s", self.rank, self.world_size, error)
        self._form_generation()

    def _form_generation(self) -> None:
        began, world_size = time.monotonic(), self.world_size
        late, self._late = self._late, None
        if late is not None:
            # It fails, and its chosen elements are put back, unless its vote is over.
            late.wait(StepState.MERGED)
            if late.error is None:
                with contextlib.suppress(PeerLostError):
                    self._settle(late)
        while True:
            self._detach()
            self._pipeline.reclaim()
            generation = self._membership.form(self._status())
            try:
                self._catch_up(generation)
                # A lost rank may have been about to flush, and a flush rounds: all do it.
                self._optimizer.flush()
                world, check_transport = self._connect("gradients"), self._connect("looks")
                self._attach(FlatTopology(world), check_transport)
                self._synchronise(world)
                self._resume(generation)
                repaired = self._consistency.check()
                break
            except (PeerLostError, ConfigError) as error:  # a rank was lost, or joins with another model
                logger.warning("generation %d did not form: %s", generation.number, error)
        # Its notices have been followed.
        self._settled = None
        self._record(generation, world_size, len(repaired), time.monotonic() - began)

    def _status(self) -> dict[str, Any]:
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
            "layouts": [self._optimizer.layout_of(bucket) for bucket in self._buckets],
        }

    def _catch_up(self, generation: Generation) -> None:
        # A rank that is lost during a vote leaves some ranks with all votes, which apply the step, and some without,
        # which do not. All have the merged step. A rank without votes applies it now, if any rank has.
        source, work = source_rank(generation), self._settled
        if source is None or work is None or work.unvoted is None:
            return
        source_status = generation.members[source].status
        merged, work.unvoted = work.unvoted, None
        if source_status["applied"] != work.step:
            # No rank has: the chosen elements are in the residual, and are sent later.
            return
        # That rank's norm, since it decides clipping.
        work.merged, work.norm = merged, source_status["norm"]
        self._apply(work)
        for number, sparse in work.chosen.items():
            # The failed step put these elements back into the residual; they count as sent now.
            sent = Sparse(sparse.indices_K, -sparse.values_K, sparse.size)
            self._bucket_states[number].feedback.absorb(sent)
        self._meter.count("caught_up_steps")

    def _resume(self, generation: Generation) -> None:
        self._meter.rank = generation.rank
        source = source_rank(generation)
        if source is None:
            return
        source_status = generation.members[source].status
        self._plan.load_state_dict(source_status["plan"], generation.world_size)
        self._scale.load_status(source_status["scaling"])
        self._applied = source_status["applied"], source_status["norm"]
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
        logger.warning("%s", change)


def _compile() -> None:
    # Before the others wait for this rank.
    for loops in ("loops", "index_loops", "step_loops"):
        build(loops)
