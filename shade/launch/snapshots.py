"""What the launcher knows of snapshots, without loading PyTorch: whether they can be kept, and whether there are any.

Only machine 0 looks: elsewhere there may be nothing to see.

Invariant: nothing is changed; a folder that was made to try whether it can be written is taken away again.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from shade.checkpoint._buffer.shared_memory_folder import own_folder, own_records
from shade.checkpoint._format.retention import Keep
from shade.checkpoint._pacing.schedule import Schedule
from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.storage import StorageTier
from shade.config import RunConfig
from shade.errors import ConfigError, ShadeError, StorageError, StoreUnavailableError
from shade.storage import open_volume
from shade.store import StoreURL, open_store

_OUTLIVES = "name a server that outlives the run (shade cache up): unix://, redis:// or redis+cluster://"


def check(config: RunConfig, checkpoint_url: str | None) -> None:
    """Checks that snapshots can be kept as asked, and with ``--resume`` that there is one.

    Args:
        config: The resolved run.
        checkpoint_url: Of the store, with its password, or None.

    Raises:
        ConfigError: Not so.
        StoreAuthError: The store refuses us.
    """
    if config.checkpoint_every is not None:
        Schedule(config.checkpoint_every)
    Keep.parse(config.checkpoint_keep)
    if config.checkpoint_strategy != RunConfig.checkpoint_strategy:
        from shade.checkpoint._strategies import STRATEGIES

        STRATEGIES.get(config.checkpoint_strategy)
    if config.node_rank > 0:
        return
    if checkpoint_url is not None:
        _check_store(checkpoint_url)
    if config.persist is not None:
        _check_storage(config.persist)
    if config.resume and not exist(config, checkpoint_url):
        places = ", ".join(filter(None, (config.checkpoint, config.persist_to)))
        raise ConfigError.of("a checkpoint to resume from", f"none of run {config.run} in {places}", _CURE)


_CURE = "start without --resume, or name the --checkpoint and --persist that the run was started with"


def _check_store(url: str) -> None:
    if StoreURL.parse(url).scheme in ("local", "memory"):
        raise ConfigError.of("a --checkpoint that is there when the run is gone", url, _OUTLIVES)
    with open_store(url) as store:
        try:
            store.ping()
        except StoreUnavailableError as error:
            cure = "start it (shade cache up), correct the URL, or leave --checkpoint out to save to storage alone"
            raise ConfigError.of("a store for snapshots that answers", f"{store.url}: {error}", cure) from error


def _check_storage(persist: str) -> None:
    missing = (
        [] if "://" in persist else [path for path in (Path(persist), *Path(persist).parents) if not path.exists()]
    )
    with open_volume(persist) as volume:
        try:
            volume.ping()
        except StorageError as error:
            cure = "make it writable, or name another"
            raise ConfigError.of("a --persist that can be written", f"{persist}: {error}", cure) from error
        finally:
            with contextlib.suppress(OSError):
                for path in missing:
                    path.rmdir()


def exist(config: RunConfig, checkpoint_url: str | None) -> bool:
    """Whether there is anything to resume from; a place that is silent counts as empty.

    Args:
        config: The run.
        checkpoint_url: Of the store, with its password, or None.

    Returns:
        True where some place holds a committed snapshot of the run.
    """
    if own_records(own_folder(config.run)):
        return True
    with contextlib.ExitStack() as resources, contextlib.suppress(ShadeError):
        if config.persist_to is not None:
            storage = StorageTier(resources.enter_context(open_volume(config.persist_to)), config.run)
            if storage.held():
                return True
    with contextlib.ExitStack() as resources, contextlib.suppress(ShadeError):
        if checkpoint_url is not None:
            memory = MemoryTier(resources.enter_context(open_store(checkpoint_url)), config.run)
            resources.callback(memory.close)
            return bool(memory.held())
    return False
