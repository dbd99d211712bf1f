"""Keeps the host's copy of indices that are moved to a device, so that a sampler need not read them back.

Reading them back waits for all that the device was given before. The copy is an attribute of the tensor on the device;
what is computed from that tensor has none, and is read back. So is one that was changed in place.
"""

from __future__ import annotations

import torch


def moved(on_host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a tensor on the device; one that can be a batch's indices has its copy with it."""
    tensor = on_host.to(device, non_blocking=True)
    if on_host.dtype == torch.int64 and on_host.ndim == 1 and tensor is not on_host and not tensor.is_inference():
        tensor._shade_host_copy = on_host, tensor._version  # type: ignore[attr-defined]
    return tensor


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the copy of a tensor that `moved` returned, or any other as it is."""
    on_host, version = getattr(tensor, "_shade_host_copy", (tensor, None))
    return on_host if version is None or version == tensor._version else tensor
