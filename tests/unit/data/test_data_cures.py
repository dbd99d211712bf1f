"""What a refusal of the data plane advises works: the same script with that one change gives the wrapped samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from shade.data import ShadeDataset, ShadeLoader, ShadeSampler
from shade.errors import ConfigError
from tests.support.data_plane import Reversed

N, BATCH = 24, 4


class Items(Dataset[Any]):
    """Vectors with their numbers; ``make`` makes an item of a number."""

    def __init__(self, make: Callable[[int], Any] = lambda i: (torch.full((3,), float(i)), i), n: int = N) -> None:
        self.make, self.n = make, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return self.make(index)


class Opaque:
    """Nothing that an encoder knows."""

    def __init__(self, number: int) -> None:
        self.number = number


def cached(dataset: Any, **options: Any) -> ShadeDataset:
    return ShadeDataset(dataset, cache="memory://", working_set_fraction=1.0, **options)


def train(dataset: Any, loader: Any = DataLoader, batch_size: int = BATCH, sampler_batch: int = BATCH) -> list[Any]:
    """Two passes; the values of the second, which the cache gives, in the order of the samples."""
    sampler = ShadeSampler(dataset, batch_size=sampler_batch, mode="uniform", num_replicas=1, rank=0)
    batches = loader(dataset, batch_size=batch_size, sampler=sampler)
    seen: dict[int, Any] = {}
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for values, *_, indices in batches:
            sampler.report(indices, torch.ones(len(indices)))
            seen.update(zip(indices.tolist(), values.tolist(), strict=True))
    return [seen[index] for index in range(len(dataset))]


class Case(NamedTuple):
    """One refusal."""

    message: str
    refused: Callable[[], Any]
    advised: Callable[[], Any]
    expected: list[Any]


FORWARD = [[float(i)] * 3 for i in range(N)]
CASES = {
    "a subset around": Case(
        "the Subset inside the ShadeDataset",
        lambda: train(Subset(cached(Items()), range(8))),
        lambda: train(cached(Subset(Items(), range(8)))),
        FORWARD[:8],
    ),
    "two in one": Case(
        "the ConcatDataset inside the ShadeDataset",
        lambda: train(ConcatDataset([cached(Items(n=12)), cached(Items(n=12))])),
        lambda: train(cached(ConcatDataset([Items(n=12), Items(n=12)]))),
        FORWARD[:12] * 2,
    ),
    "reordered": Case(
        "reorders samples belongs inside",
        lambda: train(Reversed(cached(Items()))),
        lambda: train(cached(Reversed(Items()))),
        FORWARD[::-1],
    ),
    "ShadeLoader of a wrapper": Case(
        "expected a ShadeDataset",
        lambda: ShadeLoader(Reversed(cached(Items())), batch_size=BATCH),  # type: ignore[arg-type]
        lambda: train(cached(Reversed(Items())), partial(ShadeLoader, num_workers=0)),
        FORWARD[::-1],
    ),
    "an unknown class": Case(
        "cannot encode index 0",
        lambda: cached(Items(Opaque)),
        lambda: train(
            cached(
                Items(Opaque),
                encode=lambda item: bytes([item.number]),
                decode=lambda content: (torch.full((3,), float(bytes(content)[0])),),
            )
        ),
        FORWARD,
    ),
    "a list": Case(
        "as a tuple, such as",
        lambda: cached(Items(lambda i: [torch.full((3,), float(i)), Opaque(i)])),
        lambda: train(cached(Items(lambda i: (torch.full((3,), float(i)), i)))),
        FORWARD,
    ),
    "a batch that is too large": Case(
        "choose a smaller batch size",
        lambda: train(cached(Items()), batch_size=N + 1, sampler_batch=N + 1),
        lambda: train(cached(Items()), batch_size=N, sampler_batch=N),
        FORWARD,
    ),
    "another batch size": Case(
        "give loader and sampler one batch_size, 4",
        lambda: train(cached(Items()), batch_size=2 * BATCH),
        lambda: train(cached(Items()), batch_size=BATCH),
        FORWARD,
    ),
    "pictures of what has none": Case(
        "form='encoded'",
        lambda: cached(Items(), form="decoded"),
        lambda: train(cached(Items(), form="encoded")),
        FORWARD,
    ),
    "ranks without a group": Case(
        "torch.distributed",
        lambda: ShadeSampler(cached(Items()), batch_size=BATCH, num_replicas=2, rank=0),
        lambda: train(cached(Items())),
        FORWARD,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_advice_works(name: str) -> None:
    case = CASES[name]
    with pytest.raises(ConfigError, match=case.message):
        case.refused()
    assert case.advised() == case.expected


def test_what_is_random_belongs_into_the_transform() -> None:
    def noisy(item: torch.Tensor) -> torch.Tensor:
        return item + torch.rand(3)

    with pytest.warns(UserWarning, match=r"move what is random into ShadeDataset\(…, transform=…\)"):
        frozen = cached(Items(lambda i: (noisy(torch.full((3,), float(i))), i)))
    assert torch.equal(frozen[3][0], frozen[3][0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        free = cached(Items(), transform=noisy)
    assert not torch.equal(free[3][0], free[3][0])
    assert free[3][0].floor().tolist() == [3.0] * 3
