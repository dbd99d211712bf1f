"""Corrections of a rank's own gradient: momentum or Adam, applied before elements are picked.

Pass one as ``correction=`` to `GradientEngine` with plain SGD, or to `SparseState`.
"""

from shade.gradient._compress.correction import AdamCorrection, Correction, MomentumCorrection

__all__ = ["AdamCorrection", "Correction", "MomentumCorrection"]
