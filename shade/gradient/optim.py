"""Optimizers that take the few elements that were sent, on the CPU, and reach the result of the dense optimizer."""

from shade.gradient._optim.adam import SparseAdam, SparseAdamW
from shade.gradient._optim.base import SparseOptimizer
from shade.gradient._optim.local_adamw import LocalAdam, LocalAdamW
from shade.gradient._optim.sgd import SparseSGD

__all__ = ["LocalAdam", "LocalAdamW", "SparseAdam", "SparseAdamW", "SparseOptimizer", "SparseSGD"]
