"""Strategies: when a snapshot's bytes are copied, and on what terms; one file each."""

from shade.checkpoint.strategies import asymmetric, copy, overlap
from shade.checkpoint.strategies.base import STRATEGIES, Moment, Strategy, Terms

__all__ = ["STRATEGIES", "Moment", "Strategy", "Terms", "asymmetric", "copy", "overlap"]
