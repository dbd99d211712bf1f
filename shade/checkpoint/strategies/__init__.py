"""Strategies: at which moments a snapshot's bytes are copied, one file each."""

from shade.checkpoint.strategies import asymmetric, copy, overlap
from shade.checkpoint.strategies.base import STRATEGIES, Strategy

__all__ = ["STRATEGIES", "Strategy", "asymmetric", "copy", "overlap"]
