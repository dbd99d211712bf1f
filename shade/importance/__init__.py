"""Turns per-sample losses into scores, keeps them in an (N,) table, and keeps that table the same on every rank.

Read `base` (what a score is), `loss`, `rank` and `grad_norm` (the three there are), `table`, then `merge`.
"""

from shade.importance.base import SCORES, ScoreStrategy
from shade.importance.grad_norm import GradNormScore, last_layer_norm
from shade.importance.loss import LossScore
from shade.importance.rank import RankScore
from shade.importance.table import ImportanceTable, ScoreMerger, ScoreSnapshot

__all__ = [
    "SCORES",
    "GradNormScore",
    "ImportanceTable",
    "LossScore",
    "RankScore",
    "ScoreMerger",
    "ScoreSnapshot",
    "ScoreStrategy",
    "last_layer_norm",
]
