"""PCcheck: several snapshots on their way at once, and a pointer that moves to the newest that is whole.

Strati et al., ASPLOS 2025. Where storage is slower than the interval, one save at a time means that training waits for
the disk; N at a time mean that each may take N intervals. The interval is bounded by that, f ≥ T / (N·q·t): see
`_pacing.schedule`; N is `in_flight`. Memory is that of N snapshots, the cluster keeps N + 1. The pointer is
the highest sequence among the commit records, each written when its snapshot is whole: one that is overtaken never
replaces a newer one. Where we differ: no address of a mapping is stored, which would mean nothing to the next process;
tensors keep their types; what was there before a restart is still there after it.
"""

from __future__ import annotations

from shade.checkpoint.strategies.base import STRATEGIES, Terms
from shade.checkpoint.strategies.overlap import Overlap


@STRATEGIES.register("pccheck")
class PcCheck(Overlap):
    """Copies in a thread, streams, two saves at once."""

    terms = Terms(every="profiled 5%", in_flight=2, buffers=2, streams=True)
