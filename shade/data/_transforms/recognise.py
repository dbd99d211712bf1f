"""Recognises the usual torchvision transforms, and draws their random numbers from the generators that they use.

A recognised chain is: perhaps a conversion to a tensor; one geometry (RandomResizedCrop, or Resize and CenterCrop, or
either alone); perhaps a RandomHorizontalFlip; then only steps that work on each value by itself (ToTensor, Normalize,
…). It takes old classes and v2 classes, in any nesting of Compose, exactly these classes and no subclasses, bilinear.
Such a chain is a `TransformView`, done in one pass over the pixels. For any other chain the result is None, and it runs
as the user wrote it.

Random numbers are drawn sample by sample with torchvision's calls in torchvision's order, from a generator of the
caller's: so they are torchvision's, in whichever thread and in however many.

Invariant: `TransformView.draw` leaves the generator where the user's chain would have left it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

from shade.data._decode.pixels import Box

_ATTEMPTS = 10
_TO_TENSOR = (v1.ToTensor, v1.PILToTensor, v2.PILToTensor, v2.ToImage)
_CONVERSIONS = (v1.ConvertImageDtype, v2.ConvertImageDtype, v2.ToDtype, v2.ToPureTensor)
_PER_VALUE = (*_TO_TENSOR, *_CONVERSIONS, v1.Normalize, v2.Normalize)
_CROPS, _RESIZES = (v1.RandomResizedCrop, v2.RandomResizedCrop), (v1.Resize, v2.Resize)
_CENTERS, _FLIPS = (v1.CenterCrop, v2.CenterCrop), (v1.RandomHorizontalFlip, v2.RandomHorizontalFlip)
_OUTPUTS = (torch.float32, torch.uint8, torch.float64)


class Window(NamedTuple):
    """The frame of one sample's view, in whole pixels."""

    crop: Box
    """The part of the picture that is resized."""
    resized: tuple[int, int]
    """Height and width after the resize."""
    inner: tuple[int, int]
    """Top and left of the output in the resized picture."""
    flip: bool


Geometry = Callable[[int, int, torch.Generator], tuple[Box, tuple[int, int], tuple[int, int]]]
"""From a picture's height and width, and a generator: a `Window` without the flip."""


