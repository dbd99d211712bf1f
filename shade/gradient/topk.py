"""The exact top-k: `shade.gradient.threshold_v` with no tolerance.

The sampled threshold is set so low that too much is picked, and the smallest are put back; if it was too little, once
more. So it is exact, equal ones apart (the first are taken), at little more than the price of a threshold.
"""

from __future__ import annotations

from shade.gradient.compressor import COMPRESSORS
from shade.gradient.threshold_v import ThresholdV


@COMPRESSORS.register("topk")
class TopK(ThresholdV):
    """The K largest, no more and no fewer, unless fewer are not 0."""

    tolerance = 0.0
