"""What a sampler refuses to plan a cache with; see tests/integration for what it does with it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from PIL import Image
from torchvision.datasets import ImageFolder

from shade import ShadeDataset, ShadeSampler
from shade.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> ImageFolder:
    for number in range(8):
        path = tmp_path / f"class{number % 2}" / f"{number}.bmp"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(path)
    return ImageFolder(str(tmp_path))


def test_a_policy_that_must_see_all_epochs_first_is_for_the_simulator(folder: ImageFolder) -> None:
    dataset = ShadeDataset(folder, cache="memory://", policy="belady")
    with pytest.raises(ConfigError, match=r"must see all epochs before the first.*use 'plan'"):
        ShadeSampler(dataset, batch_size=2)
    dataset.close()


@pytest.mark.multiprocess
def test_following_takes_a_cache_that_others_can_see_and_one_rank(folder: ImageFolder) -> None:
    private = ShadeDataset(folder, cache="memory://")
    with pytest.raises(ConfigError, match="a cache that other jobs can see"):
        ShadeSampler(private, batch_size=2, follow="search")
    private.close()
    with (
        contextlib.closing(ShadeDataset(folder, cache="local://")) as shared,
        pytest.raises(ConfigError, match="one rank"),
    ):
        ShadeSampler(shared, num_replicas=2, rank=0, batch_size=2, mode="uniform", follow="search")
    with pytest.raises(ConfigError, match="a ShadeDataset with a cache"):
        ShadeSampler(folder, batch_size=2, follow="search")
