"""Objects of the user's own, and loaders, of generated checkpoint scripts."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.differential.checkpoint_objects import WIDTH

NUM_SAMPLES, BATCH = 12, 4


# ── the user's own objects ──────────────────────────────────────────────────────────────────────────────────────────


class Noise:
    """Generators of the user's own, which the training draws from."""

    def __init__(self) -> None:
        self.torch, self.numpy, self.python = torch.Generator(), np.random.default_rng(5), random.Random(6)
        self.torch.manual_seed(4)

    def next(self) -> float:
        drawn = torch.rand((), generator=self.torch).item() + self.numpy.random() + self.python.gauss(0, 1)
        return 0.01 * float(drawn)

    def state_dict(self) -> dict[str, Any]:
        numpy = self.numpy.bit_generator.state
        return {"torch": self.torch.get_state(), "numpy": numpy, "python": self.python.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.torch.set_state(state["torch"])
        self.numpy.bit_generator.state = state["numpy"]
        self.python.setstate(state["python"])


class Notes:
    """Plain values of many kinds; the state is the object's own memory, which every step changes in place."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "step": 0,
            "name": "ä/@%\n",
            "none": None,
            "nested": {"": [], 1: (1, ("a", None)), (2, "b"): {"deep": [{}]}},
            "seen": set(),
            "big": 2**80,
            "best": float("inf"),
            "queue": deque([1.0], maxlen=3),
            "bytes": b"\x00\xff",
            "history": [],
        }

    def next(self) -> float:
        state = self.state
        state["step"] += 1
        state["seen"].add(state["step"] % 4)
        state["nested"][""].append(state["step"])
        state["queue"].append(float(state["step"]))
        state["history"] += [state["step"]] * 150  # long lists are stored as tensors
        state["big"] += 1
        state["best"] = 1.0 / state["step"]
        return 0.001 * len(state["nested"][""]) + 0.001 * len(state["seen"])

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Arrays(Notes):
    """NumPy arrays of several types and layouts, changed in place."""

    def __init__(self) -> None:
        self.state = {
            "table": np.arange(12, dtype=np.float64).reshape(3, 4),
            "columns": np.arange(12, dtype=np.float32).reshape(3, 4).T,
            "part": np.arange(10)[::3],
            "scalar": np.float32(0.1),
            "zero": np.array(3),
            "empty": np.zeros((0, 2)),
            "bool": np.zeros(3, dtype=bool),
            "complex": np.ones(2, dtype=np.complex128),
            "text": np.array(["ab", "c"]),
            "half": np.ones(2, dtype=np.float16),
            "big": np.arange(3, dtype=">i4"),
        }

    def next(self) -> float:
        for name in ("table", "columns", "part", "zero", "complex", "half", "big"):
            self.state[name] += 1
        self.state["bool"][int(self.state["zero"]) % 3] ^= True
        self.state["scalar"] = np.float32(self.state["scalar"] * 1.1)
        return float(self.state["columns"].sum() + self.state["part"][1] + self.state["scalar"]) * 1e-4


class Tensors(Notes):
    """Tensors of several types and layouts, two of them the same and one a part of another."""

    def __init__(self) -> None:
        whole = torch.arange(12.0).view(3, 4)
        self.state = {
            "whole": whole,
            "again": whole,
            "columns": torch.arange(6, dtype=torch.int32).view(2, 3).t(),
            "part": torch.arange(100.0)[40:44],
            "zero": torch.tensor(0.5, dtype=torch.float64),
            "empty": torch.empty(0, 2, dtype=torch.bfloat16),
            "bool": torch.zeros(3, dtype=torch.bool),
            "complex": torch.ones(2, dtype=torch.complex128),
            "bytes": torch.arange(5, dtype=torch.uint8),
            "list": [torch.ones(1), (torch.zeros(2, dtype=torch.float16),)],
        }

    def next(self) -> float:
        for name in ("whole", "columns", "part", "zero", "complex", "bytes"):
            self.state[name] += 1
        self.state["list"][1][0].add_(0.5)
        self.state["bool"][int(self.state["zero"]) % 3] ^= True
        return float(self.state["whole"].sum() + self.state["columns"].sum() + self.state["part"][2]) * 1e-4


class Holder:
    """Shows a tensor of the model's, as a teacher does, and keeps what it is given."""

    def __init__(self) -> None:
        self.shown: Any = None
        self.given: Any = None

    def next(self) -> float:
        return 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.shown}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["weight"]


