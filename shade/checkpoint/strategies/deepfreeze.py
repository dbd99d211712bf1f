"""DeepFreeze: layer by layer, each copied by whichever thread is free and on its way as soon as it is copied.

Nicolae et al., CCGrid 2020. The state is not one thing but hundreds of tensors that become final one after the other;
each layer's are copied by themselves, serialised in threads of their own, and shared out among the ranks that hold the
same. Here a layer is what one module owns, or what the optimizer keeps for one parameter; a few threads copy layers in
the order in which they lie in the shard, so that its first chunks are complete, hashed and sent while the last are
still being copied; and every rank has its share of the layers anyway.

Where we differ: the paper hangs its copies into TensorFlow's graph, where a layer's update is final before the backward
pass has reached the layers below. PyTorch updates all parameters in one call of the optimizer, so all are final at the
same moment: when `step` has returned, which is when a save is begun. What is overlapped is the next pass.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from shade.checkpoint._buffer.copy import Copying
from shade.checkpoint.strategies.base import STRATEGIES, Terms
from shade.checkpoint.strategies.pooled import Pooled

NUM_THREADS: Final = min(4, os.cpu_count() or 1)
_LAST_PART: Final = re.compile(r"[./][^./]*$")


@STRATEGIES.register("deepfreeze")
class DeepFreeze(Pooled):
    """Layers, in the order of the shard."""

    terms = Terms(streams=True)

    def _num_threads(self) -> int:
        """See `Pooled`."""
        return NUM_THREADS

    def _parts(self, copying: Copying) -> Sequence[Callable[[], None]]:
        """See `Pooled`."""
        return [partial(_copy, copying, names) for names in layers(copying.names)]


def layers(names: list[str]) -> list[list[str]]:
    """Names of tensors by layer: neighbours that share all of their path but its last part.

    Args:
        names: In the order of the shard.

    Returns:
        The same names, in the same order.
    """
    return [list(group) for _, group in itertools.groupby(names, key=lambda name: _LAST_PART.sub("", name))]


def _copy(copying: Copying, names: list[str]) -> None:
    for name in names:
        copying.copy(name)
