"""Tables: Parquet, Hugging Face's Arrow files, and MosaicML's MDS. A sample is a row; a piece is what holds it.

pyarrow reads Parquet and Arrow. Of a Parquet file a piece is a row group, of which only the chosen columns are read; of
an Arrow file it is a record batch. A row's payload is an Arrow record batch of one row, without its schema: it keeps
every type of Arrow, and it is no code. Of an MDS file a piece is a sample.

A type whose row would carry the memory of all rows (a view, a dictionary) is cast to the plain one of the same values.
A layout that is not read here is refused when the shard is opened.
"""

from __future__ import annotations

import bisect
import contextlib
import importlib
import io
import json
import struct
from abc import abstractmethod
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt
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
from shade.data._shards.parquet_pages import DAMAGED, ChunkPages, check_statistics, page_table, pages_of
from shade.data._source.item_codec import pixel_bytes
from shade.errors import DataError, shown_place

_SCHEMA_MESSAGE, _DICTIONARY_MESSAGE, _BATCH_MESSAGE = 1, 2, 3
_TAIL_BYTES: Final = 8
_HEAD: Final = struct.Struct("<QQ")
"""What is kept of a Parquet file: its length and that of its table of pages, then both and the footer."""
_SMALL_BYTES: Final = 1 << 20
_BUFFER_BYTES: Final = 64 << 10
_CONTINUED: Final = b"\xff\xff\xff\xff"
_ARROW_MARK: Final = b"ARROW1"
_MAPPED, _COPIED = b"\0", b"\1"
"""First byte of what is kept of an Arrow shard. Of a batch that is compressed, or has a type that is cast, reading one
row takes as long as reading all, so it is read into memory."""


def pyarrow(module: str = "pyarrow") -> Any:
    """Returns a module of pyarrow, which is imported when a shard needs it."""
    return importlib.import_module(module)


class ArrowRows(ShardFormat):
    """Reads the rows of Parquet and Arrow, whose payloads are alike."""

    library, reads, extra = "pyarrow", "Parquet and Arrow", "parquet"

    @override
    def row(self, scan: ShardScan, payload: Any, columns: Columns) -> dict[str, Any]:
        schema = self._schema(scan, columns)
        batch = pyarrow().ipc.read_record_batch(pyarrow().py_buffer(payload), schema)
        found: dict[str, Any] = batch.to_pylist()[0]
        return found

    def _schema(self, scan: ShardScan, columns: Columns) -> Any:
        """Returns the schema of payloads: the chosen columns in the file's order."""
        chosen = None if columns is None else tuple(columns)

        def plain(extra: bytes) -> Any:
            fields = self._written_schema(extra)
            return pyarrow().schema(
                [
                    field.with_type(_plain_column(field.type))
                    for field in fields
                    if chosen is None or field.name in chosen
                ]
            )

        return scan.parsed(("payloads", chosen), plain)

    @abstractmethod
    def _written_schema(self, extra: bytes) -> Any:
        """Returns the schema of a shard as it was written, without metadata."""

    def _columns_of(self, name: str, extra: bytes) -> list[str]:
        """Returns the names of a shard's columns; raises DataError for columns that have no names of their own, or a
        type that cannot be cast to the plain one."""
        schema, arrow = self._written_schema(extra), pyarrow()
        for field in schema:
            if schema.names.count(field.name) > 1:
                got, cure = f"{field.name!r} twice", "rename one of them"
                raise DataError.of(f"each column of {shown_place(name)} by a name of its own", got, cure)
            plain = field.type
            try:
                plain = _plain_column(field.type)
                plain_rows(arrow.table({"": arrow.nulls(1, field.type)}), arrow.schema({"": plain}))
            except (arrow.ArrowException, KeyError) as error:  # KeyError: a type without a class in Python
                cure = f"write the column as {'text' if plain == field.type else plain}"
                got = f"{field.name!r} of type {field.type} ({error})"
                raise DataError.of(f"columns of {shown_place(name)} that pyarrow can cast", got, cure) from error
        names: list[str] = schema.names
        if not names:
            raise DataError.of(f"columns in {shown_place(name)}", "none", "leave the shard out")
        return names


