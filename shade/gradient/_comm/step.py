"""Holds one step's gradient on its way through the pipeline: what each stage leaves for the next, and how it ended.

Invariant: the state only advances, along the arrows of `StepState`; any other change raises.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from shade.errors import ConfigError, GradientError, NonFiniteGradientError
from shade.gradient._comm.transport import Octets
from shade.gradient._compress.compressor import Sparse
from shade.types import Decision


class StepState(enum.IntEnum):
    """The state of a step: ``FILLING → PACKED → AGREED → MERGED``; before its end also ``→ FAILED | ABANDONED``."""

    FILLING = 0
    """Gradients arrive; buckets are picked and encoded one by one."""
    PACKED = 1
    """All buckets are encoded: no residual is touched for this step any more."""
    AGREED = 2
    """All ranks' gradients are finite and in the same step: the residuals are settled."""
    MERGED = 3
    """``merged`` holds the result, the same on all ranks."""
    FAILED = 4
    """``error`` says why; no rank applies it."""
    ABANDONED = 5
    """The engine dropped it before it was complete."""


_NEXT: Final = {
    StepState.FILLING: {StepState.PACKED, StepState.FAILED, StepState.ABANDONED},
    StepState.PACKED: {StepState.AGREED, StepState.FAILED, StepState.ABANDONED},
    StepState.AGREED: {StepState.MERGED, StepState.FAILED, StepState.ABANDONED},
    StepState.MERGED: set[StepState](),
    StepState.FAILED: set[StepState](),
    StepState.ABANDONED: set[StepState](),
}

STAYS, CALLS, LEAVES = 0, 1, 2
"""Notices: nothing new; a process asks to join; this rank leaves after this step."""
RESTS = 4
"""Beside another notice: this rank's weights have not moved."""


@dataclass
class StepCosts:
    """The cost of one step, on all threads."""

    compute_seconds: float = 0.0
    wait_seconds: float = 0.0
    compress_seconds: float = 0.0
    exchange_seconds: float = 0.0
    latency_seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    num_chosen: int = 0
    """Elements that this rank sent."""


