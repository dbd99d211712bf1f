"""Names samples in the store, so that a batch finds them fast and a cluster carries them evenly.

::

    shade:<namespace>:{<tag>}<index>         shade:9f2c41d07ab3e655:{k1x}48213
                      ─┬───                   the hash tag alone decides the slot, hence the node

The namespace is the data set's fingerprint. The tag is one of ``num_buckets``, each *chosen* so that its slot falls
into its own equal part of the slot space: a cluster that splits the slots evenly holds the same number of buckets on
each node, ± 1. Invariant: ``index_of(key(i)) == i``, and every key starts with ``prefix``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from redis.crc import key_slot

from shade.errors import ConfigError
from shade.types import Indices

NUM_SLOTS: Final = 16384
NUM_BUCKETS: Final = 4096
NUM_PLACEMENT_TAGS: Final = 256
_GOLDEN: Final = 0.6180339887498949
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"


@lru_cache(maxsize=4)
def balanced_tags(num_buckets: int) -> tuple[str, ...]:
    """Finds for each bucket the first short word whose slot falls into that bucket's part of the slot space: 25 ms for
    4096, once a process."""
    tags: list[str | None] = [None] * num_buckets
    missing, number = num_buckets, 0
    while missing:
        word, rest = "", number
        while not word or rest:
            rest, digit = divmod(rest, len(_DIGITS))
            word = _DIGITS[digit] + word
        bucket = key_slot(word.encode()) * num_buckets // NUM_SLOTS
        if tags[bucket] is None:
            tags[bucket] = word
            missing -= 1
        number += 1
    return tuple(tag for tag in tags if tag is not None)


def placement_tags() -> tuple[str, ...]:
    """Returns the hash tags that `Store.placement` chooses from: few enough to look under all of them, and enough for
    each of some hundred servers with equal shares of the slots to own one."""
    return balanced_tags(NUM_PLACEMENT_TAGS)


class SampleKeys:
    """The keys of one data set.

    Args:
        namespace: Letters, digits, ``.``, ``_`` and ``-``: anything else would mean something to Redis.
        num_buckets: A power of two, at most 16384; part of the address: all users of a cache use the same.
    """

    def __init__(self, namespace: str, num_buckets: int = NUM_BUCKETS) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", namespace):
            raise ConfigError.of("letters, digits, '.', '_' or '-' as a namespace", namespace, "pass a fingerprint")
        if not 1 <= num_buckets <= NUM_SLOTS or num_buckets & (num_buckets - 1):
            raise ConfigError.of(f"a power of two up to {NUM_SLOTS} buckets", num_buckets, f"use {NUM_BUCKETS}")
        self.namespace = namespace
        self.num_buckets = num_buckets
        self.prefix = f"shade:{namespace}:"
        """Prefix of every key of the data set, counters included: the argument of `Store.scan`."""
        # Odd, so coprime to the power of two: the stride visits every bucket.
        self._stride = int(num_buckets * _GOLDEN) | 1
        self._mask = num_buckets - 1
        self._heads = [f"{self.prefix}{{{tag}}}" for tag in balanced_tags(num_buckets)]
        self.key_length = max(map(len, self._heads)) + 7
        """Bytes of the longest key up to index 9 999 999, for `Store.stored_bytes`."""

    def __reduce__(self) -> tuple[type[SampleKeys], tuple[str, int]]:
        return type(self), (self.namespace, self.num_buckets)

    def many(self, index_B: Indices | Sequence[int]) -> list[str]:
        """Returns the keys of a batch of sample indices, in its order: 10 µs for 64."""
        heads, stride, mask = self._heads, self._stride, self._mask
        numbers = index_B.tolist() if isinstance(index_B, np.ndarray) else index_B
        return [heads[i * stride & mask] + str(i) for i in numbers]

    def key(self, index: int) -> str:
        """Returns the key of one sample."""
        return self._heads[index * self._stride & self._mask] + str(index)

    def counter_key(self, name: str) -> str:
        """Returns the key of a shared integer of the data set; never a sample's."""
        return f"{self.prefix}counter:{name}"

    def index_of(self, key: str) -> int | None:
        """Returns the sample index in a key, or None if it is not a sample key of this data set."""
        digits = key.rpartition("}")[2]
        if not digits.isdecimal() or not digits.isascii():
            return None
        index = int(digits)
        return index if self.key(index) == key else None
