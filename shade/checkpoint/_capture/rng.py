"""Where the random generators of this process stand: Python's, numpy's, torch's, and each CUDA device's.

Saved and restored per rank, this makes a resumed run draw the numbers that the undisturbed one would have drawn. A CUDA
device is asked only if this process has used CUDA: asking would start it up, which costs hundreds of megabytes of its
memory and makes a later fork impossible; and what was never used has no position to lose. Generators of your own
(`torch.Generator`, `numpy.random.Generator`) are not known here: attach what holds them.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from shade.errors import StateMismatchError


class RandomState:
    """The global generators of this process, as something that can be saved."""

    def state_dict(self) -> dict[str, Any]:
        """Where they stand; numbers, strings, arrays and tensors, about 10 KB and 16 bytes a CUDA device."""
        version, words, gauss = random.getstate()
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = range(torch.cuda.device_count()) if used else ()
        return {
            "python": {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss},
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "cuda": [torch.cuda.get_rng_state(device) for device in devices],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts them there again. With more CUDA devices than were saved the others stay as they are, and vice versa.

        Args:
            state: From `state_dict`.

        Raises:
            StateMismatchError: It is none, or of another kind of generator; nothing was changed.
        """
        before = self.state_dict()
        try:
            _put(state)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
            _put(before)
            raise StateMismatchError.of(
                "a state of random generators", str(error), "restore without 'random'"
            ) from error


def _put(state: dict[str, Any]) -> None:
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].clone())  # of a view PyTorch would read from the storage's start
    for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(saved.clone(), device)