class Strange(Notes):
    """Holds what no snapshot can hold."""

    def __init__(self) -> None:
        self.state = {"step": 0, "thing": object()}

    def next(self) -> float:
        return 0.0


USERS: Mapping[str, Callable[[], Any]] = {
    "noise": Noise,
    "notes": Notes,
    "arrays": Arrays,
    "tensors": Tensors,
    "holder": Holder,
    "strange": Strange,
    "generator": torch.Generator,
}


# ── data ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Samples(torch.utils.data.Dataset[Any]):
    """Random numbers, perhaps with noise of one of the global generators."""

    def __init__(self, augments: str) -> None:
        self.data = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3))
        self._augments = augments

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        drawn = {
            "": lambda: 0.0,
            "torch": lambda: float(torch.rand(())),
            "numpy": np.random.rand,
            "python": random.random,
        }[self._augments]()
        return self.data[index] + 0.1 * drawn, 0


class Cursor:
    """The user's own place in the data: an epoch's order comes from a generator of its own."""

    def __init__(self, data: Samples, batch: int, rank: int = 0, num_ranks: int = 1) -> None:
        self._data, self._batch, self._rank, self._num_ranks = data, batch, rank, num_ranks
        self.position, self.generator = 0, torch.Generator().manual_seed(7)
        self.order = torch.randperm(NUM_SAMPLES, generator=self.generator)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            if self.position >= NUM_SAMPLES:
                self.position, self.order = 0, torch.randperm(NUM_SAMPLES, generator=self.generator)
            chosen = self.order[self.position : self.position + self._batch]
            self.position += self._batch
            yield torch.stack([self._data[int(index)][0] for index in chosen[self._rank :: self._num_ranks]])

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": self.order, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.order = state["position"], state["order"]
        self.generator.set_state(state["generator"])


@dataclass
class Feed:
    """Batches without end, and what is attached so that they continue."""

    batches: Callable[[int], Iterator[torch.Tensor]]
    """Takes the epoch to begin with."""
    attached: dict[str, Any] = field(default_factory=dict)
    report: Callable[[], None] = lambda: None
    """Called after each step."""
    close: Callable[[], None] = lambda: None


def make_feed(script: Any, rank: int, *, batch: int = BATCH) -> Feed:
    """Returns the batches of a script."""
    data, workers = Samples(script.augments), script.num_workers
    if script.loader == "cursor":
        cursor = Cursor(data, batch, rank, script.num_ranks)
        return Feed(lambda epoch: iter(cursor), {"cursor": cursor})
    if script.loader == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(data, batch, shuffle=True, num_workers=workers)
        return Feed(lambda epoch: _epochs(loader), {"loader": loader})
    from shade.data import ShadeDataset, ShadeLoader, ShadeSampler

    wrapped = ShadeDataset(data, cache=None)
    if script.loader == "shade_loader":
        own = ShadeLoader(wrapped, batch, shuffle=True, num_workers=workers)
        return Feed(lambda epoch: _epochs(own), {"loader": own})
    is_loaders = script.loader in (
        "shade_both",
        "stateful_shade",
    )  # the loader is attached, and keeps the sampler's place
    sampler = ShadeSampler(wrapped, batch_size=batch, mode="uniform")
    made: Any = torch.utils.data.DataLoader if script.loader == "dataloader" else ShadeLoader
    if script.loader == "stateful_shade":
        from torchdata.stateful_dataloader import StatefulDataLoader as made
    sampled = made(wrapped, batch, sampler=sampler, num_workers=workers)
    last = torch.zeros(0)

    def epochs(epoch: int) -> Iterator[torch.Tensor]:
        nonlocal last
        while True:
            sampler.set_epoch(epoch)
            for x, _, indices in sampled:
                last = indices
                yield x
            epoch += 1

    attached = {"loader": sampled} if is_loaders else {"sampler": sampler}
    return Feed(epochs, attached, lambda: sampler.report(last, torch.ones(len(last))), sampler.close)


def _epochs(loader: Any) -> Iterator[torch.Tensor]:
    while True:
        for x, *_ in loader:
            yield x
