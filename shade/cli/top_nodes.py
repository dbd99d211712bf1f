"""The memory of the cache's nodes, for ``shade top``: asked of the nodes themselves, not of the training.

A run says in ``progress.json`` which store it uses, its password left out; that one is read from the environment, as
everywhere. Whoever looks pays for the look: a connection and one INFO a node, and nothing on the training's side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from shade.cli.tables import printable, size, table
from shade.errors import ShadeError


def lines(url: str) -> Iterator[str]:
    """A line for each node.

    Args:
        url: Of the store, any password in it masked.

    Yields:
        Address, role, memory, keys; or that no node answers.
    """
    from shade.store import open_store
    from shade.store.url import StoreURL

    if not url.startswith(("unix:", "redis")):
        return  # this process has no part in a store of another's own memory, and starts none
    try:
        named = dataclasses.replace(StoreURL.parse(url), password=None)
        with open_store(str(named)) as store:
            nodes = store.stats().nodes
    except (ShadeError, OSError) as error:
        yield printable(f"cache nodes: no answer ({' '.join(str(error).split())})")
        return
    rows = [("cache node", "role", "memory", "of", "full", "entries")]
    for node in nodes:
        used = node.used_bytes + node.overhead_bytes
        limit = size(node.max_bytes) if node.max_bytes else "no limit"
        full = f"{used / node.max_bytes:.0%}" if node.max_bytes else "-"
        rows.append((node.address, node.role, size(used), limit, full, f"{node.num_keys:,}"))
    yield from table(rows, "<<>>>>").splitlines()
