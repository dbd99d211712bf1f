"""Strategies: when a snapshot's bytes are copied, one file each."""
