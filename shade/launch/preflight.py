"""Checks the plan: everything that would fail on a rank in a minute fails here in a second, in one line.

It checks the data (folders, classes, the first image of each class), names (mode, policy), the stores, the port, the
devices, and whether snapshots can be kept. It starts nothing and writes nothing (a folder made to try whether it can be
written is removed again), and loads PyTorch only where it must: an import of two seconds before the word "typo" is two
seconds too long. Only machine 0 looks for snapshots: elsewhere there may be nothing to see.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from shade.checkpoint._buffer.shared_memory_folder import own_folder, own_records
from shade.checkpoint._format.retention import Keep
from shade.checkpoint._pacing.schedule import Schedule
from shade.checkpoint._tiers import identity
from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.storage import StorageTier
from shade.config import HAS_SNAPSHOTS, RunConfig
from shade.errors import ConfigError, DataError, ShadeError, StorageError, StoreUnavailableError, shown_place
from shade.launch.resolve import StoreURLs
from shade.policy import POLICIES
from shade.sampling import MODES
from shade.storage import open_volume
from shade.store import StoreURL, open_store
from shade.store._servers.server import find_server_binary
from shade.store.disk import check_local

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""File names that ImageFolder takes for images."""
_OUTLIVES = "name a server that outlives the run (shade cache up): unix://, redis:// or redis+cluster://"
_RESUME_CURE = "start without --resume, or name the --checkpoint and --persist-to that the run was started with"


_PARTS = {"train", "training", "val", "valid", "validation", "test"}


@dataclass(frozen=True)
class FolderContent:
    """The images and classes of a folder in ImageFolder layout."""

    num_images: int
    num_classes: int
    sizes: frozenset[tuple[int, int]]
    """Width and height of the first image of each class."""

    def __add__(self, other: FolderContent) -> FolderContent:
        num_classes = max(self.num_classes, other.num_classes)
        return FolderContent(self.num_images + other.num_images, num_classes, self.sizes | other.sizes)

    def __str__(self) -> str:
        (width, height), *others = sorted(self.sizes)
        size = f"{width}×{height}" + (" to {}×{}".format(*max(others)) if others else "")
        return (
            f"{self.num_images:,} images in {self.num_classes:,} class{'es' * (self.num_classes != 1)}, {size} pixels"
        )


def check(config: RunConfig, stores: StoreURLs) -> str:
    """Checks the whole plan; returns what is trained and validated on, in one line. Raises ConfigError if it is
    impossible, DataError if the data set is missing or malformed, and StoreAuthError if a named server refused the
    credentials."""
    check_names(config)
    check_ranks(config)
    content, *more = [check_folder(Path(path)) for path in config.train_paths]
    content = sum(more, content)
    num_samples = content.num_images
    validation = [check_folder(Path(path)) for path in config.val_paths]
    global_batch = config.batch_size * config.processes * config.nodes
    if global_batch > num_samples:
        raise ConfigError.of(
            f"batch_size × ranks of at most {num_samples}, the size of the data set",
            f"{config.batch_size} × {config.processes * config.nodes}",
            "pass a smaller --batch_size",
        )
    check_out(config)
    if stores.cache.startswith("local:"):
        find_server_binary()  # refused now, not after the first of two trainings
    elif stores.cache != "none":
        check_cache(config, stores.cache)
    if config.disk is not None:
        check_disk(config.disk)
    check_snapshots(config, stores.checkpoint)
    return f"{content}" + (f"; validation: {sum(validation[1:], validation[0])}" if validation else "")


def check_cache(config: RunConfig, cache_url: str) -> None:
    """Checks that a named server answers, accepts the credentials, and can be shared if more than one process
    uses it."""
    with open_store(cache_url) as store:
        try:
            store.wait_ready()
        except StoreUnavailableError as error:
            cure = "start it (shade cache up), correct the URL, or leave --cache out for a private one"
            raise ConfigError(f"expected the cache {config.cache} to answer, but {error}; {cure}") from error
        if not store.shared and (config.workers or config.processes * config.nodes > 1):
            cure = "use local://, or one rank and --workers 0"
            raise ConfigError.of("a cache that ranks and workers share", config.cache, cure)


