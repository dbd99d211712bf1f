"""Holds the weights that all ranks have in common, and steps them along the mean distance of the ranks.

Invariant: replicas that took the same steps hold the same bits, on any processor: products are rounded before they are
added, since a fused operation has other bits.

Legend: D bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shade.errors import StateMismatchError
from shade.gradient._comm.transport import Transport
from shade.gradient._compress.bucket import Bucket
from shade.gradient._compress.compressor import Sparse


class Anchors:
    """One anchor for each bucket, and its momentum.

    Args:
        buckets: Their weights are the first anchors.
        lr: Rate of the outer step.
        momentum: Nesterov's; 0: none is kept.
    """

    def __init__(self, buckets: Sequence[Bucket], lr: float, momentum: float) -> None:
        self._buckets, self._lr, self._momentum = tuple(buckets), lr, momentum
        self.weights = [bucket.weights_D.clone() for bucket in buckets]
        """By bucket (D,); live."""
        self._velocities = [torch.zeros_like(each) for each in self.weights] if momentum else []

    def step(self, number: int, merged: Sparse) -> None:
        """Steps one anchor."""
        anchor_D = self.weights[number]
        if not self._momentum and 4 * merged.count <= merged.size:
            anchor_D.numpy()[merged.indices_K] -= merged.values_K * np.float32(self._lr)
            return
        distance_D = torch.from_numpy(merged.dense())
        if self._momentum:
            velocity_D = self._velocities[number].mul_(self._momentum).add_(distance_D)
            distance_D.add_(velocity_D * self._momentum)
        anchor_D.sub_(distance_D.mul_(self._lr))

    def begin_from(self, number: int, captured_D: Tensor | None = None) -> None:
        """Gives a bucket's parameters the anchor, plus what they have changed by since their capture; None: nothing."""
        bucket, anchor_D = self._buckets[number], self.weights[number]
        bucket.rebind()
        if captured_D is None:
            bucket.weights_D.copy_(anchor_D)
        else:
            bucket.refresh()
            bucket.weights_D.sub_(captured_D).add_(anchor_D)
        bucket.publish()

    def broadcast(self, world: Transport, source: int) -> None:
        """Gives every rank anchors and momentum of rank ``source``. Collective."""
        for tensor_D in (*self.weights, *self._velocities):
            world.broadcast(tensor_D, source)

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Returns the live memory."""
        return {"anchors": list(self.weights), "velocities": list(self._velocities)}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises StateMismatchError for a state of other buckets or without the momentum."""
        for name, mine in self.state_dict().items():
            sizes, got = ([torch.as_tensor(each).numel() for each in some] for some in (mine, state[name]))
            if got != sizes:
                cure = "build the model and what updates it as they were"
                raise StateMismatchError.of(f"{name} of {sizes} elements", got, cure)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state that was checked."""
        for name, mine in self.state_dict().items():
            for own_D, loaded_D in zip(mine, state[name], strict=True):
                own_D.copy_(torch.as_tensor(loaded_D))
