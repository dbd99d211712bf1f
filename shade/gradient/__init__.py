"""Gradients across a slow link: choose what matters, keep the rest for later, send, merge, apply.

One file a compressor or a quantiser; importing this room registers them all.
"""

from shade.gradient._compress import quantiser, random_k, threshold
from shade.gradient._compress.compressor import COMPRESSORS, Compressor, Key, Sparse
from shade.gradient._compress.quantiser import QUANTISERS, Quantiser

__all__ = [
    "COMPRESSORS",
    "QUANTISERS",
    "Compressor",
    "Key",
    "Quantiser",
    "Sparse",
    "quantise_bf16",
    "quantise_int8",
    "quantise_none",
    "random_k",
    "threshold_v",
    "threshold_v16",
    "topk",
]
