"""Sparse all-reduce: message format, topology, transport."""
