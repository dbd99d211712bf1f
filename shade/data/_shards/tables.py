"""Tables: Parquet, Hugging Face's Arrow files, and MosaicML's MDS. A sample is a row; a piece is what holds it.

pyarrow reads Parquet and Arrow. Of a Parquet file a piece is a row group, of which only the chosen columns are read; of
an Arrow file it is a record batch. A row's payload is an Arrow record batch of one row, without its schema: it keeps
every type of Arrow, and it is no code. Of an MDS file a piece is a sample.
"""

from __future__ import annotations

import importlib
import io
import json
import struct
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from PIL import Image
from typing_extensions import override

from shade.data._shards.archives import decoded_text
from shade.data._shards.index import (
    FORMATS,
    Columns,
    RangeFile,
    RangeParts,
    Rows,
    ShardFile,
    ShardFormat,
    ShardScan,
    UnlikeIndexError,
)
from shade.errors import DataError, shown_place

_SCHEMA_MESSAGE, _DICTIONARY_MESSAGE, _BATCH_MESSAGE = 1, 2, 3
_TAIL_BYTES: Final = 8
_CONTINUED: Final = b"\xff\xff\xff\xff"


def _pyarrow(module: str = "pyarrow") -> Any:
    return importlib.import_module(module)


class ArrowRows(ShardFormat):
    """Reads the rows of Parquet and Arrow, whose payloads are alike."""

    library, reads, extra = "pyarrow", "Parquet and Arrow", "parquet"

    @override
    def row(self, scan: ShardScan, payload: Any, columns: Columns) -> dict[str, Any]:
        schema = self._schema(scan, columns)
        batch = _pyarrow().ipc.read_record_batch(_pyarrow().py_buffer(payload), schema)
        found: dict[str, Any] = batch.to_pylist()[0]
        return found

    def _schema(self, scan: ShardScan, columns: Columns) -> Any:
        """Returns the schema of payloads: the chosen columns in the file's order."""
        whole = scan.parsed("schema", self._whole_schema)
        if columns is None:
            return whole
        chosen = tuple(columns)
        return scan.parsed(chosen, lambda _: _pyarrow().schema([field for field in whole if field.name in chosen]))

    @abstractmethod
    def _whole_schema(self, extra: bytes) -> Any:
        """Returns the schema of a shard, without metadata."""


def _row_payloads(batch: Any, rows: Rows) -> list[bytes]:
    wanted = range(batch.num_rows) if rows is None else rows
    return [batch.slice(row, 1).serialize().to_pybytes() for row in wanted]


@FORMATS.register("parquet")
class ParquetFormat(ArrowRows):
    """Parquet. Rows are compressed together, so that reading one takes as long as reading its row group."""

    keeps_rows = True

    @override
    def scan(self, file: ShardFile) -> ShardScan:
        name, num_bytes = file.entry.url, file.entry.num_bytes
        tail = file.range(max(0, num_bytes - _TAIL_BYTES), num_bytes)
        if tail[4:] != b"PAR1":
            raise DataError.of(f"{shown_place(name)} to be a whole Parquet file", "another end", "copy it again")
        (length,) = struct.unpack("<I", tail[:4])
        start = num_bytes - _TAIL_BYTES - length
        if start < 4:
            raise DataError.of(f"{shown_place(name)} to be a whole Parquet file", "a short one", "copy it again")
        extra = struct.pack("<Q", num_bytes) + file.range(start, num_bytes)
        metadata = _footer(extra)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        spans = [self._chunks(group, None) for group in groups]
        return ShardScan.of(
            [span[0][0] for span in spans],
            [span[-1][1] - span[0][0] for span in spans],
            list(dict.fromkeys(field.name for field in self._whole_schema(extra))),
            extra,
            rows=[group.num_rows for group in groups],
        )

    def _metadata(self, scan: ShardScan) -> Any:
        return scan.parsed("metadata", _footer)

    @override
    def _whole_schema(self, extra: bytes) -> Any:
        return _plain(_footer(extra).schema.to_arrow_schema().remove_metadata())

    @staticmethod
    def _chunks(group: Any, columns: Columns) -> list[tuple[int, int]]:
        """Returns the ranges of the column chunks of a row group, in order."""
        ranges = []
        for number in range(group.num_columns):
            chunk = group.column(number)
            if columns is not None and chunk.path_in_schema.split(".")[0] not in columns:
                continue
            start = chunk.data_page_offset
            # A dictionary comes before the data.
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                start = min(start, chunk.dictionary_page_offset)
            ranges.append((start, start + chunk.total_compressed_size))
        return sorted(ranges)

    @override
    def ranges(self, scan: ShardScan, piece: int, columns: Columns) -> list[tuple[int, int]]:
        return self._chunks(self._metadata(scan).row_group(piece), columns)

    @override
    def payloads(self, scan: ShardScan, piece: int, parts: Any, columns: Columns, rows: Rows) -> list[bytes]:
        metadata, schema = self._metadata(scan), self._schema(scan, columns)
        (num_bytes,) = struct.unpack("<Q", scan.extra[:8])
        try:
            file = _pyarrow("pyarrow.parquet").ParquetFile(RangeFile(num_bytes, parts.range), metadata=metadata)
            table = file.read_row_group(piece, columns=schema.names, use_threads=False).replace_schema_metadata(None)
            table = table.select(schema.names).cast(schema)
        # pyarrow's own errors are of these kinds.
        except (OSError, EOFError, ValueError) as error:
            raise UnlikeIndexError(f"a row group that pyarrow cannot read ({error})") from error
        if table.num_rows != scan.rows_P[piece]:
            raise UnlikeIndexError(f"{table.num_rows} rows")
        payloads = [each for batch in table.combine_chunks().to_batches() for each in _row_payloads(batch, None)]
        return payloads if rows is None else [payloads[row] for row in rows]


