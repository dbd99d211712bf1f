"""Says what a new generation changes: who has the state that others lack, who was lost, and what went with them.

All members read the same statuses, so all conclude the same without another exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shade.gradient._compress.device_error_feedback import DeviceErrorFeedback
from shade.gradient._compress.error_feedback import ErrorFeedback
from shade.gradient._elastic.membership import Generation
from shade.gradient._engine.bucket_state import BucketState

_SAMPLED_LINES = 2**14


@dataclass(frozen=True)
class MembershipChange:
    """A generation that formed after this process had joined."""

    generation: int
    step: int
    """The next step."""
    rank: int
    """This process's from now on."""
    world_size: int
    num_lost: int
    """Ranks that fell silent; a slow one may return."""
    lost_share: float
    """The share of their residuals in the squared norm of all residuals, by their last statuses."""
    num_left: int
    num_joined: int
    num_repaired: int
    """Buckets that differed between ranks; there should be none."""
    seconds: float
    """From the loss to the next step."""

    @classmethod
    def of(
        cls, generation: Generation, size_before: int, step: int, num_repaired: int, seconds: float
    ) -> MembershipChange:
        """Computes the change that a generation brings to a group of ``size_before`` ranks."""
        lost = [status for status in generation.gone if status]
        energies = [float(status.get("kept", 0.0)) ** 2 for status in lost]
        total = sum(energies) + sum(float(each.status.get("kept", 0.0)) ** 2 for each in generation.members)
        num_stayed = sum(each.rank_before is not None for each in generation.members)
        return cls(
            generation=generation.number,
            step=step,
            rank=generation.rank,
            world_size=generation.world_size,
            num_lost=len(lost),
            lost_share=sum(energies) / total if total else 0.0,
            num_left=max(0, size_before - num_stayed - len(lost)),
            num_joined=generation.world_size - num_stayed,
            num_repaired=num_repaired,
            seconds=seconds,
        )

    def __str__(self) -> str:
        return (
            f"generation {self.generation}: {self.world_size} ranks continue from step {self.step} ({self.num_lost} "
            f"lost, with {100 * self.lost_share:.0f} % of the squared norm of the residuals; {self.num_left} left, "
            f"{self.num_joined} joined) after {self.seconds:.1f} s"
        )


def source_rank(generation: Generation) -> int | None:
    """Returns the lowest of the ranks that have applied most; None if no rank has trained yet."""
    trained = [rank for rank, each in enumerate(generation.members) if "applied" in each.status]
    stayed = [rank for rank in trained if generation.members[rank].rank_before is not None]
    # A rank that was taken for lost and returns may have applied what no other rank has.
    # It counts only if there is no other.
    applied = {rank: generation.members[rank].status["applied"] for rank in stayed or trained}
    return max(applied, key=lambda rank: (applied[rank], -rank), default=None)


def lagging_ranks(generation: Generation) -> list[int]:
    """Returns the ranks that lack state of the source and cannot catch up alone."""
    source = source_rank(generation)
    if source is None:
        return list(range(generation.world_size))
    aim = generation.members[source].status["applied"]

    def has(rank: int) -> bool:
        member = generation.members[rank]
        stayed = member.rank_before is not None and "applied" in member.status
        return rank == source or (stayed and aim in (member.status["applied"], member.status["unvoted"]))

    return [rank for rank in range(generation.world_size) if not has(rank)]


def residual_norm(bucket_states: Sequence[BucketState]) -> float:
    """Estimates the norm of all residuals, from a sample of each large bucket."""
    return math.sqrt(sum(_energy(each.feedback) for each in bucket_states))


def _energy(feedback: ErrorFeedback | DeviceErrorFeedback) -> float:
    residual_D = torch.as_tensor(feedback.residual_D)
    stride = feedback.size // 16 // _SAMPLED_LINES
    if stride > 1:
        residual_D = residual_D[: feedback.size // (16 * stride) * 16 * stride].view(-1, stride, 16)[:, 0]
    return float(residual_D.double().square().sum()) * max(1, stride)
