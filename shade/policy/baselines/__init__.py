"""Policies that `plan` is compared with, from a page cache's to the optimum. Importing this package registers them."""

from shade.policy.baselines import belady, fifo, lfu, lru, static

__all__ = ["belady", "fifo", "lfu", "lru", "static"]
