"""A cache of samples: a store of bytes, a policy that decides, and the honesty about both.

Read `entry` (what a sample looks like in the store), `ledger` (what is counted), `board` (what ranks and their workers
share), `breaker` (when to leave a store alone), then `cache`, which puts them together.
"""
