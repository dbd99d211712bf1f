"""Read through the cache in a pipeline of Ray Data.

    pip install torch-shade 'ray[data]'
    python examples/ray_data.py
    python examples/ray_data.py redis://10.0.0.1:6379

What moves through the pipeline are sample indices, in the order that the sampler draws; actors read them through one
cache. So losses decide what is drawn, and the sampler's state continues in the middle of an epoch. Ray Data itself has
no state.

What to know: actors have no plan for the cache, since they may run on other machines than the sampler: the first
samples that are read stay in it. All machines must reach the cache: name a server, ``redis://10.0.0.1:6379``, and not
``local://``. ``preserve_order`` is what keeps the sampler's order.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from shade import ShadeDataset, ShadeSampler

BATCH = 8


def make_data(num_samples: int = 200) -> TensorDataset:
    """Points in four classes, and some noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(num_samples) % 4
    points = F.one_hot(labels, 16).float() * 2 + torch.randn(num_samples, 16, generator=generator)
    return TensorDataset(points, labels)


class ReadThroughCache:
    """An actor that reads samples by index: what ``map_batches`` calls."""

    def __init__(self, cache: str) -> None:
        self._dataset = ShadeDataset(make_data(), cache=cache, working_set_fraction=0.5)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns the samples of a batch as columns."""
        points, labels, indices = zip(*self._dataset.__getitems__(batch["data"].tolist()), strict=True)
        return {"point": np.stack(points), "label": np.stack(labels), "index": np.array(indices)}


def batches_of(sampler: ShadeSampler, cache: str, num_actors: int = 2) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the batches of an epoch, or of the rest of it after ``load_state_dict``."""
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    order = np.fromiter(sampler, dtype=np.int64)
    blocks = np.split(order, range(4 * BATCH, len(order), 4 * BATCH))  # an actor takes one at a time
    actors = ray.data.ActorPoolStrategy(size=num_actors)
    samples = ray.data.from_numpy(blocks).map_batches(
        ReadThroughCache, fn_constructor_args=(cache,), batch_size=BATCH, compute=actors
    )
    yield from samples.iter_torch_batches(batch_size=BATCH)


def train(model: torch.nn.Module, sampler: ShadeSampler, cache: str, stop_after: int | None = None) -> list[list[int]]:
    """Trains an epoch, or the rest of it; returns the sample indices of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[list[int]] = []
    for batch in batches_of(sampler, cache):
        losses_B = F.cross_entropy(model(batch["point"]), batch["label"], reduction="none")
        (losses_B * sampler.weights(batch["index"])).mean().backward()
        sampler.report(batch["index"], losses_B)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(batch["index"].tolist())
        if len(seen) == stop_after:
            break
    return seen


def main() -> None:
    """Trains an epoch in one go, and again with a stop in the middle."""
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        cache = sys.argv[1] if len(sys.argv) > 1 else f"disk://{folder}?capacity=1GiB"  # all actors are on this machine
        samplers = [ShadeSampler(make_data(), batch_size=BATCH, seed=0) for _ in range(3)]
        models = [torch.nn.Linear(16, 4) for _ in range(2)]
        expected = train(models[0], samplers[0], cache)
        found = train(models[1], samplers[1], cache, stop_after=10)
        samplers[2].load_state_dict(samplers[1].state_dict())
        found += train(models[1], samplers[2], cache)
        print(f"{len(expected)} steps; the same samples after the stop: {found == expected}")
        for sampler in samplers:
            sampler.close()
        ray.shutdown()


if __name__ == "__main__":
    main()
