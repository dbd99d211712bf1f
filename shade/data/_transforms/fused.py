"""FusedBatch: draws for all samples of a batch in order, then renders each into its place, in any order.

Drawing needs the pictures' sizes, which are in the files' headers, and no pixels. So the part that must happen in order
takes microseconds, and the part that takes milliseconds may run in as many threads as there are. The caller decodes
whole what this way cannot decode (no plain JPEG, or one that the library refuses), and handles bad samples.

Invariant: sample and target are those of the user's chain, bit for bit.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shade.data._decode.cached_format import picture_of
from shade.data._decode.jpeg import REDUCTIONS, jpeg_decoder, size_of
from shade.data._decode.pixels import Box, Pixels
from shade.data._transforms.recognise import TransformView, Window, recognise

logger = logging.getLogger("shade.data")

_SMALL_PIXELS = 128 * 128
"""Up to this size pictures are decoded whole, and rendered a part of the batch at a time."""
_SMALL_FILE_BYTES = 8192
DecodeWhole = Callable[[int], tuple[npt.NDArray[np.uint8], tuple[Any, ...]]]
"""From a position in the batch to the whole picture (height, width, 3) and what comes with it. Raises `BadSampleError`.
"""


class Fuser:
    """What all batches of one view have in common. ``reduced``: large pictures may be decoded smaller."""

    def __init__(self, view: TransformView, *, reduced: bool) -> None:
        self.view, self.reduced = view, reduced
        self.decode = jpeg_decoder()

    def __getstate__(self) -> dict[str, Any]:
        return {"view": self.view, "reduced": self.reduced}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def reduction_of(self, window: Window) -> int:
        """Returns the factor by which a file is reduced while it is decoded: the crop stays at least as large as the
        output."""
        (_, _, height, width), (to_height, to_width) = window.crop, window.resized
        if self.reduced and not self.view.by_torch:
            for reduction in REDUCTIONS:
                if height >= reduction * to_height and width >= reduction * to_width:
                    return reduction
        return 1


def fuser_of(chain: Sequence[Callable[[Any], Any]], *, reduced: bool) -> Fuser | None:
    """Returns the fuser of a chain of transforms; None if the chain is not recognised, or this machine's arithmetic is
    not Pillow's, so that it runs as written."""
    view = recognise(chain) if chain else None
    if view is None:
        return None
    try:
        from shade.data._transforms.kernels import pillow_order

        if pillow_order() is not None:
            # The first draw compares both ways of drawing, here before workers are forked.
            view.draw_many(np.zeros((0, 2), dtype=np.int64), torch.Generator())
            return Fuser(view, reduced=reduced)
        logger.info("Pillow resizes otherwise on this machine; the transforms run as written")
    except Exception as error:  # noqa: BLE001 - whatever a compiler may raise: there is another way
        logger.info("the transforms run as written: %s", error)
    return None


