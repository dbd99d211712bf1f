"""Strategies: when a snapshot's bytes are copied, and on what terms; one file each."""

from shade.checkpoint.strategies import (
    acute,
    asymmetric,
    asymmetric_variants,
    auto,
    checkfreq,
    copy,
    datastates,
    deepfreeze,
    excp,
    fastpersist,
    gemini,
    mlc_base,
    overlap,
    pccheck,
    sync,
)
from shade.checkpoint.strategies.base import STRATEGIES, Moment, Strategy, Terms

__all__ = [
    "STRATEGIES",
    "Moment",
    "Strategy",
    "Terms",
    "acute",
    "asymmetric",
    "asymmetric_variants",
    "auto",
    "checkfreq",
    "copy",
    "datastates",
    "deepfreeze",
    "excp",
    "fastpersist",
    "gemini",
    "mlc_base",
    "overlap",
    "pccheck",
    "sync",
]
