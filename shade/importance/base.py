"""What an importance score is: how a reported value changes the score of its sample. Arithmetic on arrays.

A strategy sees one batch at a time and keeps nothing, so the table of scores is the whole state and any batch can be
replayed.

Legend: B batch · N data set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from shade.registry import Registry
from shade.types import Bools, Floats


class ScoreStrategy(ABC):
    """Base of all strategies."""

    by_sample: bool = True
    """False if a new score depends on the other samples of the batch, so that batches must not be joined."""

    takes_losses: bool = True
    """False if the reported value is no loss: then it says nothing about a label."""

    @abstractmethod
    def rescore(self, score_B: Floats, seen_B: Bools, value_B: Floats) -> Floats:
        """Returns the new scores of a batch.

        Args:
            score_B: Scores so far; meaningless where not seen.
            seen_B: Whether anything was reported for the sample before.
            value_B: The reported values, finite float32: a loss, or whatever the strategy asks for.

        Returns:
            float32 (B,), finite and ≥ 0; only ratios matter.
        """


SCORES: Registry[ScoreStrategy] = Registry("importance score")
