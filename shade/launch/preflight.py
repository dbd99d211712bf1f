"""Whether the plan can be: everything that would fail on a rank in a minute fails here in a second, in one line.

Looks at the data (folders, classes, the first image of each class), names (mode, policy), the store, the port and the
devices. Starts nothing and writes nothing, and does without torch where it can: an import of two seconds before the
word "typo" is two seconds too long.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from shade.checkpoint.memory_tier import MemoryTier
from shade.checkpoint.own_memory import own_folder, own_records
from shade.checkpoint.retention import Keep
from shade.checkpoint.schedule import Schedule
from shade.checkpoint.storage_tier import StorageTier
from shade.config import RunConfig
from shade.errors import ConfigError, DataError, ShadeError, StorageError, StoreUnavailableError
from shade.launch.resolve import StoreURLs
from shade.policy import POLICIES
from shade.sampling import MODES
from shade.storage import open_volume
from shade.store import StoreURL, open_store

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""What ImageFolder takes for an image."""
_OUTLIVES = "name a server that outlives the run (shade cache up): unix://, redis:// or redis+cluster://"
_RESUME_CURE = "start without --resume, or name the --checkpoint and --persist that the run was started with"


def check(config: RunConfig, stores: StoreURLs) -> None:
    """Checks the whole plan.

    Args:
        config: The resolved run.
        stores: With their passwords.

    Raises:
        ConfigError: The plan asks for what cannot be.
        DataError: The data set is not what it should be.
        StoreAuthError: A named server refuses us.
    """
    check_names(config)
    check_ranks(config)
    num_samples = sum(check_folder(Path(path)) for path in config.train_paths)
    for path in config.val_paths:
        check_folder(Path(path))
    global_batch = config.batch_size * config.processes * config.nodes
    if global_batch > num_samples:
        raise ConfigError.of(
            f"batch_size × ranks of at most {num_samples}, the size of the data set",
            f"{config.batch_size} × {config.processes * config.nodes}",
            "pass a smaller --batch_size",
        )
    check_out(config)
    if stores.cache != "none" and not stores.cache.startswith("local:"):
        check_cache(config, stores.cache)
    check_snapshots(config, stores.checkpoint)


def check_cache(config: RunConfig, cache_url: str) -> None:
    """A named server: there, willing, and of use to more than one process."""
    with open_store(cache_url) as store:
        try:
            store.ping()
        except StoreUnavailableError as error:
            cure = "start it (shade cache up), correct the URL, or leave --cache out for a private one"
            raise ConfigError.of("a cache that answers", f"{config.cache}: {error}", cure) from error
        if not store.shared and (config.workers or config.processes * config.nodes > 1):
            raise ConfigError.of(
                "a cache that ranks and workers share", config.cache, "use local://, or one rank and --workers 0"
            )


def check_names(config: RunConfig) -> None:
    """Mode, policy and their arguments, as the ranks will make them."""
    mode_class = MODES.get(config.sampling)
    options = {"keep": config.keep, "replication_factor": config.replication_factor}
    try:
        mode = mode_class(2, 1, 0, **{name: value for name, value in options.items() if value is not None})
    except TypeError:
        named = [name for name, value in options.items() if value is not None]
        raise ConfigError.of(
            f"options that --sampling {config.sampling} takes", named, "--keep is for unbiased, -rep for pads"
        ) from None
    policy = POLICIES.get(config.policy or mode.default_policy)
    if policy.offline:
        raise ConfigError.of(
            "a --policy for a run", config.policy, "this one sees the whole future: it is for shade simulate"
        )
    if policy.needs_next_order and not mode.draws_ahead:
        raise ConfigError.of(
            f"a --policy that can do without the next epoch's order, with --sampling {config.sampling}",
            config.policy,
            "use --policy shade or lru",
        )


def check_out(config: RunConfig) -> None:
    """The run directory: ours to write, and without a run in it unless that is to be resumed."""
    out = Path(config.out)
    if not config.resume and any((out / name).exists() for name in ("run.json", "metrics.jsonl")):
        raise ConfigError.of("an --out without a run in it", config.out, "choose another, or go on with --resume")
    nearest = next(path for path in (out, *out.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        what = "is not a directory" if not nearest.is_dir() else "is not ours to write"
        raise ConfigError.of("an --out that can be written", f"{config.out}: {nearest} {what}", "choose another --out")


def check_ranks(config: RunConfig) -> None:
    """Devices, interface and port of this machine."""
    num_gpus = _count_gpus() if config.processes > 1 else 0
    if num_gpus and config.processes > num_gpus:
        raise ConfigError.of(f"-g of at most {num_gpus}, the GPUs here", config.processes, "lower -g")
    interfaces = [name for _, name in socket.if_nameindex()]
    if config.master_socket and config.master_socket not in interfaces:
        raise ConfigError.of(
            f"a -master_socket among {', '.join(interfaces)}", config.master_socket, "see `ip link` for its name"
        )
    if config.node_rank == 0 and config.master_port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", config.master_port))
            except OSError as error:
                raise ConfigError.of(
                    "a free --master_port", f"{config.master_port}: {error.strerror}", "choose another port"
                ) from None


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def check_folder(root: Path) -> int:
    """Checks that a folder is in ImageFolder layout and that the first image of each class decodes.

    Args:
        root: The folder.

    Returns:
        Number of images.

    Raises:
        DataError: It is missing or empty, a class has no image, or a first image is none.
    """
    if not root.is_dir():
        raise DataError.of("a folder with one sub-folder per class", str(root), "check the path (is it mounted?)")
    classes = sorted(entry.path for entry in os.scandir(root) if entry.is_dir())
    if not classes:
        raise DataError.of(
            f"one sub-folder per class in {root}", "none", "arrange it as ImageFolder: root/class/image.png"
        )
    total = 0
    for folder in classes:
        images = _images(folder)
        first = next(images, None)
        if first is None:
            raise DataError.of(
                f"at least one image in {folder}", "none", "add images or remove the folder of that class"
            )
        try:
            with Image.open(first) as image:
                image.convert("RGB")
        except UnidentifiedImageError:
            raise DataError.of("an image", f"{first}, which is none", "replace or remove that file") from None
        except (OSError, ValueError, SyntaxError) as error:  # what Pillow's decoders raise on damaged files
            raise DataError.of("a readable image", f"{first}: {error}", "replace or remove that file") from error
        total += 1 + sum(1 for _ in images)
    return total


def _images(folder: str) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        yield from (os.path.join(parent, name) for name in sorted(names) if name.lower().endswith(EXTENSIONS))


def check_snapshots(config: RunConfig, checkpoint_url: str | None) -> None:
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
        from shade.checkpoint.strategies import STRATEGIES

        STRATEGIES.get(config.checkpoint_strategy)
    if config.node_rank > 0:
        return
    if checkpoint_url is not None:
        _check_store(checkpoint_url)
    if config.persist is not None:
        _check_storage(config.persist)
    if config.resume and not has_snapshots(config, checkpoint_url):
        places = ", ".join(filter(None, (config.checkpoint, config.persist_to)))
        raise ConfigError.of("a checkpoint to resume from", f"none of run {config.run} in {places}", _RESUME_CURE)


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


def has_snapshots(config: RunConfig, checkpoint_url: str | None) -> bool:
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
