"""Runs a data-parallel step: hooks, buckets, the pipeline, and DDP's communication hook."""
