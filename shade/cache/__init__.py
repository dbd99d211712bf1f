"""A cache of samples: a store of bytes, a policy that decides, and counters that say what happened.

Read `entry` (a sample's bytes in the store), `ledger` (the counters), `residency_map` (what ranks and their workers
share), `breaker` (when a store is left alone), and then `cache`, which puts them together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shade._lazy import lazy

__all__ = [
    "SampleCache",
]

if TYPE_CHECKING:
    from shade.cache.cache import SampleCache
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "shade.cache.cache": ["SampleCache"],
        },
    )
