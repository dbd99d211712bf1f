"""Gemini: every snapshot into the memory of peers, in the gaps that training leaves on the network.

Wang et al., SOSP 2023. Each machine's state is kept in its own memory and in those of its group, so that a lost machine
comes back from its peers and not from storage, and saves can be as frequent as steps. The peers' memory is the
cluster's here: servers on the training machines, each chunk on one of them and on `replicas` others of its group
(`_tiers.slot_table`), two snapshots in own memory, storage behind all of it; a restore asks them in that order.

Traffic goes into the gaps. Data-parallel ranks exchange gradients in the backward pass; in the forward pass and in the
optimizer's step the network rests. How long, is measured in every step (`Gaps`), and a chunk is sent when it fits into
what is left of a gap. Where there is no gap for longer than two steps take, it is sent all the same. The interval is
one step if a snapshot's chunks fit into its gaps, and as many as they need otherwise, as the paper has it: that is
``profiled``. Where we differ: the paper sends through NCCL between buffers of the GPUs, we through sockets from the
snapshot in shared memory; and under FSDP the forward pass is not silent, which is not known here.

`Gaps` finds the gaps. Gradients are exchanged during the backward pass, as each becomes ready, and nothing else is. So
a gap begins where an optimizer steps, lasts through what the training does between two steps and through the next
forward pass, and ends where the backward pass begins. Its length is the median of the last ones. Something of known
length is let through if what is left of the gap is long enough for it, by the rate of what went through before. A
sender does not wait for a gap that does not come: after twice the usual step without one, or before anything is known
of the training, everything passes. A training thread that waits for the sender is in no backward pass: the gap is open,
lasts longer than any before, and lets everything through.
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
from shade.checkpoint._strategies.overlap import Overlap
from shade.checkpoint._strategies.windows import PROFILED_STEPS, first_tensor

_PATIENT_STEPS: Final = 2.0
_MEASURED: Final = 32
"""Things let through without a wait, by which a rate is measured: senders take a few ahead of what they send."""
_REMEMBERED: Final = 4
"""Rates; the fastest counts, as what else comes in between (the end of a snapshot) only makes it look slower."""
_LEAST_SECONDS: Final = 0.001
"""Of a wait."""


class Gaps:
    """Lets senders through in gaps."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._turn = threading.Condition()
        self._opened: float | None = time.monotonic()
        """When the gap began; None: there is none."""
        self._last_opened: float | None = None
        self._gap_seconds: deque[float] = deque(maxlen=PROFILED_STEPS)
        self._step_seconds: deque[float] = deque(maxlen=PROFILED_STEPS)
        self._passed: list[tuple[float, int]] = []
        """Times and lengths of the chunks that passed since a sender last had to wait."""
        self._rates: deque[float] = deque(maxlen=_REMEMBERED)
        """Bytes a second."""
        self._closed = False

    def attach(self, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Hangs hooks.

        Args:
            modules: A forward pass of any of them is a gap; the gradient of what it returns ends it.
            optimizers: A step of any of them begins one.
        """
        for module in modules:
            self._hooks.append(module.register_forward_pre_hook(lambda *_: self._begin()))
            self._hooks.append(module.register_forward_hook(lambda *last: self._watch(last[-1])))
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._begin()))

    def _watch(self, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        tensor = first_tensor(output)
        if tensor is not None and tensor.requires_grad:
            tensor.register_hook(lambda _: self._end())  # type: ignore[no-untyped-call]

    def _begin(self) -> None:
        """A gap begins."""
        now = time.monotonic()
        with self._turn:
            if self._opened is None:
                if self._last_opened is not None:
                    self._step_seconds.append(now - self._last_opened)
                self._opened = self._last_opened = now
                self._turn.notify_all()

    def _end(self) -> None:
        """The gap ends."""
        with self._turn:
            if self._opened is not None and self._last_opened is not None:
                self._gap_seconds.append(time.monotonic() - self._opened)
            self._opened = None

    def wait(self, num_bytes: int) -> None:
        """Returns when something may be sent.

        Args:
            num_bytes: Its length.
        """
        with self._turn:
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
        """Whether there is a gap, with time for so many bytes, or longer already than what is usual."""
        if self._opened is None:
            return False
        if not self._gap_seconds or not self._rates:
            return True
        left = self._seconds_left()
        return left <= 0 or num_bytes / max(self._rates) <= left

    def _seconds_left(self) -> float:
        """Of the gap, if it is as long as usual; of no gap, for ever."""
        if self._opened is None:
            return float("inf")
        return self._opened + statistics.median(self._gap_seconds) - time.monotonic()

    def _measure(self) -> None:
        if len(self._passed) == _MEASURED:
            seconds = self._passed[-1][0] - self._passed[0][0]
            self._rates.append(sum(length for _, length in self._passed[:-1]) / max(seconds, 1e-6))
            self._passed.clear()

    def close(self) -> None:
        """Takes the hooks off; everything passes. Safe to call twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        with self._turn:
            self._closed = True
            self._turn.notify_all()


@STRATEGIES.register("gemini")
class Gemini(Overlap):
    """Copies in a thread, sends in gaps."""

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
