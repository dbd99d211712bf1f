"""Chooses which elements of a bucket are sent, and keeps the others for later steps.

Importing this package registers every compressor and quantiser.
"""

from shade.gradient._compress import chunk_top_k, quantiser, random_k, threshold

__all__ = ["chunk_top_k", "quantiser", "random_k", "threshold"]
