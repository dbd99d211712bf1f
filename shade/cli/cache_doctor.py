"""The rows of ``shade doctor`` that look into a cache: can it be reached, and is it set up as a cache?

A Redis server is a database unless it is told otherwise, and each of those defaults costs a cache something: snapshots
cost memory, eviction breaks the plan, a cluster that wants all its slots falls silent with one node. The reasons are in
``redis.conf``. A user with no more rights than a cache needs may not ask for settings; that is no fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from shade.cli.finding import Finding, broken, fail, ok, warn
from shade.errors import ShadeError, StoreError, StoreUnavailableError
from shade.store import open_store
from shade.store.link import Endpoint
from shade.store.server import ask
from shade.store.url import StoreURL, format_address

_WANTED: Final = {
    "maxmemory-policy": ("noeviction", "CONFIG SET maxmemory-policy noeviction: else it throws out planned hits"),
    "save": ("", "CONFIG SET save '': snapshots cost memory, for data that nobody restores"),
    "appendonly": ("no", "CONFIG SET appendonly no: a cache needs no log"),
}
_WANTED_OF_NODES: Final = {
    "cluster-require-full-coverage": ("no", "CONFIG SET it no: else one lost node silences all"),
    "cluster-allow-reads-when-down": ("yes", "CONFIG SET it yes: else a minority of nodes falls silent"),
}


def look_into(text: str) -> Iterator[Finding]:
    """Rows about the cache at a URL."""
    try:
        url = StoreURL.parse(text)
        with open_store(url, timeout_seconds=2.0) as store:
            store.ping()
            stats = store.stats()
    except StoreUnavailableError as error:
        yield fail("cache", str(error), "check host and port, and that the server runs: shade cache status")
        return
    except ShadeError as error:
        yield broken("cache", error)
        return
    for node in stats.nodes:
        limit = f"of {node.max_bytes / 2**30:,.2f} GiB" if node.max_bytes else "and no limit"
        found = f"{node.role}, Redis {node.version}, {node.num_keys:,} keys, {node.used_bytes / 2**30:,.2f} GiB {limit}"
        if node.max_bytes:
            yield ok(node.address, found)
        else:
            yield warn(node.address, found, "CONFIG SET maxmemory …: without a limit it can exhaust the machine")
    endpoints = [Endpoint.of(url, host, port) for host, port in url.addresses] or [Endpoint.of(url)]
    if url.scheme not in ("memory", "local"):
        for endpoint in endpoints:
            yield from _settings(endpoint, url)


def _settings(endpoint: Endpoint, url: StoreURL) -> Iterator[Finding]:
    name = format_address(endpoint.host, endpoint.port) if endpoint.host else endpoint.path
    wanted = _WANTED | (_WANTED_OF_NODES if url.scheme.endswith("+cluster") else {})
    try:
        told = {setting: _get(endpoint, setting) for setting in wanted}
    except StoreUnavailableError as error:
        yield warn(name, f"is away ({error})", "start it again: until then its share of the cache is missing")
        return
    except StoreError as error:
        yield ok(name, f"does not show its settings to this user ({error})")
        return
    good = [setting for setting, (value, _) in wanted.items() if told[setting] == value]
    for setting, (value, cure) in wanted.items():
        if told[setting] != value and told[setting] is not None:
            yield warn(name, f"{setting} {told[setting]!r}", cure)
    if good:
        yield ok(name, "as a cache should have it: " + ", ".join(good))


def _get(endpoint: Endpoint, setting: str) -> str | None:
    """A setting's value; None where the server has none of that name."""
    reply = ask(endpoint, "CONFIG", "GET", setting)
    if not isinstance(reply, list) or len(reply) != 2:
        return None
    value = reply[1]
    return value.decode() if isinstance(value, bytes) else str(value)