class ArrowPieces(ArrowRows):
    """Reads pieces as tables."""

    @override
    def payloads(self, scan: ShardScan, piece: int, parts: Any, columns: Columns, rows: Rows) -> Sequence[bytes]:
        schema = self._schema(scan, columns)
        try:
            table, has_N = self._table(scan, piece, parts, schema.names)
            payloads = TableRows(plain_rows(table.replace_schema_metadata(None), schema), has_N)
        # pyarrow's own errors are of these kinds.
        except (OSError, EOFError, ValueError) as error:
            raise UnlikeIndexError(f"rows that pyarrow cannot read ({error})") from error
        if len(payloads) != scan.rows_P[piece]:
            raise UnlikeIndexError(f"{len(payloads)} rows")
        return payloads if rows is None else [payloads[row] for row in rows]

    @abstractmethod
    def _table(self, scan: ShardScan, piece: int, parts: Any, names: list[str]) -> tuple[Any, Any]:
        """Returns a piece as a table with these columns, and perhaps others, and which rows are true, None for all."""


class TableRows(Sequence[bytes]):
    """The payloads of a table's rows, each made when it is asked for: a row is wanted more often than all of them."""

    def __init__(self, table: Any, has_N: npt.NDArray[np.bool_] | None = None) -> None:
        self._batches = table.combine_chunks().to_batches()
        self._starts = [0]
        for batch in self._batches:
            self._starts.append(self._starts[-1] + batch.num_rows)
        self.num_bytes = int(table.nbytes)
        """Bytes of the table."""
        self.has_N = has_N
        """Which rows were read; None for all."""

    @override
    def __len__(self) -> int:
        return self._starts[-1]

    @override
    def __getitem__(self, row: Any) -> Any:
        if row >= len(self):
            raise IndexError(row)
        number = bisect.bisect_right(self._starts, row) - 1
        return _payload(self._batches[number].slice(row - self._starts[number], 1))


def _payload(row: Any) -> bytes:
    payload: bytes = row.serialize().to_pybytes()
    return payload


def plain_rows(table: Any, schema: Any) -> Any:
    """Returns a table with the columns and types of a schema."""
    table = table.select(schema.names)
    # Not all by `Table.cast`: pyarrow casts some nested types wrongly, even to their own.
    arrow = pyarrow()
    for number, field in enumerate(schema):
        column = table.column(number)
        if column.type != field.type:
            # Nor does it cast the storage of an extension type.
            if isinstance(column.type, arrow.BaseExtensionType):
                column = arrow.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
            table = table.set_column(number, field, column.cast(field.type))
    return table


def _plain_column(kind: Any) -> Any:
    """Returns `_plain` of a column's type, of an extension type that of its storage."""
    if isinstance(kind, pyarrow().BaseExtensionType) and _plain(kind.storage_type) != kind.storage_type:
        return _plain(kind.storage_type)
    return _plain(kind)


def _plain(kind: Any) -> Any:
    """Returns the type of the same values of which a slice has its own bytes alone."""
    arrow = pyarrow()
    types = arrow.types
    if types.is_union(kind) and not kind.num_fields:  # pyarrow would read what is not there
        raise arrow.ArrowInvalid("a union of no types")
    if types.is_dictionary(kind):
        return _plain(kind.value_type)
    if types.is_string_view(kind):
        return arrow.large_string()
    if types.is_binary_view(kind):
        return arrow.large_binary()
    if types.is_struct(kind):
        return arrow.struct([field.with_type(_plain(field.type)) for field in kind])
    if types.is_map(kind):
        return arrow.map_(_plain(kind.key_type), _plain(kind.item_type), keys_sorted=kind.keys_sorted)
    for is_list, plain in (
        (types.is_list, arrow.list_),
        (types.is_large_list, arrow.large_list),
        (types.is_list_view, arrow.list_view),
        (types.is_large_list_view, arrow.large_list_view),
    ):
        if is_list(kind):
            return plain(kind.value_field.with_type(_plain(kind.value_type)))
    if types.is_fixed_size_list(kind):
        return arrow.list_(kind.value_field.with_type(_plain(kind.value_type)), kind.list_size)
    return kind


