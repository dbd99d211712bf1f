"""The published systems that differ from `copy` and `overlap` in their configs alone: one row a paper.

A row gives the names, the paper, the class that copies and the config; `about` says what the paper does and where we
differ. Each row becomes a subclass with that config and no code. CheckFreq needs two lines of code, so it is a class.
Systems that copy or send in their own way have a module: `asymmetric`, `deepfreeze`, `gemini`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from typing_extensions import override

from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._strategies.base import STRATEGIES, Strategy, StrategyConfig
from shade.checkpoint._strategies.copy import Copy
from shade.checkpoint._strategies.overlap import Overlap


@dataclass(frozen=True)
class PublishedSystem:
    """A published system."""

    names: tuple[str, ...]
    """Names that `Checkpointer(strategy=…)` takes; the second is an alias."""
    paper: str
    """Authors or project, venue and year."""
    parent: type[Strategy]
    """The strategy that copies."""
    config: StrategyConfig
    about: str
    """A summary of the paper and of our differences."""


PUBLISHED: Final = (
    PublishedSystem(
        ("sync",),
        "torch.save and fsync",
        Copy,
        StrategyConfig(save_waits_for="durable"),
        "Training continues only when the snapshot is in storage. It is the baseline of all other strategies: each "
        "save costs the whole way to the disk.",
    ),
    PublishedSystem(
        ("mlc-base",),
        "the baseline of ACUTE and DASH, IEEE Access 12, 2024",
        Copy,
        StrategyConfig(save_waits_for="committed"),
        "Multi-level checkpointing: a blocking copy, a blocking transfer to the remote node's memory, and a write to "
        "storage in the background. Where we differ: every rank sends its share, where rank 0 sent the whole state; "
        "and a save sends one copy (the published baseline loops over the number of saves in each save, and hangs "
        "in the second).",
    ),
    PublishedSystem(
        ("acute", "dash"),
        "ACUTE, and DASH, which is the same under another name, IEEE Access 12, 2024",
        Overlap,
        StrategyConfig(slots=2),
        "Three threads: one copies the state while training computes the next gradients, one sends it, one on the "
        "remote node flushes it from a circular buffer with a dirty bit a slot. Here `overlap` copies, the async "
        "writer sends, and the flusher is a process on the memory node; two slots are the fewest that keep a whole "
        "snapshot there. Where we differ: the wait for the copy works (the published barrier reads a flag that is "
        "never cleared), dirty bits are cleared after the write to the disk, every rank sends its share without "
        "serialising it, and a restore exists. `_integrations.acute` has the original's interface.",
    ),
    PublishedSystem(
        ("datastates",),
        "DataStates-LLM: Maurya et al., HPDC 2024",
        Overlap,
        StrategyConfig(streams=True),
        "Parameters and optimizer state do not change during a forward and a backward pass, so a thread copies them "
        "then (the idea of `overlap`), and copied chunks are written while others are still copied. Where we differ: "
        "the buffer is as long as the state, in pinned shared memory, where the paper's is a ring of a few gigabytes "
        "that blocks when it is full; so it is the nearest tier as well, and a torn copy is detected. The file has its "
        "header and its commit record (the published code builds the header and does not write it), and a save counts "
        "when it is on the medium, not in a page cache.",
    ),
    PublishedSystem(
        ("excp",),
        "ExCP: Li et al., ICML 2024",
        Overlap,
        StrategyConfig(codec="excp"),
        "Stores each snapshot's changes, pruned together with Adam's moments and clustered to sixteen values; not "
        "exact. Only its codec is special; the paper compresses while training waits. Where we differ: a thread copies "
        "and compresses, every snapshot reports its measured loss, and regular exact keyframes (``keyframe_every``) "
        "end errors and chains.",
    ),
    PublishedSystem(
        ("fastpersist",),
        "FastPersist: Wang et al. (DeepSpeed), 2024",
        Overlap,
        StrategyConfig(streams=True, step_waits_for="durable"),
        "All data-parallel ranks write past the page cache. A save begins after step i, and step i + 1 may not change "
        "the state before the save is durable, so one step at most is at risk. Speed makes this bearable: while one "
        "part of the buffer is written with O_DIRECT the next is filled, and every rank writes its share. Here "
        "`DirectFile` writes. Where we differ: shares are whole tensors, the largest first, not byte ranges of one "
        "serialised stream, so a file can be read by itself; no rank has more than 4/3 of the optimum (decision 0008 "
        "has the price). With a store, snapshots pass through its memory, and the flusher makes them durable.",
    ),
    PublishedSystem(
        ("pccheck",),
        "PCcheck: Strati et al., ASPLOS 2025",
        Overlap,
        StrategyConfig(every="profiled 5%", in_flight=2, buffers=2, streams=True),
        "If storage is slower than the interval, training with one save in flight waits for the disk; with N in flight "
        "each save may take N intervals. That bounds the interval, f ≥ T / (N·q·t) (`_pacing.schedule`); N is "
        "`in_flight`. Own memory holds N snapshots, the cluster N + 1. The newest whole snapshot has the highest "
        "sequence among the commit records, so a save that is overtaken never replaces a newer one. Where we differ: "
        "no address of a mapping is stored, since the next process could not use it; tensors keep their types; "
        "snapshots survive a restart.",
    ),
)

for _row in PUBLISHED:
    _documented = {"__doc__": f"{_row.paper}. {_row.about}", "__module__": __name__, "config": _row.config}
    _strategy: type[Strategy] = type(_row.names[0], (_row.parent,), _documented)
    for _name in _row.names:
        STRATEGIES.register(_name)(_strategy)


@STRATEGIES.register("checkfreq")
class CheckFreq(Overlap):
    """CheckFreq: Mohan et al., FAST 2021. Copies into the device's spare memory first, then to the host in a thread.

    With spare memory the device's copy takes milliseconds, and the next update waits for nothing more; else it waits
    for the thread. A second phase writes to storage. The interval is profiled, k = max(⌈(T − o) / t⌉, 1), and grows
    where saves cost more than the budget (`_pacing.schedule`). Where we differ: the interval follows measurements in
    both directions; a restore never finds a half-written snapshot; rules retire snapshots, not the order of a listing.
    The data loader's position is in the snapshot if the loader is attached.
    """

    config = StrategyConfig(every="profiled 5%")
    is_for_devices = True

    @override
    def _secure(self, copying: Copying) -> bool:
        return copying.set_aside()