class GradientStep:
    """One step of one rank.

    Args:
        step: Its number, the same on all ranks.
        sizes: Parameters in each bucket.
        density: Kept fraction.
        num_samples: Weight of this rank; may change until the first gradient arrives.
        before: The previous step, if it may still be in progress.
        proposal: Sent to all ranks with the counts.
    """

    def __init__(
        self,
        step: int,
        sizes: Sequence[int],
        density: float,
        num_samples: int,
        before: GradientStep | None = None,
        proposal: Decision | None = None,
    ) -> None:
        self.step, self.density, self.num_samples = step, density, num_samples
        self.before, self.proposal = before, proposal
        self.scale = 1.0
        """The factor for its gradients: one over the scaler's scale."""
        self.sizes = tuple(sizes)
        self.gradients: list[list[Tensor | None]] = [[None] * size for size in sizes]
        self._missing = list(sizes)
        self._taken: list[set[int]] = [set() for _ in sizes]
        self.own_used: list[set[int]] = [set() for _ in sizes]
        """Places of the parameters of each bucket that have a gradient on this rank."""
        self.used: list[set[int] | None] = [None] * len(sizes)
        """The same on any rank with samples, from the counts; None: all of the bucket's parameters."""
        # Events of each bucket, since buckets overlap: all its gradients are here; it is picked and encoded.
        self.ready = [threading.Event() for _ in sizes]
        self.packed = [threading.Event() for _ in sizes]
        self.sealed = threading.Event()
        """The backward pass has ended, and this rank has checked what it may refuse."""
        self.chosen: dict[int, Sparse] = {}
        """The elements that left the residuals, by bucket."""
        self.payloads: dict[int, Octets] = {}
        """The same, encoded."""
        self.copied: list[torch.cuda.Event | None] = [None] * len(sizes)
        """For gradients on a device: the event after which they are computed."""
        self._state, self._changed = StepState.FILLING, threading.Condition()
        self.merged: list[Sparse] = []
        """One for each bucket, the same on all ranks; empty if the step failed, or no rank had samples."""
        self.unvoted: list[Sparse] | None = None
        """As `merged`, for a step whose vote lost a rank: other ranks may have applied it."""
        self.norm = 0.0
        """Of the merged gradient, the same on all ranks."""
        self.decision: Decision | None = None
        """Rank 0's proposal in this step."""
        self.notice = STAYS
        """This rank's notice about the membership."""
        self.notices: tuple[int, ...] = ()
        """All ranks' notices."""
        self.error: Exception | None = None
        self.trouble: list[Exception] = []
        """Errors of this rank alone: a gradient that is not finite, a refusal, or a defect."""
        self.damage: list[Exception] = []
        """Errors of payloads that arrived damaged."""
        self.costs = StepCosts()

    @property
    def own_failure(self) -> Exception | None:
        """This rank's refusal, or else its first error that is no gradient that is not finite."""
        own = [each for each in self.trouble if not isinstance(each, NonFiniteGradientError)]
        return next((each for each in own if isinstance(each, ConfigError)), own[0] if own else None)

    def add_cause(self, error: Exception) -> None:
        """Makes this rank's own failure, if there is one, the cause of the error that the step ends with."""
        if self.own_failure is not error:
            error.__cause__ = self.own_failure or error.__cause__

    @property
    def is_untouched(self) -> bool:
        """Whether no gradient has arrived yet."""
        return not any(self._taken)

    def has(self, bucket: int, position: int) -> bool:
        """Returns whether that parameter's gradient has arrived."""
        return position in self._taken[bucket]

    def put(self, bucket: int, position: int, gradient: Tensor | None) -> None:
        """Stores one parameter's gradient (None: it has none); the last one of a bucket makes the bucket ready."""
        self._taken[bucket].add(position)
        self.gradients[bucket][position] = gradient
        if gradient is not None:
            self.own_used[bucket].add(position)
        self._missing[bucket] -= 1
        if not self._missing[bucket]:
            on_device = next((each for each in self.gradients[bucket] if each is not None and each.is_cuda), None)
            if on_device is not None:
                self.copied[bucket] = torch.cuda.current_stream(on_device.device).record_event()
            self.ready[bucket].set()

    @property
    def state(self) -> StepState:
        """The state."""
        return self._state

    def advance(self, state: StepState) -> None:
        """Advances to a state and wakes waiting threads; raises `GradientError` where there is no such arrow."""
        with self._changed:
            if self._state is StepState.ABANDONED:
                return
            if state not in _NEXT[self._state]:
                raise GradientError(f"step {self.step} cannot go from {self._state.name} to {state.name}")
            self._state = state
            self._changed.notify_all()

    def wait(self, state: StepState) -> None:
        """Waits until the step has reached a state, or has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._state >= state)

    def abandon(self) -> None:
        """Drops the step, unless it has ended; both threads skip it."""
        with self._changed:
            if self._state < StepState.MERGED:
                self._state = StepState.ABANDONED
                self._changed.notify_all()
        for event in (*self.ready, *self.packed, self.sealed):
            event.set()

    def end(self, error: Exception | None) -> None:
        """Ends the step, with its result or with an error."""
        if error is None:
            self.advance(StepState.MERGED)
        else:
            self.error, self.merged = error, []
            self.advance(StepState.FAILED)


@dataclass
class Undelivered:
    """Elements that left the residuals but were not delivered."""

    parts: list[tuple[int, Sparse]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, work: GradientStep) -> None:
        """Keeps all that a failed step had chosen."""
        with self.lock:
            self.parts += work.chosen.items()

    def take(self) -> list[tuple[int, Sparse]]:
        """Returns the elements, and forgets them."""
        with self.lock:
            parts, self.parts = self.parts, []
        return parts
