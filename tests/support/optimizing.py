"""Runs a sparse optimizer beside PyTorch's, on the same gradients and the same schedule."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LRScheduler

from shade.gradient._compress.bucket import Bucket
from shade.gradient._compress.compressor import Sparse
from shade.gradient._optim import adam, sgd
from shade.gradient._optim.base import SparseOptimizer
from tests.support import kernel_oracle

SIZE = 203
"""Not a multiple of 16."""


def use_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forces the loops in numpy."""
    for module in (sgd, adam):
        monkeypatch.setattr(module, "loops", lambda: kernel_oracle)


def bits(tensor: torch.Tensor) -> list[int]:
    """For comparisons that forgive nothing."""
    return tensor.detach().reshape(-1).view(torch.int32).tolist()


def gradient(step: int, size: int = SIZE, count: int = 4, scale: float = 1.0, num_lines: int = 0) -> Sparse:
    """The same for the same step; sometimes empty, sometimes the very end, sometimes all; and some lines of 16."""
    rng = np.random.default_rng(step)
    count = 0 if step % 37 == 5 else size if step % 211 == 100 else count
    indices = np.sort(rng.choice(size, count, replace=False)).astype(np.uint32)
    if count and step % 10 == 0:
        indices[-1] = size - 1
    if num_lines:
        lines = rng.choice(size // 16, num_lines, replace=False)[:, None] * 16 + np.arange(16)
        indices = np.union1d(indices, lines).astype(np.uint32)
    return Sparse(indices, (scale * rng.standard_normal(len(indices))).astype(np.float32), size)


class Run:
    """A sparse optimizer on one bucket of two parameters, with a schedule."""

    def __init__(self, cls: type[SparseOptimizer], settings: dict[str, Any], size: int = SIZE, **more: Any) -> None:
        weights_D = 0.1 * torch.randn(size, generator=torch.Generator().manual_seed(0))
        parts = weights_D[: size // 3].clone(), weights_D[size // 3 :].clone()
        self.parameters = [torch.nn.Parameter(part) for part in parts]
        self.optimizer = cls(self.parameters, **settings, **more)
        self.bucket = Bucket(self.parameters)
        self.schedule = scheduled(self.optimizer)
        self.size, self.step = size, 0

    def go(self, num_steps: int, **how: Any) -> Run:
        """Takes some steps."""
        for _ in range(num_steps):
            self.optimizer.apply(self.bucket, gradient(self.step, self.size, **how))
            self.schedule.step()
            self.step += 1
        return self

    @property
    def weights_D(self) -> torch.Tensor:
        """The bucket's."""
        return self.bucket.weights_D

    def state(self) -> dict[str, Any]:
        """All that a snapshot would hold."""
        parts = [parameter.detach() for parameter in self.parameters]
        return copy.deepcopy(
            {"weights": parts, "optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}
        )

    def resume(self, state: dict[str, Any], step: int) -> Run:
        """Goes on from there."""
        with torch.no_grad():
            for parameter, part in zip(self.parameters, state["weights"], strict=True):
                parameter.copy_(part)
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.step = step
        return self


class DenseRun:
    """PyTorch's optimizer on the same, in float64 unless said otherwise."""

    def __init__(
        self, cls: type[torch.optim.Optimizer], settings: dict[str, Any], dtype: torch.dtype = torch.float64
    ) -> None:
        start = 0.1 * torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
        self.parameters = [torch.nn.Parameter(part.to(dtype)) for part in (start[: SIZE // 3], start[SIZE // 3 :])]
        self.optimizer = cls(self.parameters, **settings)
        self.schedule = scheduled(self.optimizer)
        self.step = 0

    def go(self, num_steps: int, **how: Any) -> DenseRun:
        """Takes some steps."""
        for _ in range(num_steps):
            dense_D = torch.from_numpy(gradient(self.step, **how).dense()).to(self.parameters[0].dtype)
            for parameter, part in zip(self.parameters, dense_D.split([SIZE // 3, SIZE - SIZE // 3]), strict=True):
                parameter.grad = part
            self.optimizer.step()
            self.schedule.step()
            self.step += 1
        return self

    @property
    def weights_D(self) -> torch.Tensor:
        """All of them."""
        return torch.cat([parameter.detach() for parameter in self.parameters])


def scheduled(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Falls to a hundredth and jumps back up, again and again."""
    least = optimizer.param_groups[0]["lr"] / 100
    return CosineAnnealingWarmRestarts(optimizer, T_0=70, T_mult=2, eta_min=least)


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference."""
    return float((ours.detach().double() - theirs.detach().double()).abs().max())
