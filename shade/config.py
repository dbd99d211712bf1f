"""Holds one run, fully resolved: the launcher decides, and every rank reads.

The launcher turns flags into a `RunConfig`, writes it to ``run.json`` in the run directory, and gives the ranks its
path in one environment variable, so that script, launcher and report read the same run. The file never holds a
password: the environment alone carries a store's URL with its password.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shade.errors import ConfigError
from shade.process import replacing
from shade.types import BadSample, ModeName, PolicyName, StrategyName

RUN_FILE = "SHADE_RUN"
"""Environment variable: path of the run's ``run.json``."""
CACHE_URL = "SHADE_CACHE"
"""Environment variable: the cache URL that the ranks use, password included."""
CHECKPOINT_URL = "SHADE_CHECKPOINT"
"""Environment variable: the URL of the store for snapshots that the ranks use, password included."""
ACCESS_LOG = "SHADE_ACCESS_LOG"
"""Environment variable: the file that gets a ``hitting <index>`` or ``miss <index>`` line for every sample."""
SNAPSHOTS = "checkpoints"
"""Folder of the run directory for snapshots, if the flags name no other place."""
HAS_SNAPSHOTS = "has-snapshots"
"""Empty file of the run directory: a snapshot was committed, so a resume that finds none must not start over."""
WORKING_SET_FRACTION = 0.2
"""Default of ``-wss`` and of `ShadeDataset`: the cached share of the data set."""


