"""Recognises the usual torchvision transforms, and draws their random numbers from the generators that they use.

A recognised chain is: perhaps a conversion to a tensor; one geometry (RandomResizedCrop, or Resize and CenterCrop, or
either alone); perhaps a RandomHorizontalFlip; then only steps that work on each value by itself (ToTensor, Normalize,
…). It takes old classes and v2 classes, in any nesting of Compose, exactly these classes and no subclasses, bilinear.
Such a chain is a `TransformView`, done in one pass over the pixels; any other one runs as the user wrote it.

Invariant: `TransformView.draw` leaves the generator where the user's chain would have left it, and so does `draw_many`.

Legend: B batch · F the nine numbers of a `Window`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

from shade.data._decode.pixels import Box

logger = logging.getLogger("shade.data")

_ATTEMPTS = 10
_WORDS = 8
"""Words of the generator that a crop usually takes, amply."""
_COMPARED = 240
_ODD_SIZES = ((1, 1), (1, 600), (600, 1), (32, 32), (3, 40), (40, 3), (224, 224))
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

    @property
    def numbers(self) -> tuple[int, ...]:
        """Returns its nine numbers, in order."""
        return (*self.crop, *self.resized, *self.inner, self.flip)

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Window:
        """Returns the window of nine numbers."""
        top, left, height, width, to_height, to_width, inner_top, inner_left, flip = map(int, numbers)
        return cls(Box(top, left, height, width), (to_height, to_width), (inner_top, inner_left), bool(flip))


Geometry = Callable[[int, int, torch.Generator], tuple[Box, tuple[int, int], tuple[int, int]]]
"""From a picture's height and width, and a generator: a `Window` without the flip."""


class RandomCropGeometry:
    """torchvision's RandomResizedCrop: ranges of the crop's share of the area and of its width over its height."""

    def __init__(self, scale: Sequence[float], ratio: Sequence[float], size: tuple[int, int]) -> None:
        self.scale, self.ratio, self._size = scale, ratio, size
        log_ratio = torch.log(torch.tensor(ratio))
        self.log_ratio = float(log_ratio[0]), float(log_ratio[1])

    def __call__(
        self, height: int, width: int, generator: torch.Generator
    ) -> tuple[Box, tuple[int, int], tuple[int, int]]:
        # torchvision's calls in torchvision's order, for its numbers.
        area, number, place = height * width, torch.empty(1), torch.empty(1, dtype=torch.int64)
        for _ in range(_ATTEMPTS):
            target = area * number.uniform_(*self.scale, generator=generator).item()
            aspect = number.uniform_(*self.log_ratio, generator=generator).exp_().item()
            crop_width, crop_height = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
            if 0 < crop_width <= width and 0 < crop_height <= height:
                top = int(place.random_(0, height - crop_height + 1, generator=generator).item())
                left = int(place.random_(0, width - crop_width + 1, generator=generator).item())
                return Box(top, left, crop_height, crop_width), self._size, (0, 0)
        crop_height, crop_width = height, width
        if width / height < min(self.ratio):
            crop_height = round(width / min(self.ratio))
        elif width / height > max(self.ratio):
            crop_width = round(height * max(self.ratio))
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
        self._draws_alike: bool | None = None

    def draw(self, height: int, width: int, generator: torch.Generator) -> Window:
        """Draws the window of the next sample, a picture of that height and width, as torchvision would."""
        crop, resized, inner = self._geometry(height, width, generator)
        flip = self._flip_probability is not None and bool(
            torch.rand(1, generator=generator).item() < self._flip_probability
        )
        return Window(crop, resized, inner, flip)

    def draw_many(self, size_B2: npt.NDArray[np.int64], generator: torch.Generator) -> npt.NDArray[np.int64]:
        """Returns the windows of the next samples as int64 (B, 9), drawn as `draw` does it, in order."""
        # `draw` makes some twenty calls of torch, 40 µs a sample. Compiled loops draw from the same words of the
        # generator, unless a number or the generator's state differs, which is compared once a view and process.
        if self._draws_alike is None:
            self._draws_alike = self._compare_draws()
        return self._draw_natively(size_B2, generator) if self._draws_alike else self._draw_each(size_B2, generator)

    def _draw_each(self, size_B2: npt.NDArray[np.int64], generator: torch.Generator) -> npt.NDArray[np.int64]:
        windows = [self.draw(height, width, generator).numbers for height, width in size_B2.tolist()]
        return np.array(windows, dtype=np.int64).reshape(-1, 9)

    def _draw_natively(self, size_B2: npt.NDArray[np.int64], generator: torch.Generator) -> npt.NDArray[np.int64]:
        from shade.data._transforms.kernels import random_crops

        geometry, words = self._geometry, GeneratorWords(generator)
        probability = self._flip_probability
        window_BF = np.zeros((len(size_B2), 9), dtype=np.int64)
        if not isinstance(geometry, RandomCropGeometry):
            kinds, kind_B = np.unique(size_B2, axis=0, return_inverse=True)
            fixed = [Window(*geometry(height, width, generator), False).numbers for height, width in kinds.tolist()]
            window_BF[:] = np.array(fixed, dtype=np.int64).reshape(-1, 9)[kind_B.reshape(-1)]
            if probability is not None:
                drawn_B = words.uniform(words.first(len(size_B2)), 0.0, 1.0)
                window_BF[:, 8] = drawn_B.astype(np.float64) < probability
                words.used(len(size_B2))
            return window_BF
        window_BF[:, 4:6] = self.size
        ratio = np.array([min(geometry.ratio), max(geometry.ratio)], dtype=np.float64)
        num_used, count = -1, _WORDS * len(size_B2)
        while num_used < 0:
            first = words.first(count)
            part = words.uniform(first, *geometry.scale)
            aspect = torch.from_numpy(words.uniform(first, *geometry.log_ratio)).exp_().numpy()
            flips, odds = probability is not None, probability or 0.0
            num_used = random_crops(first, part, aspect, size_B2, ratio, flips, odds, window_BF)
            count *= 2
        words.used(num_used)
        return window_BF

    def _compare_draws(self) -> bool:
        """Returns whether `_draw_natively` gives what `draw` gives, for pictures of many sizes."""
        sizes = np.random.default_rng(0).integers(1, 700, (_COMPARED, 2))
        sizes[: len(_ODD_SIZES)] = _ODD_SIZES
        one, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
        each = np.concatenate([self._draw_each(part, one) for part in np.array_split(sizes, 3)])
        try:
            native = np.concatenate([self._draw_natively(part, other) for part in np.array_split(sizes, 3)])
        except Exception as error:  # noqa: BLE001 - whatever another version of torch or a compiler may raise
            logger.info("random crops are drawn one by one: %s", error)
            return False
        return np.array_equal(each, native) and torch.equal(one.get_state(), other.get_state())


