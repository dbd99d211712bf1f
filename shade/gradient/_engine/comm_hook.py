"""Compresses gradients below DistributedDataParallel, which keeps its loop, its optimizer and its buckets.

::

    ddp = DistributedDataParallel(model)
    state = SparseState(ddp, density=0.01)
    ddp.register_comm_hook(state, sparse_hook)

DDP hands over a bucket's gradient when the backward pass has filled it, and gets the averaged one back, dense, in the
same memory. Compared with `_engine.engine` this costs a dense step, and there is no staleness.

An error on any rank is raised by ``backward()`` on all of them, so that training may continue after
`NonFiniteGradientError`; the gradients are NaN then. With a ``scaler`` NaN and infinity are no error: every rank's
gradients are NaN, ``scaler.step`` skips on all, and the step is dropped.

The choice of elements depends on the buckets, so a resumed run, whose first step has DDP's first buckets again, is not
bit-identical to the uninterrupted one.

Invariant: per parameter, what was sent plus the residual is the sum of the gradients.

Legend: D bucket.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types themselves.

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shade.errors import ConfigError, NonFiniteGradientError, PayloadError, PeerLostError, StateMismatchError
from shade.gradient._comm.sparse_all_reduce import SparseAllReduce
from shade.gradient._comm.step import GradientStep
from shade.gradient._comm.topology import FlatTopology
from shade.gradient._comm.transport import Transport
from shade.gradient._compress.compressor import COMPRESSORS, Key, Sparse
from shade.gradient._compress.correction import STEPS, Correction
from shade.gradient._compress.error_feedback import ErrorFeedback
from shade.gradient._compress.quantiser import QUANTISERS
from shade.gradient._engine.density import WarmUp
from shade.gradient._engine.gradient_hooks import LossScale
from shade.gradient._engine.replica import check_same_setup
from shade.rank_group import CLOSE_SECONDS, TIMEOUT_SECONDS, ScriptEndedError, inside_torch

_NO_BACKWARD = -1
"""The graph task while DDP mirrors the other ranks' steps for a rank whose inputs are used up (``ddp.join()``)."""


@dataclass(frozen=True)
class _Job:
    """One bucket of one step."""

    number: int
    buffer: Tensor
    """Flat; the gradient itself where it is sparse, as an embedding's."""
    parameters: list[Tensor]
    is_last: bool
    computed: torch.cuda.Event | None
    future: torch.futures.Future[Tensor]


