"""Accelerate: a prepared loader that saves and resumes training; the loop stays as it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from typing_extensions import override

from shade.errors import ConfigError
from shade.installation import install_hint
from shade.integrations._saved_loader import END, SavedLoader
from shade.types import Stateful

try:
    from accelerate import Accelerator, DistributedType
    from accelerate.utils import send_to_device
except ImportError as error:
    raise ConfigError.of("the accelerate package", None, install_hint("ecosystem")) from error

__all__ = ["AccelerateLoader"]


class AccelerateLoader(SavedLoader):
    """Iterates over a prepared loader, saves training between two steps, and resumes it when it is made.

    `epoch` is the one to begin with, as in ``for epoch in range(loader.epoch, epochs)``. A step ends where
    ``accelerator.sync_gradients`` says so.

    Args:
        accelerator: The accelerator.
        loader: A loader that it has prepared; with a `ShadeSampler`, one that it has not.
        objects: What is saved beside the place, by name: prepared model, optimizer, scheduler …
        **options: As for `Checkpointer`.

    Raises:
        ConfigError: See `Checkpointer`; or training is that of DeepSpeed or Megatron.
    """

    def __init__(self, accelerator: Accelerator, loader: Any, objects: Mapping[str, Stateful], **options: Any) -> None:
        kind = accelerator.distributed_type
        if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise ConfigError.of("one process, DDP or FSDP2", kind.value, "use accelerator.save_state")
        self._accelerator = accelerator
        scaler = {"scaler": accelerator.scaler} if accelerator.scaler is not None else {}
        super().__init__(loader, {**objects, **scaler}, **options)

    @override
    def _begin(self, num_done: int) -> Iterator[Any]:
        batches = iter(self._accelerator.skip_first_batches(self.loader, num_done) if num_done else self.loader)
        if self._keeps_place:
            return (send_to_device(batch, self._accelerator.device) for batch in batches)
        # A prepared loader draws its seed when it is asked first.
        first = next(batches, END)
        return itertools.chain(() if first is END else (first,), batches)

    @property
    @override
    def _is_step(self) -> bool:
        return bool(self._accelerator.sync_gradients)
