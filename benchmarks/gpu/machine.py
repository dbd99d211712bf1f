"""The device that is measured, and the sizes for it: a GPU, or the processor, which stands in for one with small sizes.

On the processor the same lines run: copies are plain, memory is not pinned, NCCL is gloo. What they take says nothing
of a GPU; that they run says that the rows have not rotted.
"""

from __future__ import annotations

import contextlib
import gc
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import measures
import torch

Value = TypeVar("Value")
STAND_IN = "stand-in: no figure of a GPU"


@dataclass(frozen=True)
class Machine:
    """One device."""

    device: torch.device

    @classmethod
    def here(cls) -> Machine:
        """The first GPU, or else the processor."""
        return cls(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))

    @property
    def is_gpu(self) -> bool:
        """Whether this is no stand-in."""
        return self.device.type == "cuda"

    @property
    def backend(self) -> str:
        """torch.distributed's for tensors on the device."""
        return "nccl" if self.is_gpu else "gloo"

    @property
    def num_ranks(self) -> int:
        """One for each GPU; two where the processor stands in."""
        return torch.cuda.device_count() if self.is_gpu else 2

    @property
    def half(self) -> torch.dtype:
        """What mixed precision with a scaler computes in."""
        return torch.float16 if self.is_gpu else torch.bfloat16

    def sized(self, on_gpu: Value, on_stand_in: Value) -> Value:
        """One of two sizes."""
        return on_gpu if self.is_gpu else on_stand_in

    def wait(self) -> None:
        """Waits until the device has done all that it was given."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, action: Callable[[], object]) -> float:
        """The time of an action, with what the device does for it."""
        self.wait()
        begun = time.perf_counter()
        action()
        self.wait()
        return time.perf_counter() - begun

    def clear(self) -> None:
        """Gives back what earlier parts have left in the device's memory; processes of ranks need it."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def refusing_syncs(self) -> Iterator[None]:
        """Makes an operation that waits for the device an error."""
        before = torch.cuda.get_sync_debug_mode() if self.is_gpu else 0
        if self.is_gpu:
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if self.is_gpu:
                torch.cuda.set_sync_debug_mode(before)

    def about(self) -> str:
        """Device, driver, versions, machine and commit."""
        software = f"torch {torch.__version__} for CUDA {torch.version.cuda}, commit {measures.commit()}"
        if not self.is_gpu:
            return f"{STAND_IN}; {software}, {measures.machine()}"
        which = torch.cuda.get_device_properties(self.device)
        gpu = f"{torch.cuda.device_count()} × {which.name}, {which.total_memory / 2**30:.0f} GiB"
        return f"{gpu}, driver {_driver()}, {software}, cuDNN {torch.backends.cudnn.version()}, {measures.machine()}"


def _driver() -> str:
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError):
        told = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30).stdout.split()
        if told:
            return told[0]
    path = Path("/proc/driver/nvidia/version")
    return path.read_text().splitlines()[0] if path.exists() else f"unknown ({platform.system()})"
