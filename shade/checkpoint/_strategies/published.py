"""The published systems that differ from `copy` and `overlap` in their configs alone: one row a paper.

A row gives the names, the paper, the class that copies and the config; `about` says what the paper does and where we
differ. The strategy of a row is a subclass with that config and no code. CheckFreq needs two lines of code, and so has
a class. Systems that copy or send in a way of their own have a module: `asymmetric`, `deepfreeze`, `gemini`.
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
    """One row."""

    names: tuple[str, ...]
    """As `Checkpointer(strategy=…)` takes them; the second one is another name of the same."""
    paper: str
    """Authors or project, venue and year."""
    parent: type[Strategy]
    """Which copies."""
    config: StrategyConfig
    about: str
    """What the paper does, and where we differ."""


PUBLISHED: Final = (
    PublishedSystem(
        ("sync",),
        "torch.save and fsync",
        Copy,
        StrategyConfig(save_waits_for="durable"),
        "Training continues when the snapshot is in storage, and not before. Every other strategy is measured against "
        "it: its cost is the whole way to the disk, each time.",
    ),
    PublishedSystem(
        ("mlc-base",),
        "the baseline of ACUTE and DASH, IEEE Access 12, 2024",
        Copy,
        StrategyConfig(save_waits_for="committed"),
        "Multi-level checkpointing: a blocking copy, a blocking transfer to the remote node's memory, and only the way "
        "to storage behind the training. Where we differ: every rank sends its share, and not rank 0 the whole state; "
        "and a save sends one copy (the published baseline loops over the number of saves in each of them, and hangs "
        "in the second).",
    ),
    PublishedSystem(
        ("acute", "dash"),
        "ACUTE, and DASH, which is the same under another name, IEEE Access 12, 2024",
        Overlap,
        StrategyConfig(slots=2),
        "Three threads: one copies the state while training computes the next gradients, one sends it, one on the "
        "remote node flushes it from a circular buffer with a dirty bit a slot. Here the first is `overlap`, the "
        "second the async writer, the third the flusher, a process on the memory node; two slots are the fewest that "
        "keep a whole snapshot there. Where we differ: waiting for the copy waits (the published barrier reads a flag "
        "that is never cleared), bits are cleared after the write to the disk and not before, every rank sends its "
        "share of bytes that were never serialised, and there is a way back. `_integrations.acute` has the "
        "original's interface.",
    ),
    PublishedSystem(
        ("datastates",),
        "DataStates-LLM: Maurya et al., HPDC 2024",
        Overlap,
        StrategyConfig(streams=True),
        "Parameters and optimizer state do not change during a forward and a backward pass, so a thread copies them "
        "then (`overlap`, which has the idea from there), and what has been copied is written while the rest is still "
        "coming. Where we differ: the buffer is not a ring of a few gigabytes that blocks when it is full, but as long "
        "as the state, in pinned shared memory, and used in turn; so it is the nearest tier as well, and a torn copy "
        "is found, for which the copy must still be there. What reaches the file has its header and its commit record "
        "(the published code builds the header and does not write it), and is on the medium, not in a page cache, "
        "before it counts.",
    ),
    PublishedSystem(
        ("excp",),
        "ExCP: Li et al., ICML 2024",
        Overlap,
        StrategyConfig(codec="excp"),
        "Stores of each snapshot what has changed, pruned together with its moments and clustered to sixteen values. "
        "Not exact. All that sets it apart is in its codec; the paper compresses while training waits. Where we "
        "differ: a thread copies and compresses, what was lost is measured and reported with every snapshot, and a "
        "keyframe that is exact comes again and again (``keyframe_every``), so that errors and chains of snapshots "
        "end.",
    ),
    PublishedSystem(
        ("fastpersist",),
        "FastPersist: Wang et al. (DeepSpeed), 2024",
        Overlap,
        StrategyConfig(streams=True, step_waits_for="durable"),
        "Written past the page cache by all data-parallel ranks. A save is decoupled by one step: it begins after step "
        "i, and step i + 1 may not change the state before it is durable, so nothing but that one step is ever at "
        "risk. What makes this bearable is speed: while one part of the buffer is written with O_DIRECT the next is "
        "filled, and every rank writes its share of the bytes. Here the writer is `DirectFile`. Where we "
        "differ: shares are whole tensors, the largest first, and not byte ranges of one serialised stream, so that a "
        "file can be read by itself; no rank has more than 4/3 of the best possible (decision 0008 has the price). "
        "With a store the way goes through its memory, and durable is what the flusher has written.",
    ),
    PublishedSystem(
        ("pccheck",),
        "PCcheck: Strati et al., ASPLOS 2025",
        Overlap,
        StrategyConfig(every="profiled 5%", in_flight=2, buffers=2, streams=True),
        "Where storage is slower than the interval, one save at a time means that training waits for the disk; N at a "
        "time mean that each may take N intervals. The interval is bounded by that, f ≥ T / (N·q·t): see "
        "`_pacing.schedule`; N is `in_flight`. Memory is that of N snapshots, the cluster keeps N + 1. The "
        "pointer to the newest whole snapshot is the highest sequence among the commit records, so one that is "
        "overtaken never replaces a newer one. Where we differ: no address of a mapping is stored, which would mean "
        "nothing to the next process; tensors keep their types; what was there before a restart is still there after.",
    ),
)

for _row in PUBLISHED:
    _documented = {"__doc__": f"{_row.paper}. {_row.about}", "__module__": __name__, "config": _row.config}
    _strategy: type[Strategy] = type(_row.names[0], (_row.parent,), _documented)
    for _name in _row.names:
        STRATEGIES.register(_name)(_strategy)


@STRATEGIES.register("checkfreq")
class CheckFreq(Overlap):
    """CheckFreq: Mohan et al., FAST 2021. Copies on the device, where it has room, and from there in a thread.

    The first phase copies the state: on a device into its spare memory, if there is any, which takes milliseconds, and
    the next update waits for nothing more; else into the host's, in a thread, and the update waits for that. The second
    phase brings it to storage. The interval is profiled, k = max(⌈(T − o) / t⌉, 1), and grows where saves cost more
    than the budget: see `_pacing.schedule`. Where we differ: it is followed all the time, in both directions;
    what is half written is never found by a restore; snapshots are retired by rules, not by the order of a listing. The
    data loader's position is in the snapshot if it is attached, as anything that has a state.
    """

    config = StrategyConfig(every="profiled 5%")
    is_for_devices = True

    @override
    def _secure(self, copying: Copying) -> bool:
        return copying.set_aside()
