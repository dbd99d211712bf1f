"""Samples in shards, read where they lie: the index, the formats, and the data set."""
