"""Keeps the host's copy of indices that a loader puts on a device, so that a sampler need not read them back.

Reading them back waits for all that the device was given before. The copy is an attribute of the tensor on the device;
what is computed from that tensor has none, and is read back. One that was changed in place is read back, too.
"""

from __future__ import annotations

import torch


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns the tensor on a device, which is not waited for; with the copy, if it can be a batch's indices."""
    found = tensor.to(device, non_blocking=True)
    if tensor.dtype == torch.int64 and tensor.ndim == 1 and found is not tensor and not found.is_inference():
        found._shade_host_copy = tensor, found._version  # type: ignore[attr-defined]
    return found


def host_copy(indices: torch.Tensor) -> torch.Tensor:
    """Returns the copy on the host; the indices as they are without one."""
    on_host, version = getattr(indices, "_shade_host_copy", (indices, None))
    return on_host if version is None or version == indices._version else indices
