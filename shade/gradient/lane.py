"""A bucket on this rank: its parameters, what is remembered of its gradient, and how its values are coded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shade.gradient.bucket import Bucket
from shade.gradient.compressor import COMPRESSORS
from shade.gradient.correction import Correction
from shade.gradient.device import DeviceErrorFeedback, is_known
from shade.gradient.error_feedback import ErrorFeedback
from shade.gradient.quantiser import QUANTISERS
from shade.gradient.route import Route

WHOLE = "none"
"""How the values of buckets that are always sent whole are coded: not at all."""


@dataclass(frozen=True)
class Lane:
    """One bucket."""

    bucket: Bucket
    feedback: ErrorFeedback | DeviceErrorFeedback
    """Of the part that this rank answers for; where its gradient is chosen from."""
    coder: str
    """Name of its quantiser."""


def make_lanes(
    route: Route,
    buckets: Sequence[Bucket],
    compressor: str,
    quantiser: str,
    corrections: Sequence[Correction | None] = (),
) -> tuple[Lane, ...]:
    """Gives each bucket its memory.

    Args:
        route: Says which part of a bucket this rank answers for.
        buckets: Front layers first.
        compressor: Name in `COMPRESSORS`.
        quantiser: Name in `QUANTISERS`, for buckets that are not sent whole.
        corrections: Of `ErrorFeedback`, by the optimizer's groups; empty: none.

    Returns:
        One lane for each bucket.
    """
    lanes = []
    for bucket in buckets:
        part = route.part(bucket.size)
        coder = WHOLE if bucket.is_dense else quantiser
        size = part.stop - part.start
        parts = COMPRESSORS.get(compressor)(), QUANTISERS.get(coder)()
        correction = corrections[bucket.group] if corrections else None
        feedback: ErrorFeedback | DeviceErrorFeedback
        if size == bucket.size and not bucket.is_dense and is_accelerator(bucket.device) and is_known(parts[0]):
            feedback = DeviceErrorFeedback(size, *parts, bucket.device, correction=correction)
        else:  # also of what is summed over a node first: that sum is made on the host
            feedback = ErrorFeedback(size, *parts, correction=correction)
        lanes.append(Lane(bucket, feedback, coder))
    return tuple(lanes)


def is_accelerator(device: torch.device) -> bool:
    """Whether it is far from the host: what is chosen there is all that has to come over."""
    return device.type == "cuda"
