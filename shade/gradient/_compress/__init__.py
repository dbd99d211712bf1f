"""Chooses which elements of a bucket are sent, and keeps the others for later steps.

Importing this package registers every compressor and quantiser.
"""

from shade.gradient._compress import quantiser, random_k, threshold

__all__ = ["quantiser", "random_k", "threshold"]
