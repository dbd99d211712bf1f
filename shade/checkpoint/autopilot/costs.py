"""What a machine was measured to need for the parts of a save: a page of rates that every prediction is made from.

Rates are bytes a second of one rank, state bytes, everything else seconds. *Drag* is what the training loses while
another thread works for it: seconds a second, 0 on a machine with cores and bandwidth to spare, near 1 where the thread
takes a core that the training had. It is what makes a copy behind the training's back cheap or dear, and no data sheet
has it. Kept as JSON, so that `shade checkpoint simulate` can ask what another habit would have cost the same run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shade.errors import ConfigError


@dataclass(frozen=True)
class CodecCost:
    """One codec, on this state."""

    encode_rate: float
    """Plain bytes a second."""
    ratio: float
    """Plain bytes a stored byte."""


@dataclass(frozen=True)
class Costs:
    """Measured; see the top of the file."""

    state_bytes: int
    """Of this rank's shard."""
    step_seconds: float
    """Of a step in which nothing is saved."""
    pass_seconds: float
    """Forward and backward: the part of a step in which the state stands still."""
    copy_rate: float
    """One thread, into memory that has been written to before."""
    burst_rate: float
    """Two threads, while the training stands still."""
    hash_rate: float
    copy_drag: float = 0.0
    """While a copy runs behind the training."""
    work_drag: float = 0.0
    """While chunks are encoded, hashed, sent and written behind it."""
    send_rate: float | None = None
    """To the cluster's memory; None where there is none."""
    write_rate: float | None = None
    """To storage, until it is durable; None where there is none."""
    fetch_rate: float | None = None
    """Back from the cluster's memory; None: as sent."""
    read_rate: float | None = None
    """Back from storage; None: as written."""
    commit_seconds: float = 0.0
    """Of each save, whatever its size: files, records, rounds between ranks."""
    codecs: Mapping[str, CodecCost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("state_bytes", "step_seconds", "copy_rate", "burst_rate", "hash_rate"):
            if not getattr(self, name) > 0:
                raise ConfigError.of(f"{name} > 0", getattr(self, name), "measure it, or leave the file out")
        if not 0 <= self.pass_seconds <= self.step_seconds:
            raise ConfigError.of("pass_seconds within step_seconds", self.pass_seconds, "measure both in one run")

    def save(self, path: Path) -> None:
        """Writes a JSON file."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Costs:
        """Reads one.

        Args:
            path: Of it.

        Returns:
            The costs.

        Raises:
            ConfigError: It is no such file.
        """
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            codecs = {name: CodecCost(**each) for name, each in found.pop("codecs", {}).items()}
            return cls(**found, codecs=codecs)
        except ConfigError:
            raise
        except (OSError, ValueError, TypeError, AttributeError) as error:
            cure = "name one that strategy='auto' or shade checkpoint simulate wrote"
            raise ConfigError.of("a file of measured costs", f"{path}: {error}", cure) from error
