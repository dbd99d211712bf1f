"""MLC-base: training waits until the snapshot is in the cluster's memory; the way to storage is the flusher's.

The multi-level checkpointing that ACUTE and DASH (IEEE Access 12, 2024) compare themselves with: a blocking copy, a
blocking transfer to the remote node's memory, and only the last level behind the training's back. Where we differ:
every rank sends its share, and not rank 0 the whole state; and a save sends one copy (the published baseline loops over
the number of saves in each of them, and hangs in the second).
"""

from __future__ import annotations

from shade.checkpoint.strategies.base import STRATEGIES, Terms
from shade.checkpoint.strategies.copy import Copy


@STRATEGIES.register("mlc-base")
class MlcBase(Copy):
    """Copies at once, and waits for the commit."""

    terms = Terms(save_waits_for="committed")
