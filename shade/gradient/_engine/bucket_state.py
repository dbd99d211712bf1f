"""Holds the state of an engine's buckets, and loads the residuals of a world of another size.

Residuals belong to ranks. Those of missing ranks are added to the remaining ones, in turns; new ranks start with zero.
So the sum of all residuals stays the same. (A residual that was to be averaged over two ranks weighs more among one.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shade.errors import NonFiniteGradientError, StateMismatchError
from shade.gradient._comm.step import GradientStep, StepState
from shade.gradient._comm.topology import Topology
from shade.gradient._compress.bucket import Bucket
from shade.gradient._compress.compressor import COMPRESSORS, Sparse
from shade.gradient._compress.correction import Correction
from shade.gradient._compress.device_error_feedback import DeviceErrorFeedback, is_known
from shade.gradient._compress.error_feedback import ErrorFeedback
from shade.gradient._compress.quantiser import QUANTISERS
from shade.gradient._engine.density import plain_decision, read_decision

WHOLE = "none"
"""The quantiser of buckets that are always sent whole."""


@dataclass(frozen=True)
class BucketState:
    """One bucket of this rank."""

    bucket: Bucket
    feedback: ErrorFeedback | DeviceErrorFeedback
    """For the part that this rank is responsible for, on the device that picks."""
    quantiser: str
    """Name of its quantiser."""


def make_bucket_states(
    topology: Topology,
    buckets: Sequence[Bucket],
    compressor: str,
    quantiser: str,
    corrections: Sequence[Correction | None] = (),
    decay: float = 1.0,
) -> tuple[BucketState, ...]:
    """Makes the state of each bucket; ``corrections`` has one for each optimizer group, or is empty."""
    bucket_states = []
    for bucket in buckets:
        part = topology.part(bucket.size)
        name = WHOLE if bucket.is_dense else quantiser
        size = part.stop - part.start
        parts = COMPRESSORS.get(compressor)(), QUANTISERS.get(name)()
        correction = corrections[bucket.group] if corrections else None
        feedback: ErrorFeedback | DeviceErrorFeedback
        if size == bucket.size and not bucket.is_dense and is_accelerator(bucket.device) and is_known(parts[0]):
            feedback = DeviceErrorFeedback(size, *parts, bucket.device, correction=correction, decay=decay)
        else:
            # Also for sums over a node, which are made on the host.
            feedback = ErrorFeedback(size, *parts, correction=correction, decay=decay)
        bucket_states.append(BucketState(bucket, feedback, name))
    return tuple(bucket_states)


def is_accelerator(device: torch.device) -> bool:
    """Returns whether a device is far from the host, so that only picked elements should cross."""
    return device.type == "cuda"


_CURE = "build the model, the optimizer and the engine as they were when it was saved"


class EngineState:
    """Saves and loads the state of an engine's buckets."""

    def __init__(self, topology: Topology, bucket_states: Sequence[BucketState]) -> None:
        self._world, self._bucket_states = topology.world, tuple(bucket_states)
        self._parts = [[topology.part(each.bucket.size).start, each.feedback.size] for each in bucket_states]

    def state_dict(self, late: GradientStep | None) -> dict[str, Any]:
        """Returns plain values, and residuals as the live memory; ``late`` is the step still to be applied, ended."""
        return {
            "rank": self._world.rank,
            "world_size": self._world.world_size,
            "names": [list(each.bucket.names) for each in self._bucket_states],
            "parts": self._parts,
            "residuals": [each.feedback.state_dict() for each in self._bucket_states],
            "late": None if late is None else pack_late(late),
        }

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> GradientStep | None:
        """Loads residuals from the states of the previous world; returns the step that is still to be applied, if any.

        A state that does not fit raises `StateMismatchError`, before anything changes.
        """
        by_rank = {int(state["rank"]): state for state in states}
        mine = [state for rank, state in sorted(by_rank.items()) if self._is_mine(rank)]
        expected = [list(each.bucket.names) for each in self._bucket_states]
        for state in states:
            if state["names"] != expected:
                raise StateMismatchError.of(f"residuals of the parameters {expected}", state["names"], _CURE)
        for state in mine:
            if [list(part) for part in state["parts"]] != self._parts:
                raise StateMismatchError.of(f"parts of buckets {self._parts}", state["parts"], _CURE)
            for (_, size), residual in zip(self._parts, state["residuals"], strict=True):
                got = torch.as_tensor(residual["residual"]).numel()
                if got != size:
                    raise StateMismatchError.of(f"a residual of {size} elements", got, _CURE)
        # The merged gradient that is still to be applied is the same on every rank: any rank's state has it.
        late = unpack_late(states[0]["late"], self._bucket_states)
        for number, bucket_state in enumerate(self._bucket_states):
            feedback = bucket_state.feedback
            # A rank that no earlier world had starts with a residual of zero.
            found = [state["residuals"][number] for state in mine] or [{"residual": torch.zeros(feedback.size)}]
            feedback.load_state_dict(found[0])
            for residual in found[1:]:
                feedback.merge_from(residual)
        return late

    def _is_mine(self, rank: int) -> bool:
        world = self._world
        # Ranks that are missing now are dealt to the remaining ones in turns.
        return rank == world.rank if rank < world.world_size else rank % world.world_size == world.rank


def pack_late(work: GradientStep) -> dict[str, Any]:
    """Returns a step that has ended and is still to be applied, in plain values and tensors."""
    return {
        "step": work.step,
        "num_samples": work.num_samples,
        "norm": work.norm,
        "used": [None if used is None else sorted(used) for used in work.used],
        "overflow": str(work.error) if isinstance(work.error, NonFiniteGradientError) else None,
        "decision": None if work.decision is None else plain_decision(work.decision),
        # Tensors, not arrays: torch.load reads them with weights_only, its default.
        "indices": [torch.from_numpy(each.indices_K.astype(np.int64)) for each in work.merged],
        "values": [torch.from_numpy(each.values_K.copy()) for each in work.merged],
    }


def unpack_late(state: Mapping[str, Any] | None, bucket_states: Sequence[BucketState]) -> GradientStep | None:
    """Returns the step that `pack_late` packed, of the same buckets."""
    if state is None:
        return None
    work = GradientStep(int(state["step"]), [1] * len(bucket_states), 1.0, int(state["num_samples"]))
    work.norm = float(state["norm"])
    failure = None if state["overflow"] is None else NonFiniteGradientError(state["overflow"])
    if state["decision"] is not None:
        work.decision = read_decision(state["decision"])
    work.used = [None if used is None else set(used) for used in state["used"]]
    for bucket_state, indices, values in zip(bucket_states, state["indices"], state["values"], strict=False):
        indices_K = np.asarray(indices, dtype=np.int64)
        if len(indices_K) and not 0 <= int(indices_K.min()) <= int(indices_K.max()) < bucket_state.bucket.size:
            got = f"indices up to {indices_K.max()}"
            raise StateMismatchError.of(f"a late result of {bucket_state.bucket.size} elements", got, _CURE)
        values_K = np.ascontiguousarray(np.asarray(values, dtype=np.float32))
        work.merged.append(Sparse(indices_K.astype(np.uint32), values_K, bucket_state.bucket.size))
    if failure is None:
        work.advance(StepState.PACKED)
        work.advance(StepState.AGREED)
    work.end(failure)
    return work
