"""Strategies: when a snapshot's bytes are copied, and with what config.

In reading order: `base` (what a strategy is), `copy` and `overlap` (the two simple ones), `published` (one class a
paper), `windows`, `deepfreeze`, `asymmetric`, `gemini` (own ways to copy or send).
"""

from shade.checkpoint._strategies import asymmetric, copy, deepfreeze, gemini, overlap, published
from shade.checkpoint._strategies.base import STRATEGIES, DurabilityLevel, Strategy, StrategyConfig

__all__ = [
    "STRATEGIES",
    "DurabilityLevel",
    "Strategy",
    "StrategyConfig",
    "asymmetric",
    "copy",
    "deepfreeze",
    "gemini",
    "overlap",
    "published",
]
