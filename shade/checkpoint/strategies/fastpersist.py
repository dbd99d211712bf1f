"""FastPersist: written past the page cache by all data-parallel ranks, while the next pass runs; durable when it ends.

Wang et al. (DeepSpeed), 2024. A save is decoupled by one step: it begins after step i, and step i + 1 may not change
the state before it is durable, so nothing but that one step is ever at risk. What makes this bearable is speed: while
one part of the buffer is written with O_DIRECT the next is filled, and every rank writes its share of the bytes. Here
the writer is `shade.storage.file_operations`, which takes chunks as they lie in the aligned buffer. Where we
differ: shares are whole tensors, the largest first, and not byte ranges of one serialised stream, so that a file can be
read by itself; no rank has more than 4/3 of the best possible (decision 0008 has the price). With a store the way goes
through its memory, and durable is what the flusher has written.
"""

from __future__ import annotations

from shade.checkpoint.strategies.base import STRATEGIES, Terms
from shade.checkpoint.strategies.overlap import Overlap


@STRATEGIES.register("fastpersist")
class FastPersist(Overlap):
    """Copies in a thread, streams, and holds the next step until all is durable."""

    terms = Terms(streams=True, step_waits_for="durable")
