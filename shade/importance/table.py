"""Holds one score per sample, keyed by the sample's index alone.

SHADE's release keyed scores by position in a list that was shuffled and sorted in between, so losses landed on the
wrong samples (rank correlation 0.00). Here a report carries its indices; there is no position to get wrong.

Of several reports for one sample in one batch the last counts. Not locked: while a `ScoreMerger` runs, it is the only
writer, and readers flush it first.

Invariant: ``score_N`` is finite and ≥ 0; it depends only on the sequence of batches.

Legend: N data set · B batch of this rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shade.errors import ConfigError
from shade.importance.base import SCORES
from shade.types import Bools, Floats, Indices


class ScoreSnapshot(NamedTuple):
    """A copy of the table; later updates do not change it."""

    score_N: Floats
    """float32, finite, ≥ 0; 0 where not seen."""
    seen_N: Bools


class ImportanceTable:
    """The (N,) table of scores.

    Args:
        num_samples: N.
        score: Name of a strategy in `SCORES`: ``target-grad``, ``loss``, ``rank`` or ``grad-norm``. None takes the
            default, and that of a state which is loaded.
        default: Such a name.

    Raises:
        ConfigError: ``num_samples`` below 1.
        UnknownNameError: No such strategy.
    """

    def __init__(self, num_samples: int, score: str | None = None, default: str = "loss") -> None:
        if num_samples < 1:
            raise ConfigError.of("num_samples ≥ 1", num_samples, "check the path of the data set")
        self.num_samples = num_samples
        self._is_chosen = score is not None
        self.score_N: Floats = np.zeros(num_samples, dtype=np.float32)
        self.seen_N: Bools = np.zeros(num_samples, dtype=bool)
        self.loss_N: Floats = np.full(num_samples, np.nan, dtype=np.float32)
        """The last reported value of each sample since `take_losses`, unchanged; NaN if there is none."""
        self.num_ignored = 0
        """Reports dropped because the loss was not finite."""
        self._use(score or default)

    def _use(self, score: str) -> None:
        self._strategy = SCORES.get(score)()
        self.score = score
        self.takes_losses = self._strategy.takes_losses
        """Whether the reported values are losses, and not another measure of importance."""

    def update(self, index_B: Indices, loss_B: Floats) -> None:
        """Takes in one batch of reports.

        Args:
            index_B: int64 (B,), sample indices; may be empty.
            loss_B: float32 (B,): what the strategy asks for, usually the loss.

        Raises:
            ConfigError: An index outside the data set, or unequal lengths. Nothing was changed.
        """
        if index_B.dtype != np.int64:
            raise ConfigError.of("int64 indices", index_B.dtype, "keep indices integers: floats cannot hold large ones")
        if len(index_B) != len(loss_B):
            raise ConfigError.of(f"{len(index_B)} losses, one per index", len(loss_B), "use reduction='none'")
        if len(index_B) == 0:
            return
        # As an unsigned number a negative index is huge: one comparison finds both kinds of bad index.
        if np.ascontiguousarray(index_B).view(np.uint64).max() >= self.num_samples:
            wrong = int(index_B[(index_B < 0) | (index_B >= self.num_samples)][0])
            cure = "report the index the data set returned"
            raise ConfigError.of(f"sample indices in [0, {self.num_samples})", wrong, cure)
        # A loss that is not finite says that training diverged, not that the sample matters; one infinity would own the
        # whole sampling budget.
        finite_B = np.isfinite(loss_B)
        if not finite_B.all():
            index_B, loss_B = index_B[finite_B], loss_B[finite_B]
            if not self.num_ignored:
                warnings.warn(
                    "report() got a loss that is NaN or infinite; it is left out, and its sample keeps the importance "
                    "that it had",
                    stacklevel=2,
                )
            self.num_ignored += len(finite_B) - len(index_B)
        self.score_N[index_B] = self._strategy.rescore(self.score_N[index_B], self.seen_N[index_B], loss_B)
        # After rescore, which must see whether the sample was new.
        self.seen_N[index_B] = True
        self.loss_N[index_B] = loss_B

    def take_losses(self) -> Floats:
        """Returns a copy of `loss_N` and clears it: called at an epoch's end for the reports of that epoch."""
        taken = self.loss_N.copy()
        self.loss_N.fill(np.nan)
        return taken

    def update_in_order(self, index_B: Indices, loss_B: Floats, sizes: Sequence[int]) -> None:
        """Takes in several batches in order; in one go if that gives the same result, at a third of the price.

        Args:
            index_B: The batches' indices, one after the other.
            loss_B: Their losses.
            sizes: Sizes of the batches.

        Raises:
            ConfigError: As `update`. The batches before the wrong one are in, it and those after it are not.
        """
        if self._strategy.by_sample and self._are_distinct(index_B):
            self.update(index_B, loss_B)
            return
        start = 0
        for size in sizes:
            self.update(index_B[start : start + size], loss_B[start : start + size])
            start += size

    def _are_distinct(self, index_B: Indices) -> bool:
        """Returns whether the indices are valid and distinct."""
        # As in `update`: a negative index is huge.
        if not len(index_B) or index_B.view(np.uint64).max() >= self.num_samples:
            return False
        marked_N = np.zeros(self.num_samples, dtype=bool)
        marked_N[index_B] = True
        return int(np.count_nonzero(marked_N)) == len(index_B)

    def scores(self) -> ScoreSnapshot:
        """Returns a copy of the table as it is now."""
        return ScoreSnapshot(self.score_N.copy(), self.seen_N.copy())

    def state_dict(self) -> dict[str, Any]:
        """Returns the table: 4 bytes and a bit per sample."""
        # float32 and not float16, because a resumed average must continue from the very number at which it stopped; it
        # costs 2.6 MB more for ImageNet.
        return {
            "score": self.score,
            "num_samples": self.num_samples,
            "score_N": self.score_N.copy(),
            "seen_bits": np.packbits(self.seen_N),
            "num_ignored": self.num_ignored,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a `state_dict`, in place; raises ConfigError, and changes nothing, if it is of another data set or
        strategy."""
        if state["num_samples"] != self.num_samples:
            cure = "resume with the data set of that run"
            raise ConfigError.of(f"scores of {self.num_samples} samples", state["num_samples"], cure)
        if state["score"] != self.score and self._is_chosen:
            raise ConfigError.of(f"{self.score!r} scores", state["score"], "resume with the score of that run")
        self._use(state["score"])
        self.score_N[:] = np.asarray(state["score_N"], dtype=np.float32)
        self.seen_N[:] = np.unpackbits(np.asarray(state["seen_bits"]), count=self.num_samples).astype(bool)
        self.num_ignored = int(state["num_ignored"])
