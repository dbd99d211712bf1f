"""Checks what decides a sampler's stream besides its state, when it is made and again when a run resumes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from shade.errors import ConfigError


def settings_of(options: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Returns a sampler's settings as they are saved.

    Args:
        options: Of its mode.
        **settings: The sampler's own, those that are None left out.

    Returns:
        Plain values by name.
    """
    kept = {name: value for name, value in settings.items() if value is not None}
    return kept | {name: value for name, value in options.items() if name != "targets_N"}


def check_ranks(num_samples: int, batch_size: int, num_replicas: int, *, distributed: bool, uses_scores: bool) -> None:
    """Raises ConfigError if a global batch is larger than the data set, or if the ranks are not torch.distributed's."""
    if batch_size * num_replicas > num_samples:
        raise ConfigError.of(
            f"batch_size × ranks of at most {num_samples}, the size of the data set",
            f"{batch_size} × {num_replicas}",
            "choose a smaller batch size",
        )
    if num_replicas > 1 and distributed:
        check_world(num_replicas)
    if num_replicas > 1 and not distributed and uses_scores:
        raise ConfigError.of(
            "torch.distributed to be initialised: ranks merge their losses through it",
            f"num_replicas={num_replicas}",
            "call torch.distributed.init_process_group('gloo') first, or use mode='uniform'",
        )


def check_world(num_replicas: int) -> None:
    """Raises ConfigError if torch.distributed connects another number of ranks."""
    world_size = dist.get_world_size()
    if world_size != num_replicas:
        raise ConfigError.of(f"num_replicas equal to the world size {world_size}", num_replicas, "leave it out")


def check_settings(saved: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raises ConfigError if a state was saved with other settings; only ``epochs`` may differ."""
    for name, mine in ({"shuffle_window": None} | settings).items():
        theirs = saved.get(name)
        # A run may be continued for more epochs: what was drawn stays, and only later draws ask for the length.
        if name == "revision" and theirs is not None:
            # Another commit may have the same files.
            theirs = mine if theirs.rpartition(", ")[2] == mine.rpartition(", ")[2] else theirs
        if theirs != mine and name != "epochs":
            raise ConfigError.of(f"{name}={theirs!r}, as in the saved run", mine, "resume with the saved settings")
