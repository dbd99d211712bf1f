"""Carries a step's gradient from the backward pass to the merged result, bucket by bucket, in two threads.

::

    backward (training thread)   hooks hand over gradients; no copy, no wait
    compress (thread 1)          device → host, widen, sum over the node, pick, encode; or pick on the device, and
                                 copy what was picked
    exchange (thread 2)          counts, payloads, merge, vote                       → `StepState.MERGED`
    apply    (training thread)   sparse step, host → device, at one fixed point

Nothing is applied before the whole step succeeds, and a residual's old content stays until then. So a step happens on
all ranks or on none.

Legend: D bucket · B buckets.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

import torch

from shade.errors import PayloadError, PeerLostError
from shade.gradient._comm.sparse_all_reduce import SparseAllReduce
from shade.gradient._comm.step import GradientStep, StepState, Undelivered
from shade.gradient._comm.topology import Topology
from shade.gradient._compress.compressor import Key, Sparse
from shade.gradient._compress.device_error_feedback import DeviceErrorFeedback
from shade.gradient._engine.bucket_state import BucketState
from shade.gradient._engine.meter import norm_of
from shade.gradient._kernels.build import prepare
from shade.rank_group import CLOSE_SECONDS, inside_torch


class GradientPipeline:
    """The two threads, which end when this object is closed or collected; ``is_late`` means staleness 1."""

    def __init__(self, topology: Topology, bucket_states: Sequence[BucketState], seed: int, is_late: bool) -> None:
        self._stages = _Stages(topology, tuple(bucket_states), seed, is_late)
        weakref.finalize(self, self._stages.inbox.put, None).atexit = False

    def submit(self, work: GradientStep) -> None:
        """Queues a step that is about to begin; steps are processed in this order."""
        self._stages.inbox.put(work)

    def reclaim(self) -> None:
        """Puts undelivered elements back into the residuals. No step may be in progress."""
        self._stages.reclaim()

    def close(self) -> None:
        """Ends the threads; a step in progress gets 5 seconds. Safe to call twice."""
        self._stages.inbox.put(None)
        for thread in self._stages.threads:
            thread.join(CLOSE_SECONDS)


class _Stages:
    """The threads' side; it does not refer to the pipeline, so that the pipeline can be collected."""

    def __init__(self, topology: Topology, bucket_states: tuple[BucketState, ...], seed: int, is_late: bool) -> None:
        self.inbox: queue.SimpleQueue[GradientStep | None] = queue.SimpleQueue()
        self._undelivered = Undelivered()
        self._topology, self._bucket_states, self._seed = topology, bucket_states, seed
        self._all_reduce = SparseAllReduce(
            topology, [each.bucket.size for each in bucket_states], [each.quantiser for each in bucket_states]
        )
        everything = range(len(bucket_states))
        # One fixed order, whatever order the backward pass fills the buckets in, so that ranks never wait crosswise and
        # two runs do the same. Back layers come first, because the backward pass usually fills them first. A round of
        # counts for each bucket overlaps its exchange with the rest of the backward pass. With staleness 1 the next
        # forward pass hides the exchange, and one round of counts serves all buckets.
        self._compress_order = tuple(reversed(everything))
        self._rounds = (tuple(everything),) if is_late else tuple((number,) for number in reversed(everything))
        self._packed: queue.SimpleQueue[GradientStep | None] = queue.SimpleQueue()
        is_pinned = any(each.bucket.device.type == "cuda" for each in bucket_states)
        largest = max(each.bucket.size for each in bucket_states)
        self._gradient_D = torch.empty(largest, dtype=torch.float32, pin_memory=is_pinned)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.threads = [
            threading.Thread(target=run, name=f"shade-gradient-{name}", daemon=True)
            for name, run in (("compress", self._run_compress), ("exchange", self._run_exchange))
        ]
        for thread in self.threads:
            thread.start()

    def reclaim(self) -> None:
        for number, sparse in self._undelivered.take():
            bucket_state = self._bucket_states[number]
            with self._on_stream(bucket_state.bucket.device):
                bucket_state.feedback.absorb(sparse)

    # ── thread 1 ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run_compress(self) -> None:
        # Compiles during the first forward pass. If that fails, the first step reports the error, on all ranks.
        with contextlib.suppress(Exception):
            prepare()
        while (work := self.inbox.get()) is not None:
            # Thread 2 gets the step first: it sends bucket by bucket, before all are packed.
            self._packed.put(work)
            if work.before is not None:
                # Its residuals may be reverted until then.
                work.before.wait(StepState.AGREED)
                work.before = None
            try:
                self._compress(work)
            except Exception as error:  # noqa: BLE001 - the next counts report it to all ranks
                work.trouble.append(error)
            work.advance(StepState.PACKED)
            for event in work.packed:
                event.set()
        self._packed.put(None)

    def _compress(self, work: GradientStep) -> None:
        share, weight = 1.0, 0.0
        for place, number in enumerate(self._compress_order):
            work.ready[number].wait()
            if work.state is StepState.ABANDONED:
                return
            with inside_torch():
                if place == 0:
                    self.reclaim()
                    share, weight = self._topology.begin(work.num_samples)
                self._compress_bucket(work, number, share, weight)
            work.packed[number].set()

    def _compress_bucket(self, work: GradientStep, number: int, share: float, weight: float) -> None:
        started, bucket = time.perf_counter(), self._bucket_states[number].bucket
        with self._on_stream(bucket.device):
            try:
                gradient_D = self._gather(work, number, share * work.scale)
            except Exception as error:  # noqa: BLE001 - the counts report it to all ranks
                # Not raised here: the other ranks of the node would wait in the sum.
                work.trouble.append(error)
                gradient_D = self._gradient_D[: bucket.size]
            if gradient_D.device.type == "cpu":
                gradient_D = self._topology.reduce(gradient_D)
            if weight and not work.trouble:
                density = 1.0 if bucket.is_dense else work.density
                self._choose(work, number, gradient_D, density)
        if not weight and not work.trouble:
            nothing = Sparse.empty(self._bucket_states[number].feedback.size)
            work.payloads[number] = self._all_reduce.pack(work, number, nothing)
        work.costs.compress_seconds += time.perf_counter() - started

    def _choose(self, work: GradientStep, number: int, gradient_D: torch.Tensor, density: float) -> None:
        feedback = self._bucket_states[number].feedback
        try:
            held = self._held(work, number, gradient_D)
            chosen = feedback.compress(gradient_D, density, Key(self._seed, work.step, number), held)
            work.chosen[number] = chosen
            work.payloads[number] = self._all_reduce.pack(work, number, chosen)
            work.costs.num_chosen += chosen.count
        except Exception as error:  # noqa: BLE001 - the counts report it to all ranks
            work.trouble.append(error)

    def _held(self, work: GradientStep, number: int, gradient_D: torch.Tensor) -> list[slice]:
        """Returns the parts of this rank's share of a bucket for which there is no gradient.

        Their residual stays until there is one again: if no rank has a gradient of a parameter, none steps it.
        """
        bucket, used = self._bucket_states[number].bucket, work.own_used[number]
        if len(used) == work.sizes[number]:
            return []
        share, held = self._topology.part(bucket.size), []
        for place in range(work.sizes[number]):
            part = bucket.part(range(place, place + 1))
            first, last = (min(max(each, share.start), share.stop) - share.start for each in (part.start, part.stop))
            if place in used or first == last:
                continue
            # Another rank of the node may have one, which is in the sum. Such a sum is on the host.
            if gradient_D.device.type != "cpu" or not gradient_D[first:last].any():
                held.append(slice(first, last))
        return held

    def _gather(self, work: GradientStep, number: int, scale: float) -> torch.Tensor:
        """Returns the bucket's gradient where it is picked, on the host or its device."""
        bucket_state, gradients, computed = self._bucket_states[number], work.gradients[number], work.copied[number]
        bucket, host_D = bucket_state.bucket, self._gradient_D[: bucket_state.bucket.size]
        if computed is not None:
            torch.cuda.current_stream(bucket.device).wait_event(computed)
        if isinstance(bucket_state.feedback, DeviceErrorFeedback):
            gradient_D = torch.empty(bucket.size, dtype=torch.float32, device=bucket.device)
            bucket.gather(gradients, gradient_D, scale)
        elif bucket.device.type == "cuda":
            remote_D = torch.empty(bucket.size, dtype=torch.float32, device=bucket.device)
            bucket.gather(gradients, remote_D, scale)
            gradient_D = host_D.copy_(remote_D, non_blocking=True)
        else:
            gradient_D = host_D
            bucket.gather(gradients, gradient_D, scale)
        if bucket.device.type == "cuda":
            # What is freed, the model's stream may write to at once: it does not wait for ours.
            torch.cuda.current_stream(bucket.device).synchronize()
        # Frees the tensors for the next backward pass.
        work.gradients[number] = []
        return gradient_D

    @contextlib.contextmanager
    def _on_stream(self, device: torch.device) -> Iterator[None]:
        # A stream of our own, beside the one that the model computes on.
        if device.type != "cuda":
            yield
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # `stream` alone ends on the thread's device before, GPU 0, and makes a context there.
        with torch.cuda.device(device), torch.cuda.stream(self._streams[device]):
            yield
            # Residuals are saved, and loaded, on other streams.
            self._streams[device].synchronize()

    # ── thread 2 ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run_exchange(self) -> None:
        while (work := self._packed.get()) is not None:
            link = self._topology.link
            before = (link.seconds, link.bytes_sent, link.bytes_received)
            failure: Exception | None = None
            try:
                self._exchange(work)
            except Exception as error:  # noqa: BLE001 - the training thread raises it
                failure = error
            if failure is not None:
                try:
                    self._restore_residuals(work, failure)
                except Exception as error:  # noqa: BLE001 - else the training thread would wait for ever
                    error.__cause__, failure = failure, error
            work.costs.exchange_seconds = link.seconds - before[0]
            work.costs.bytes_sent = link.bytes_sent - before[1]
            work.costs.bytes_received = link.bytes_received - before[2]
            work.payloads = {}
            if work.unvoted is None:
                work.chosen = {}
            work.end(failure)

    def _exchange(self, work: GradientStep) -> None:
        merged: dict[int, Sparse] = {}
        for numbers in self._rounds:
            for number in numbers:
                work.packed[number].wait()
            if numbers is self._rounds[-1]:
                work.wait(StepState.PACKED)
            if work.state is StepState.ABANDONED:
                return
            with inside_torch():
                weights_P, lengths = self._all_reduce.count(work, numbers)
                if numbers is self._rounds[-1]:
                    work.advance(StepState.AGREED)
                if sum(weights_P) > 0:
                    results = self._all_reduce.exchange(work, numbers, weights_P, lengths)
                    merged.update(zip(numbers, results, strict=True))
        everything = [merged[number] for number in sorted(merged)]
        # If the vote loses a rank, others may have applied the step: an elastic engine then needs the result.
        norm = norm_of(everything)
        # The vote also carries a refusal of what the script did since the last step, so it waits for `step`.
        work.sealed.wait()
        if work.state is StepState.ABANDONED:
            return
        work.unvoted = None if work.damage or work.trouble else everything
        before = self._topology.link.seconds
        work.norm = self._all_reduce.vote(work, norm)
        # Each round has counts and payloads.
        work.costs.latency_seconds = (2 * len(self._rounds) + 1) * (self._topology.link.seconds - before)
        work.merged, work.unvoted = everything, None

    def _restore_residuals(self, work: GradientStep, error: Exception) -> None:
        work.add_cause(error)
        # Thread 1 may still be picking.
        work.wait(StepState.PACKED)
        if not isinstance(error, PeerLostError):
            work.unvoted = None
        # After a lost peer or a damaged payload the chosen elements go back into the residuals, and are sent later
        # (decision 0017). A gradient with NaN, or one that a rank has refused, is dropped: its step never was.
        if isinstance(error, (PeerLostError, PayloadError)):
            self._undelivered.put(work)
        else:
            with inside_torch():
                for number in work.chosen:
                    self._bucket_states[number].feedback.undo()
