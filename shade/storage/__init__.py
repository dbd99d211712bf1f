"""Stores durable bytes by name: in a local folder, or in whatever fsspec reaches. `base` says what is guaranteed."""

from shade.storage import directory, fsspec_volume
from shade.storage.base import VOLUMES, Volume, open_volume

__all__ = ["VOLUMES", "Volume", "directory", "fsspec_volume", "open_volume"]