class GeneratorWords:
    """The words that torch's generator for the CPU draws from, without drawing them."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._state = generator.get_state()
        # torch's state: the seed (8 bytes), words left (4), seeded (4), the next word (8), 624 words in 8 bytes each.
        content = self._state.numpy()
        self._left, self._next = content[8:12].view(np.int32), content[16:24].view(np.uint64)
        self._words = content[24 : 24 + 8 * 624].view(np.uint64)
        self._position = 625 - int(self._left[0])

    def first(self, count: int) -> npt.NDArray[np.uint32]:
        """Returns the next words, which stay there."""
        from shade.data._transforms.kernels import random_words

        words: npt.NDArray[np.uint32] = random_words(self._words.astype(np.uint32), self._position, count)[0]
        return words

    def used(self, count: int) -> None:
        """Moves the generator on by so many words."""
        from shade.data._transforms.kernels import random_words

        if count:
            state = self._words.astype(np.uint32)
            self._next[0] = position = random_words(state, self._position, count)[1]
            self._words[:], self._left[0] = state, 625 - position
            self._generator.set_state(self._state)

    @staticmethod
    def uniform(words: npt.NDArray[np.uint32], low: float, high: float) -> npt.NDArray[np.float32]:
        """Returns what ``uniform_`` makes of each word: float32, multiplied and added with one rounding."""
        span = np.float64(np.float32(high) - np.float32(low))
        return ((words & 0xFFFFFF) * 2.0**-24 * span + np.float64(np.float32(low))).astype(np.float32)


def recognise(chain: Sequence[Callable[[Any], Any]]) -> TransformView | None:
    """Returns the view of a chain of transforms; None unless all of it is exactly known."""
    steps = list(_flattened(chain))
    before = []
    while steps and type(steps[0]) in _TO_TENSOR:
        before.append(steps.pop(0))
    # Floats are resized by other arithmetic.
    if any(type(step) is v1.ToTensor for step in before):
        return None
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
    """Returns whether a step is bilinear, with known arithmetic."""
    # Not known: old classes on tensors, and tensors without antialiasing.
    if as_tensor and (step.antialias is not True or not isinstance(step, v2.Transform)):
        return False
    # 2 is Pillow's number of bilinear.
    return step.interpolation in (InterpolationMode.BILINEAR, "bilinear", 2)


def _tabulated(steps: list[Any]) -> torch.Tensor | None:
    """Returns the result of the user's own per-value steps for every value, by channel."""
    from PIL import Image

    ramp = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
    value: Any = Image.fromarray(ramp)
    for step in steps:
        value = step(value)
    fits = isinstance(value, torch.Tensor) and value.shape == (3, 1, 256) and value.dtype in _OUTPUTS
    return value if fits else None