@FORMATS.register("parquet")
class ParquetFormat(ArrowPieces):
    """Parquet. Rows are compressed together: one is read with its page, or without page indexes with its row group."""

    keeps_rows = True

    @override
    def scan(self, file: ShardFile) -> ShardScan:
        name, num_bytes = file.entry.url, file.entry.num_bytes
        tail = file.range(max(0, num_bytes - _TAIL_BYTES), num_bytes)
        if tail[4:] == b"PARE":
            cure = "write it without encryption"
            raise DataError.of(f"{shown_place(name)} to be a plain Parquet file", "an encrypted one", cure)
        if tail[4:] != b"PAR1":
            raise DataError.of(f"{shown_place(name)} to be a whole Parquet file", "another end", "copy it again")
        (length,) = struct.unpack("<I", tail[:4])
        start = num_bytes - _TAIL_BYTES - length
        if start < 4:
            raise DataError.of(f"{shown_place(name)} to be a whole Parquet file", "a short one", "copy it again")
        footer = file.range(start, num_bytes)
        extra = _HEAD.pack(num_bytes, 0) + footer
        try:
            metadata = _footer(extra)
            check_statistics(footer, metadata.schema)
            # Of small row groups the rest is cheaper than another request.
            if any(
                metadata.row_group(number).total_byte_size > _SMALL_BYTES for number in range(metadata.num_row_groups)
            ):
                with contextlib.suppress(*DAMAGED):
                    pages = page_table(footer, metadata.schema, file.range)
                    extra = _HEAD.pack(num_bytes, len(pages)) + pages + footer
            columns = self._columns_of(name, extra)
        except (pyarrow().ArrowException, OSError, *DAMAGED) as error:
            raise _unread(name, "Parquet", error) from error
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        chunks = (group.column(number) for group in groups for number in range(group.num_columns))
        other = next((chunk.file_path for chunk in chunks if chunk.file_path), None)
        if other is not None:
            cure = "name the files that it points to"
            raise DataError.of(f"columns in {shown_place(name)} itself", f"some in {other}", cure)
        spans = [[place for _, place in self._leaves(group, None)] for group in groups]
        return ShardScan.of(
            [span[0][0] for span in spans],
            [max(stop for _, stop in span) - span[0][0] for span in spans],
            columns,
            extra,
            rows=[group.num_rows for group in groups],
        )

    def _metadata(self, scan: ShardScan) -> Any:
        return scan.parsed("metadata", _footer)

    @override
    def _written_schema(self, extra: bytes) -> Any:
        # The schema of the metadata has no extension types, such as that of UUIDs.
        return pyarrow("pyarrow.parquet").ParquetFile(_tail(extra)).schema_arrow.remove_metadata()

    @staticmethod
    def _leaves(group: Any, columns: Columns) -> list[tuple[int, tuple[int, int]]]:
        """Returns number and range of the column chunks of a row group, in the order of the ranges."""
        ranges = []
        for number in range(group.num_columns):
            chunk = group.column(number)
            # As pyarrow chooses them: a name may have dots, as have the paths of what is nested.
            if columns is not None and not any(f"{chunk.path_in_schema}.".startswith(f"{name}.") for name in columns):
                continue
            start = chunk.data_page_offset
            # A dictionary comes before the data.
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                start = min(start, chunk.dictionary_page_offset)
            ranges.append((number, (start, start + chunk.total_compressed_size)))
        return sorted(ranges, key=itemgetter(1))

    @override
    def ranges(self, scan: ShardScan, piece: int, columns: Columns) -> list[tuple[int, int]]:
        return [place for _, place in self._leaves(self._metadata(scan).row_group(piece), columns)]

    @override
    def _table(self, scan: ShardScan, piece: int, parts: Any, names: list[str]) -> tuple[Any, Any]:
        metadata, (num_bytes, _) = self._metadata(scan), _HEAD.unpack_from(scan.extra)
        leaves = self._leaves(metadata.row_group(piece), names)
        read, has_N, words = parts.range, None, dict[str, Any]()
        if any(parts.find(*place) is None for _, place in leaves):
            has_N = np.ones(metadata.row_group(piece).num_rows, np.bool_)
            pages = [(place, self._pages(scan, piece, number)) for number, place in leaves]
            chunks = [each.content(parts, place[0], has_N) if each else parts.range(*place) for place, each in pages]
            read = _padded([place[0] for _, place in leaves], chunks)
            # Else a chunk would be asked for as a whole.
            words = {"pre_buffer": False, "buffer_size": _BUFFER_BYTES}
        file = pyarrow("pyarrow.parquet").ParquetFile(RangeFile(num_bytes, read), metadata=metadata, **words)
        return file.read_row_group(piece, columns=names, use_threads=False), has_N

    def _pages(self, scan: ShardScan, piece: int, number: int) -> ChunkPages | None:
        """Returns the pages of a column of a row group."""

        def parse(extra: bytes) -> list[ChunkPages | None]:
            _, length = _HEAD.unpack_from(extra)
            return pages_of(extra[_HEAD.size : _HEAD.size + length])

        found = scan.parsed("pages", parse)
        return found[piece * self._metadata(scan).num_columns + number] if found else None

    @override
    def row_ranges(self, scan: ShardScan, piece: int, columns: Columns, rows: Rows) -> list[tuple[int, int]]:
        whole, found = self.ranges(scan, piece, columns), list[tuple[int, int]]()
        if rows is None:
            return whole
        for number, (start, stop) in self._leaves(self._metadata(scan).row_group(piece), columns):
            pages = self._pages(scan, piece, number)
            found += [(start, stop)] if pages is None else pages.ranges(rows, start)
        # Else the neighbours that are wanted next come for little.
        return found if 2 * _num_bytes(found) < _num_bytes(whole) else whole


