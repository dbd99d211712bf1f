"""Builds the networks of the benchmarks, with random weights, for large images and for small ones.

The architectures are torchvision's own; nothing is downloaded. Their first layers were drawn for 224 pixels and throw a
32-pixel image away before the network has looked at it, so below `SMALL` pixels the stem alone is changed, as is usual
for CIFAR: a 3×3 convolution of stride 1 in place of the large strided one, and no pooling right after it. Everything
behind the stem stays as published.

=============  =====================================================  =================  ==============
name           below 64 px                                            least image size   parameters *
=============  =====================================================  =================  ==============
cnn            (the same at every size)                               8                  0.09 M
alexnet        3×3 stem, head on 3×3 features                         16                 29 M
resnet18       3×3 stem, no pooling                                   8                  11 M
resnet50       3×3 stem, no pooling                                   8                  24 M
resnet152      3×3 stem, no pooling                                   8                  58 M
resnext50      3×3 stem, no pooling                                   8                  23 M
densenet161    3×3 stem, no pooling                                   8                  26 M
googlenet      3×3 stem, no first pooling, no auxiliary heads         8                  6 M
vgg16          head on 1×1 features                                   32                 34 M
inceptionv3    stem of stride 1, no pooling, no auxiliary head        24                 22 M
=============  =====================================================  =================  ==============

(* 10 classes at 32 px; inceptionv3 changes its stem below 75 px, the least that the published one takes.)

Invariant: ``build(...)(images)`` is one tensor of logits (B, num_classes), in training mode too.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import NamedTuple, cast

from torch import nn
from torchvision import models

from shade.errors import ConfigError, UnknownNameError

SMALL = 64
"""Below this many pixels the stem is replaced."""


class SmallCNN(nn.Sequential):
    """Three convolutions and a linear layer: what the embedded default trains, half a second per epoch on two cores.

    Normalises by groups and not by batches: five epochs of the digits are too few steps for running statistics to
    settle, and a sample's loss, which scores it, does not then depend on the samples it happened to meet.
    After 5 epochs of the digits in batches of 64, three seeds: 96.4–97.2 % (SGD 0.01, momentum 0.9), 98.1–98.3 %
    (Adam 0.001).
    """

    def __init__(self, num_classes: int) -> None:
        def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
            convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
            return [convolution, nn.GroupNorm(8, outputs), nn.ReLU(inplace=True)]

        head = [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(96 * 16, num_classes)]
        super().__init__(*block(3, 32, 2), *block(32, 64, 2), *block(64, 96, 1), *head)


def _cnn(num_classes: int, small: bool) -> nn.Module:
    del small
    return SmallCNN(num_classes)


def _alexnet(num_classes: int, small: bool) -> nn.Module:
    network = models.alexnet(weights=None, num_classes=num_classes)
    if small:
        network.features[0] = nn.Conv2d(3, 64, 3, padding=1)
        network.avgpool = nn.AdaptiveAvgPool2d(3)
        network.classifier[1] = nn.Linear(256 * 9, 4096)
    return cast(nn.Module, network)


def _vgg16(num_classes: int, small: bool) -> nn.Module:
    network = models.vgg16(weights=None, num_classes=num_classes)
    if small:
        network.avgpool = nn.AdaptiveAvgPool2d(1)
        network.classifier[0] = nn.Linear(512, 4096)
    return cast(nn.Module, network)


def _resnet(constructor: Callable[..., models.ResNet]) -> Callable[[int, bool], nn.Module]:
    def make(num_classes: int, small: bool) -> nn.Module:
        network = constructor(weights=None, num_classes=num_classes)
        if small:
            network.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
            network.maxpool = nn.Identity()
        return cast(nn.Module, network)

    return make


def _densenet161(num_classes: int, small: bool) -> nn.Module:
    network = models.densenet161(weights=None, num_classes=num_classes)
    if small:
        network.features.conv0 = nn.Conv2d(3, 96, 3, padding=1, bias=False)
        network.features.pool0 = nn.Identity()
    return cast(nn.Module, network)


def _googlenet(num_classes: int, small: bool) -> nn.Module:
    network = models.googlenet(weights=None, num_classes=num_classes, aux_logits=False, init_weights=True)
    if small:
        network.conv1.conv = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        network.maxpool1 = nn.Identity()
    return cast(nn.Module, network)


def _inceptionv3(num_classes: int, small: bool) -> nn.Module:
    network = models.inception_v3(weights=None, num_classes=num_classes, aux_logits=False, init_weights=True)
    if small:
        network.Conv2d_1a_3x3.conv = nn.Conv2d(3, 32, 3, bias=False)
        network.maxpool1 = nn.Identity()
        network.maxpool2 = nn.Identity()
    return cast(nn.Module, network)


class Recipe(NamedTuple):
    """How a network is built, and for which images."""

    constructor: Callable[[int, bool], nn.Module]
    """(num_classes, small) → network."""
    least_size: int
    """Pixels below which nothing would be left of an image."""
    large_size: int = SMALL
    """Pixels from which the stem is the published one."""


NETWORKS = {
    "cnn": Recipe(_cnn, 8),
    "alexnet": Recipe(_alexnet, 16),
    "resnet18": Recipe(_resnet(models.resnet18), 8),
    "resnet50": Recipe(_resnet(models.resnet50), 8),
    "resnet152": Recipe(_resnet(models.resnet152), 8),
    "resnext50": Recipe(_resnet(models.resnext50_32x4d), 8),
    "densenet161": Recipe(_densenet161, 8),
    "googlenet": Recipe(_googlenet, 8),
    "vgg16": Recipe(_vgg16, 32),
    "inceptionv3": Recipe(_inceptionv3, 24, 75),
}


def build(name: str, num_classes: int, image_size: int) -> nn.Module:
    """Builds a network with random weights, drawn from torch's global generator.

    Args:
        name: One of `NETWORKS`.
        num_classes: Width of the logits, ≥ 2.
        image_size: Height and width of the images in pixels; the shorter one if they differ.

    Returns:
        The network, on the CPU, in training mode; maps (B, 3, image_size, image_size) to (B, num_classes).

    Raises:
        UnknownNameError: No network of that name; the message lists the known ones.
        ConfigError: Too few classes, or images too small for the network.
    """
    if name not in NETWORKS:
        near = difflib.get_close_matches(name, NETWORKS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UnknownNameError(f"no network named {name!r}{hint}; known: {', '.join(sorted(NETWORKS))}")
    recipe = NETWORKS[name]
    if num_classes < 2:
        raise ConfigError.of("at least 2 classes", num_classes, "check that the training folder has one folder a class")
    if image_size < recipe.least_size:
        raise ConfigError.of(
            f"images of at least {recipe.least_size} px for {name}", image_size, "resize them or use cnn"
        )
    return recipe.constructor(num_classes, image_size < recipe.large_size)


def num_parameters(network: nn.Module) -> int:
    """Trainable numbers in a network."""
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
