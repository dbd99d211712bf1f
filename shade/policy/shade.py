"""SHADE's policy, Adaptive Priority-aware Prediction: keeps important samples, replaces them by more important ones.

A priority queue over the residents, keyed (importance, uses), and the same pair for every sample ever seen. A miss is
admitted while there is space, then only if it is more important than the least important resident, which leaves; among
equally important residents the least used leaves. Unlike the released code, importance belongs to the sample that the
loss came from, capacity is in bytes, and all ranks share one queue.

References:
    Khan et al., "SHADE: Enable Fundamental Cacheability for Distributed Deep Learning Training", FAST 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from shade.policy.base import EMPTY, POLICIES, EpochPlan
from shade.policy.priority import Key, PriorityPolicy
from shade.types import Indices


@POLICIES.register("shade")
class Shade(PriorityPolicy):
    """Keeps the most important samples; before there is any importance, the first ones."""

    def __init__(self, size_bytes_N: npt.NDArray[np.int64], capacity_bytes: int) -> None:
        self._importance = [0.0] * len(size_bytes_N)
        self._uses = [0] * len(size_bytes_N)
        super().__init__(size_bytes_N, capacity_bytes)

    def _key(self, index: int) -> Key:
        # Uses choose a victim but never admit. In the release they did: the sample just read had always been used once
        # more than those that wait, which is `lru`, with 0.5 % hits at f = 0.1 instead of 10 %.
        return self._importance[index], self._uses[index]

    @override
    def begin_epoch(self, plan: EpochPlan) -> Indices:
        """Takes in the scores; a score that is not a number counts as 0. No sample leaves."""
        if plan.score_N is not None:
            self._importance = np.nan_to_num(plan.score_N, nan=0.0).tolist()
            self._rebuild()
        return EMPTY

    def _touch(self, index: int) -> Sequence[int]:
        self._uses[index] += 1
        if self.resident_N[index]:
            return ()
        return self._admit(index)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Returns the residents and the ghost cache."""
        return {
            **super().state_dict(),
            "importance": np.array(self._importance, dtype=np.float64),
            "uses": np.array(self._uses, dtype=np.int64),
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._importance = np.asarray(state["importance"]).tolist()
        self._uses = np.asarray(state["uses"]).tolist()
        super().load_state_dict(state)
