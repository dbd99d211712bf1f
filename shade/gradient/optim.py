"""Optimizers that take a few chosen elements at a time, on the CPU, and end where the dense ones would."""

from shade.gradient._optim.adam import SparseAdam, SparseAdamW
from shade.gradient._optim.base import SparseOptimizer
from shade.gradient._optim.local_adam import LocalAdam, LocalAdamW
from shade.gradient._optim.sgd import SparseSGD

__all__ = ["LocalAdam", "LocalAdamW", "SparseAdam", "SparseAdamW", "SparseOptimizer", "SparseSGD"]
