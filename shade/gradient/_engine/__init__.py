"""The gradient engine: hooks, buckets, the pipeline of a step, and DDP's communication hook."""
