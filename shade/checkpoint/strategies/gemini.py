"""Gemini: every snapshot into the memory of peers, in the gaps that training leaves on the network.

Wang et al., SOSP 2023. Each machine's state is kept in its own memory and in those of its group, so that a lost machine
comes back from its peers and not from storage, and saves can be as frequent as steps. The peers' memory is the
cluster's here: servers on the training machines, each chunk on one of them and on `replicas` others of its group
(`_tiers.slot_table`), two snapshots in own memory, storage behind all of it; a restore asks them in that order.

Traffic goes into the gaps. Data-parallel ranks exchange gradients in the backward pass; in the forward pass and in the
optimizer's step the network rests. How long, is measured in every step (`gaps`), and a chunk is sent when it fits into
what is left of a gap. Where there is no gap for longer than two steps take, it is sent all the same. The interval is
one step if a snapshot's chunks fit into its gaps, and as many as they need otherwise, as the paper has it: that is
``profiled``. Where we differ: the paper sends through NCCL between buffers of the GPUs, we through sockets from the
snapshot in shared memory; and under FSDP the forward pass is not silent, which is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shade.checkpoint.strategies.base import STRATEGIES, Terms
from shade.checkpoint.strategies.gaps import Gaps
from shade.checkpoint.strategies.overlap import Overlap


@STRATEGIES.register("gemini")
class Gemini(Overlap):
    """Copies in a thread, sends in gaps."""

    terms = Terms(every="profiled", replicas=1, buffers=2)

    def __init__(self) -> None:
        super().__init__()
        self._gaps = Gaps()

    def attach(self, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """See `Strategy`."""
        self._gaps.attach(modules, optimizers)

    def before_chunk(self, num_bytes: int) -> None:
        """See `Strategy`."""
        self._gaps.wait(num_bytes)

    def close(self) -> None:
        """See `Strategy`."""
        self._gaps.close()
        super().close()
