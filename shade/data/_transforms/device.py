"""Decodes and renders a batch on a GPU: nvJPEG for the files, torch for crop, resize, flip and table.

The host draws all random numbers as always, so crops and flips equal those of every other way. Pixels do not: nvJPEG
widens subsampled colours by other arithmetic than libjpeg, and torch resizes floats where Pillow rounds between its two
passes. They differ by a level or two of 255 where the decoders agree, and by more at sharp edges of colour. So only
``decode_on="device"`` asks for it, on machines whose processors cannot keep up with the GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from shade.data._transforms.fused import FusedBatch
from shade.data._transforms.recognise import TransformView, Window

_RGB = 3
"""torchvision's ImageReadMode.RGB."""


def render_on_device(batch: FusedBatch, device: torch.device) -> torch.Tensor:
    """Renders a drawn batch; returns (B, 3, H, W) on the device. Raises BadSampleError for a file that no decoder
    reads."""
    # A device that is no GPU gets pictures that the host has decoded.
    files = batch.plain_positions() if device.type == "cuda" else []
    decoded = dict(zip(files, _decode_many([batch.payload(position) for position in files], device), strict=True))
    rendered = []
    for position in range(len(batch)):
        picture = decoded.get(position)
        # nvJPEG did not decode it.
        if picture is None:
            picture = torch.from_numpy(np.array(batch.picture(position))).permute(2, 0, 1).to(device, non_blocking=True)
        rendered.append(_render(batch.view, picture, batch.window(position)))
    values_BCHW = torch.stack(rendered).long()
    table_CV = torch.from_numpy(batch.view.table_CV).to(device, non_blocking=True)
    return torch.stack([table[values] for table, values in zip(table_CV, values_BCHW.unbind(1), strict=True)], dim=1)


def _decode_many(contents: list[Any], device: torch.device) -> list[torch.Tensor | None]:
    """Decodes all files at once, as nvJPEG likes it; one by one if it refuses one of them, and None for that one."""
    if not contents:
        return []
    # This loads the operators; torchvision's functions would warn of their age at every call.
    import torchvision.io  # noqa: F401

    files = [torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy()) for content in contents]
    decode = torch.ops.image.decode_jpegs_cuda
    try:
        return list(decode(files, _RGB, device))
    except RuntimeError:
        # One file that nvJPEG refuses does not keep the others from the GPU.
        if len(files) == 1:
            return [None]
        return [picture for content in contents for picture in _decode_many([content], device)]


def _render(view: TransformView, picture_CHW: torch.Tensor, window: Window) -> torch.Tensor:
    """Returns one picture in the output's size, as whole numbers of 0 to 255."""
    (top, left, height, width), (inner_top, inner_left) = window.crop, window.inner
    crop = picture_CHW[None, :, top : top + height, left : left + width].float()
    resized = interpolate(crop, size=window.resized, mode="bilinear", antialias=True, align_corners=False)[0]
    part = resized[:, inner_top : inner_top + view.size[0], inner_left : inner_left + view.size[1]]
    return (part.flip(-1) if window.flip else part).round().clamp(0, 255)
