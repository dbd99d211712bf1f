"""Gemini: copies every snapshot into the memory of peers, and sends it in the network's idle gaps.

Here the peers' memory is the cluster's: each chunk lies on one server and on `replicas` others of its group
(`_tiers.slot_table`). A gap begins where an optimizer steps, and ends where the backward pass begins; a chunk passes if
the rest of the gap, by the median of the last ones, is long enough for it.

Wang et al., SOSP 2023. The paper sends through NCCL between GPU buffers, we send through sockets from shared memory.
Under FSDP the forward pass uses the network too, which `Gaps` does not know.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import torch
from typing_extensions import override

from shade.checkpoint._strategies.base import STRATEGIES, StrategyConfig
from shade.checkpoint._strategies.overlap import PROFILED_STEPS, ThreadedCopy
from shade.checkpoint._strategies.windows import ModuleHook, at_gradient

_PATIENT_STEPS: Final = 2.0
_MEASURED: Final = 32
"""Chunks that pass without a wait and give one rate; a few, because senders ask ahead of what they send."""
_REMEMBERED: Final = 4
"""Rates that are kept; the fastest counts, because pauses between snapshots only slow a rate down."""
_LEAST_SECONDS: Final = 0.001
"""Shortest wait."""


class Gaps:
    """A gate that lets senders pass in gaps of the network traffic."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._turn = threading.Condition()
        self._opened: float | None = time.monotonic()
        """When the gap began; None outside a gap."""
        self._last_opened: float | None = None
        self._gap_seconds: deque[float] = deque(maxlen=PROFILED_STEPS)
        self._step_seconds: deque[float] = deque(maxlen=PROFILED_STEPS)
        self._passed: list[tuple[float, int]] = []
        """Time and length of each chunk that has passed since the last wait."""
        self._rates: deque[float] = deque(maxlen=_REMEMBERED)
        """Bytes a second."""
        self._closed = False

    def attach(self, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Adds hooks: a forward pass and an optimizer's step begin a gap, the gradient of a module's output ends it."""
        for module in modules:
            self._hooks.append(module.register_forward_pre_hook(ModuleHook(lambda *_: self._begin())))
            self._hooks.append(module.register_forward_hook(ModuleHook(lambda *last: at_gradient(last[-1], self._end))))
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._begin()))

    def _begin(self) -> None:
        now = time.monotonic()
        with self._turn:
            if self._opened is None:
                if self._last_opened is not None:
                    self._step_seconds.append(now - self._last_opened)
                self._opened = self._last_opened = now
                self._turn.notify_all()

    def _end(self) -> None:
        with self._turn:
            if self._opened is not None and self._last_opened is not None:
                self._gap_seconds.append(time.monotonic() - self._opened)
            self._opened = None

    def wait(self, num_bytes: int) -> None:
        """Waits until `num_bytes` may be sent."""
        with self._turn:
            # A chunk waits for two steps at most: a network that is never idle must not keep a snapshot back.
            patience = _PATIENT_STEPS * statistics.median(self._step_seconds) if self._step_seconds else 0.0
            until = time.monotonic() + patience
            while not (self._closed or self._fits(num_bytes)):
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._passed.clear()
                self._turn.wait(max(_LEAST_SECONDS, min(left, self._seconds_left())))
            self._passed.append((time.monotonic(), num_bytes))
            self._measure()

    def _fits(self, num_bytes: int) -> bool:
        """Whether a gap is open that has time for so many bytes, or lasts longer than usual already."""
        if self._opened is None:
            return False
        if not self._gap_seconds or not self._rates:
            return True
        left = self._seconds_left()
        return left <= 0 or num_bytes / max(self._rates) <= left

    def _seconds_left(self) -> float:
        """Returns the seconds until the gap ends, if it is as long as usual; infinity outside a gap."""
        if self._opened is None:
            return float("inf")
        return self._opened + statistics.median(self._gap_seconds) - time.monotonic()

    def _measure(self) -> None:
        if len(self._passed) == _MEASURED:
            seconds = self._passed[-1][0] - self._passed[0][0]
            self._rates.append(sum(length for _, length in self._passed[:-1]) / max(seconds, 1e-6))
            self._passed.clear()

    def close(self) -> None:
        """Removes the hooks and lets everything pass. Safe to call twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        with self._turn:
            self._closed = True
            self._turn.notify_all()


@STRATEGIES.register("gemini")
class Gemini(ThreadedCopy):
    """A strategy that copies in a thread and sends in gaps."""

    config = StrategyConfig(every="profiled", replicas=1, buffers=2)

    def __init__(self) -> None:
        super().__init__()
        self._gaps = Gaps()

    @override
    def attach(self, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._gaps.attach(modules, optimizers)

    @override
    def before_chunk(self, num_bytes: int) -> None:
        self._gaps.wait(num_bytes)

    @override
    def close(self) -> None:
        self._gaps.close()
        super().close()
