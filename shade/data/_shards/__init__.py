"""Samples in shards, read where they lie: the index, the formats, and the data set."""

from shade.data._shards import archives, lance_tables, tables

__all__ = ["archives", "lance_tables", "tables"]