def _footer(extra: bytes) -> Any:
    """Returns the metadata of a Parquet file, from its length and its last bytes."""
    # pyarrow wants a file that begins with the mark, too.
    return _pyarrow("pyarrow.parquet").read_metadata(io.BytesIO(b"PAR1" + extra[8:]))


def _plain(schema: Any) -> Any:
    """Returns a schema without dictionaries, which a payload would have to repeat."""
    arrow = _pyarrow()

    def plain(kind: Any) -> Any:
        return kind.value_type if arrow.types.is_dictionary(kind) else kind

    return arrow.schema([field.with_type(plain(field.type)) for field in schema])


@FORMATS.register("arrow")
class ArrowFormat(ArrowRows):
    """Arrow's IPC files and streams, which Hugging Face's ``datasets`` keeps. A local one is mapped into memory."""

    keeps_rows = True

    @override
    def opened(self, path: str) -> Any:
        return RangeParts([(0, np.memmap(path, dtype=np.uint8, mode="r"))])

    @override
    def scan(self, file: ShardFile) -> ShardScan:
        # To find the record batches, pyarrow would read them; the messages' headers are a few hundred bytes each.
        name, num_bytes, schema = file.entry.url, file.entry.num_bytes, b""
        at = 8 if file.range(0, min(8, num_bytes)).startswith(b"ARROW1") else 0
        starts, lengths, rows = [], [], []
        has_end = at > 0 and file.range(num_bytes - 6, num_bytes) == b"ARROW1"
        while True:
            prefix = file.range(at, min(at + 8, num_bytes))
            # A stream may end without a mark.
            if prefix == b"" and schema and not has_end:
                break
            if len(prefix) < 8 or prefix[:4] != _CONTINUED:
                raise _no_arrow(name, f"no message at byte {at}")
            (length,) = struct.unpack("<i", prefix[4:])
            if length == 0:
                break
            if length < 0 or at + 8 + length > num_bytes:
                raise _no_arrow(name, f"it ends at byte {num_bytes}, in a message")
            kind, num_rows, body = _message(file.range(at + 8, at + 8 + length))
            stop = at + 8 + length + body
            if stop > num_bytes:
                raise _no_arrow(name, f"it ends at byte {num_bytes}, before byte {stop}")
            if kind == _SCHEMA_MESSAGE:
                schema = file.range(at, stop)
            elif kind == _BATCH_MESSAGE:
                if num_rows:
                    starts.append(at)
                    lengths.append(stop - at)
                    rows.append(num_rows)
            else:
                cure = "write the column without a dictionary: table.cast(…)"
                raise DataError.of(f"plain columns in {shown_place(name)}", "a dictionary", cure)
            at = stop
        return ShardScan.of(starts, lengths, self._whole_schema(schema).names, schema, rows=rows)

    @override
    def _whole_schema(self, extra: bytes) -> Any:
        return _pyarrow().ipc.read_schema(_pyarrow().py_buffer(extra)).remove_metadata()

    @override
    def payloads(self, scan: ShardScan, piece: int, parts: Any, columns: Columns, rows: Rows) -> list[bytes]:
        names, whole, arrow = self._schema(scan, columns).names, self._schema(scan, None), _pyarrow()
        content = parts.range(*scan.span(piece))
        try:
            batch = arrow.ipc.read_record_batch(arrow.py_buffer(content), whole)
        except (OSError, EOFError, ValueError) as error:
            raise UnlikeIndexError(f"a record batch that pyarrow cannot read ({error})") from error
        if batch.num_rows != scan.rows_P[piece]:
            raise UnlikeIndexError(f"{batch.num_rows} rows")
        return _row_payloads(batch.select(names), rows)


