"""Strategies: when a snapshot's bytes are copied, and with what config; `auto` chooses among them.

In reading order: `base` (what a strategy is), `copy` and `overlap` (the two simple ones), `published` (one row a
paper), `windows`, `deepfreeze`, `asymmetric`, `gemini` (those that copy or send in a way of their own); then what
`auto` is made of: `measure` (rates of this machine), `predict` (what a save will cost), `pilot` (which strategy is
next).
"""

from shade.checkpoint._strategies import asymmetric, auto, copy, deepfreeze, gemini, overlap, published
from shade.checkpoint._strategies.base import STRATEGIES, DurabilityLevel, Strategy, StrategyConfig

__all__ = [
    "STRATEGIES",
    "DurabilityLevel",
    "Strategy",
    "StrategyConfig",
    "asymmetric",
    "auto",
    "copy",
    "deepfreeze",
    "gemini",
    "overlap",
    "published",
]