class SparseState:
    """The state of `sparse_hook` between steps. Its constructor is collective; `close` it at the end.

    Made before torch.distributed is initialised, it meets the other ranks in the first backward pass.

    Args:
        model: The module, bare or wrapped, for its parameters' names.
        compressor: Name in `COMPRESSORS`.
        density: Kept fraction, or a `WarmUp` of it.
        quantiser: Name in `QUANTISERS`.
        correction: Applied to each rank's gradient, for torch.optim.SGD without momentum.
        scaler: The script's; read, never changed.
        group: DDP's ranks; None: all.
        timeout_seconds: Longest silence of a rank.
        seed: For the compressors' random choices; the same on every rank.

    Raises:
        ConfigError: An argument is out of range, or differs between ranks; raised on all ranks.
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
        def make(size: int) -> ErrorFeedback:
            return ErrorFeedback(size, make_compressor(), make_quantiser(), correction=correction)

        refusal: Exception | None = None
        try:
            make_compressor, make_quantiser = COMPRESSORS.get(compressor), QUANTISERS.get(quantiser)
            self._warm_up = density if isinstance(density, WarmUp) else WarmUp(density)
        except Exception as error:  # noqa: BLE001 - raised once the others know it, or they would wait for this rank
            refusal = error
        bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        settings = {
            "compressor, quantiser, seed": [compressor, quantiser, seed],
            "density, correction": [repr(density), repr(correction)],
            "scaler": LossScale(scaler).skips,
        }
        self._topology: FlatTopology | None = None

        def meet() -> FlatTopology:
            world = Transport(group, timeout_seconds=timeout_seconds)
            check_same_setup(world, bare, [], settings, refusal)
            return FlatTopology(world)

        self._meet = meet
        if refusal is not None or not dist.is_available() or dist.is_initialized():
            self._topology = meet()
        self.num_samples = 1
        """Weight of this rank's gradient; set it before the backward pass."""
        self._step, self._is_under_way = 0, False
        self._residual_store = ResidualStore(bare, make)
        self._quantiser, self._seed = quantiser, seed
        self._scale = LossScale(scaler)
        self._unscale = 1.0
        self._chosen: list[tuple[ErrorFeedback, Sparse]] = []
        """What this step sent, by bucket; its end decides what the residuals get back."""
        self._error: Exception | None = None
        self._damage: list[Exception] = []
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run, args=(self._inbox, weakref.ref(self)), name="shade-gradient-hook", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._inbox.put, None).atexit = False

    @property
    def step(self) -> int:
        """Backward passes that were exchanged, the one under way included."""
        return self._step + self._is_under_way

    def state_dict(self) -> dict[str, Any]:
        """Returns the residuals by parameter. Call it between two steps."""
        self._settle()
        return {"step": self.step, "kept": self._residual_store.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads this rank's `state_dict`, whatever buckets DDP has now.

        Args:
            state: Of the same model.

        Raises:
            StateMismatchError: It has other parameters; nothing was loaded.
        """
        self._settle()
        self._residual_store.load_state_dict(state["kept"])
        self._step = int(state["step"])

    def close(self) -> None:
        """Ends the thread and frees the group. Safe to call twice."""
        self._inbox.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._topology is not None:
            self._topology.close()

    def _submit(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """Queues one of DDP's buckets; returns the future of its averaged gradient."""
        buffer = bucket.buffer()
        if self._topology is None:
            self._topology = self._meet()
        if bucket.index() == 0:
            self._settle()
            self._is_under_way, self._unscale = True, self._scale.unscale
        is_shadow = torch._C._current_graph_task_id() == _NO_BACKWARD
        if bucket.is_last() and not is_shadow:
            _after_backward(self._raise)
        computed, devices = None, None
        if buffer.is_cuda:
            computed, devices = torch.cuda.current_stream(buffer.device).record_event(), [buffer.device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        job = _Job(bucket.index(), buffer, list(bucket.parameters()), bucket.is_last(), computed, future)
        self._inbox.put(job)
        if not is_shadow:
            return future
        # Without a backward pass there is no end of one: the future's own value raises the error.

        def checked(done: torch.futures.Future[Tensor]) -> Tensor:
            self._raise()
            return done.value()

        return future.then(checked)

    # ── on the thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def _process(self, job: _Job) -> None:
        try:
            average_D = self._average(job)
        except Exception as error:  # noqa: BLE001 - all ranks have it, and _raise raises it
            self._error = self._error or error
            # NaN, in case a script steps anyway.
            # A failed future would leave DDP in a state that it cannot continue from (decision 0017).
            average_D = np.full(job.buffer.numel(), float("nan"), dtype=np.float32)
        try:
            job.future.set_result(_filled(job.buffer, torch.from_numpy(average_D)))
        except Exception as error:  # noqa: BLE001 - better than a backward pass that never returns
            self._error = self._error or error
            job.future.set_exception(error)  # type: ignore[arg-type]

    def _raise(self) -> None:
        if self._error is not None and not (isinstance(self._error, NonFiniteGradientError) and self._scale.skips):
            raise self._error

    def _average(self, job: _Job) -> Any:
        """Compresses, exchanges and merges; all ranks fail or none."""
        assert self._topology is not None, "_submit made it"
        size = job.buffer.numel()
        all_reduce = SparseAllReduce(self._topology, [0] * job.number + [size], [self._quantiser] * (job.number + 1))
        work = GradientStep(self._step, [], self._warm_up.at(self._step), self.num_samples)
        work.damage = self._damage
        try:
            feedback = self._residual_store.of(job.parameters)
            if job.computed is not None:
                job.computed.synchronize()
            dense = job.buffer.to_dense() if job.buffer.is_sparse else job.buffer
            # Residuals are in unscaled units, so that a new scale does not spoil them.
            gradient_D = dense.detach().reshape(-1).to("cpu", torch.float32, copy=True).mul_(self._unscale)
            chosen = Sparse.empty(size)
            if self.num_samples:
                # DDP drops the average of a parameter that no rank used in the step (``find_unused_parameters``): its
                # residual stays until the rank uses it again.
                unused = self._residual_store.unused(gradient_D, job.parameters)
                key = Key(self._seed, self._step, job.number)
                chosen = feedback.compress(gradient_D, work.density, key, unused)
                self._chosen.append((feedback, chosen))
            work.payloads[job.number] = all_reduce.pack(work, job.number, chosen)
        except Exception as error:  # noqa: BLE001 - the counts report it to all ranks
            work.trouble.append(error)
        weights_P, lengths = all_reduce.count(work, [job.number])
        average_D = np.zeros(size, dtype=np.float32)
        if sum(weights_P) > 0:
            (average,) = all_reduce.exchange(work, [job.number], weights_P, lengths)
            average_D = average.dense()
        if job.is_last:
            all_reduce.vote(work, 0.0)
        if self._unscale != 1.0:
            average_D *= np.float32(1.0 / self._unscale)
        return average_D

    def _settle(self) -> None:
        """Between two steps, reverts or keeps the residuals of a failed one."""
        chosen, self._chosen = self._chosen, []
        error, self._error = self._error, None
        self._damage = []
        self._step += self._is_under_way
        self._is_under_way = False
        for feedback, sent in chosen:
            # As in the engine's pipeline.
            if isinstance(error, (PeerLostError, PayloadError)):
                feedback.absorb(sent)
            elif error is not None:
                feedback.undo()


def sparse_hook(state: SparseState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Averages a bucket over the ranks by samples; for ``ddp.register_comm_hook``.

    Args:
        state: This rank's.
        bucket: DDP's.

    Returns:
        The mean, in the bucket's memory.
    """
    return state._submit(bucket)


def _filled(buffer: Tensor, content_D: Tensor) -> Tensor:
    """Returns the buffer with new content; in place of a sparse one another, which holds the rows that are not zero."""
    if not buffer.is_sparse:
        return buffer.copy_(content_D)
    dense = content_D.to(buffer.device, buffer.dtype).view(buffer.shape)
    return dense.to_sparse(buffer.sparse_dim())


def _after_backward(call: Callable[[], None]) -> None:
    """Queues a call for the end of the running backward pass, after DDP's own call."""
    queue_callback = torch.autograd.Variable._execution_engine.queue_callback
    # DDP is still to queue its call. A call that is queued by a call comes behind it.
    queue_callback(lambda: queue_callback(call))


def _run(inbox: queue.SimpleQueue[_Job | None], owner: weakref.ref[SparseState]) -> None:
    while (job := inbox.get()) is not None:
        state = owner()
        if state is None:
            return
        with contextlib.suppress(ScriptEndedError), inside_torch():
            state._process(job)
        # The next get() may wait for long; until then the thread must not keep its owner alive.
        del state


class ResidualStore:
    """One `ErrorFeedback` for each of DDP's buckets; ``make`` makes one of a given size."""

    def __init__(self, model: nn.Module, make: Callable[[int], ErrorFeedback]) -> None:
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        # DDP lays a complex gradient out as pairs of real numbers.
        self._sizes = {name: each.numel() * (1 + each.is_complex()) for each, name in self._names.items()}
        self._make = make
        self._buckets: dict[tuple[str, ...], ErrorFeedback] = {}
        self._by_parameter: dict[str, dict[str, Tensor]] = {}

    def of(self, parameters: Sequence[Tensor]) -> ErrorFeedback:
        """Returns the feedback of a bucket, with the residuals that its parameters had in other buckets."""
        unknown = [parameter for parameter in parameters if parameter not in self._names]
        if unknown:
            got = f"one of shape {tuple(unknown[0].shape)}"
            raise ConfigError.of("parameters of the state's model", got, "give SparseState the model that DDP wraps")
        key = tuple(self._names[parameter] for parameter in parameters)  # type: ignore[index]
        if key not in self._buckets:
            # DDP rebuilds its buckets after the first step, and in another run, so residuals belong to parameters.
            self._split_buckets(set(key))
            feedback = self._make(sum(self._sizes[name] for name in key))
            by_parameter = {name: self._by_parameter.pop(name, {}) for name in key}
            kinds = {kind for kept in by_parameter.values() for kind in kept}
            if kinds:
                zeros = {name: torch.zeros(self._sizes[name]) for name in key}
                whole = {
                    kind: torch.cat([by_parameter[name].get(kind, zeros[name]) for name in key])
                    for kind in kinds - {STEPS}
                }
                counted = [kept[STEPS] for kept in by_parameter.values() if STEPS in kept]
                # The moments of one bucket share a count. The lowest counts no gradient that a moment has not had.
                feedback.load_state_dict(whole | ({STEPS: torch.stack(counted).amin(dim=0)} if counted else {}))
            self._buckets[key] = feedback
        return self._buckets[key]

    def unused(self, gradient_D: Tensor, parameters: Sequence[Tensor]) -> list[slice]:
        """Returns the parts of a bucket whose parameters have no gradient."""
        ends = np.cumsum([0, *(self._sizes[self._names[each]] for each in parameters)]).tolist()  # type: ignore[index]
        parts = [slice(*bounds) for bounds in pairwise(ends)]
        # Most gradients show in their first elements that they are not all zero.
        return [part for part in parts if not (gradient_D[part][:64].any() or gradient_D[part].any())]

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Returns copies of the residuals, by parameter."""
        state = {name: dict(kept) for name, kept in self._by_parameter.items()}
        for key, feedback in self._buckets.items():
            state |= self._split(key, feedback)
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Loads a `state_dict`, whatever buckets there will be; `StateMismatchError` if it has other parameters."""
        by_parameter = {
            name: {kind: torch.as_tensor(each).clone() for kind, each in k.items()} for name, k in state.items()
        }
        for name, kept in by_parameter.items():
            got = {kind: each.numel() for kind, each in kept.items() if kind != STEPS}
            size = self._sizes.get(name)
            if set(got.values()) - {size}:
                unknown = f"no residual of {name!r}: the model has no such parameter"
                expected = unknown if size is None else f"a residual of {name!r} with {size} elements"
                raise StateMismatchError.of(expected, got, "build the model as it was when it was saved")
        self._buckets, self._by_parameter = {}, by_parameter

    def _split_buckets(self, names: set[str]) -> None:
        """Drops the buckets that hold any of these parameters, and keeps their residuals by parameter."""
        for key in [key for key in self._buckets if names & set(key)]:
            self._by_parameter |= self._split(key, self._buckets.pop(key))

    def _split(self, key: tuple[str, ...], feedback: ErrorFeedback) -> dict[str, dict[str, Tensor]]:
        state = feedback.state_dict()
        sizes = [self._sizes[name] for name in key]
        split: dict[str, Sequence[Tensor]] = {
            kind: [each] * len(key) if kind == STEPS else torch.split(each.clone(), sizes)
            for kind, each in state.items()
        }
        return {name: {kind: parts[place] for kind, parts in split.items()} for place, name in enumerate(key)}