class RandomCropGeometry:
    """torchvision's RandomResizedCrop: ranges of the crop's share of the area and of its width over its height."""

    def __init__(self, scale: Sequence[float], ratio: Sequence[float], size: tuple[int, int]) -> None:
        self._scale, self._ratio, self._size = scale, ratio, size
        log_ratio = torch.log(torch.tensor(ratio))
        self._log_ratio = float(log_ratio[0]), float(log_ratio[1])

    def __call__(
        self, height: int, width: int, generator: torch.Generator
    ) -> tuple[Box, tuple[int, int], tuple[int, int]]:
        area, number, place = height * width, torch.empty(1), torch.empty(1, dtype=torch.int64)
        for _ in range(_ATTEMPTS):
            target = area * number.uniform_(*self._scale, generator=generator).item()
            aspect = number.uniform_(*self._log_ratio, generator=generator).exp_().item()
            crop_width, crop_height = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
            if 0 < crop_width <= width and 0 < crop_height <= height:
                top = int(place.random_(0, height - crop_height + 1, generator=generator).item())
                left = int(place.random_(0, width - crop_width + 1, generator=generator).item())
                return Box(top, left, crop_height, crop_width), self._size, (0, 0)
        crop_height, crop_width = height, width
        if width / height < min(self._ratio):
            crop_height = round(width / min(self._ratio))
        elif width / height > max(self._ratio):
            crop_width = round(height * max(self._ratio))
        crop = Box((height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width)
        return crop, self._size, (0, 0)


class CenterGeometry:
    """torchvision's Resize, then CenterCrop; nothing is random. Either ``edge`` (the shorter edge's length after the
    resize) or ``resized`` (height and width after it) is given."""

    def __init__(self, edge: int | None, resized: tuple[int, int] | None, size: tuple[int, int]) -> None:
        self._edge, self._resized, self._size = edge, resized, size

    def __call__(
        self, height: int, width: int, generator: torch.Generator
    ) -> tuple[Box, tuple[int, int], tuple[int, int]]:
        resized = self._resized
        if resized is None:
            assert self._edge is not None
            long = int(self._edge * max(height, width) / min(height, width))
            resized = (long, self._edge) if width <= height else (self._edge, long)
        inner = (round((resized[0] - self._size[0]) / 2.0), round((resized[1] - self._size[1]) / 2.0))
        return Box(0, 0, height, width), resized, inner


class TransformView:
    """A recognised chain. Height and width of the output are its ``size``; without a flip, ``flip_probability`` is
    None.

    ``by_torch`` says that the picture is a tensor when it is resized, so torch's arithmetic counts and not Pillow's.
    ``result`` are the per-value steps' results for the uint8 values 0 to 255: (3, 1, 256).
    """

    def __init__(
        self,
        geometry: Geometry,
        size: tuple[int, int],
        flip_probability: float | None,
        by_torch: bool,
        result: torch.Tensor,
    ) -> None:
        self._geometry, self.size, self._flip_probability, self.by_torch = geometry, size, flip_probability, by_torch
        self.is_random = flip_probability is not None or isinstance(geometry, RandomCropGeometry)
        self.kind: type[torch.Tensor] = type(result)
        self.dtype = result.dtype
        pure = result.as_subclass(torch.Tensor)
        self.table_CV: npt.NDArray[Any] = np.ascontiguousarray(pure.reshape(3, 256).numpy())

    def draw(self, height: int, width: int, generator: torch.Generator) -> Window:
        """Draws the window of the next sample, a picture of that height and width, as torchvision would."""
        crop, resized, inner = self._geometry(height, width, generator)
        flip = self._flip_probability is not None and bool(
            torch.rand(1, generator=generator).item() < self._flip_probability
        )
        return Window(crop, resized, inner, flip)


def recognise(chain: Sequence[Callable[[Any], Any]]) -> TransformView | None:
    """Returns the view of a chain of transforms; None unless all of it is exactly known."""
    steps = list(_flattened(chain))
    before = []
    while steps and type(steps[0]) in _TO_TENSOR:
        before.append(steps.pop(0))
    if any(type(step) is v1.ToTensor for step in before):
        return None  # floats are resized by other arithmetic
    found = _geometry_of(steps, as_tensor=bool(before))
    if found is None:
        return None
    geometry, size, num_taken = found
    rest, flip_probability = steps[num_taken:], None
    if rest and type(rest[0]) in _FLIPS:
        flip_probability = float(rest.pop(0).p)
    if not all(type(step) in _PER_VALUE for step in rest) or not any(type(s) in _TO_TENSOR for s in [*before, *rest]):
        return None
    result = _tabulated([*before, *rest])
    return None if result is None else TransformView(geometry, size, flip_probability, bool(before), result)


def parameters_of(chain: Sequence[Callable[[Any], Any]]) -> str:
    """Returns all that `recognise` depends on: other parameters, other words."""
    known = (*_PER_VALUE, *_CROPS, *_RESIZES, *_CENTERS, *_FLIPS)
    return str([(type(step), vars(step) if type(step) in known else id(step)) for step in _flattened(chain)])


def _flattened(chain: Sequence[Any]) -> Iterator[Any]:
    for step in chain:
        if type(step) in (v1.Compose, v2.Compose):
            yield from _flattened(step.transforms)
        elif type(step) is torch.nn.Sequential:
            yield from _flattened(list(step))
        else:
            yield step


def _geometry_of(steps: list[Any], *, as_tensor: bool) -> tuple[Geometry, tuple[int, int], int] | None:
    """Returns the geometry, the output's size, and how many of the steps it takes."""
    if not steps:
        return None
    first = steps[0]
    if type(first) in _CROPS and _is_bilinear(first, as_tensor=as_tensor):
        size = (int(first.size[0]), int(first.size[1]))
        return RandomCropGeometry(first.scale, first.ratio, size), size, 1
    if type(first) not in _RESIZES or not _is_bilinear(first, as_tensor=as_tensor) or first.max_size is not None:
        return None
    lengths = [first.size] if isinstance(first.size, int) else list(first.size)
    edge = lengths[0] if len(lengths) == 1 else None
    resized = None if edge is not None else (int(lengths[0]), int(lengths[1]))
    if len(steps) > 1 and type(steps[1]) in _CENTERS:
        size = (int(steps[1].size[0]), int(steps[1].size[1]))
        least = (edge, edge) if resized is None else resized
        fits = all(length is not None and length >= wanted for length, wanted in zip(least, size, strict=True))
        return (CenterGeometry(edge, resized, size), size, 2) if fits else None
    return None if resized is None else (CenterGeometry(None, resized, resized), resized, 1)


def _is_bilinear(step: Any, *, as_tensor: bool) -> bool:
    """Returns whether a step is bilinear, with known arithmetic: no for old classes on tensors, and without
    antialiasing."""
    if as_tensor and (step.antialias is not True or not isinstance(step, v2.Transform)):
        return False
    return step.interpolation in (InterpolationMode.BILINEAR, "bilinear", 2)


def _tabulated(steps: list[Any]) -> torch.Tensor | None:
    """Returns the per-value steps' result for every value, by channel: they are run, not imitated."""
    from PIL import Image

    ramp = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
    value: Any = Image.fromarray(ramp)
    for step in steps:
        value = step(value)
    fits = isinstance(value, torch.Tensor) and value.shape == (3, 1, 256) and value.dtype in _OUTPUTS
    return value if fits else None
