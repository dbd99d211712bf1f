"""Tar and zip archives, as WebDataset groups them, and LMDB files. A piece is one sample.

Files of one name that lie side by side in an archive are one sample. A name is parted at the first dot after its last
slash: ``a/000.seg.png`` is the column ``seg.png`` of the sample ``a/000``. Names like ``__meta__`` and what is no plain
file are left out, and columns are in lower case: `webdataset`'s rules. A piece reaches from the header of its first
file to the end of its last; its headers are parsed again when it is read, and prove that it is the sample that was
indexed.

A member of a tar whose content lies elsewhere (a link) or in pieces (a sparse file, a file of several volumes) is
refused when the shard is opened, and so are files of one sample that do not lie side by side: `webdataset` would leave
them out, or part the sample.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash
from typing_extensions import override

from shade.data._decode.jpeg import decode_rgb
from shade.data._origin.url_origin import is_url
from shade.data._shards.index import (
    COMPRESSED_BY,
    FORMATS,
    Columns,
    Rows,
    ShardFile,
    ShardFormat,
    ShardScan,
    UnlikeIndexError,
)
from shade.data._source import item_codec
from shade.errors import ConfigError, DataError, shown_place
from shade.trajectory import array_of

KEY: Final = "__key__"
"""The column that holds a sample's name."""
_NAME: Final = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
_META: Final = re.compile(r"__[^/]*__($|/)")
_BESIDE: Final = re.compile(r"__MACOSX/|(.*/)?\._", re.DOTALL)
"""What macOS keeps beside a file. It would stand between the files of a sample, and part them."""
_BLOCK: Final = 512
_FILES: Final = b"07\x00"
_LINKS: Final = b"12"
_OTHERS: Final = b"123456"
"""Links, devices and folders, which have no content."""
_PAX, _SOLARIS_PAX, _GLOBAL, _LONG_NAME, _LONG_LINK = b"xXgLK"
_LINK: Final = ("a link", "write the files themselves: tar --dereference --hard-dereference")
_UNREAD: Final = {
    b"1": _LINK,
    b"2": _LINK,
    b"S": ("sparse", "write the tar without --sparse (-S)"),
    b"M": ("the rest of one in another volume", "write the tar as one volume"),
}
"""By kind of a member: why it is not read, and the cure."""


class UnreadMemberError(ValueError):
    """A tar has a member whose content is not one range of it."""

    def __init__(self, name: str, kind: bytes) -> None:
        words, self.cure = _UNREAD[kind]
        super().__init__(f"{name}, which is {words}")


class ArchivedFile(NamedTuple):
    """A file in an archive."""

    name: str
    header: int
    """Where its first header begins."""
    start: int
    stop: int
    """Where its content lies."""


def decoded_text(data: bytes) -> str:
    """Returns a text in UTF-8; raises UnicodeDecodeError for what is none."""
    return data.decode("utf-8")


DECODERS: Final[Mapping[str, Callable[[bytes], Any]]] = (
    dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), int)
    | dict.fromkeys(("txt", "text", "transcript"), decoded_text)
    | dict.fromkeys(("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm"), decode_rgb)
    | {"json": json.loads, "npy": array_of}
)
"""Decoders of files, by the last part of their extension; they do what ``webdataset.decode("pil")`` does."""


def key_and_column(name: str) -> tuple[str, str] | None:
    """Returns the sample and the column that a file belongs to; None for a file that belongs to none."""
    parted = _NAME.fullmatch(name)
    if parted is None or _META.match(name) or (("._" in name or "__MACOSX" in name) and _BESIDE.match(name)):
        return None
    return parted[1], parted[2].lower()


def _proof(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode(errors="surrogateescape")) & 0xFFFFFFFF


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU: base 256
        return int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
    return int(field.strip(b" \0") or b"0", 8)


def _pax(data: bytes) -> dict[str, str]:
    """Returns the records of a pax header."""
    records, at = {}, 0
    while at < len(data) and data[at] != 0:
        space = data.index(b" ", at)
        stop = at + int(data[at:space])
        if stop <= space:
            raise ValueError(f"a record of {stop - at} bytes")
        name, _, value = data[space + 1 : stop - 1].partition(b"=")
        records[name.decode()] = value.decode("utf-8", "surrogateescape")
        at = stop
    return records


