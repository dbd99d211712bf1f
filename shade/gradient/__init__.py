"""Trains data-parallel across a slow link: each rank sends its largest elements and keeps the others for later steps.

`GradientEngine` replaces ``optimizer.step()``; `sparse_hook` keeps DistributedDataParallel. The private packages, from
the bottom: `_kernels` (compiled loops), `_compress` (pick, quantise, keep the residual), `_comm` (message, topology,
transport), `_optim` (sparse optimizers; public names in `shade.gradient.optim`), `_engine`, `_elastic`, `_local`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shade._lazy import lazy

__all__ = [
    "COMPRESSORS",
    "QUANTISERS",
    "DiLoCo",
    "ElasticEngine",
    "GradientEngine",
    "LocalSGD",
    "LocalUpdates",
    "Membership",
    "SparseState",
    "sparse_hook",
]

if TYPE_CHECKING:
    from shade.gradient._compress.compressor import COMPRESSORS
    from shade.gradient._compress.quantiser import QUANTISERS
    from shade.gradient._elastic.elastic_engine import ElasticEngine
    from shade.gradient._elastic.membership import Membership
    from shade.gradient._engine.comm_hook import SparseState, sparse_hook
    from shade.gradient._engine.engine import GradientEngine
    from shade.gradient._local.local_updates import DiLoCo, LocalSGD, LocalUpdates
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "shade.gradient._compress.compressor": ["COMPRESSORS"],
            "shade.gradient._compress.quantiser": ["QUANTISERS"],
            "shade.gradient._elastic.elastic_engine": ["ElasticEngine"],
            "shade.gradient._elastic.membership": ["Membership"],
            "shade.gradient._engine.comm_hook": ["SparseState", "sparse_hook"],
            "shade.gradient._engine.engine": ["GradientEngine"],
            "shade.gradient._local.local_updates": ["DiLoCo", "LocalSGD", "LocalUpdates"],
        },
    )
