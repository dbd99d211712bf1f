"""LocalUpdates trains apart for H steps, then agrees: where even a hundredth of every gradient is too much.

Each rank takes H inner steps from common weights, the *anchor* θ. The distance Δ = θ - weights goes the way of a
gradient: e ← β·e + Δ; the largest elements of e are sent, e keeps the others, and θ steps along the mean of what all
ranks sent (SparseLoCo, algorithm 1). With everything sent, rate 1 and no momentum that is the mean of all ranks'
weights (`LocalSGD`); with Nesterov's momentum it is `DiLoCo`.

Cost: copies of the weights on the host, two for the residual, one for the anchor, one for momentum, one of a fragment
for each exchange under way. Weights, buffers and inner optimizers differ between ranks; `LocalUpdates.synchronise`
brings the first two together.

Invariant: all ranks that took the same outer steps hold the same anchors, bit for bit; an outer step is taken by all
or by none.

References:
    Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019. Douillard et al., "DiLoCo", 2023. Sarfi et
    al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025 (arXiv 2508.15706).
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from typing import Any

import torch.distributed as dist
from torch import nn
from typing_extensions import override

from shade.errors import ConfigError, PeerLostError
from shade.gradient._comm.step import CALLS, RESTS, STAYS, GradientStep, StepState
from shade.gradient._comm.topology import FlatTopology
from shade.gradient._comm.transport import Transport
from shade.gradient._compress.bucket import BUCKET_BYTES, Bucket, plan_buckets
from shade.gradient._compress.compressor import COMPRESSORS
from shade.gradient._compress.quantiser import QUANTISERS
from shade.gradient._elastic.membership import Generation, Membership
from shade.gradient._elastic.membership_change import MembershipChange, lagging_ranks, residual_norm, source_rank
from shade.gradient._engine.bucket_state import EngineState, make_bucket_states
from shade.gradient._engine.replica import (
    average_buffers,
    broadcast_untrained,
    broadcast_weights,
    check_all_known,
    check_same_setup,
)
from shade.gradient._local.anchors import Anchors
from shade.gradient._local.fragment_schedule import FragmentSchedule
from shade.gradient._local.outer_exchange import OuterExchange, OuterStep
from shade.rank_group import TIMEOUT_SECONDS
from shade.types import ClosedByWith

_PURPOSE = "local updates"

logger = logging.getLogger("shade.gradient")


class LocalUpdates(ClosedByWith):
    """Exchanges how far each rank came in H steps, and steps the common weights. The constructor is collective.

    Args:
        model: Any module; all ranks start with rank 0's parameters and buffers.
        every: H, inner steps between two exchanges of a parameter.
        lr: Rate of the outer step.
        momentum: Nesterov's, of the outer step; below 1.
        density: Kept fraction of the distance; 1: all.
        decay: β, what is left of the residual at the next exchange; up to 1.
        compressor: Name in `shade.gradient.COMPRESSORS`.
        quantiser: Name in `shade.gradient.QUANTISERS`.
        fragments: Groups of parameters that are exchanged in turns.
        delay: Inner steps from a fragment's capture to its result, below ``every``; 0 waits for it.
        group: The ranks that train together; None: all.
        membership: Of ranks that come and go, instead of a group; closed with this object.
        timeout_seconds: Longest silence of a rank: longer than the difference of two ranks' times for H steps.
        bucket_bytes: The largest size of a bucket that holds more than one parameter.
        seed: For the compressors' random choices.

    Raises:
        ConfigError: An argument is out of range, or differs between ranks; raised on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        lr: float = 1.0,
        momentum: float = 0.0,
        density: float = 1 / 64,
        decay: float = 0.95,
        compressor: str = "chunk-top-k",
        quantiser: str = "int2",
        fragments: int = 1,
        delay: int = 0,
        group: dist.ProcessGroup | None = None,
        membership: Membership | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        bucket_bytes: int = BUCKET_BYTES,
        seed: int = 0,
    ) -> None:
        self.num_samples = 1
        """Weight of this rank: samples since the last exchange; 0: it sends nothing."""
        self.step_count = 0
        """Inner steps."""
        self.outer_count = 0
        """Outer steps that were applied, of a fragment each, also where no rank had moved; the same on every rank."""
        self.changes: list[MembershipChange] = []
        """Changes of the group since this rank joined."""
        self._model, self._membership = model, membership
        self._density, self._seed = density, seed
        self._settings = {
            "every, fragments, delay": [every, fragments, delay],
            "lr, momentum, density, decay, seed": [lr, momentum, density, decay, seed],
            "compressor, quantiser": [compressor, quantiser],
        }
        self._flights: deque[OuterStep] = deque()
        """Outer steps that are not applied yet, in the order of their captures."""
        self._is_whole = True
        """Whether the anchors belong to one outer step."""
        self._is_called = False
        """Whether all ranks know, by an outer step, that a process asks to join."""
        self._buckets: list[Bucket] = []
        self._schedule = FragmentSchedule(every, delay, ())
        names = {parameter: name for name, parameter in model.named_parameters()}
        refusal: Exception | None = None
        try:
            _check_arguments(every, lr, momentum, density, decay, fragments, delay)
            COMPRESSORS.get(compressor), QUANTISERS.get(quantiser)
            if membership is not None and (group is not None or timeout_seconds != TIMEOUT_SECONDS):
                raise ConfigError.of("the membership's group and timeout", "others", "leave out those given here")
            num_bytes = 4 * sum(each.numel() for each in names if each.requires_grad)
            size = min(bucket_bytes, max(1, -(-num_bytes // fragments)))
            self._buckets = plan_buckets([{"params": list(names)}], names, size)
            self._schedule = FragmentSchedule.of([each.size for each in self._buckets], every, fragments, delay)
        except Exception as error:  # noqa: BLE001 - raised once the others know it, or they would wait for this rank
            refusal = error
        try:
            generation = None if membership is None else membership.form({})
            world = membership.connect(_PURPOSE) if membership else Transport(group, timeout_seconds=timeout_seconds)
            check_same_setup(world, model, self._buckets, self._settings, refusal)
            parts = self._buckets, compressor, quantiser
            self._bucket_states = make_bucket_states(FlatTopology(world), *parts, decay=decay)
            self._anchors = Anchors(self._buckets, lr, momentum)
            self._attach(world)
            self._take_state(generation)
        except BaseException:
            if membership is not None:
                membership.close()
            raise

    # ── the training loop ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def rank(self) -> int:
        """This process's rank; with a membership until the next change."""
        return self._topology.world.rank

    @property
    def world_size(self) -> int:
        """Ranks; with a membership until the next change."""
        return self._topology.world.world_size

    def step(self) -> bool:
        """Ends an inner step: call it after each step of the optimizer, on every rank.

        Returns:
            Whether an outer step was applied.

        Raises:
            ConfigError: The model has other trainable parameters than at the start, or converted ones.
            NonFiniteGradientError: A rank's weights hold NaN or infinity. All ranks keep their own.
            PayloadError: Ranks are not in the same step, or a payload arrived damaged. All ranks keep their own.
            PeerLostError: A rank is gone or silent, and there is no membership.
            GradientError: Another rank refused the step; or no rank of the membership can be reached.
        """
        # What is due first, so that a delay of almost H ends before the fragment is captured again.
        self.step_count += 1
        before = self.outer_count
        try:
            while self._flights and self._flights[0].due <= self.step_count:
                self._land()
            for place in self._schedule.captured_at(self.step_count):
                self._launch(place, self._schedule.delay)
            if self._is_called:
                self._regroup()
        except PeerLostError as error:
            self._recover(error)
        return self.outer_count > before

    def synchronise(self) -> None:
        """Makes all ranks' weights the same by an exchange of all fragments, now, and averages buffers. Collective;
        raises as `step`.
        """
        step = self.step_count
        while self.step_count == step:
            try:
                while self._flights:
                    self._land()
                for place in range(len(self._schedule.fragments)):
                    self._launch(place, 0)
                average_buffers(self._topology.world, self._model)
                if self._is_called:
                    self._regroup()
                return
            except PeerLostError as error:
                self._recover(error)
        # A rank was lost during the last vote, and the others have all votes: they are past this place.
        self._take_anchors()

    @override
    def close(self) -> None:
        """Ends the thread and frees the group; drops what is under way. Safe to call twice."""
        self._exchange.close()
        self._topology.close()
        if self._membership is not None:
            self._membership.close()

    # ── state ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """Returns anchors, momentum, residuals and results that are not due yet. Save model and optimizer beside it."""
        for outer in self._flights:
            outer.work.wait(StepState.MERGED)
        return {
            **self._states.state_dict(None),
            "step": self.step_count,
            "outer_step": self.outer_count,
            **self._anchors.state_dict(),
            "flights": [outer.state_dict() for outer in self._flights if outer.work.error is None],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads this rank's `state_dict`, on every rank; `StateMismatchError` changes nothing."""
        self._anchors.check(state)
        flights = deque(OuterStep.of(each, self._bucket_states) for each in state["flights"])
        for outer in self._flights:
            outer.work.wait(StepState.MERGED)
        self._states.load_state_dicts([state])
        self._flights = flights
        self.step_count, self.outer_count = int(state["step"]), int(state["outer_step"])
        self._anchors.load_state_dict(state)

    # ── outer steps ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _launch(self, place: int, delay: int) -> None:
        """Captures a fragment and begins its exchange; without a delay, applies its result."""
        work = GradientStep(self.step_count, [], self._density, self.num_samples)
        is_called = self._membership is not None and self._membership.is_join_requested
        work.notice = CALLS if is_called else STAYS
        outer = OuterStep(work, self._schedule.fragments[place], self.step_count + delay)
        try:
            known = {parameter for bucket in self._buckets for parameter in bucket.parameters}
            check_all_known(self._model, known, "make a new one after parameters were added or replaced")
            for number in outer.numbers:
                bucket = self._buckets[number]
                # The inner optimizer is any, and may have bound parameters to other memory.
                bucket.rebind()
                bucket.refresh()
                outer.weights[number] = bucket.weights_D.clone() if delay else bucket.weights_D
            if not delay and all(self._anchors.are_weights(number) for number in outer.numbers):
                work.notice |= RESTS
        except ConfigError as refusal:
            work.trouble.append(refusal)
        self._flights.append(outer)
        if delay:
            self._exchange.submit(outer)
        else:
            self._exchange.run(outer)
            self._land()

    def _land(self) -> None:
        """Waits for the oldest outer step and applies it, or raises its error on all ranks."""
        work = self._flights[0].work
        work.wait(StepState.MERGED)
        if isinstance(work.error, PeerLostError):
            raise work.error  # it may still count, see `_regroup`
        outer = self._flights.popleft()
        if work.error is not None:
            raise work.error
        self._apply(outer)

    def _apply(self, outer: OuterStep) -> None:
        for number, merged in zip(outer.numbers, outer.work.merged, strict=False):
            self._anchors.step(number, merged)
        for number in outer.numbers:
            captured_D = outer.weights[number]
            is_now = captured_D is self._buckets[number].weights_D
            self._anchors.begin_from(number, None if is_now else captured_D)
        self.outer_count += 1
        self._is_called |= any(notice & CALLS for notice in outer.work.notices)
        if self._membership is not None:
            self._membership.publish(step=self.step_count, kept=residual_norm(self._bucket_states))

    # ── members ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _attach(self, world: Transport) -> None:
        """Builds what depends on the members of the group."""
        self._topology = FlatTopology(world)
        self._states = EngineState(self._topology, self._bucket_states)
        self._exchange = OuterExchange(self._topology, self._bucket_states, self._anchors.weights, self._seed)
        weakref.finalize(self, self._exchange.stop).atexit = False

    def _take_state(self, generation: Generation | None) -> None:
        """Sends what some ranks lack, from the lowest rank that has it; from rank 0 before the first step."""
        world, source = self._topology.world, None if generation is None else source_rank(generation)
        if generation is None or source is None:
            broadcast_weights(world, self._model, self._buckets)
            for anchor_D, bucket in zip(self._anchors.weights, self._buckets, strict=True):
                anchor_D.copy_(bucket.weights_D)
            return
        lagging = lagging_ranks(generation)
        if lagging:
            self._is_whole = generation.rank not in lagging
            self._anchors.broadcast(world, source)
            broadcast_untrained(world, self._model, self._buckets, source)
            if generation.rank in lagging:
                self._take_anchors()
            self._is_whole = True
        # Ranks that find a loss at different steps continue from the latest one, so that their turns are the same.
        self.step_count = max(each.status.get("step", 0) for each in generation.members)
        self.outer_count = generation.members[source].status["applied"]

    def _take_anchors(self) -> None:
        for number in range(len(self._buckets)):
            self._anchors.begin_from(number)

    def _recover(self, error: PeerLostError) -> None:
        if self._membership is None:
            for outer in self._flights:
                outer.work.wait(StepState.MERGED)
                self._exchange.forget(outer)
            self._flights.clear()
            raise error
        logger.warning("rank %d of %d: %s", self.rank, self.world_size, error)
        self._regroup()

    def _regroup(self) -> None:
        """Forms the next generation; no outer step is under way afterwards."""
        assert self._membership is not None
        began, size = time.monotonic(), self.world_size
        for outer in self._flights:
            outer.work.wait(StepState.MERGED)
        # Steps with all votes are applied on all ranks. The next one may lack votes here, and have all elsewhere.
        while self._flights and self._flights[0].work.error is None:
            self._apply(self._flights.popleft())
        unvoted = self._flights[0] if self._flights and self._flights[0].work.unvoted is not None else None
        self._flights.clear()
        self._is_called = False
        while True:
            self._exchange.close()
            self._topology.close()
            generation = self._membership.form(self._status(unvoted))
            if unvoted is not None:
                self._decide(unvoted, generation)
                unvoted = None
            try:
                self._attach(world := self._membership.connect(_PURPOSE))
                check_same_setup(world, self._model, self._buckets, self._settings)
                self._take_state(generation)
                break
            except (PeerLostError, ConfigError) as error:  # a rank was lost, or joins with another model
                logger.warning("generation %d did not form: %s", generation.number, error)
        change = MembershipChange.of(generation, size, self.step_count, 0, time.monotonic() - began)
        self.changes.append(change)
        logger.warning("%s", change)

    def _status(self, unvoted: OuterStep | None) -> dict[str, Any]:
        kept = residual_norm(self._bucket_states)
        if not self._is_whole:
            return {"kept": kept}
        number = None if unvoted is None else self.outer_count + 1
        return {"kept": kept, "applied": self.outer_count, "unvoted": number, "step": self.step_count}

    def _decide(self, unvoted: OuterStep, generation: Generation) -> None:
        """Applies a step that lacks votes here if another rank had all of them."""
        source = source_rank(generation)
        work = unvoted.work
        if source is not None and generation.members[source].status["applied"] == self.outer_count + 1:
            work.merged = work.unvoted or []
            self._apply(unvoted)
        else:
            self._exchange.forget(unvoted)


def _check_arguments(
    every: int, lr: float, momentum: float, density: float, decay: float, fragments: int, delay: int
) -> None:
    for expected, got, is_right in (
        ("every ≥ 1 step", every, every >= 1),
        ("an outer lr > 0", lr, lr > 0),
        ("an outer momentum in [0, 1)", momentum, 0 <= momentum < 1),
        ("a density in (0, 1]", density, 0 < density <= 1),
        ("a decay in [0, 1]", decay, 0 <= decay <= 1),
        ("1 ≤ fragments ≤ every", fragments, 1 <= fragments <= every),
        ("0 ≤ delay < every", delay, 0 <= delay < every),
    ):
        if not is_right:
            raise ConfigError.of(expected, got, "every=30 and the defaults of the others are usual")


_WHOLE = {"density": 1.0, "decay": 1.0, "compressor": "threshold-v", "quantiser": "none"}


class DiLoCo(LocalUpdates):
    """Sends whole distances, and steps along them with Nesterov's momentum.

    Args:
        model: As in `LocalUpdates`.
        every: H.
        **settings: The others of `LocalUpdates`; here everything is sent, ``lr`` is 0.7 and ``momentum`` 0.9.
    """

    def __init__(self, model: nn.Module, *, every: int, **settings: Any) -> None:
        super().__init__(model, every=every, **{**_WHOLE, "lr": 0.7, "momentum": 0.9, **settings})


class LocalSGD(LocalUpdates):
    """Averages all ranks' weights every H steps.

    Args:
        model: As in `LocalUpdates`.
        every: H.
        **settings: The others of `LocalUpdates`, without ``lr`` and ``momentum``.
    """

    def __init__(self, model: nn.Module, *, every: int, **settings: Any) -> None:
        super().__init__(model, every=every, lr=1.0, momentum=0.0, **{**_WHOLE, **settings})
