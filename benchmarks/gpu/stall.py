"""How long a save of GPT-2 and its Adam state holds up a training on the device.

The stall is the time that the training thread is held: in the call that begins the save, and where it waits for the
copy before the optimizer's step. Between the two lie the next forward and backward passes, which end before the clock
runs again: a copy that they hide holds nobody up. The saves of a round write to one folder, one after the other; what
they still do in the background is waited for outside the clock.

Floor: each tensor copied into pinned memory of its own, by one ``copy_`` that does not wait, and one wait for all.
Rival: PyTorch's `dcp.async_save` with its own stager into pinned memory, which copies in a thread or while training
waits; memory that other processes can read is left out, as it is for writers that are processes.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from gpu.gpt import gpt_of
from gpu.machine import Machine
from gpu.table import Row, interleaved, rounds, row
from shade import Checkpointer


class Way(Protocol):
    """A way to save."""

    def save(self) -> None:
        """Begins a save."""

    def wait(self) -> None:
        """Waits until the state may change."""

    def settle(self) -> None:
        """Waits until nothing goes on in the background."""


class Nothing:
    """No save."""

    def save(self) -> None:
        """Does nothing."""

    wait = settle = save


class PlainCopy(Nothing):
    """The copy alone."""

    def __init__(self, tensors: list[torch.Tensor], machine: Machine) -> None:
        self._tensors, self._machine = tensors, machine
        self._copies = [torch.empty_like(each, device="cpu", pin_memory=machine.is_gpu) for each in tensors]

    def save(self) -> None:
        """Copies."""
        for copy, tensor in zip(self._copies, self._tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._machine.wait()


class Ours:
    """`Checkpointer` with a strategy."""

    def __init__(self, strategy: Any, folder: str, **state: Any) -> None:
        self.checkpointer = Checkpointer(
            persist_to=f"{folder}/{strategy}", run="stall", strategy=strategy, every="never", keep="last=1"
        )
        self.checkpointer.attach(**state)

    def save(self) -> None:
        """Begins a save."""
        self.checkpointer.save()

    def wait(self) -> None:
        """Waits for the copy, as the optimizer's step does by itself."""
        self.checkpointer.wait_copy_complete()

    def settle(self) -> None:
        """Waits until it is durable."""
        self.checkpointer.wait_durable()


class OfDcp:
    """`dcp.async_save` with `DefaultStager`."""

    def __init__(self, machine: Machine, folder: str, *, in_thread: bool, **state: Any) -> None:
        self._folder, self._state = f"{folder}/dcp-{in_thread}", state
        self._saved: Any = None
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=machine.is_gpu,
                use_shared_memory=False,
                use_async_staging=in_thread,
                use_non_blocking_copy=machine.is_gpu,
            )
        )
        # PyTorch 2.11 gives the copies' memory back after each save, and can save no second time; newer ones keep it.
        self._copies = self.stager._state_dict_stager
        self._free, self._copies.close = self._copies.close, lambda: None

    def save(self) -> None:
        """Begins a save."""
        self._saved = dcp.async_save(self._state, checkpoint_id=self._folder, async_stager=self.stager, no_dist=True)

    def wait(self) -> None:
        """Waits for the stager; one that blocks has ended by now."""
        staged = getattr(self._saved, "staging_completion", None)
        if staged is not None:
            staged.result()

    def close(self) -> None:
        """Ends the stager."""
        self.stager.close()
        self._free()

    def settle(self) -> None:
        """Waits until it is written, and removes it: DCP writes no second one into a folder without a warning."""
        getattr(self._saved, "upload_completion", self._saved).result()
        shutil.rmtree(self._folder)


def stall(machine: Machine) -> list[Row]:
    """The rows of one state."""
    torch.manual_seed(0)
    network = gpt_of(machine)
    words_BT = torch.randint(0, 512, machine.sized((8, 1024), (2, 32)), device=machine.device)
    optimizer = torch.optim.Adam(network.parameters(), 1e-4)

    def passes() -> None:
        for _ in range(machine.sized(4, 1)):
            with torch.autocast(machine.device.type, dtype=torch.bfloat16):
                loss = network(words_BT)
            loss.backward()
        machine.wait()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()
        machine.wait()

    passes()
    step()
    state = [each.detach() for each in network.parameters()]
    state += [each for of in optimizer.state.values() for each in of.values() if each.numel() > 1]
    whole: dict[str, list[float]] = {}

    def held(name: str, way: Way) -> float:
        begun = time.perf_counter()
        way.save()
        seconds = time.perf_counter() - begun
        passes()
        waiting = time.perf_counter()
        way.wait()
        seconds += time.perf_counter() - waiting
        step()
        whole.setdefault(name, []).append(time.perf_counter() - begun)
        way.settle()
        return seconds

    attached = {"model": network, "optimizer": optimizer}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shade_gpu_"))
        ours = {strategy: Ours(strategy, folder, **attached) for strategy in ("copy", "overlap")}
        theirs = {name: OfDcp(machine, folder, in_thread=name == "thread", **attached) for name in ("thread", "block")}
        for each in ours.values():
            stack.enter_context(each.checkpointer)
        for other in theirs.values():
            stack.callback(other.close)
        ways: dict[str, Way] = {"nothing": Nothing(), "plain copy": PlainCopy(state, machine), **ours, **theirs}
        found = interleaved(
            {name: lambda name=name, way=way: held(name, way) for name, way in ways.items()},
            rounds(3, machine.sized(60.0, 3.0)),
        )
    size = f"{sum(each.nbytes for each in state) / 1e6:,.0f} MB"
    memory = "pinned" if machine.is_gpu else "ordinary"
    steps = {name: seconds[1:] for name, seconds in whole.items()}
    return [
        row(f"stall, strategy copy, {size}", found["copy"], f"copy into {memory} memory", found["plain copy"], 1.1),
        row("stall, strategy overlap", found["overlap"], "DCP's stager in a thread", found["thread"], 0.05),
        row("stall, strategy overlap", found["overlap"], "DCP's stager that blocks", found["block"], 0.05),
        row("whole step with a save, overlap", steps["overlap"], "a step without", steps["nothing"]),
        row("whole step with a save, overlap", steps["overlap"], "with DCP's, in a thread", steps["thread"]),
    ]
