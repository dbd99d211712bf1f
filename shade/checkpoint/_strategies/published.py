"""The published systems that differ from `copy` and `ThreadedCopy` in little more than their configs: a class a paper.

Systems that copy or send in their own way have a module: `asymmetric`, `deepfreeze`, `gemini`. Decision 0027 compares
all of them.
"""

from __future__ import annotations

from typing_extensions import override

from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._strategies.base import STRATEGIES, StrategyConfig
from shade.checkpoint._strategies.copy import Copy
from shade.checkpoint._strategies.overlap import ThreadedCopy


@STRATEGIES.register("sync")
class Sync(Copy):
    """torch.save and fsync: training continues only when the snapshot is in storage; the baseline of all others."""

    config = StrategyConfig(save_waits_for="durable")


@STRATEGIES.register("mlc-base")
class MultiLevelBaseline(Copy):
    """Multi-level checkpointing, the baseline of ACUTE and DASH, IEEE Access 12, 2024.

    A blocking copy, a blocking transfer to the remote node's memory, and a write to storage in the background. Where we
    differ: every rank sends its share, where rank 0 sent the whole state; and a save sends one copy (the published
    baseline loops over the number of saves in each save, and hangs in the second).
    """

    config = StrategyConfig(save_waits_for="committed")


@STRATEGIES.register("dash")
@STRATEGIES.register("acute")
class Acute(ThreadedCopy):
    """ACUTE, and DASH, which is the same under another name, IEEE Access 12, 2024.

    One thread copies the state while training computes the next gradients, one sends it, and one on the remote node
    flushes it from a circular buffer with a dirty bit a slot. Here a thread copies, the async writer sends, and the
    flusher is a process on the memory node; two slots are the fewest that keep a whole snapshot there. Where we differ:
    the wait for the copy works (the published barrier reads a flag that is never cleared), dirty bits are cleared after
    the write to the disk, every rank sends its share without serialising it, and a restore exists.
    `_integrations.acute` has the original's interface.
    """

    config = StrategyConfig(slots=2)


@STRATEGIES.register("datastates")
class DataStates(ThreadedCopy):
    """DataStates-LLM: Maurya et al., HPDC 2024. Copied chunks are written while a thread copies the others.

    Where we differ: the buffer is as long as the state, in pinned shared memory, where the paper's is a ring of a few
    gigabytes that blocks when it is full; so it is the nearest tier as well, and a torn copy is detected. The file has
    its header and its commit record (the published code builds the header and does not write it), and a save counts
    when it is on the medium, not in a page cache.
    """

    config = StrategyConfig(streams=True)


@STRATEGIES.register("excp")
class ExCP(ThreadedCopy):
    """ExCP: Li et al., ICML 2024. The codec prunes each snapshot's changes with Adam's moments to sixteen values.

    Not exact. Where we differ: a thread compresses while training continues, every snapshot reports its measured loss,
    and regular exact keyframes (``keyframe_every``) end errors and chains.
    """

    config = StrategyConfig(codec="excp")


@STRATEGIES.register("fastpersist")
class FastPersist(ThreadedCopy):
    """FastPersist: Wang et al. (DeepSpeed), 2024. All data-parallel ranks write their shares past the page cache.

    A save begins after step i, and step i + 1 may not change the state before the save is durable, so one step at most
    is at risk. Speed makes this bearable: while one part of the buffer is written with O_DIRECT (`DirectFile`) the next
    is filled. Where we differ: shares are whole tensors, the largest first, not byte ranges of one serialised stream,
    so a file can be read by itself; no rank has more than 4/3 of the optimum (decision 0008 has the price). With a
    store, snapshots pass through its memory, and the flusher makes them durable.
    """

    config = StrategyConfig(streams=True, step_waits_for="durable")


@STRATEGIES.register("pccheck")
class PCcheck(ThreadedCopy):
    """PCcheck: Strati et al., ASPLOS 2025. N saves in flight (`in_flight`) may each take N intervals.

    That bounds the interval, f ≥ T / (N·q·t) (`_pacing.schedule`), where storage is slower than the interval. Own
    memory holds N snapshots, the cluster N + 1. The newest whole snapshot has the highest sequence among the commit
    records, so a save that is overtaken never replaces a newer one. Where we differ: no address of a mapping is stored,
    since the next process could not use it; tensors keep their types; snapshots survive a restart.
    """

    config = StrategyConfig(every="profiled 5%", in_flight=2, buffers=2, streams=True)


@STRATEGIES.register("checkfreq")
class CheckFreq(ThreadedCopy):
    """CheckFreq: Mohan et al., FAST 2021. Copies into the device's spare memory first, then to the host in a thread.

    With spare memory the device's copy takes milliseconds, and the next update waits for nothing more; else it waits
    for the thread. The interval is profiled, k = max(⌈(T − o) / t⌉, 1), and grows where saves cost more than the budget
    (`_pacing.schedule`). Where we differ: the interval follows measurements in both directions; a restore never finds a
    half-written snapshot; rules retire snapshots, not the order of a listing.
    """

    config = StrategyConfig(every="profiled 5%")

    @override
    def _secure(self, copying: Copying) -> bool:
        return copying.set_aside()