class FusedBatch:
    """One batch under way: payloads as they were fetched (files, pictures, or exceptions), and what comes with each
    sample. ``decode_whole`` decodes what is no plain JPEG, and raises BadSampleError. The generator gives all random
    numbers."""

    def __init__(
        self,
        fuser: Fuser,
        payloads: Sequence[Any],
        rests: Sequence[tuple[Any, ...]],
        decode_whole: DecodeWhole,
        generator: torch.Generator,
    ) -> None:
        self._fuser, self._payloads, self.rests = fuser, payloads, list(rests)
        self._decode_whole, self._generator = decode_whole, generator
        self._before = generator.get_state()
        self._failed: list[int] = []
        self._whole: dict[int, Pixels] = {}
        self._draw(())

    def __len__(self) -> int:
        return len(self._payloads)

    def _draw(self, not_plain: Sequence[int]) -> None:
        self._size_B2 = _sizes_of(self._payloads)
        for position, payload in enumerate(self._payloads):
            is_plain = not isinstance(payload, Exception) and position not in not_plain
            size = self._size_B2[position]
            if is_plain and not size[0]:
                size[:] = self._look(position, payload) or 0
            if not is_plain or not size[0]:
                try:
                    picture, self.rests[position] = self._decode_whole(position)
                except BaseException:
                    # In the user's chain the samples before it would have been drawn.
                    self._fuser.view.draw_many(self._size_B2[:position], self._generator)
                    raise
                self._whole[position] = Pixels.of(picture)
                size[:] = picture.shape[:2]
        self._window_BF = self._fuser.view.draw_many(self._size_B2, self._generator)

    def _look(self, position: int, payload: Any) -> tuple[int, int] | None:
        picture = picture_of(payload)
        if picture is None:
            return size_of(payload)
        self._whole[position] = Pixels.of(picture)
        return picture.shape[0], picture.shape[1]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Returns (B, C, H, W)."""
        return (len(self), 3, *self._fuser.view.size)

    @property
    def dtype(self) -> torch.dtype:
        """Returns the samples' dtype."""
        return self._fuser.view.dtype

    @property
    def view(self) -> TransformView:
        """Returns the recognised chain."""
        return self._fuser.view

    @property
    def is_small(self) -> bool:
        """Returns whether the pictures are so small that a part of a batch costs more than the pixels in it."""
        is_usual = not self._fuser.reduced and not self._fuser.view.by_torch
        return is_usual and int(self._size_B2.prod(axis=1).max(initial=0)) <= _SMALL_PIXELS

    def window(self, position: int) -> Window:
        """Returns the window that was drawn for a sample."""
        return Window.of(self._window_BF[position])

    def payload(self, position: int) -> Any:
        """Returns a sample as it was fetched."""
        return self._payloads[position]

    def plain_positions(self) -> list[int]:
        """Returns the positions of plain JPEGs that are not decoded yet."""
        return [position for position in range(len(self)) if position not in self._whole]

    def picture(self, position: int) -> npt.NDArray[np.uint8]:
        """Returns a sample's whole picture, (height, width, 3), decoded here if need be. Raises BadSampleError."""
        whole, size = self._whole.get(position), None
        if whole is None:
            size = size_of(self._payloads[position])
        if size is not None:
            try:
                return self._fuser.decode(self._payloads[position], Box(0, 0, *size), 1).cut(Box(0, 0, *size))
            # The library refuses it; Pillow decides below.
            except ValueError:
                pass
        if whole is None:
            return self._decode_whole(position)[0]
        return whole.source_S.reshape(-1, whole.pitch // 3, 3)

    def items(self, indices: Sequence[int], samples_BCHW: torch.Tensor) -> list[tuple[Any, ...]]:
        """Returns the batch as a list of ``(sample, target, index)``, with samples of the class that the user's chain
        returns, after `fill` and `finish`."""
        kind = self._fuser.view.kind
        samples = [each if kind is torch.Tensor else each.as_subclass(kind) for each in samples_BCHW.unbind()]
        return [(each, *rest, index) for each, rest, index in zip(samples, self.rests, indices, strict=True)]

    def fill(self, first: int, stop: int, out_BCHW: npt.NDArray[Any]) -> tuple[int, int]:
        """Renders samples ``first`` to before ``stop`` into the batch's memory; threads may call it for different ones
        at the same time. Returns the nanoseconds spent decoding, and rendering."""
        if self.is_small:
            return self._fill_small(first, stop, out_BCHW)
        clock, decoding, rendering = time.perf_counter_ns, 0, 0
        for position in range(first, stop):
            begun = clock()
            window = self.window(position)
            reduction = 1 if position in self._whole else self._fuser.reduction_of(window)
            needed, frame = _needed(window, self._fuser.view, reduction)
            pixels = self._whole.get(position)
            if pixels is None:
                try:
                    pixels = self._fuser.decode(self._payloads[position], needed, reduction)
                # The library refuses it; `finish` has it decoded otherwise.
                except ValueError:
                    self._failed.append(position)
                    continue
            decoded = clock()
            _render(self._fuser.view, pixels, window, frame, out_BCHW[position])
            decoding += decoded - begun
            rendering += clock() - decoded
        return decoding, rendering

    def _fill_small(self, first: int, stop: int, out_BCHW: npt.NDArray[Any]) -> tuple[int, int]:
        """Does what `fill` does, with one call of the kernel."""
        from shade.data._transforms.kernels import pillow_order, render_many

        begun = time.perf_counter_ns()
        decode, begin_B, pictures, num_bytes = self._fuser.decode, np.full(stop - first, -1), [], 0
        for position, (height, width) in enumerate(self._size_B2[first:stop].tolist(), first):
            box, pixels = Box(0, 0, height, width), self._whole.get(position)
            if pixels is None:
                try:
                    pixels = decode(self._payloads[position], box, 1)
                except ValueError:  # as in `fill`
                    self._failed.append(position)
                    continue
            is_alone = pixels.source_S.size == 3 * height * width
            pictures.append(pixels.source_S if is_alone else pixels.cut(box).reshape(-1))
            begin_B[position - first], num_bytes = num_bytes, num_bytes + pictures[-1].size
        decoded = time.perf_counter_ns()
        if pictures:
            order, window_BF = pillow_order(), self._window_BF[first:stop]
            assert order is not None, "a fuser exists only where the order is known"
            columns_first_B = np.broadcast_to(order(*window_BF[:, 2:6].T), stop - first)
            size_B2, table_CV, out = self._size_B2[first:stop], self._fuser.view.table_CV, out_BCHW[first:stop]
            render_many(np.concatenate(pictures), begin_B, size_B2, window_BF, columns_first_B, table_CV, out)
        return decoded - begun, time.perf_counter_ns() - decoded

    def finish(self, out_BCHW: npt.NDArray[Any]) -> None:
        """Decodes and renders what `fill` could not decode, after the last `fill`. Raises BadSampleError."""
        if self._failed:
            failed, self._failed = self._failed, []
            # A sample of another size may come instead of a bad one, which changes all draws after it.
            self._generator.set_state(self._before)
            self._draw(failed)
            self.fill(0, len(self), out_BCHW)


def _sizes_of(payloads: Sequence[Any]) -> npt.NDArray[np.int64]:
    """Returns (B, 2) height and width of plain JPEGs; zeros for what else there is, and where files are large."""
    from shade.data._transforms.kernels import jpeg_sizes

    files = [b"" if isinstance(payload, Exception) else payload for payload in payloads]
    end_B = np.cumsum([len(content) for content in files])
    # Large files are not joined: their headers are read as they are used.
    if not len(files) or end_B[-1] > _SMALL_FILE_BYTES * len(files):
        return np.zeros((len(files), 2), dtype=np.int64)
    size_B2: npt.NDArray[np.int64] = jpeg_sizes(np.frombuffer(b"".join(files), dtype=np.uint8), end_B)
    return size_B2


class _FusedFrame:
    """A crop in the coordinates of the decoded part: offsets of the picture, and the box for the resize."""

    def __init__(self, top: int, left: int, box: tuple[float, ...]) -> None:
        self.top, self.left = top, left
        self.box: npt.NDArray[np.float64] = np.array(box)


def _needed(window: Window, view: TransformView, reduction: int) -> tuple[Box, _FusedFrame]:
    """Returns the part of the (reduced) picture that the output depends on; torch needs the whole crop."""
    (top, left, height, width), size, spans, frames = window.crop, view.size, [], []
    for start, length, to, inner, out in (
        (top, height, window.resized[0], window.inner[0], size[0]),
        (left, width, window.resized[1], window.inner[1], size[1]),
    ):
        first = start // reduction
        begin, end = start / reduction - first, (start + length) / reduction - first
        count = math.ceil(end)
        scale = (end - begin) / to
        reach = max(scale, 1.0) + 1.0
        low = max(math.floor(begin + inner * scale - reach), 0)
        high = min(math.ceil(begin + (inner + out) * scale + reach), count)
        spans.append((first + low, high - low))
        frames.append((first, begin, float(count), end))
    (y, y_begin, y_count, y_end), (x, x_begin, x_count, x_end) = frames
    box = window.crop if view.by_torch else Box(spans[0][0], spans[1][0], spans[0][1], spans[1][1])
    return box, _FusedFrame(y, x, (y_begin, x_begin, y_count, x_count, y_end, x_end))


def _render(view: TransformView, pixels: Pixels, window: Window, frame: _FusedFrame, out_CHW: npt.NDArray[Any]) -> None:
    from shade.data._transforms.kernels import look_up, pillow_order, render

    if view.by_torch:
        look_up(_resized_by_torch(view, pixels, window), window.flip, view.table_CV, out_CHW)
        return
    order = pillow_order()
    assert order is not None, "a fuser exists only where the order is known"
    columns_first = order(window.crop.height, window.crop.width, *window.resized)
    offset = np.array([frame.top - pixels.top, frame.left - pixels.left])
    inner, resized = np.array(window.inner), np.array(window.resized)
    source_S, pitch, table_CV = pixels.source_S, pixels.pitch, view.table_CV
    render(source_S, pitch, offset, frame.box, resized, inner, columns_first, window.flip, table_CV, out_CHW)


def _resized_by_torch(view: TransformView, pixels: Pixels, window: Window) -> npt.NDArray[np.uint8]:
    """Crops and resizes as the v2 classes do it with tensors: by their own functions."""
    from torchvision.transforms.v2 import functional

    # torch wants memory that may be written to.
    crop_HWC = np.array(pixels.cut(window.crop))
    crop_CHW = torch.from_numpy(crop_HWC).permute(2, 0, 1)
    resized_CHW = functional.resize_image(crop_CHW, list(window.resized), antialias=True)
    top, left = window.inner
    inner: npt.NDArray[np.uint8] = resized_CHW[:, top : top + view.size[0], left : left + view.size[1]].numpy()
    return inner