def check_disk(url: str) -> None:
    """Checks that the folder of a disk tier is on a local disk, and can be written."""
    folder = StoreURL.parse(url).path
    check_local(folder)
    _check_writable("a --disk that can be written", folder, "choose another --disk")


def check_names(config: RunConfig) -> None:
    """Checks mode, policy and their options by constructing them, as the ranks will."""
    mode_class = MODES.get(config.sampling)
    options = {"keep": config.keep, "replication_factor": config.replication_factor}
    try:
        mode = mode_class(2, 1, 0, **{name: value for name, value in options.items() if value is not None})
    except TypeError:
        named = [name for name, value in options.items() if value is not None]
        cure = "--keep is for unbiased, -rep for pads"
        raise ConfigError.of(f"options that --sampling {config.sampling} takes", named, cure) from None
    policy = POLICIES.get(config.policy or mode.default_policy)
    if policy.offline:
        cure = "this one sees the whole future: it is for shade simulate"
        raise ConfigError.of("a --policy for a run", config.policy, cure)
    if policy.needs_next_order and not mode.draws_ahead:
        expected = f"a --policy that can do without the next epoch's order, with --sampling {config.sampling}"
        raise ConfigError.of(expected, config.policy, "use --policy shade or lru")


def check_out(config: RunConfig) -> None:
    """Checks that the run directory can be written, and holds no run unless that is to be resumed."""
    out = Path(config.out)
    if not config.resume and any((out / name).exists() for name in ("run.json", "metrics.jsonl")):
        raise ConfigError.of("an --out without a run in it", config.out, "choose another, or continue it with --resume")
    _check_writable("an --out that can be written", config.out, "choose another --out")


