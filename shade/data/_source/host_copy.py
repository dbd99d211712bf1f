"""Keeps the host's copy of indices that a loader puts on a device, so that a sampler need not read them back.

Reading them back waits for all that the device was given before. The copy is an attribute of the tensor on the device;
what is computed from that tensor has none, and is read back. One that was changed in place is read back, too.
"""

from __future__ import annotations

import torch


def keep_host_copy(on_device: torch.Tensor, on_host: torch.Tensor) -> None:
    """Keeps the copy, if the tensors can be a batch's indices."""
    if on_host.dtype == torch.int64 and on_host.ndim == 1 and not on_device.is_cpu and not on_device.is_inference():
        on_device._shade_host_copy = on_host, on_device._version  # type: ignore[attr-defined]


def host_copy(indices: torch.Tensor) -> torch.Tensor:
    """Returns the copy on the host; the indices as they are without one."""
    on_host, version = getattr(indices, "_shade_host_copy", (indices, None))
    return on_host if version is None or version == indices._version else indices