@dataclass(frozen=True)
class RunConfig:
    """The settings of a run, from its flags."""

    out: str
    """The run directory."""
    script: str
    """The training script, absolute."""
    train_paths: tuple[str, ...]
    """Folders in ImageFolder layout, one data set together."""
    val_paths: tuple[str, ...] = ()
    """Validation folders; empty: no validation."""
    nodes: int = 1
    """Machines."""
    processes: int = 1
    """Ranks per machine (``-g``): one per GPU, or CPU processes over gloo."""
    node_rank: int = 0
    """This machine's number."""
    master_address: str = "127.0.0.1"
    """Address where the ranks of all machines meet."""
    master_port: int = 8888
    """Port of that address."""
    master_socket: str | None = None
    """Network interface for the exchange between ranks; None lets the backend choose."""
    epochs: int = 1
    """Epochs in all, those before a resume included."""
    network: str = "resnet18"
    """Name in ``examples/networks.py``."""
    batch_size: int = 256
    """Samples per rank and step."""
    cache: str = "local://"
    """Cache URL with its password hidden, or ``none``."""
    disk: str | None = None
    """``disk://`` URL of a folder of each machine's own disk, with its capacity; None: no disk tier."""
    working_set_fraction: float = WORKING_SET_FRACTION
    """Capacity as a share of the data set."""
    policy: PolicyName | None = None
    """Cache policy; None: the one that suits the sampling mode."""
    sampling: ModeName = "unbiased"
    """Sampling mode."""
    keep: float | None = None
    """Mean inclusion probability (`unbiased`)."""
    replication_factor: float | None = None
    """Repetitions of cached samples (`pads`)."""
    workers: int = 2
    """DataLoader workers per rank."""
    seed: int = 0
    """Seed of everything."""
    steps: int | None = None
    """Stop after so many steps in all; None: run the epochs out."""
    resume: bool = False
    """Resume from the run's newest snapshot."""
    on_bad_sample: BadSample = "stop"
    """``stop`` or ``skip``."""

    run: str = ""
    """Id of the run's snapshots: made with the run, kept in ``run.json``, never changed."""
    checkpoint: str | None = None
    """URL, its password hidden, of the store whose memory takes snapshots; None: storage alone."""
    persist_to: str | None = None
    """Path or URL of durable storage for snapshots; None: the run directory, or none where a store takes them."""
    checkpoint_every: str | None = None
    """When a snapshot is due, besides the end of each epoch: what a kill can cost; None: when the strategy says."""
    checkpoint_keep: str = "last=2"
    """Which snapshots stay in durable storage."""
    checkpoint_strategy: StrategyName = "overlap"
    """Name of the strategy that copies a snapshot."""
    gradient: str | None = None
    """Compressor that picks the elements of a gradient to send; None: DDP averages whole gradients."""
    density: float = 0.01
    """Share of the elements that are sent (``gradient``)."""
    staleness: int = 0
    """Steps by which a gradient may be late, 0 or 1 (``gradient``)."""
    controller: bool = False
    """Rank 0 adapts the density to what the link carries (``gradient``)."""
    profile: str | None = None
    """Path of a profile of `shade tune`: the controller's prior."""
    restarts: int = 0
    """Restarts of all ranks from the newest snapshot after the loss of a rank."""
    min_nodes: int | None = None
    """Fewest machines with which the run continues when others are lost; None: it needs all of them."""
    notice: str | None = None
    """Preemption notice besides SIGTERM: a path that appears, or an address."""
    track: str | None = None
    """Names of trackers, separated by commas, that get the run's events: see `shade.tracking`."""
    metrics_port: int | None = None
    """Port of 127.0.0.1 where each machine serves its ranks' Prometheus page, 0 for any; None: in files alone."""

    def __post_init__(self) -> None:
        if not self.run:
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(self.out).name).strip("._-")[:40] or "run"
            object.__setattr__(self, "run", f"{name}-{secrets.token_hex(4)}")

    def shared_by(self, ranks: int) -> RunConfig:
        """Returns the run with the batch of one of so many ranks: the global batch decides the sample stream.

        Raises `ConfigError` if the ranks cannot share the global batch equally.
        """
        global_batch = self.batch_size * self.processes * self.nodes
        if global_batch % ranks:
            cure = "choose a --batch_size that any number of machines from --min_nodes to -n can share"
            raise ConfigError.of(f"ranks that can share a global batch of {global_batch}", ranks, cure)
        return dataclasses.replace(self, batch_size=global_batch // ranks)

    @property
    def keeps_beside(self) -> bool:
        """Returns whether snapshots go into the run directory: the flags name no other place."""
        return self.checkpoint is None and self.persist_to is None

    @property
    def storage(self) -> str | None:
        """Returns the durable storage for snapshots, or None."""
        return str(Path(self.out) / SNAPSHOTS) if self.keeps_beside else self.persist_to

    @property
    def checkpoint_url(self) -> str | None:
        """Returns the URL with which a rank opens the store for snapshots, or None."""
        return None if self.checkpoint is None else os.environ.get(CHECKPOINT_URL, self.checkpoint)

    @property
    def has_cache(self) -> bool:
        """Returns whether samples are cached, in memory or on the disk."""
        return self.cache != "none" or self.disk is not None

    @property
    def cache_url(self) -> str | None:
        """Returns the URL with which a rank opens the cache, or None for no cache."""
        url = os.environ.get(CACHE_URL, self.cache)
        return None if url == "none" else url

    def save(self, *, is_new: bool = False) -> Path:
        """Writes ``run.json`` into the run directory; returns its path. FileExistsError if a new run finds one."""
        path = Path(self.out) / "run.json"
        text = json.dumps(dataclasses.asdict(self), indent=1) + "\n"
        # A launcher that is killed here leaves no half of a file, with which no run could be resumed.
        if not is_new:
            with replacing(path) as beside:
                beside.write_text(text)
            return path
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(text)
        try:
            os.link(draft, path)
        finally:
            draft.unlink()
        return path

    @classmethod
    def load(cls, path: str | Path) -> RunConfig:
        """Reads ``run.json``; raises `ConfigError` if there is none, or another program wrote it."""
        try:
            fields: dict[str, Any] = json.loads(Path(path).read_text())
            for name in ("train_paths", "val_paths"):
                fields[name] = tuple(fields[name])
            return cls(**fields)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError.of(
                "a run.json written by the launcher", f"{path}: {error}", "start through runshade.py"
            ) from error