def _check_writable(expected: str, folder: str, cure: str) -> None:
    path = Path(folder)
    nearest = next(each for each in (path, *path.parents) if each.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        what = "is not a directory" if not nearest.is_dir() else "is not writable for this user"
        raise ConfigError.of(expected, folder, f"{cure}: {nearest} {what}")


def check_ranks(config: RunConfig) -> None:
    """Checks devices, interface and port of this machine."""
    num_gpus = _count_gpus() if config.processes > 1 else 0
    if num_gpus and config.processes > num_gpus:
        raise ConfigError.of(f"-g of at most {num_gpus}, the GPUs here", config.processes, "lower -g")
    interfaces = [name for _, name in socket.if_nameindex()]
    if config.master_socket and config.master_socket not in interfaces:
        expected = f"a -master_socket among {', '.join(interfaces)}"
        raise ConfigError.of(expected, config.master_socket, "see `ip link` for its name")
    if config.node_rank == 0 and config.master_port:
        with socket.socket() as probe:
            # A port in TIME_WAIT counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", config.master_port))
            except OSError as error:
                cure = f"choose another port ({error.strerror})"
                raise ConfigError.of("a free --master_port", config.master_port, cure) from None


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def check_folder(root: Path) -> FolderContent:
    """Checks that a folder is in ImageFolder layout and that the first image of each class decodes; returns images,
    classes and the sizes of these images. Raises DataError if it is missing or empty, a class has no image, a first
    image cannot be decoded, or the classes are the parts of a data set, such as train and val."""
    if not root.is_dir():
        raise DataError.of("a folder with one sub-folder per class", str(root), "check the path (is it mounted?)")
    classes = sorted(entry.path for entry in os.scandir(root) if entry.is_dir())
    if not classes:
        cure = "arrange it as ImageFolder: root/class/image.png"
        raise DataError.of(f"one sub-folder per class in {root}", "none", cure)
    names = {os.path.basename(folder).lower(): folder for folder in classes}
    if len(names) > 1 and names.keys() <= _PARTS and (train := names.get("train") or names.get("training")):
        others = " ".join(folder for folder in classes if folder != train)
        cure = f"pass {train} --val_paths {others}, or rename the folders if these are your classes"
        raise DataError.of(f"classes in {root}", ", ".join(map(os.path.basename, classes)), cure)
    total, sizes = 0, set()
    for folder in classes:
        images = _images(folder)
        first = next(images, None)
        if first is None:
            cure = "add images or remove the folder of that class"
            raise DataError.of(f"at least one image in {folder}", "none", cure)
        try:
            with Image.open(first) as image:
                image.convert("RGB")
                sizes.add(image.size)
        except UnidentifiedImageError:
            raise DataError.of(f"an image in {first}", "another format", "replace or remove that file") from None
        except (OSError, ValueError, SyntaxError) as error:  # what Pillow's decoders raise on damaged files
            raise DataError.of(f"a readable image in {first}", str(error), "replace or remove that file") from error
        total += 1 + sum(1 for _ in images)
    return FolderContent(total, len(classes), frozenset(sizes))


def _images(folder: str) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        yield from (os.path.join(parent, name) for name in sorted(names) if name.lower().endswith(EXTENSIONS))


def check_snapshots(config: RunConfig, checkpoint_url: str | None) -> None:
    """Checks that snapshots can be kept as asked, and with ``--resume`` that there is one, unless the run has come to
    none; raises ConfigError if not, and StoreAuthError if the store (its URL includes the password) refuses the
    credentials."""
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
    if config.persist_to is not None:
        _check_storage(config.persist_to)
    if config.resume and _has_begun(Path(config.out)) and not has_snapshots(config, checkpoint_url):
        locations = ", ".join(filter(None, (config.checkpoint, shown_place(config.storage or ""))))
        raise ConfigError.of("a checkpoint to resume from", f"none of run {config.run} in {locations}", _RESUME_CURE)


def _has_begun(out: Path) -> bool:
    """Returns whether a run has saved a snapshot or measured an epoch, which must not be lost unnoticed."""
    metrics = out / "metrics.jsonl"
    return (out / HAS_SNAPSHOTS).exists() or (metrics.exists() and metrics.stat().st_size > 0)


def _check_store(url: str) -> None:
    if StoreURL.parse(url).scheme in ("local", "memory"):
        raise ConfigError.of("a --checkpoint that is there when the run is gone", url, _OUTLIVES)
    with open_store(url) as store:
        try:
            store.ping()
        except StoreUnavailableError as error:
            cure = "start it (shade cache up), correct the URL, or leave --checkpoint out to save to storage alone"
            raise ConfigError(f"expected the snapshot store {store.url} to answer, but {error}; {cure}") from error


def _check_storage(persist_to: str) -> None:
    folders = () if "://" in persist_to else (Path(persist_to), *Path(persist_to).parents)
    missing = [path for path in folders if not path.exists()]
    with open_volume(persist_to) as volume:
        try:
            volume.ping()
        except StorageError as error:
            raise ConfigError(f"could not write to --persist-to {volume.url}: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                for path in missing:
                    path.rmdir()


def memory_folder(config: RunConfig, checkpoint_url: str | None) -> Path | None:
    """Returns the folder of a run's buffers in this machine's shared memory; None if no process has saved it."""
    name = identity.find(config.run, checkpoint_url, config.storage)
    return None if name is None else own_folder(config.run) / name


def has_snapshots(config: RunConfig, checkpoint_url: str | None) -> bool:
    """Returns whether any location holds a committed snapshot of the run; an unreachable one counts as empty."""
    folder = memory_folder(config, checkpoint_url)
    if folder is not None and own_records(folder, config.run):
        return True
    with contextlib.ExitStack() as resources, contextlib.suppress(ShadeError):
        if config.storage is not None:
            storage = StorageTier(resources.enter_context(open_volume(config.storage)), config.run)
            if storage.held():
                return True
    with contextlib.ExitStack() as resources, contextlib.suppress(ShadeError):
        if checkpoint_url is not None:
            memory = MemoryTier(resources.enter_context(open_store(checkpoint_url)), config.run)
            resources.callback(memory.close)
            return bool(memory.held())
    return False
