"""shade: a training-aware distributed caching data loader for PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shade._lazy import lazy
from shade.installation import warn_of_name_clash

__version__ = "0.1.0"
warn_of_name_clash()

__all__ = [
    "Checkpointer",
    "DiLoCo",
    "ElasticEngine",
    "GradientEngine",
    "LocalAdam",
    "LocalAdamW",
    "LocalSGD",
    "LocalUpdates",
    "Membership",
    "Recorded",
    "RecordedSampler",
    "RemoteImageFolder",
    "SampleCache",
    "ShadeDataset",
    "ShadeLoader",
    "ShadeSampler",
    "Shards",
    "SparseAdam",
    "SparseAdamW",
    "SparseSGD",
    "SparseState",
    "TrainSession",
    "__version__",
    "destroy_ACUTE",
    "destroy_DASH",
    "destroy_acute",
    "destroy_dash",
    "init_ACUTE",
    "init_DASH",
    "init_acute",
    "init_dash",
    "open_store",
    "simulate",
    "sparse_hook",
]

if TYPE_CHECKING:
    from shade.cache import SampleCache
    from shade.checkpoint import (
        Checkpointer,
        destroy_ACUTE,
        destroy_acute,
        destroy_DASH,
        destroy_dash,
        init_ACUTE,
        init_acute,
        init_DASH,
        init_dash,
    )
    from shade.data import RemoteImageFolder, ShadeDataset, ShadeLoader, ShadeSampler
    from shade.data._recorded.recorded import Recorded
    from shade.data._recorded.recorded_sampler import RecordedSampler
    from shade.data._shards.shards import Shards
    from shade.gradient import (
        DiLoCo,
        ElasticEngine,
        GradientEngine,
        LocalSGD,
        LocalUpdates,
        Membership,
        SparseState,
        sparse_hook,
    )
    from shade.gradient.optim import LocalAdam, LocalAdamW, SparseAdam, SparseAdamW, SparseSGD
    from shade.policy.simulator import simulate
    from shade.store import open_store
    from shade.train import TrainSession
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "shade.cache": ["SampleCache"],
            "shade.checkpoint": [
                "Checkpointer",
                "destroy_ACUTE",
                "destroy_DASH",
                "destroy_acute",
                "destroy_dash",
                "init_ACUTE",
                "init_DASH",
                "init_acute",
                "init_dash",
            ],
            "shade.data": ["RemoteImageFolder", "ShadeDataset", "ShadeLoader", "ShadeSampler"],
            "shade.data._recorded.recorded": ["Recorded"],
            "shade.data._recorded.recorded_sampler": ["RecordedSampler"],
            "shade.data._shards.shards": ["Shards"],
            "shade.gradient": [
                "DiLoCo",
                "ElasticEngine",
                "GradientEngine",
                "LocalSGD",
                "LocalUpdates",
                "Membership",
                "SparseState",
                "sparse_hook",
            ],
            "shade.gradient.optim": ["LocalAdam", "LocalAdamW", "SparseAdam", "SparseAdamW", "SparseSGD"],
            "shade.policy.simulator": ["simulate"],
            "shade.store": ["open_store"],
            "shade.train": ["TrainSession"],
        },
    )
