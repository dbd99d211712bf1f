"""DeepFreeze: a few threads copy the state layer by layer, and each layer leaves as soon as it is copied.

Nicolae et al., CCGrid 2020. Here a layer is what one module owns, or what the optimizer keeps for one parameter. The
threads take layers in the shard's order, so its first chunks are hashed and sent while the last are still copied. The
paper hangs its copies into TensorFlow's graph; PyTorch updates all parameters in one call of the optimizer, so all are
final when `step` returns, and the copy overlaps the next pass.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from typing_extensions import override

from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._strategies.base import STRATEGIES, StrategyConfig
from shade.checkpoint._strategies.overlap import ThreadedCopy

NUM_THREADS: Final = min(4, os.cpu_count() or 1)
_LAST_PART: Final = re.compile(r"[./][^./]*$")


@STRATEGIES.register("deepfreeze")
class DeepFreeze(ThreadedCopy):
    """A strategy that copies layers in the shard's order."""

    config = StrategyConfig(streams=True)

    @override
    def _num_threads(self) -> int:
        return NUM_THREADS

    @override
    def _parts(self, copying: Copying) -> Sequence[Callable[[], None]]:
        return [partial(_copy, copying, names) for names in layers(copying.names)]


def layers(names: list[str]) -> list[list[str]]:
    """Groups tensor names, in the shard's order, by layer: neighbours that differ in the last part of their path."""
    return [list(group) for _, group in itertools.groupby(names, key=lambda name: _LAST_PART.sub("", name))]


def _copy(copying: Copying, names: list[str]) -> None:
    for name in names:
        copying.copy(name)
