"""Lance: a shard is a data set at one version, of which its own library takes rows. A piece is 64 of them.

Each change makes a new version; the one that is found when the set is opened is read to the end. Lance's threads are
missing in a fork, where a read may wait for ever, so the fork of a process that has used Lance is refused.
"""

from __future__ import annotations

import importlib
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import xxhash
from typing_extensions import override

from shade.data._origin.hub import parted_at_commit
from shade.data._origin.url_origin import Entry
from shade.data._shards.index import FORMATS, Columns, LibraryFormat, ShardFile, ShardScan
from shade.data._shards.tables import ArrowRows, TableRows, plain_rows, pyarrow
from shade.errors import ConfigError, DataError, shown_place, without_login

_ROWS: Final = 64
_VERSION: Final = struct.Struct("<Q")
_used_by: list[int] = []
"""The process that has used Lance; a fork has that of its parent."""


@FORMATS.register("lance")
class LanceFormat(ArrowRows, LibraryFormat):
    """Lance's data sets, local or where Lance itself reads: ``options`` are its storage options, and a ``version``."""

    library, reads, extra = "lance", "Lance", "lance"
    keeps_rows = True

    def __init__(self) -> None:
        self._options: dict[str, Any] = {}
        self._tables: tuple[int, dict[str, Any]] = 0, {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_tables": (0, {})}

    def _opened_at(self, url: str, version: int | str | None) -> Any:
        """Returns a data set at a version, opened once a process."""
        if _used_by and _used_by[0] != os.getpid():
            cure = "pass multiprocessing_context='forkserver' (or 'spawn') to the loader"
            raise ConfigError.of("a process that is no fork of one that has used Lance", "a fork", cure)
        _used_by[:] = [os.getpid()]
        if self._tables[0] != os.getpid():
            self._tables = os.getpid(), {}
        found = self._tables[1].get(f"{url} {version}")
        if found is None:
            # Lance would read what `main` has now.
            place, commit = parted_at_commit(url)
            options = self._options | ({"hf_revision": commit} if commit else {})
            try:
                found = importlib.import_module("lance").dataset(
                    place, version=version, storage_options=options or None
                )
            except (OSError, ValueError) as error:
                words, cure = without_login(str(error), url), "check the path, the version and the login"
                raise DataError.of(f"a Lance data set at {shown_place(url)}", words, cure) from error
            self._tables[1][f"{url} {version}"] = found
        return found

    @override
    def described(self, url: str, options: Mapping[str, Any]) -> Entry:
        self._options = {name: value for name, value in options.items() if name != "version"}
        table = self._opened_at(url, options.get("version"))
        parts = [fragment.metadata.to_json() for fragment in table.get_fragments()]
        num_bytes = sum(file.get("file_size_bytes") or 0 for part in parts for file in part["files"])
        # A data set that was written again from its beginning may have the same version.
        version = f"version={table.version} {xxhash.xxh3_64_hexdigest(repr(parts).encode())}"
        return Entry(url, num_bytes, version, named=f"{url}?{version}")

    @override
    def scan(self, file: ShardFile) -> ShardScan:
        version = int(file.entry.version.split()[0].partition("=")[2])
        table, name = self._opened_at(file.entry.url, version), file.entry.url
        num_rows = table.count_rows()
        taken = table.take([0] if num_rows else []).schema
        for number, field in enumerate(taken):
            if _is_blob(table.schema.field(number)):
                taken = taken.set(number, pyarrow().field(field.name, pyarrow().large_binary()))
            elif field.type != table.schema.field(number).type:
                got = f"{field.name!r} of type {table.schema.field(number).type}, read as {field.type}"
                raise DataError.of(f"columns of {shown_place(name)} that Lance takes", got, "store them as plain types")
        extra = _VERSION.pack(version) + taken.remove_metadata().serialize().to_pybytes()
        first_P = np.arange(0, num_rows, _ROWS)
        rows_P = np.minimum(_ROWS, num_rows - first_P)
        # Not where they lie, but how much is read for them, about.
        row_bytes = max(1, file.entry.num_bytes // max(1, num_rows))
        return ShardScan.of(first_P * row_bytes, rows_P * row_bytes, self._columns_of(name, extra), extra, rows=rows_P)

    @override
    def _written_schema(self, extra: bytes) -> Any:
        return pyarrow().ipc.read_schema(pyarrow().py_buffer(extra[_VERSION.size :]))

    @override
    def opened(self, path: str, scan: ShardScan) -> Any:
        return self._opened_at(path, _VERSION.unpack_from(scan.extra)[0])

    @override
    def taken(self, scan: ShardScan, opened: Any, rows: Sequence[int], columns: Columns) -> Sequence[bytes]:
        schema = self._schema(scan, columns)
        blobs = [name for name in schema.names if _is_blob(opened.schema.field(name))]
        table = opened.take(list(rows), columns=[name for name in schema.names if name not in blobs])
        for name in blobs:
            values = [value for _, value in opened.read_blobs(name, indices=list(rows))]
            table = table.append_column(name, pyarrow().array(values, pyarrow().large_binary()))
        return TableRows(plain_rows(table.replace_schema_metadata(None), schema))

    @override
    def counted(self, opened: Any) -> tuple[int, int]:
        stats = opened.io_stats_incremental()
        return stats.read_iops, stats.read_bytes


def _is_blob(field: Any) -> bool:
    if (field.metadata or {}).get(b"lance-encoding:blob") == b"true":
        return True
    return str(getattr(field.type, "extension_name", "")).startswith("lance.blob")
