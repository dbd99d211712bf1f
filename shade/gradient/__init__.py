"""Gradients across a slow link: choose what matters, keep the rest for later, send, merge, apply.

One file a compressor or a quantiser; importing this room registers them all.
"""

from shade.gradient import (
    quantise_bf16,
    quantise_int8,
    quantise_none,
    random_k,
    threshold_v,
    threshold_v16,
    topk,
)
from shade.gradient.compressor import COMPRESSORS, Compressor, Key
from shade.gradient.quantiser import QUANTISERS, Quantiser
from shade.gradient.sparse import Sparse

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
