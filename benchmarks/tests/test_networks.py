"""Every network takes small and large images, trains, and has the size its architecture promises."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from shade.errors import ConfigError, UnknownNameError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MILLIONS = {
    "cnn": (0.05, 0.2), "alexnet": (25, 60), "resnet18": (11, 11.3), "resnet50": (23, 24), "resnext50": (22.5, 23.5),
    "densenet161": (26, 27), "googlenet": (5, 6.5), "vgg16": (30, 140), "inceptionv3": (21, 23),
    "resnet152": (58, 58.5),
}  # fmt: skip
HEAVY = {"vgg16", "densenet161", "inceptionv3", "resnet152"}


@pytest.fixture(scope="module")
def networks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("networks", BENCHMARKS / "networks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("networks", module)
    spec.loader.exec_module(module)
    return module


def step(networks: ModuleType, name: str, image_size: int) -> None:
    """One forward and one backward pass of two noise images; every parameter must get a finite gradient."""
    torch.manual_seed(0)
    network = networks.build(name, 10, image_size)
    assert network.training
    low, high = MILLIONS[name]
    assert low <= networks.num_parameters(network) / 1e6 <= high
    logits = network(torch.rand(2, 3, image_size, image_size))
    assert isinstance(logits, torch.Tensor)
    assert logits.shape == (2, 10)
    torch.nn.functional.cross_entropy(logits, torch.tensor([3, 7])).backward()
    without = [n for n, p in network.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    assert without == []


@pytest.mark.parametrize("name", sorted(MILLIONS.keys() - HEAVY))
def test_small_images_train(networks: ModuleType, name: str) -> None:
    step(networks, name, 32)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(HEAVY))
def test_small_images_train_the_heavy_networks(networks: ModuleType, name: str) -> None:
    step(networks, name, 32)


@pytest.mark.parametrize("name", ["cnn", "resnet18", "googlenet"])
def test_large_images_train(networks: ModuleType, name: str) -> None:
    step(networks, name, 224)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MILLIONS.keys() - {"cnn", "resnet18", "googlenet"}))
def test_large_images_train_the_heavy_networks(networks: ModuleType, name: str) -> None:
    step(networks, name, 224)


@pytest.mark.parametrize("name", sorted(MILLIONS.keys() - HEAVY))
def test_the_least_image_size_is_enough_and_one_less_is_refused(networks: ModuleType, name: str) -> None:
    least = networks.NETWORKS[name].least_size
    step(networks, name, least)
    with pytest.raises(ConfigError, match=rf"at least {least} px for {name}, got {least - 1}; resize"):
        networks.build(name, 10, least - 1)


def test_a_small_stem_keeps_the_resolution(networks: ModuleType) -> None:
    small, large = networks.build("resnet18", 10, 32), networks.build("resnet18", 10, 64)
    image = torch.rand(1, 3, 32, 32)
    assert small.maxpool(small.conv1(image)).shape[-1] == 32
    assert large.maxpool(large.conv1(image)).shape[-1] == 8


def test_the_tested_networks_are_all_there_are(networks: ModuleType) -> None:
    assert set(networks.NETWORKS) == set(MILLIONS)


def test_an_unknown_name_lists_the_known(networks: ModuleType) -> None:
    with pytest.raises(UnknownNameError) as caught:
        networks.build("resnet5", 10, 32)
    assert "no network named 'resnet5' (did you mean 'resnet50'?); known: alexnet, cnn, densenet161" in str(
        caught.value
    )
    assert "\n" not in str(caught.value)


def test_one_class_is_no_classification(networks: ModuleType) -> None:
    with pytest.raises(ConfigError, match="at least 2 classes, got 1"):
        networks.build("cnn", 1, 32)
