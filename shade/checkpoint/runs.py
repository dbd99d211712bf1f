"""Which runs there are: in a store, and in durable storage. For tools; a training run knows its own id."""

from __future__ import annotations

from shade.storage import Volume
from shade.store import Store

_PREFIX = "shade:checkpoint:"


def runs_in_store(store: Store) -> list[str]:
    """Ids of runs that have anything in a store's memory.

    Args:
        store: Searched key by key: a second for a few million.

    Returns:
        Sorted.
    """
    return sorted({key[len(_PREFIX) :].partition(":")[0] for key in store.scan(_PREFIX)})


def runs_in_volume(volume: Volume) -> list[str]:
    """Ids of runs that have a committed snapshot in durable storage.

    Args:
        volume: Listed as a whole.

    Returns:
        Sorted.
    """
    parts = [name.split("/") for name in volume.list()]
    return sorted({part[0] for part in parts if len(part) == 3 and part[2] == "commit.json"})
