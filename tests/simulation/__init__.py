"""Simulations that make the library fail: `torture` the commit protocol, `cluster_chaos` a cache cluster.

They test this repository; a user of the package does not import them. `scripts/torture` and `scripts/chaos` run them,
and so do the tests in `tests/faults`.
"""
