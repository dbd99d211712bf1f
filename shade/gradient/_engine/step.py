"""One step's gradient on its way through the pipeline: what each stage leaves for the next, and how it ended.

Made by the engine before the backward pass, filled by its hooks bucket by bucket, sealed by `GradientEngine.step`. Two
threads take it from there (`_engine.pipeline`); whoever waits, waits on its events.

Life of a bucket's part: ``ready`` (all its gradients are here) → ``packed`` (chosen and coded) → in ``merged``. Life
of the whole: ``agreed`` (all ranks' gradients are finite; the residuals are settled) → ``done`` (merged, or failed).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shade.gradient._comm.transport import Octets
from shade.gradient._compress.compressor import Sparse
from shade.types import Decision

STAYS, CALLS, LEAVES = 0, 1, 2
"""Notices: nothing new; somebody wants in; this rank goes after this step."""


@dataclass
class StepCosts:
    """What one step took, on whatever thread."""

    compute_seconds: float = 0.0
    wait_seconds: float = 0.0
    compress_seconds: float = 0.0
    exchange_seconds: float = 0.0
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
        num_samples: Weight of this rank; may be changed until the first gradient is here.
        before: The step before, if that may still be under way.
        proposal: Rides along to all ranks.
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
        """What its gradients are multiplied with: one over the scaler's scale."""
        self.gradients: list[list[Tensor | None]] = [[None] * size for size in sizes]
        self._missing = list(sizes)
        self._taken: list[set[int]] = [set() for _ in sizes]
        self.ready = [threading.Event() for _ in sizes]
        self.packed = [threading.Event() for _ in sizes]
        self.chosen: dict[int, Sparse] = {}
        """What left the residuals, by bucket."""
        self.payloads: dict[int, Octets] = {}
        """The same, coded."""
        self.copied: list[torch.cuda.Event | None] = [None] * len(sizes)
        """Of gradients on a device: when they are all computed."""
        self.compressed = threading.Event()
        """No residual is touched for this step any more."""
        self.agreed = threading.Event()
        self.done = threading.Event()
        self.merged: list[Sparse] = []
        """One for each bucket, the same on all ranks; empty if it failed, or nobody had samples."""
        self.unvoted: list[Sparse] | None = None
        """As `merged`, of a step during whose vote a rank was lost: others may have applied it."""
        self.norm = 0.0
        """Of what was merged, the same on all ranks."""
        self.decision: Decision | None = None
        """What rank 0 proposed with this step."""
        self.notice = STAYS
        """What this rank says of itself: whether it stays, and whether the group shall form anew."""
        self.notices: tuple[int, ...] = ()
        """What all ranks have said."""
        self.error: Exception | None = None
        self.is_abandoned = False
        """Nobody will ever fill it."""
        self.trouble: list[Exception] = []
        """What the first stage met: a gradient that is not finite, or a defect."""
        self.damage: list[Exception] = []
        """Payloads that came and were not whole."""
        self.costs = StepCosts()

    @property
    def is_untouched(self) -> bool:
        """Whether no gradient has come yet."""
        return not any(self._taken)

    def has(self, bucket: int, position: int) -> bool:
        """Whether that parameter's gradient is here."""
        return position in self._taken[bucket]

    def put(self, bucket: int, position: int, gradient: Tensor | None) -> None:
        """Takes one parameter's gradient over; a bucket whose last it is goes on its way.

        Args:
            bucket: Number of the bucket.
            position: Of the parameter in it.
            gradient: None: it got none, and counts as zero.
        """
        self._taken[bucket].add(position)
        self.gradients[bucket][position] = gradient
        self._missing[bucket] -= 1
        if not self._missing[bucket]:
            on_device = next((each for each in self.gradients[bucket] if each is not None and each.is_cuda), None)
            if on_device is not None:
                self.copied[bucket] = torch.cuda.current_stream(on_device.device).record_event()
            self.ready[bucket].set()

    def abandon(self) -> None:
        """Ends it before it has begun; both threads drop it."""
        self.is_abandoned = True
        for event in (*self.ready, *self.packed):
            event.set()

    def fail(self, error: Exception) -> None:
        """Says what went wrong; the first word counts."""
        self.error = self.error or error
        self.merged = []


@dataclass
class Undelivered:
    """What was chosen, and taken out of the residuals, but has reached nobody."""

    parts: list[tuple[int, Sparse]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, work: GradientStep) -> None:
        """Keeps all that a failed step had chosen."""
        with self.lock:
            self.parts += work.chosen.items()

    def take(self) -> list[tuple[int, Sparse]]:
        """Hands it out, once."""
        with self.lock:
            parts, self.parts = self.parts, []
        return parts