def _no_arrow(name: str, words: str) -> DataError:
    return DataError.of(f"{shown_place(name)} to be a whole Arrow file", words, "copy it again")


def _message(header: bytes) -> tuple[int, int, int]:
    """Returns an Arrow message's kind, the rows of its record batch, and the bytes of its body."""
    # The header is a flatbuffer: a table begins with the distance back to its list of fields' places.
    (table,) = struct.unpack_from("<I", header)

    def field(table: int, number: int) -> int:
        (back,) = struct.unpack_from("<i", header, table)
        (size,) = struct.unpack_from("<H", header, table - back)
        place = struct.unpack_from("<H", header, table - back + 4 + 2 * number)[0] if 4 + 2 * number < size else 0
        return table + place if place else 0

    # Arrow's Message.fbs: 0 version, 1 kind of header, 2 header, 3 length of the body.
    kind_at, inner_at, body_at = field(table, 1), field(table, 2), field(table, 3)
    kind = header[kind_at] if kind_at else 0
    body = struct.unpack_from("<q", header, body_at)[0] if body_at else 0
    num_rows = 0
    if kind == _BATCH_MESSAGE:
        rows_at = field(inner_at + struct.unpack_from("<I", header, inner_at)[0], 0)
        num_rows = struct.unpack_from("<q", header, rows_at)[0] if rows_at else 0
    return kind, num_rows, body


_NUMBERS: Final = {
    name: np.dtype(name)
    for name in (
        *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64"),
    )
}


def _picture(data: bytes) -> Image.Image:
    picture = Image.open(io.BytesIO(data))
    picture.load()
    return picture


def _raw_picture(data: bytes) -> Image.Image:
    """Returns a picture that MDS stored as its size, mode and pixels."""
    width, height, length = struct.unpack_from("<III", data)
    mode = data[12 : 12 + length].decode()
    return Image.frombytes(mode, (width, height), data[12 + length :])


_ENCODINGS: Final[dict[str, Callable[[bytes], Any]]] = {
    "bytes": bytes,
    "str": decoded_text,
    "int": lambda data: int(np.frombuffer(data, np.int64)[0]),
    "jpeg": _picture,
    "png": _picture,
    "pil": _raw_picture,
    "json": json.loads,
}


@FORMATS.register("mds")
class MDSFormat(ShardFormat):
    """MosaicML's MDS shards, not compressed. Pickled columns are refused: they could run code."""

    @override
    def scan(self, file: ShardFile) -> ShardScan:
        name, num_bytes = file.entry.url, file.entry.num_bytes
        try:
            (num_samples,) = struct.unpack("<I", file.range(0, min(4, num_bytes)))
            # The number of samples, where each begins, and where the last ends.
            begin = 4 * (num_samples + 2)
            offset_N = np.frombuffer(file.range(4, min(begin, num_bytes)), np.uint32)
            extra = file.range(begin, min(int(offset_N[0]), num_bytes))
            config = json.loads(extra)
        except (struct.error, ValueError, IndexError) as error:
            raise DataError.of(f"{shown_place(name)} to be an MDS shard", str(error), "copy it again") from error
        if offset_N[-1] != num_bytes:
            words = f"{num_bytes} bytes instead of {offset_N[-1]}"
            raise DataError.of(f"{shown_place(name)} to be a whole MDS shard", words, "copy it again")
        unknown = [each for each in config["column_encodings"] if _mds_decoder(each) is None]
        if unknown:
            cure = f"write the shard with one of {', '.join([*_ENCODINGS, *_NUMBERS])}"
            raise DataError.of(f"columns of {shown_place(name)} in a known encoding", unknown[0], cure)
        return ShardScan.of(offset_N[:-1], np.diff(offset_N.astype(np.int64)), config["column_names"], extra)

    @override
    def row(self, scan: ShardScan, payload: Any, columns: Columns) -> dict[str, Any]:
        config = scan.parsed("config", json.loads)
        payload, at, sizes = bytes(payload), 0, []
        # A column without a size has it in front of the sample's values.
        for size in config["column_sizes"]:
            sizes.append(size or struct.unpack_from("<I", payload, at)[0])
            at += 0 if size else 4
        found = {}
        for name, encoding, size in zip(config["column_names"], config["column_encodings"], sizes, strict=True):
            if columns is None or name in columns:
                decode = _mds_decoder(encoding)
                assert decode is not None
                found[name] = decode(payload[at : at + size])
            at += size
        return found


def _mds_decoder(encoding: str) -> Callable[[bytes], Any] | None:
    """Returns what decodes a column of an MDS shard; None for an encoding that is not known here."""
    if encoding in _NUMBERS:
        return lambda data: np.frombuffer(data, _NUMBERS[encoding])[0]
    return _ENCODINGS.get(encoding)
