"""Carries the distances of a fragment to the other ranks and back, on a thread beside the inner steps or at once.

One thread takes the exchanges in the order of their captures, which is the same on every rank. A failed one leaves the
residuals as they were: the fragment's next exchange measures the whole distance anew. Only where a rank was lost
during the vote, so that others may have applied the step, `LocalUpdates` decides.

Legend: D bucket.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shade.errors import PeerLostError
from shade.gradient._comm.sparse_all_reduce import SparseAllReduce
from shade.gradient._comm.step import RESTS, GradientStep, StepState
from shade.gradient._comm.topology import Topology
from shade.gradient._compress.compressor import Key, Sparse
from shade.gradient._engine.bucket_state import BucketState, pack_late, unpack_late
from shade.rank_group import CLOSE_SECONDS, ScriptEndedError, inside_torch


@dataclass
class OuterStep:
    """One exchange of one fragment."""

    work: GradientStep
    numbers: tuple[int, ...]
    """The fragment's buckets."""
    due: int
    """The inner step at which its result is applied; that of the capture: at once."""
    weights: dict[int, Tensor] = field(default_factory=dict)
    """This rank's weights (D,) by bucket at the capture; copies, unless the result is applied at once."""

    def state_dict(self) -> dict[str, Any]:
        """Returns a step whose exchange has ended, in plain values and tensors."""
        weights = [self.weights[number] for number in self.numbers]
        return {"buckets": list(self.numbers), "due": self.due, "result": pack_late(self.work), "weights": weights}

    @classmethod
    def of(cls, state: Mapping[str, Any], bucket_states: Sequence[BucketState]) -> OuterStep:
        """Returns the step of a state; raises StateMismatchError if it is one of other buckets."""
        numbers = tuple(int(each) for each in state["buckets"])
        work = unpack_late(state["result"], [bucket_states[number] for number in numbers])
        assert work is not None  # only steps that have ended are saved
        weights = [torch.as_tensor(each).clone() for each in state["weights"]]
        return cls(work, numbers, int(state["due"]), dict(zip(numbers, weights, strict=True)))


class OuterExchange:
    """Exchanges outer steps over one group; it does not refer to its owner, so that the owner can be collected.

    Args:
        topology: The ranks.
        bucket_states: Of all buckets.
        anchors: By bucket (D,); unchanged while a step of their fragment is under way.
        seed: For the compressors' random choices.
    """

    def __init__(
        self, topology: Topology, bucket_states: Sequence[BucketState], anchors: Sequence[Tensor], seed: int
    ) -> None:
        self._bucket_states, self._anchors, self._seed = bucket_states, anchors, seed
        sizes, quantisers = [each.bucket.size for each in bucket_states], [each.quantiser for each in bucket_states]
        self._all_reduce = SparseAllReduce(topology, sizes, quantisers)
        self._inbox: queue.SimpleQueue[OuterStep | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, outer: OuterStep) -> None:
        """Exchanges a step on the thread; ``outer.work`` says when it has ended."""
        if self._thread is None or not self._thread.is_alive():  # a forked child has none
            self._inbox = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._serve, name="shade-local-updates", daemon=True)
            self._thread.start()
        self._inbox.put(outer)

    def stop(self) -> None:
        """Ends the thread after the steps under way."""
        self._inbox.put(None)

    def close(self) -> None:
        """Ends the thread; a step under way gets 5 seconds. Safe to call twice."""
        self.stop()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def run(self, outer: OuterStep) -> None:
        """Exchanges a step now; no other may be under way."""
        work, failure = outer.work, None
        try:
            self._compress(outer)
        except Exception as error:  # noqa: BLE001 - the counts report it to all ranks
            work.trouble.append(error)
        work.advance(StepState.PACKED)
        try:
            self._agree(outer)
            work.chosen = {}
        except Exception as error:  # noqa: BLE001 - the training thread raises it
            failure = error
            work.add_cause(error)
            if not isinstance(error, PeerLostError):
                work.unvoted = None
            if work.unvoted is None:
                self.forget(outer)
        work.payloads = {}
        work.end(failure)

    def forget(self, outer: OuterStep) -> None:
        """Reverts the residuals to what they were before a step that no rank applies."""
        for number in outer.work.chosen:
            self._bucket_states[number].feedback.undo()
        outer.work.chosen = {}

    def _serve(self) -> None:
        while (outer := self._inbox.get()) is not None:
            with contextlib.suppress(ScriptEndedError), inside_torch():
                self.run(outer)
            # Else its memory would stay until the next one.
            del outer

    def _compress(self, outer: OuterStep) -> None:
        work = outer.work
        for number, weights_D in outer.weights.items():
            bucket, feedback = self._bucket_states[number].bucket, self._bucket_states[number].feedback
            chosen = Sparse.empty(bucket.size)
            # A rank without samples has gone nowhere.
            if work.num_samples:
                density, key = 1.0 if bucket.is_dense else work.density, Key(self._seed, work.step, number)
                chosen = work.chosen[number] = feedback.compress(self._anchors[number] - weights_D, density, key)
            work.payloads[number] = self._all_reduce.pack(work, number, chosen)

    def _agree(self, outer: OuterStep) -> None:
        work, merged = outer.work, list[Sparse]()
        weights_P, lengths = self._all_reduce.count(work, outer.numbers)
        work.advance(StepState.AGREED)
        if all(notice & RESTS for notice in work.notices):
            # No rank has moved since the last step: momentum and decay would act once too often.
            self.forget(outer)
        elif sum(weights_P) > 0:
            merged = self._all_reduce.exchange(work, outer.numbers, weights_P, lengths)
        work.unvoted = None if work.damage or work.trouble else merged
        self._all_reduce.vote(work, 0.0)
        work.merged, work.unvoted = merged, None
