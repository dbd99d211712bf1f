"""Sync: training goes on when the snapshot is in storage, and not before.

What `torch.save` and fsync do, and what every other strategy is measured against. It is the one whose cost needs no
explanation: the whole way to the disk, each time. Here it is `copy`, waited for.
"""

from __future__ import annotations

from shade.checkpoint.strategies.base import STRATEGIES, Terms
from shade.checkpoint.strategies.copy import Copy


@STRATEGIES.register("sync")
class Sync(Copy):
    """Copies at once, and waits for storage."""

    terms = Terms(save_waits_for="durable")