def _footer(extra: bytes) -> Any:
    """Returns the metadata of a Parquet file, from its length and its last bytes."""
    return pyarrow("pyarrow.parquet").read_metadata(_tail(extra))


def _tail(extra: bytes) -> io.BytesIO:
    # pyarrow wants a file that begins with the mark, too.
    return io.BytesIO(b"PAR1" + extra[_HEAD.size + _HEAD.unpack_from(extra)[1] :])


def _padded(starts: list[int], chunks: Sequence[Any]) -> Callable[[int, int], bytes]:
    """Returns what reads ranges of chunks that begin there, with zeros behind them: pyarrow reads on after the last
    page, and does not look at that."""

    def read(start: int, stop: int) -> bytes:
        number = bisect.bisect_right(starts, start) - 1
        return bytes(chunks[number][start - starts[number] : stop - starts[number]]).ljust(stop - start, b"\0")

    return read


def _num_bytes(ranges: list[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)


def _unread(name: str, kind: str, error: Exception) -> DataError:
    """Returns the error of a shard that pyarrow does not read."""
    # pyarrow's error for what it has not is one of these.
    is_unknown = isinstance(error, RuntimeError)
    cure = "write its columns as types that pyarrow has" if is_unknown else "copy it again"
    return DataError.of(f"{shown_place(name)} to be a whole {kind} file that pyarrow reads", str(error), cure)


@FORMATS.register("arrow")
class ArrowFormat(ArrowPieces):
    """Arrow's IPC files and streams, which Hugging Face's ``datasets`` keeps. A local one is mapped into memory."""

    keeps_rows = True

    @override
    def opened(self, path: str, scan: ShardScan) -> Any:
        return None if scan.extra[:1] == _COPIED else RangeParts([(0, np.memmap(path, dtype=np.uint8, mode="r"))])

    @override
    def scan(self, file: ShardFile) -> ShardScan:
        name, num_bytes = file.entry.url, file.entry.num_bytes
        starts, lengths, rows = [], [], []
        try:
            has_footer = file.range(0, min(8, num_bytes)).startswith(_ARROW_MARK)
            schema, places = _by_footer(file) if has_footer else _by_messages(file)
            extra = _MAPPED + schema
            columns = self._columns_of(name, extra)
            written = self._written_schema(extra)
            is_plain = all(field.type == _plain_column(field.type) for field in written)
            for start, header_bytes, body_bytes in places:
                message = _Message(file.range(start, start + header_bytes))
                stop = start + header_bytes + body_bytes
                if stop > num_bytes:
                    raise ValueError(f"it ends at byte {num_bytes}, before byte {stop}")
                if message.kind == _DICTIONARY_MESSAGE:
                    cure = "write the column without a dictionary: table.cast(…)"
                    got = ", ".join(field.name for field in written if "dictionary<" in str(field.type))
                    raise DataError.of(f"plain columns in {shown_place(name)}", f"a dictionary in {got}", cure)
                is_plain &= not message.is_compressed
                if message.kind == _BATCH_MESSAGE and message.num_rows:
                    starts.append(start)
                    lengths.append(stop - start)
                    rows.append(message.num_rows)
        except (ValueError, RuntimeError, struct.error, IndexError) as error:
            raise _unread(name, "Arrow", error) from error
        return ShardScan.of(starts, lengths, columns, (_MAPPED if is_plain else _COPIED) + schema, rows=rows)

    @override
    def _written_schema(self, extra: bytes) -> Any:
        return pyarrow().ipc.read_schema(pyarrow().py_buffer(extra[1:])).remove_metadata()

    @override
    def _table(self, scan: ShardScan, piece: int, parts: Any, names: list[str]) -> tuple[Any, Any]:
        arrow, written = pyarrow(), scan.parsed("written", self._written_schema)
        content = arrow.py_buffer(parts.range(*scan.span(piece)))
        batch = arrow.ipc.read_record_batch(content, written).select(names)
        batch.validate(full=True)  # else a damaged offset makes pyarrow read memory that is not the batch's
        return arrow.Table.from_batches([batch]), None


def _by_footer(file: ShardFile) -> tuple[bytes, list[tuple[int, int, int]]]:
    """Returns an Arrow file's schema, and where each record batch begins, the bytes of its header and of its body."""
    # pyarrow opens a file by its footer, and says all of it but the places.
    with pyarrow().ipc.open_file(file.as_file()) as reader:
        schema, num_batches = reader.schema, reader.num_record_batches
    end = file.entry.num_bytes - len(_ARROW_MARK) - 4
    (length,) = struct.unpack("<i", file.range(end, end + 4))
    footer = file.range(end - length, end)
    # Arrow's File.fbs: 2 dictionaries, 3 record batches, both lists of (start, bytes of the header, of the body).
    places = [
        struct.unpack_from("<qi4xq", footer, at)
        for number in (2, 3)
        for at in _list(footer, _field(footer, _root(footer), number), 24)
    ]
    if len(places) < num_batches:
        raise ValueError(f"{len(places)} places of {num_batches} record batches in its footer")
    return schema.serialize().to_pybytes(), places


def _by_messages(file: ShardFile) -> tuple[bytes, list[tuple[int, int, int]]]:
    """Returns what `_by_footer` does, of an Arrow stream, which has no footer; it may end without a mark."""
    # To find the record batches, pyarrow would read them; the messages' headers are a few hundred bytes each.
    num_bytes, at, schema, places = file.entry.num_bytes, 0, b"", list[tuple[int, int, int]]()
    while at < num_bytes or not schema:
        mark = file.range(at, min(at + 8, num_bytes))
        # Before Arrow 0.15 there was the length alone.
        prefix_bytes = 8 if mark[:4] == _CONTINUED else 4
        if len(mark) < prefix_bytes:
            raise ValueError(f"no message at byte {at}")
        (length,) = struct.unpack_from("<i", mark, prefix_bytes - 4)
        if length == 0:
            break
        header_bytes = prefix_bytes + length
        if length < 0 or at + header_bytes > num_bytes:
            raise ValueError(f"it ends at byte {num_bytes}, in a message at byte {at}")
        message = _Message(file.range(at, at + header_bytes))
        if message.kind == _SCHEMA_MESSAGE:
            schema = file.range(at, at + header_bytes + message.body_bytes)
        else:
            places.append((at, header_bytes, message.body_bytes))
        at += header_bytes + message.body_bytes
    return schema, places


class _Message:
    """The header of an Arrow message: its kind, the bytes of its body, and the rows of its record batch.

    It is a flatbuffer: a table begins with the distance back to the list of its fields' places.
    """

    def __init__(self, content: bytes) -> None:
        header = content[8:] if content[:4] == _CONTINUED else content[4:]
        # Arrow's Message.fbs: 0 version, 1 kind of header, 2 header, 3 length of the body.
        table = _root(header)
        kind_at, inner_at, body_at = (_field(header, table, number) for number in (1, 2, 3))
        self.kind = header[kind_at] if kind_at else 0
        self.body_bytes = struct.unpack_from("<q", header, body_at)[0] if body_at else 0
        self.num_rows, self.is_compressed = 0, False
        if self.kind == _BATCH_MESSAGE:
            # 0 number of rows, 3 compression.
            batch = inner_at + _root(header, inner_at)
            rows_at = _field(header, batch, 0)
            self.num_rows = struct.unpack_from("<q", header, rows_at)[0] if rows_at else 0
            self.is_compressed = _field(header, batch, 3) > 0


def _root(content: bytes, at: int = 0) -> int:
    (place,) = struct.unpack_from("<I", content, at)
    return int(place)


def _field(content: bytes, table: int, number: int) -> int:
    """Returns where a field of a flatbuffer's table lies, 0 if it is not there."""
    (back,) = struct.unpack_from("<i", content, table)
    (size,) = struct.unpack_from("<H", content, table - back)
    place = struct.unpack_from("<H", content, table - back + 4 + 2 * number)[0] if 4 + 2 * number < size else 0
    return table + place if place else 0


def _list(content: bytes, at: int, item_bytes: int) -> list[int]:
    """Returns where the items of a flatbuffer's list lie."""
    if not at:
        return []
    begin = at + _root(content, at)
    num_items = _root(content, begin)
    if begin + 4 + num_items * item_bytes > len(content):
        raise ValueError(f"a list of {num_items} items in {len(content)} bytes")
    return [begin + 4 + number * item_bytes for number in range(num_items)]


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
    mode, pixels = data[12 : 12 + length].decode(), data[12 + length :]
    # Pillow allocates the picture before it looks at them.
    if len(pixels) != pixel_bytes(mode, width, height):
        raise ValueError(f"{len(pixels)} bytes for a picture of {width} × {height} in mode {mode}")
    return Image.frombytes(mode, (width, height), pixels)


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
            described = [config[f"column_{what}"] for what in ("names", "encodings", "sizes")]
            if len({len(each) for each in described}) != 1 or not all(isinstance(each, list) for each in described):
                raise ValueError(f"columns {described}")
            if not all(isinstance(each, str) for each in (*described[0], *described[1])):
                raise ValueError(f"columns {described}")
        except (struct.error, ValueError, IndexError, KeyError, TypeError, RecursionError) as error:
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
