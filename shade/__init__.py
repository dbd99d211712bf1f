"""shade: a training-aware distributed caching data loader for PyTorch.

The public names, loaded when first used (PEP 562): ``import shade`` alone loads neither torch nor redis.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "Checkpointer": "shade.checkpoint._session.checkpointer",
    "DiLoCo": "shade.gradient._engine.local_sgd",
    "ElasticEngine": "shade.gradient._elastic.engine",
    "GradientEngine": "shade.gradient._engine.engine",
    "LocalAdam": "shade.gradient.optim",
    "LocalAdamW": "shade.gradient.optim",
    "LocalSGD": "shade.gradient._engine.local_sgd",
    "Membership": "shade.gradient._elastic.membership",
    "RemoteImageFolder": "shade.data._dataset.source",
    "ShadeDataset": "shade.data._dataset.dataset",
    "ShadeLoader": "shade.data._loader.loader",
    "ShadeSampler": "shade.data._sampler.sampler",
    "SampleCache": "shade.cache.cache",
    "SparseAdam": "shade.gradient.optim",
    "SparseAdamW": "shade.gradient.optim",
    "SparseSGD": "shade.gradient.optim",
    "SparseState": "shade.gradient._engine.comm_hook",
    "TrainSession": "shade.train",
    "open_store": "shade.store",
    "simulate": "shade.policy.simulator",
    "sparse_hook": "shade.gradient._engine.comm_hook",
    "init_acute": "shade.checkpoint._integrations.acute",
    "init_dash": "shade.checkpoint._integrations.acute",
    "destroy_acute": "shade.checkpoint._integrations.acute",
    "destroy_dash": "shade.checkpoint._integrations.acute",
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
