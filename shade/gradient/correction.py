"""Corrects a rank's own gradient, by momentum or Adam, before elements are picked.

Pass a correction as ``correction=`` to `GradientEngine` with plain SGD, or to `SparseState`.
"""

from shade.gradient._compress.correction import AdamCorrection, Correction, MomentumCorrection

__all__ = ["AdamCorrection", "Correction", "MomentumCorrection"]
