"""ShadeSampler: draws an epoch, deals it to ranks, and plans the cache."""
