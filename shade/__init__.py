"""shade: a training-aware distributed caching data loader for PyTorch.

The public names, loaded when first used (PEP 562): ``import shade`` alone loads neither torch nor redis.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "Checkpointer": "shade.checkpoint.manager",
    "DiLoCo": "shade.gradient.local_sgd",
    "ElasticEngine": "shade.gradient.elastic",
    "GradientEngine": "shade.gradient.engine",
    "LocalAdam": "shade.gradient.optim",
    "LocalAdamW": "shade.gradient.optim",
    "LocalSGD": "shade.gradient.local_sgd",
    "Membership": "shade.gradient.membership",
    "RemoteImageFolder": "shade.data.remote",
    "ShadeDataset": "shade.data.dataset",
    "ShadeLoader": "shade.data.loader",
    "ShadeSampler": "shade.data.sampler",
    "SampleCache": "shade.cache.cache",
    "SparseAdam": "shade.gradient.optim",
    "SparseAdamW": "shade.gradient.optim",
    "SparseSGD": "shade.gradient.optim",
    "SparseState": "shade.gradient.comm_hook",
    "TrainSession": "shade.train",
    "open_store": "shade.store",
    "simulate": "shade.policy.simulator",
    "sparse_hook": "shade.gradient.comm_hook",
    "init_acute": "shade.checkpoint.acute",
    "init_dash": "shade.checkpoint.acute",
    "destroy_acute": "shade.checkpoint.acute",
    "destroy_dash": "shade.checkpoint.acute",
}

__all__ = [
    "Checkpointer",
    "DiLoCo",
    "ElasticEngine",
    "GradientEngine",
    "LocalAdam",
    "LocalAdamW",
    "LocalSGD",
    "Membership",
    "RemoteImageFolder",
    "SampleCache",
    "ShadeDataset",
    "ShadeLoader",
    "ShadeSampler",
    "SparseAdam",
    "SparseAdamW",
    "SparseSGD",
    "SparseState",
    "TrainSession",
    "__version__",
    "destroy_acute",
    "destroy_dash",
    "init_acute",
    "init_dash",
    "open_store",
    "simulate",
    "sparse_hook",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Loads a public name on first use."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'shade' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
