"""Implements ``shade checkpoint restore``, ``export``, ``import`` and ``flush``: moves snapshots."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shade.cli._checkpoint.common import Locations, Verb, add_locations, add_step, opened
from shade.cli.tables import size
from shade.errors import ConfigError

if TYPE_CHECKING:
    import torch

FORMATS: Final = ("safetensors", "torch", "dcp")
_SUFFIXES: Final = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", "": "dcp"}
_RESTORE_EXAMPLES: Final = """\
examples:
  shade checkpoint restore 1200 --to state.pt --persist-to /mnt/ckpt
  shade checkpoint restore 1200 --to model.safetensors --only model --persist-to /mnt/ckpt --store redis://10.0.0.1:6379
  shade checkpoint restore newest --to folder --persist-to /mnt/ckpt

The suffix chooses the format: .safetensors; .pt, .pth and .bin for torch.load; none for a folder of
torch.distributed.checkpoint. Every byte is verified; what is damaged in one location is read from another.
exit code: 0 done; 1 damaged in every location, or missing; 2 the command could not be carried out
"""
_EXPORT_EXAMPLES: Final = """\
examples:
  shade checkpoint export 1200 --to model.safetensors --format safetensors --only model --persist-to /mnt/ckpt
  shade checkpoint export newest --to folder --format dcp --persist-to s3://bucket/ckpt

Like restore, with an explicit format.
exit code: 0 done; 1 damaged in every location, or missing; 2 the command could not be carried out
"""
_IMPORT_EXAMPLES: Final = """\
examples:
  shade checkpoint import model.safetensors --as model --run vgg --persist-to /mnt/ckpt
  shade checkpoint import state.pt --step 1200 --run vgg --persist-to /mnt/ckpt

Without --as the file must contain a dict by the names of attached objects: model, optimizer, …
Nothing in the file is executed.
exit code: 0 done; 1 the file is damaged; 2 the command could not be carried out
"""
_FLUSH_EXAMPLES: Final = """\
examples:
  shade checkpoint flush redis://10.0.0.1:6379 --persist-to /mnt/ckpt
  shade checkpoint flush redis+cluster://10.0.0.1:7000 --persist-to s3://bucket/ckpt --keep last=3,best=val_loss
  shade checkpoint flush redis://10.0.0.1:6379 --persist-to /mnt/ckpt --run vgg --once
  shade checkpoint flush unix:///run/redis.sock --persist-to /mnt/ckpt 2>> flusher.log &

Run it on the memory node: then what trainers have committed becomes durable, whatever happens to them. The newest
snapshot is written first. A store or storage that fails is tried again until it is back. The command may be killed at
any moment.

rules of --keep, separated by commas; the newest always stays:
  last=3          the newest three
  every=1000      the first at or after each multiple of 1000 steps
  best=val_loss   the one with the smallest val_loss; best=accuracy:max:3 the three with the largest
  all             everything

