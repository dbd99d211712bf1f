"""A cache of samples: a store of bytes, a policy that decides, and the honesty about both.

Read `entry` (what a sample looks like in the store), `ledger` (what is counted), `board` (what ranks and their workers
share), `breaker` (when to leave a store alone), then `cache`, which puts them together.
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