# `tarfile` takes four times as long for a sample.
def tar_members(read: Callable[[int, int], Any], at: int, stop: int) -> Iterator[ArchivedFile | None]:
    """Yields the plain files of a tar, or of a part of one, and None at its end mark.

    Args:
        read: Returns the bytes between two places, fewer where the tar ends.
        at: Where the first header begins.
        stop: Where the tar ends.

    Raises:
        UnreadMemberError: A file of a sample is a link, sparse, or in several volumes.
        ValueError: There is something else than a header.
    """
    first, records = at, dict[str, str]()
    while at < stop:
        header = bytes(read(at, min(at + _BLOCK, stop)))
        if len(header) < _BLOCK:
            raise ValueError(f"it ends at byte {stop}, in the header at byte {at}")
        if not header[0] and not any(header):
            yield None
            return
        kind = header[156:157]
        try:
            length = _number(header[124:136])
            # The checksum is computed as if its own field held spaces. A length below 0 would lead back to this header.
            is_header = length >= 0 and _number(header[148:156]) == sum(header) - sum(header[148:156]) + 8 * ord(" ")
        except ValueError:
            is_header = False
        if not is_header:
            raise ValueError(f"there is no header at byte {at}")
        begin = at + _BLOCK
        if kind[0] in (_PAX, _SOLARIS_PAX, _GLOBAL, _LONG_NAME, _LONG_LINK):
            data = bytes(read(begin, min(begin + length, stop)))
            if kind[0] in (_PAX, _SOLARIS_PAX):
                records |= _pax(data)
            elif kind[0] == _LONG_NAME:
                records["path"] = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
        elif kind[0] in _FILES:
            length = int(records.get("size", length))
            if length < 0:
                raise ValueError(f"a file of {length} bytes at byte {at}")
            name = records.get("path") or _plain_name(header)
            # An old tar's folder is a file whose name ends in a slash.
            if name.endswith("/"):
                length = 0 if kind == b"\0" else length
            elif any(word.startswith("GNU.sparse") for word in records):
                raise UnreadMemberError(records.get("GNU.sparse.name", name), b"S")
            else:
                yield ArchivedFile(name, first, begin, begin + length)
            records = {}
        # Labels, lists of names and the like have a length that is passed over, as `tarfile` does.
        else:
            name = records.get("path") or _plain_name(header)
            if kind in _UNREAD and not (kind[0] in _LINKS and key_and_column(name) is None):
                raise UnreadMemberError(name, kind)
            length, records = 0 if kind[0] in _OTHERS else length, {}
        at = begin + -(-length // _BLOCK) * _BLOCK
        # A file begins with the headers that say its name and size.
        if not records:
            first = at
    if at > stop:
        raise ValueError(f"it ends at byte {stop}, in a file that reaches byte {at}")


def _plain_name(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "surrogateescape")


def grouped(members: Iterator[ArchivedFile | None], shard: str) -> Iterator[tuple[str, list[tuple[str, ArchivedFile]]]]:
    """Yields key and files of each sample. Raises DataError for two files of one name in a sample."""
    key, files = "", list[tuple[str, ArchivedFile]]()
    for member in members:
        found = None if member is None else key_and_column(member.name)
        if found is None or member is None:
            continue
        if found[0] != key:
            if files:
                yield key, files
            key, files = found[0], []
        if any(found[1] == column for column, _ in files):
            raise DataError.of(
                f"each file of {shown_place(shard)} once", f"{member.name} twice", "write the shard anew"
            )
        files.append((found[1], member))
    if files:
        yield key, files


def side_by_side(
    samples: Iterator[tuple[str, list[tuple[str, ArchivedFile]]]], shard: str
) -> Iterator[tuple[str, list[tuple[str, ArchivedFile]]]]:
    """Yields samples. Raises DataError for one whose files lie in several places, which would be as many samples."""
    seen = dict[str, frozenset[str]]()
    same = dict[frozenset[str], frozenset[str]]()  # most samples have the same columns
    for key, files in samples:
        columns = frozenset(column for column, _ in files)
        before = seen.setdefault(key, same.setdefault(columns, columns))
        # A sample that was written twice is two samples.
        if before.isdisjoint(columns):
            got = f"{key}.{min(before)} and {key}.{min(columns)} with others in between"
            cure = "write the files in the order of their names (tar --sort=name)"
            raise DataError.of(f"the files of a sample side by side in {shown_place(shard)}", got, cure)
        yield key, files


class ArchiveFormat(ShardFormat):
    """Reads archives: the samples, payloads and decoders that their kinds have in common."""

    @override
    def row(self, scan: ShardScan, payload: Any, columns: Columns) -> dict[str, Any]:
        found: dict[str, Any] = item_codec.decode(payload)
        return found

    @override
    def decoder(self, column: str) -> Callable[[Any], Any] | None:
        return DECODERS.get(column.rpartition(".")[2])


@FORMATS.register("tar")
class TarFormat(ArchiveFormat):
    """WebDataset's tars. Not compressed: the place of a sample in a compressed one is not known."""

    @override
    def scan(self, file: ShardFile) -> ShardScan:
        name, stop = file.entry.url, file.entry.num_bytes
        starts, lengths, proofs, columns = [], [], [], dict[str, None]()
        has_end = False

        def members() -> Iterator[ArchivedFile | None]:
            nonlocal has_end
            for member in tar_members(file.range, 0, stop):
                has_end |= member is None
                yield member

        try:
            for key, files in side_by_side(grouped(members(), name), name):
                starts.append(files[0][1].header)
                lengths.append(-(-files[-1][1].stop // _BLOCK) * _BLOCK - starts[-1])
                proofs.append(_proof(key))
                columns.update(dict.fromkeys(column for column, _ in files))
        except UnreadMemberError as error:
            raise DataError.of(f"files in {shown_place(name)} that lie there whole", str(error), error.cure) from error
        except ValueError as error:
            raise _no_tar(file, str(error)) from error
        if not has_end:
            cure = f"copy it again; if it is whole and lacks the end mark alone, add it: truncate -s +1024 {name}"
            raise DataError.of(f"{shown_place(name)} to end with an empty block", "an end without it", cure)
        return ShardScan.of(starts, lengths, [KEY, *columns], proofs=proofs)

    @override
    def payloads(self, scan: ShardScan, piece: int, parts: Any, columns: Columns, rows: Rows) -> list[bytes]:
        content = parts.range(*scan.span(piece))
        try:
            found = list(grouped(tar_members(lambda at, end: content[at:end], 0, len(content)), ""))
        except ValueError as error:
            raise UnlikeIndexError(f"{error} of the piece") from error
        if len(found) != 1 or _proof(found[0][0]) != int(scan.proof_P[piece]):
            raise UnlikeIndexError(f"{', '.join(key for key, _ in found) or 'no sample'}")
        ((key, files),) = found
        item: dict[str, Any] = {KEY: key}
        for column, member in files:
            if columns is None or column in columns:
                item[column] = bytes(content[member.start : member.stop])
        return [item_codec.encode(item)]


def _no_tar(file: ShardFile, words: str) -> DataError:
    name = file.entry.url
    begin = file.range(0, min(8, file.entry.num_bytes))
    for command, mark in COMPRESSED_BY.values():
        if begin.startswith(mark):
            return DataError.of(
                f"{shown_place(name)} to be a plain tar", "a compressed one", f"decompress it: {command}"
            )
    return DataError.of(f"{shown_place(name)} to be a whole tar", words, "copy it again from where it was written")


class _ZipMember(NamedTuple):
    column: str
    name: str
    header: int
    num_bytes: int
    stored_bytes: int
    method: int
    crc: int


@FORMATS.register("zip")
class ZipFormat(ArchiveFormat):
    """Zip archives, stored or deflated, with the same grouping. Each file's CRC is its proof."""

    @override
    def scan(self, file: ShardFile) -> ShardScan:
        name = file.entry.url
        try:
            with zipfile.ZipFile(file.as_file()) as archive:
                infos, end = archive.infolist(), archive.start_dir
        except (zipfile.BadZipFile, RuntimeError, ValueError, struct.error) as error:
            raise DataError.of(f"{shown_place(name)} to be a whole zip", str(error), "copy it again") from error
        # The directory may have another order; a file reaches at most to the header of the next.
        infos.sort(key=lambda info: info.header_offset)
        for info in infos:
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
                got = f"{info.filename}, " + ("encrypted" if info.flag_bits & 1 else f"method {info.compress_type}")
                raise DataError.of(f"files in {shown_place(name)} stored or deflated", got, "write the zip anew")
        stops = [*(info.header_offset for info in infos[1:]), end]
        by_place = {info.header_offset: info for info in infos}
        members = (
            ArchivedFile(info.filename, info.header_offset, info.header_offset, stop)
            for info, stop in zip(infos, stops, strict=False)  # no file has the end of one
            if not info.filename.endswith("/")
        )
        starts, lengths, proofs, table = [], [], [], []
        for key, files in side_by_side(grouped(members, name), name):
            starts.append(files[0][1].header)
            lengths.append(files[-1][1].stop - starts[-1])
            proofs.append(_proof(key))
            table.append([key, *(_zip_member(column, by_place[member.header]) for column, member in files)])
        columns = dict.fromkeys(str(each[0]) for row in table for each in row[1:])
        return ShardScan.of(starts, lengths, [KEY, *columns], json.dumps(table).encode(), proofs=proofs)

    @override
    def payloads(self, scan: ShardScan, piece: int, parts: Any, columns: Columns, rows: Rows) -> list[bytes]:
        start, stop = scan.span(piece)
        content = parts.range(start, stop)
        key, *members = scan.parsed("table", json.loads)[piece]
        item: dict[str, Any] = {KEY: key}
        for member in map(_ZipMember._make, members):
            if columns is None or member.column in columns:
                item[member.column] = _unzipped(member, content[member.header - start :])
        return [item_codec.encode(item)]


def _zip_member(column: str, info: zipfile.ZipInfo) -> _ZipMember:
    return _ZipMember(
        column,
        info.filename,
        info.header_offset,
        info.file_size,
        info.compress_size,
        info.compress_type,
        info.CRC,
    )


def _unzipped(member: _ZipMember, content: memoryview) -> bytes:
    """Returns a file, from the bytes that begin with its header; raises UnlikeIndexError if they are others."""
    # A local header has 30 bytes, then a name and extra fields, whose lengths are its last two numbers.
    begin = 30 + int.from_bytes(content[26:28], "little") + int.from_bytes(content[28:30], "little")
    stored = bytes(content[begin : begin + member.stored_bytes])
    try:
        # At most what the directory says: a small file may unpack to a thousand times its size.
        inflate = zlib.decompressobj(-zlib.MAX_WBITS).decompress
        data = inflate(stored, member.num_bytes + 1) if member.method == zipfile.ZIP_DEFLATED else stored
    except (zlib.error, OverflowError) as error:
        raise UnlikeIndexError(f"{member.name}, which cannot be decompressed ({error})") from error
    if bytes(content[:4]) != b"PK\3\4" or len(data) != member.num_bytes or zlib.crc32(data) != member.crc:
        raise UnlikeIndexError(f"{member.name} with another checksum")
    return data


class _Environment:
    """An LMDB file that this process has open, mapped into memory."""

    _by_path: Final[dict[str, tuple[object, _Environment]]] = {}

    def __init__(self, path: str) -> None:
        lmdb = importlib.import_module("lmdb")
        try:
            self.env = lmdb.open(path, subdir=False, readonly=True, lock=False, readahead=False, max_dbs=1)
            num_bytes = (self.env.info()["last_pgno"] + 1) * self.env.stat()["psize"]
        except lmdb.VersionMismatchError as error:
            cure = "load its dump into a new one: mdb_dump and mdb_load, each of its own version"
            raise DataError.of(f"{path} to be of this LMDB's version", str(error), cure) from error
        except lmdb.Error as error:
            cure = "copy it again; or close it, if this process has it open elsewhere"
            raise DataError.of(f"{path} to be an LMDB file", str(error), cure) from error
        # Touching a page that is not there would end the process.
        if num_bytes > os.stat(path).st_size:
            self.env.close()
            raise DataError.of(f"{path} to be a whole LMDB file", f"less than {num_bytes} bytes", "copy it again")

    @classmethod
    def of(cls, path: str) -> _Environment:
        """Returns the file, opened once a process, as LMDB demands; anew if another file took its place."""
        status = os.stat(path)
        key = os.getpid(), status.st_ino, status.st_size, status.st_mtime_ns
        known, found = cls._by_path.get(path, (None, None))
        if found is None or known != key:
            del found
            cls._by_path.pop(path, None)
            found = cls(path)
            cls._by_path[path] = key, found
        return found


_DATABASE_BYTES: Final = 48
"""LMDB's record of a named database."""


@FORMATS.register("lmdb")
@FORMATS.register("mdb")
class LMDBFormat(ArchiveFormat):
    """LMDB's files: a sample is a value, with the key as its name."""

    library, reads, extra = "lmdb", "LMDB", "lmdb"

    @override
    def opened(self, path: str, scan: ShardScan) -> Any:
        return _Environment.of(path)

    @override
    def scan(self, file: ShardFile) -> ShardScan:
        path = file.entry.url
        # LMDB does not say where a value lies, so no range can be read; it maps its file into memory.
        if is_url(path):
            cure = "copy it to a local disk; LMDB is read through the machine's memory"
            raise ConfigError.of("an LMDB file on this machine", shown_place(path), cure)
        env = _Environment.of(path).env
        with env.begin(buffers=True) as transaction:
            found = [(bytes(key), len(value)) for key, value in transaction.cursor()]
        self._check_is_main(env, path, found)
        lengths = np.array([length for _, length in found], dtype=np.int64)
        keys = [key for key, _ in found]
        ends = np.cumsum([len(key) for key in keys], dtype=np.int64)
        # Not where values lie, but in which order.
        starts = np.cumsum(lengths) - lengths
        return ShardScan.of(starts, lengths, [KEY, "value"], ends.tobytes() + b"".join(keys))

    @staticmethod
    def _check_is_main(env: Any, path: str, found: list[tuple[bytes, int]]) -> None:
        """Raises DataError for named databases, which the main one lists like samples, and for several values a key."""
        lmdb = importlib.import_module("lmdb")
        for key in (key for key, length in found if length == _DATABASE_BYTES):
            with contextlib.suppress(lmdb.IncompatibleError), env.begin() as transaction:
                env.open_db(key, transaction, create=False)
                got = f"the database {key.decode('utf-8', 'replace')!r} in it"
                cure = "copy its keys and values into the main database of a file of its own"
                raise DataError.of(f"samples in the main database of {path}", got, cure)
        with env.begin() as transaction:
            if env.open_db(None, transaction).flags(transaction)["dupsort"]:
                cure = "copy them into a file with a key for each"
                raise DataError.of(f"one value for each key of {path}", "several (MDB_DUPSORT)", cure)

    @override
    def payloads(self, scan: ShardScan, piece: int, parts: Any, columns: Columns, rows: Rows) -> list[bytes]:
        num_keys = len(scan.start_P)
        ends, begin = scan.parsed("ends", lambda extra: np.frombuffer(extra, np.int64, num_keys)), 8 * num_keys
        key = scan.extra[begin + (int(ends[piece - 1]) if piece else 0) : begin + int(ends[piece])]
        with parts.env.begin() as transaction:
            value = transaction.get(key)
        if value is None or len(value) != scan.length_P[piece]:
            raise UnlikeIndexError(f"no value of {scan.length_P[piece]} bytes under the key {key!r}")
        return [item_codec.encode({KEY: key.decode("utf-8", "surrogateescape"), "value": value})]
