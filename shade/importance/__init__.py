"""Turns per-sample losses into scores, keeps them in an (N,) table, and keeps that table the same on every rank.

Read `base` (what a score is), `scores` (the three there are), then `table`.
"""

from shade.importance.base import SCORES, ScoreStrategy
from shade.importance.merge import ScoreMerger
from shade.importance.scores import GradNormScore, LossScore, RankScore, last_layer_norm
from shade.importance.table import ImportanceTable, ScoreSnapshot

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
