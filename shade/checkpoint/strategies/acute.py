"""ACUTE, and DASH, which is the same under another name: a copying thread, and a remote memory that takes its copies.

Three threads of the original (IEEE Access 12, 2024): one copies the state while training computes the next gradients,
one sends it, one on the remote node flushes it from a circular buffer with a dirty bit a slot. Here the first is
`overlap`, the second the courier, the third the flusher, a process on the memory node; two slots are the fewest that
keep a whole snapshot there. Where we differ: waiting for the copy waits (the published barrier reads a flag that nobody
clears), bits are cleared after the write to the disk and not before, every rank sends its share of bytes that were
never serialised, and there is a way back. `_integrations.acute` has the original's interface.
"""

from __future__ import annotations

from shade.checkpoint.strategies.base import STRATEGIES, Terms
from shade.checkpoint.strategies.overlap import Overlap


@STRATEGIES.register("dash")
@STRATEGIES.register("acute")
class Acute(Overlap):
    """Copies in a thread, into two slots of the cluster's memory."""

    terms = Terms(slots=2)