exit code: 0 stopped with everything durable; 1 stopped with something not durable; 2 it could not start
"""


@dataclass
class _ReadState:
    """The source that `shade.checkpoint._interchange.export` takes."""

    tree: Any
    found: dict[str, torch.Tensor]

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.found.items()


def _format_of(path: Path) -> str:
    if path.suffix not in _SUFFIXES:
        expected = ", ".join(filter(None, _SUFFIXES))
        raise ConfigError.of(f"a file that ends in {expected}, or a folder", str(path), "say which with --format")
    return _SUFFIXES[path.suffix]


def _restore_arguments(parser: argparse.ArgumentParser) -> None:
    add_step(parser)
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="a path that does not exist yet")
    parser.add_argument("--only", metavar="NAME", help="the state of one attached object alone, for example model")
    add_locations(parser)
    parser.set_defaults(format=None)


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    _restore_arguments(parser)
    parser.add_argument("--format", choices=FORMATS, required=True, help="format of the file")


def _restore(given: argparse.Namespace) -> int:
    from shade.checkpoint._interchange.export import export
    from shade.checkpoint._restore.restore import read_newest_alone

    form = given.format or _format_of(given.to)
    if given.to.exists():
        raise ConfigError.of("a path that does not exist", str(given.to), "remove it, or choose another")
    with opened(given, shared_memory=True) as locations:
        if given.step is not None and locations.of_step(given.step) is None:
            return 1
        sharded = _sharded(locations, given.step)
        if sharded is not None:
            return _restore_sharded(given, locations, sharded, form)
        found = read_newest_alone(locations.reader, None if given.only is None else [given.only], given.step)
        if found is None:
            sys.stderr.write(f"no snapshot of run {locations.run}\n")
            return 1
        export(_ReadState(found.tree, found.tensors), given.to, form, given.only)
        sys.stdout.write(
            f"step {found.record.step} of run {locations.run}, from {', '.join(found.tiers)}: {given.to}\n"
        )
    return 0


def _sharded(locations: Locations, step: int | None) -> int | None:
    """Returns the step if the snapshot was saved through DCP."""
    from shade.checkpoint._integrations.dcp_reader import is_sharded

    chosen = [snapshot for snapshot in locations.snapshots() if step in (None, snapshot.record.step)]
    return chosen[0].record.step if chosen and is_sharded(locations.reader, chosen[0]) else None


def _restore_sharded(given: argparse.Namespace, locations: Locations, step: int, form: str) -> int:
    """Gathers the parts of all ranks into one file."""
    from shade.checkpoint._integrations.dcp_reader import gather_state
    from shade.checkpoint._interchange.export import save_state
    from shade.checkpoint.dcp import ShadeReader

    with ShadeReader(given.store, persist_to=given.persist_to, run=locations.run, step=step) as reader:
        state = gather_state(reader)
    if given.only is not None:
        if given.only not in state:
            raise ConfigError.of(f"one of {', '.join(state)}", given.only, "name a part of the state that was saved")
        state = state[given.only]
    save_state(state, given.to, form)
    sys.stdout.write(f"step {step} of run {locations.run}, all ranks' parts together: {given.to}\n")
    return 0


def _import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a file, or a folder of torch.distributed.checkpoint")
    parser.add_argument("--format", choices=FORMATS, help="format of the file (default: by its suffix)")
    parser.add_argument(
        "--as", dest="name", metavar="NAME", help="the file is the state of the object attached as NAME"
    )
    parser.add_argument("--step", type=int, default=0, help="optimizer steps that it has done (0)")
    parser.add_argument("--run", required=True, metavar="ID", help="run whose newest snapshot it becomes")
    parser.add_argument(
        "--persist-to", required=True, metavar="URL", help="durable storage: a path, s3://bucket/path, …"
    )


def _import(given: argparse.Namespace) -> int:
    from shade.checkpoint._interchange.export import import_state, load_state
    from shade.checkpoint._tiers.run_lock import RunLock
    from shade.checkpoint._tiers.storage import StorageTier
    from shade.storage import open_volume

    if given.step < 0:
        raise ConfigError.of("a --step of 0 or more", given.step, "leave it out for 0")
    state = load_state(given.file, given.format or _format_of(given.file))
    if given.name is not None:
        state = {given.name: state}
    elif not isinstance(state, dict):
        raise ConfigError.of("a dict of attached objects", type(state).__name__, "name the object, as in --as model")
    with (
        open_volume(given.persist_to) as volume,
        RunLock(volume, given.run),
    ):  # a run that begins sweeps what has no record
        record = import_state(state, StorageTier(volume, given.run), given.run, given.step)
        sys.stdout.write(f"step {record.step} of run {record.run}: {size(record.num_bytes)} in {volume.url}\n")
    return 0


RESTORE: Final = Verb(
    "restore",
    "write a snapshot into a file for other programs",
    "Reads a snapshot, verified, into a file.",
    _RESTORE_EXAMPLES,
    _restore_arguments,
    _restore,
)
EXPORT: Final = Verb(
    "export",
    "the same, with an explicit format",
    "Reads a snapshot, verified, into a file of a format.",
    _EXPORT_EXAMPLES,
    _export_arguments,
    _restore,
)
IMPORT: Final = Verb(
    "import",
    "make a snapshot from such a file",
    "Makes a snapshot in durable storage from a file.",
    _IMPORT_EXAMPLES,
    _import_arguments,
    _import,
)


def _flush_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="URL", help="the cluster; its password is read from SHADE_REDIS_PASSWORD")
    parser.add_argument(
        "--persist-to", metavar="URL", required=True, help="durable storage: a path, s3://bucket/path, …"
    )
    parser.add_argument(
        "--run", metavar="ID", help="that run only (every run in the store that no other flusher serves)"
    )
    parser.add_argument("--keep", metavar="RULES", help="what stays in storage (last=2)")
    ending = parser.add_mutually_exclusive_group()
    ending.add_argument("--once", action="store_true", help="end when everything is durable")
    ending.add_argument("--until-ended", action="store_true", help="end when the --run has ended and is durable")


def _flush(given: argparse.Namespace) -> int:
    from shade.checkpoint._flush.service import flush
    from shade.checkpoint._format.retention import DEFAULT

    return flush(
        given.store, given.persist_to, given.run, given.keep or DEFAULT, once=given.once, until_ended=given.until_ended
    )


FLUSH: Final = Verb(
    "flush",
    "make snapshots durable while the training continues",
    "Moves snapshots from a cluster's memory into durable storage.",
    _FLUSH_EXAMPLES,
    _flush_arguments,
    _flush,
)
