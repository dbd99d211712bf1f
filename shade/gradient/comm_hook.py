"""The first door: DistributedDataParallel keeps its loop, its optimizer and its buckets, and sends a hundredth.

::

    ddp = DistributedDataParallel(model)
    state = SparseState(ddp, density=0.01)
    ddp.register_comm_hook(state, sparse_hook)

DDP hands over a bucket's gradient when the backward pass has filled it, and gets the averaged one back, dense, in the
same memory: any optimizer, schedule and clipping works as before. A thread compresses and exchanges while the backward
pass goes on. Against `shade.gradient.engine` this costs a dense step and gives no staleness. Buckets are DDP's, and so
is their order, the same on all ranks; what is kept back belongs to parameters (`shade.gradient.kept`).

An error on any rank comes out of ``backward()`` on all of them, after DDP has put its own things in order, so that
training may go on after `NonFiniteGradientError`; gradients are NaN then, should somebody step all the same. With a
``scaler`` NaN and infinity are no error: every rank's gradients are NaN, ``scaler.step`` skips on all, and the step is
forgotten. What is kept is in unscaled units: a scale that changes does not spoil it.

Invariant: per parameter, what was sent plus what is kept is the sum of the gradients.

Legend: D bucket.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types themselves.
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shade.errors import NonFiniteGradientError
from shade.gradient.compressor import COMPRESSORS, Key
from shade.gradient.correction import Correction
from shade.gradient.density import WarmUp
from shade.gradient.error_feedback import ErrorFeedback
from shade.gradient.exchange import TIMEOUT_SECONDS, Exchange
from shade.gradient.kept import Keeper
from shade.gradient.quantiser import QUANTISERS
from shade.gradient.route import StraightRoute
from shade.gradient.scaling import ScaleKeeper
from shade.gradient.sparse import Sparse
from shade.gradient.trade import Trade
from shade.gradient.work import StepWork

_JOIN_SECONDS = 5.0


@dataclass(frozen=True)
class _Job:
    """One bucket of one step."""

    number: int
    buffer_D: Tensor
    parameters: list[Tensor]
    is_last: bool
    computed: torch.cuda.Event | None
    future: torch.futures.Future[Tensor]


class SparseState:
    """What `sparse_hook` remembers between steps. Collective to make; `close` it at the end.

    Args:
        model: The module, bare or wrapped: for its parameters' names.
        compressor: Name in `COMPRESSORS`.
        density: Kept fraction, or a `WarmUp` of it.
        quantiser: Name in `QUANTISERS`.
        correction: Of `ErrorFeedback`, for torch.optim.SGD without momentum.
        scaler: The script's; read, never changed.
        group: DDP's ranks; None: all.
        timeout_seconds: Longest silence of a rank.
        seed: Of what compressors draw; the same on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        compressor: str = "threshold-v",
        density: float | WarmUp = 0.01,
        quantiser: str = "bf16",
        correction: Correction | None = None,
        scaler: torch.amp.GradScaler | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        seed: int = 0,
    ) -> None:
        make_compressor, make_quantiser = COMPRESSORS.get(compressor), QUANTISERS.get(quantiser)

        def make(size: int) -> ErrorFeedback:
            return ErrorFeedback(size, make_compressor(), make_quantiser(), correction=correction)

        self.num_samples = 1
        """Weight of this rank's gradient; set it before the backward pass."""
        self.step = 0
        """Backward passes that were exchanged."""
        bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._keeper = Keeper(bare, make)
        self._warm_up = density if isinstance(density, WarmUp) else WarmUp(density)
        self._quantiser, self._seed = quantiser, seed
        self._scale = ScaleKeeper(scaler)
        self._unscale = 1.0
        self._chosen: list[tuple[ErrorFeedback, Sparse]] = []
        """In this step, so that all of it can be undone or taken back."""
        self._error: Exception | None = None
        self._damage: list[Exception] = []
        self._route = StraightRoute(Exchange(group, timeout_seconds=timeout_seconds))
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run, args=(self._inbox, weakref.ref(self)), name="shade-gradient-hook", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._inbox.put, None).atexit = False

    def state_dict(self) -> dict[str, Any]:
        """What is kept back, by parameter. Between two steps."""
        self._settle()
        return {"step": self.step, "kept": self._keeper.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict` of this rank, whatever buckets DDP cuts now.

        Args:
            state: Of the same model.

        Raises:
            StateMismatchError: Of other parameters; nothing was loaded.
        """
        self._settle()
        self._keeper.load_state_dict(state["kept"])
        self.step = int(state["step"])

    def close(self) -> None:
        """Ends the thread and frees the group. Safe to call twice."""
        self._inbox.put(None)
        self._thread.join(_JOIN_SECONDS)
        self._route.close()

    def submit(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """For `sparse_hook`: takes a bucket.

        Args:
            bucket: As DDP hands it over.

        Returns:
            Its averaged gradient, some time.
        """
        buffer_D = bucket.buffer()
        if bucket.index() == 0:
            self._settle()
            self._unscale = self._scale.unscale
        if bucket.is_last():
            _after_backward(self._raise)
        computed, devices = None, None
        if buffer_D.is_cuda:
            computed, devices = torch.cuda.current_stream(buffer_D.device).record_event(), [buffer_D.device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        job = _Job(bucket.index(), buffer_D, list(bucket.parameters()), bucket.is_last(), computed, future)
        self._inbox.put(job)
        return future

    # ── on the thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def _work(self, job: _Job) -> None:
        """One bucket: its error, or that of the step, is the future's."""
        try:
            average_D = self._average(job)
        except Exception as error:  # noqa: BLE001 - every rank is told, and DDP raises it
            self._error = self._error or error
            average_D = None
        if average_D is not None:
            job.buffer_D.copy_(torch.from_numpy(average_D))
        else:
            job.buffer_D.fill_(float("nan"))
        job.future.set_result(job.buffer_D)

    def _raise(self) -> None:
        """When DDP has all results: the step's error, on all ranks."""
        if self._error is not None and not (isinstance(self._error, NonFiniteGradientError) and self._scale.skips):
            raise self._error

    def _average(self, job: _Job) -> Any:
        """Compresses, exchanges and merges; all ranks fail or none."""
        if job.computed is not None:
            job.computed.synchronize()
        gradient_D = job.buffer_D.detach().to("cpu", torch.float32, copy=True).mul_(self._unscale)
        size = gradient_D.numel()
        trade = Trade(self._route, [0] * job.number + [size], [self._quantiser] * (job.number + 1))
        work = StepWork(self.step, [], self._warm_up.at(self.step), self.num_samples)
        work.damage = self._damage
        try:
            feedback = self._keeper.of(job.parameters)
            chosen = Sparse(np.empty(0, np.uint32), np.empty(0, np.float32), size)
            if self.num_samples:
                chosen = feedback.compress(gradient_D, work.density, Key(self._seed, self.step, job.number))
                self._chosen.append((feedback, chosen))
            work.payloads[job.number] = trade.pack(work, job.number, chosen)
        except Exception as error:  # noqa: BLE001 - told to all by the counts
            work.trouble.append(error)
        weights_P, lengths = trade.count(work, [job.number])
        average_D = np.zeros(size, dtype=np.float32)
        if sum(weights_P) > 0:
            (average,) = trade.bring(work, [job.number], weights_P, lengths)
            average_D = average.dense()
        if job.is_last:
            trade.vote(work, 0.0)
        if self._unscale != 1.0:
            average_D *= np.float32(1.0 / self._unscale)
        return average_D

    def _settle(self) -> None:
        """Between two steps: the residuals of a step that failed."""
        chosen, self._chosen = self._chosen, []
        error, self._error = self._error, None
        self._damage = []
        if chosen or error is not None:
            self.step += 1
        for feedback, sparse in chosen:
            if isinstance(error, NonFiniteGradientError):
                feedback.undo()
            elif error is not None:
                feedback.absorb(sparse)


def sparse_hook(state: SparseState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """For ``ddp.register_comm_hook``: the ranks' weighted mean of a bucket, through a slow link.

    Args:
        state: This rank's.
        bucket: DDP's.

    Returns:
        The mean, in the bucket's memory.
    """
    return state.submit(bucket)


def _after_backward(call: Callable[[], None]) -> None:
    """Has something called at the end of the running backward pass, after DDP, which is still to queue its own end."""
    queue_callback = torch.autograd.Variable._execution_engine.queue_callback
    queue_callback(lambda: queue_callback(call))


def _run(inbox: queue.SimpleQueue[_Job | None], owner: weakref.ref[SparseState]) -> None:
    """The thread; does not keep its owner alive."""
    while (job := inbox.get()) is not None:
        state = owner()
        if state is None:
            return
        state._work(job)
        del state
