"""Durable bytes by name: a local folder, or whatever fsspec reaches. See `shade.storage.base` for what is promised."""

from shade.storage import directory, remote
from shade.storage.base import VOLUMES, Volume, open_volume

__all__ = ["VOLUMES", "Volume", "directory", "open_volume", "remote"]
