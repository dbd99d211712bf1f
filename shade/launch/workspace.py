"""Makes the run directory and the link to its log when the ranks are about to start, and removes them if nothing came
of it.

A bad input that only a rank can see (a network that the script does not know, a password that changed meanwhile) must
leave as little behind as one that the launcher sees itself. So `Workspace` remembers what it made, and `undo` removes
that and nothing else.

Invariant: for a run on one machine, the ``hitting`` and ``miss`` lines of train.log are as many as the rows of
metrics.jsonl say together. A killed run has logged accesses that no row counts; when it is resumed they get a row of
their own, of the kind ``lost``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

from shade.checkpoint._buffer.shared_memory_folder import own_folder
from shade.config import SNAPSHOTS, RunConfig
from shade.errors import ConfigError
from shade.launch.preflight import has_snapshots
from shade.telemetry import JsonlSink
from shade.trajectory import LOSSES

_OURS = ("run.json", "train.log", "output.log", "metrics.jsonl", "trace.npz", "trail.jsonl", "progress.json")


class Workspace:
    """The places where a run writes.

    Args:
        config: The resolved run.
        directory: The user's working directory; gets the link ``train.log``.
        checkpoint_url: URL of the store for snapshots, with its password, or None.

    Raises:
        ConfigError: The run directory cannot be made.
    """

    def __init__(self, config: RunConfig, directory: Path, checkpoint_url: str | None = None) -> None:
        self._config, self._checkpoint_url = config, checkpoint_url
        self.out = Path(config.out)
        self.train_log = self.out / "train.log"
        """A line for each sample that was fetched and one for each epoch, for grep."""
        self.output_log = self.out / "output.log"
        """All output of the ranks."""
        self.metrics = self.out / "metrics.jsonl"
        self._link = directory / "train.log"
        self._linked_before: str | None = None
        self._made = [path for path in (self.out, *self.out.parents) if not path.exists()]
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self.train_log.touch()
        except OSError as error:
            cure = f"choose another --out ({error.strerror})"
            raise ConfigError.of("an --out that can be written", str(self.out), cure) from None
        for leftover in (*self.out.glob("failure-*.txt"), self.out / "progress.json"):
            leftover.unlink(missing_ok=True)
        if config.resume and config.nodes == 1:
            self._account_for_lost()
        self._make_link()

    @property
    def failure(self) -> str | None:
        """Returns the line of the first rank that met bad input."""
        lines = [path.read_text().strip() for path in sorted(self.out.glob("failure-*.txt"))]
        return next(filter(None, lines), None)

    @property
    def has_results(self) -> bool:
        """Returns whether there is anything worth keeping: an epoch's metrics or a snapshot."""
        measured = self.metrics.exists() and self.metrics.stat().st_size > 0
        return measured or has_snapshots(self._config, self._checkpoint_url)

    def undo(self) -> None:
        """Removes what a run writes, unless there are results; the link points where it did before.

        Files of the user, and another machine's directory, may lie there too: they stay, and so do their folders.
        """
        if self.has_results:
            return
        if self._link.is_symlink() and self._points_to_us():
            self._link.unlink()
            if self._linked_before is not None:
                self._link.symlink_to(self._linked_before)
        for path in (self.out / name for name in _OURS):
            path.unlink(missing_ok=True)
        for path in (*self.out.glob("failure-*.txt"), *self.out.glob("rank*.prom")):
            path.unlink()
        for folder in ("tensorboard", LOSSES, SNAPSHOTS):
            shutil.rmtree(self.out / folder, ignore_errors=True)
        shutil.rmtree(own_folder(self._config.run), ignore_errors=True)
        with contextlib.suppress(OSError):
            # Deepest first; a folder with files of the user is not empty and stays.
            for path in self._made:
                path.rmdir()

    def _make_link(self) -> None:
        """Links train.log into the working directory, unless the user has a file of that name."""
        with contextlib.suppress(OSError):  # a working directory that is not ours to write only lacks a convenience
            if self._link.is_symlink():
                self._linked_before = os.readlink(self._link)
                self._link.unlink()
            if not self._link.exists():
                self._link.symlink_to(self.train_log)

    def _points_to_us(self) -> bool:
        return os.readlink(self._link) == str(self.train_log)

    def _account_for_lost(self) -> None:
        logged = {"hits": 0, "misses": 0}
        with self.train_log.open("rb") as lines:
            for line in lines:
                logged["hits"] += line.startswith(b"hitting ")
                logged["misses"] += line.startswith(b"miss ")
        with contextlib.suppress(FileNotFoundError), self.metrics.open("rb") as rows:
            for row in rows:
                with contextlib.suppress(ValueError):
                    counts = json.loads(row)
                    for name in logged:
                        logged[name] -= int(counts.get(name) or 0)
        if any(count > 0 for count in logged.values()):
            sink = JsonlSink(self.metrics)
            sink.write({"kind": "lost", **{name: max(0, count) for name, count in logged.items()}})
            sink.close()
