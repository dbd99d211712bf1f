"""DataStates-LLM: lazy copies, each chunk on its way to the tier as soon as it has landed in the buffer.

Maurya et al., HPDC 2024. Parameters and optimizer state stand still during a forward and a backward pass, so a thread
copies them then (`overlap`, which has the idea from there), and what has been copied is written while the rest is still
coming. Where we differ: the buffer is not a ring of a few gigabytes that blocks when it is full, but as long as the
state, in pinned shared memory, and used in turn; so it is the nearest tier as well, and a torn copy is found, for which
the copy must still be there. What reaches the file has its header and its commit record (the published code builds the
header and does not write it), and is on the medium, not in a page cache, before it counts.
"""

from __future__ import annotations

from shade.checkpoint.strategies.base import STRATEGIES, Terms
from shade.checkpoint.strategies.overlap import Overlap


@STRATEGIES.register("datastates")
class DataStates(Overlap):
    """Copies in a thread, streams."""

    terms = Terms(streams=True)
