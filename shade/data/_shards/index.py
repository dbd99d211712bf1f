"""The index of shards: where each sample lies. Made once, in parallel, and kept on disk.

A *data shard* (here: a shard) is a file that holds many samples. A *piece* is a range of a shard that its format reads
at once: one sample of a tar, a row group of a Parquet file. So one rule fits all formats: a sample is a row of a piece,
and a piece is a range of a shard. `ShardFormat` finds the pieces of a shard (`ShardFormat.scan`), and makes samples of
a piece's bytes.

Each shard's index is a file of its own, so ranks and jobs that share the folder share the work. It holds what the
shard's server or file system says of it: the size, and the time or ETag. If that is no longer so while it is read
(`ShardIndex.check`), the shard is refused by name; in the beginning (`ShardIndex`), it is refused unless its samples
lie where they lay, as those of a shard that was copied again do. A damaged index is made again.

Price: 12 to 16 bytes a sample of a tar, in memory and on disk. Invariant: a range in the index is one of the shard as
it was when its index was made, or the shard is refused.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import glob
import importlib.util
import io
import itertools
import json
import logging
import os
import re
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from typing_extensions import override

from shade.data._origin.hub import commits_of, is_at_commit, is_hub, moved
from shade.data._origin.origin import ByteRange, Origin
from shade.data._origin.url_origin import Entry, at_commits, describe_many, is_url, list_folder, open_file_system
from shade.data._shards.blocks import BLOCK_BYTES, Block
from shade.data._source.content import STAT_THREADS
from shade.errors import ConfigError, DataError, shown_place, without_login
from shade.installation import install_hint
from shade.process import replacing
from shade.registry import Registry, did_you_mean

logger = logging.getLogger("shade.data")

CHECK_SECONDS: Final = 900.0
"""A shard behind a URL is compared with its index again when it is read after so many seconds, because that takes a
request; a local one at each read."""
COMPRESSED_BY: Final = {
    "gz": ("gunzip", b"\x1f\x8b"),
    "tgz": ("gunzip", b"\x1f\x8b"),
    "zst": ("zstd -d", b"\x28\xb5\x2f\xfd"),
    "zstd": ("zstd -d", b"\x28\xb5\x2f\xfd"),
    "xz": ("unxz", b"\xfd7zXZ"),
    "bz2": ("bunzip2", b"BZh"),
    "lz4": ("lz4 -d", b"\x04\x22\x4d\x18"),
}
"""By the end of a compressed shard's name: what decompresses it, and how its content begins."""
_TABLE_LOGS: Final = ("_delta_log", ".hoodie")
"""Folders in which a table says which of the files beside them are its rows."""
_FOLDERS: Final = ("lance",)
"""Ends of folders that are one shard each."""
_VERSION: Final = 3
"""Of what the formats find: an index of another version is left alone, and made anew."""
_MAGIC: Final = b"shade-shard-index"
_DIGEST: Final = struct.Struct("<Q")
_TOGETHER: Final = 1 << 20
_MOST_SAMPLES: Final = 2**48
_SCANNERS: Final = 16
_NUMBERS: Final = re.compile(r"\{(\d+)\.\.(\d+)\}")
_LOCAL_WINDOW_BYTES, _REMOTE_WINDOW_BYTES = 16 << 10, 256 << 10
Lengths = npt.NDArray[Any]
"""Integers, in as few bytes as they need."""
Columns: TypeAlias = "Sequence[str] | None"
"""The columns that are read; None are all."""
Rows: TypeAlias = "Sequence[int] | None"
"""The rows of a piece that are wanted; None are all."""


class UnlikeIndexError(ValueError):
    """A piece is not what its index says; the message says what it is."""


class RangeFile(io.RawIOBase):
    """A file of so many bytes, made of what reads a range of it. Closing it closes nothing else."""

    def __init__(self, num_bytes: int, read_range: Callable[[int, int], Any]) -> None:
        super().__init__()
        self._num_bytes, self._read_range, self._at = num_bytes, read_range, 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._num_bytes}[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = at
        return at

    @override
    def tell(self) -> int:
        return self._at

    @override
    def read(self, size: int = -1) -> bytes:
        stop = self._num_bytes if size < 0 else min(self._at + size, self._num_bytes)
        content = bytes(self._read_range(self._at, stop)) if stop > self._at else b""
        self._at += len(content)
        return content


class ShardFile:
    """A shard that is read through a window: each request brings the next bytes too."""

    def __init__(self, origin: Origin, entry: Entry) -> None:
        self._origin, self.entry = origin, entry
        self._window_bytes = _REMOTE_WINDOW_BYTES if is_url(entry.url) else _LOCAL_WINDOW_BYTES
        self._start, self._window = 0, b""

    def as_file(self) -> RangeFile:
        """Returns the shard for a library that reads files."""
        return RangeFile(self.entry.num_bytes, self.range)

    def range(self, start: int, stop: int) -> bytes:
        """Returns the bytes ``start`` … ``stop``; raises OSError."""
        if start == stop:
            return b""
        if not self._start <= start <= stop <= self._start + len(self._window):
            end = min(max(stop, start + self._window_bytes), self.entry.num_bytes)
            (content,) = self._origin.read_many([ByteRange(self.entry.url, start, end)])
            if isinstance(content, OSError):
                raise content
            self._start, self._window = start, content
        return self._window[start - self._start : stop - self._start]


_Packed: TypeAlias = tuple[Literal["uint8", "uint16", "uint32", "uint64"], Annotated[int, msgspec.Meta(ge=0, le=2**48)]]


class _Header(msgspec.Struct):
    """Describes an index: its shard, and the arrays in it."""

    url: str
    bytes: int
    is_: str = msgspec.field(name="is")
    arrays: tuple[_Packed, _Packed, _Packed, _Packed]
    pieces: int
    columns: list[str]


@dataclass
class ShardScan:
    """The pieces of one shard, in the order of their samples.

    Legend: P pieces.
    """

    start_P: Lengths
    """Where each begins, in bytes."""
    length_P: Lengths
    """Bytes of each."""
    rows_P: Lengths
    """Samples in each."""
    proof_P: Lengths
    """A part of the hash of each piece's name; 0 where it has none."""
    columns: list[str]
    """The columns that its samples have."""
    extra: bytes = b""
    """The format's own data beside the ranges, such as a schema."""
    _parsed: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        starts: npt.ArrayLike,
        lengths: npt.ArrayLike,
        columns: Sequence[str],
        extra: bytes = b"",
        *,
        rows: npt.ArrayLike | None = None,
        proofs: npt.ArrayLike | None = None,
    ) -> ShardScan:
        """Makes a scan of lists; by default each piece is one sample, and has no proof."""
        start_P, length_P = np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64)
        rows_P = np.ones_like(start_P) if rows is None else np.array(rows, dtype=np.int64)
        proof_P = np.zeros_like(start_P) if proofs is None else np.array(proofs, dtype=np.int64)
        return cls(start_P, length_P, rows_P, proof_P, list(columns), extra)

    def span(self, piece: int) -> tuple[int, int]:
        """Returns where a piece begins and ends, in bytes."""
        start = int(self.start_P[piece])
        return start, start + int(self.length_P[piece])

    def parsed(self, name: Any, parse: Callable[[bytes], Any]) -> Any:
        """Returns what the format makes of ``extra`` under a name; it is made once a process."""
        if name not in self._parsed:
            self._parsed[name] = parse(self.extra)
        return self._parsed[name]

    def to_bytes(self, header: dict[str, Any]) -> bytes:
        """Returns the content of an index file."""
        arrays = [_packed(each) for each in (self.length_P, self.rows_P, self.proof_P)]
        arrays.insert(0, _smallest(self.start_P))
        header |= {"arrays": [[str(each.dtype), len(each)] for each in arrays], "pieces": len(self.start_P)}
        header["columns"] = self.columns
        text = json.dumps(header).encode()
        content = b"".join([_MAGIC, _DIGEST.pack(len(text)), text, *(each.tobytes() for each in arrays), self.extra])
        return content + _DIGEST.pack(xxhash.xxh3_64_intdigest(content))

    @staticmethod
    def from_bytes(content: bytes) -> tuple[Entry, ShardScan]:
        """Returns what the shard was and its pieces; raises ValueError for what `to_bytes` did not make."""
        content, digest = content[: -_DIGEST.size], content[-_DIGEST.size :]
        if not content.startswith(_MAGIC) or digest != _DIGEST.pack(xxhash.xxh3_64_intdigest(content)):
            raise ValueError("the checksum does not fit")
        at = len(_MAGIC) + _DIGEST.size
        try:
            (length,) = _DIGEST.unpack_from(content, len(_MAGIC))
            # Not msgspec's own parser: names of files need not be UTF-8.
            header = msgspec.convert(json.loads(content[at : at + length]), _Header)
        except (struct.error, RecursionError) as error:
            raise ValueError(str(error)) from error
        at, arrays = at + length, list[Lengths]()
        for dtype, num in header.arrays:
            arrays.append(np.frombuffer(content, dtype, num, at) if num else np.empty(0, dtype))
            at += arrays[-1].nbytes
        # Where pieces begin is stored of each, so that an index has as many bytes as pieces, or more.
        if len(arrays[0]) != header.pieces:
            raise ValueError(f"{header.pieces} pieces, and where {len(arrays[0])} begin")
        # A constant takes no memory.
        start_P, length_P, rows_P, proof_P = (
            each if len(each) == header.pieces else np.broadcast_to(each, header.pieces) for each in arrays
        )
        scan = ShardScan(start_P, length_P, rows_P, proof_P, header.columns, content[at:])
        return Entry(header.url, header.bytes, header.is_), scan

    def check(self, num_bytes: int) -> None:
        """Raises UnlikeIndexError for pieces that no shard of so many bytes has."""
        for first in range(0, len(self.start_P), _TOGETHER):
            start_P, length_P, rows_P = (
                each[first : first + _TOGETHER].astype(np.float64)
                for each in (self.start_P, self.length_P, self.rows_P)
            )
            is_there = min(start_P.min(), length_P.min(), rows_P.min()) >= 0 and (start_P + length_P).max() <= num_bytes
            if not is_there or rows_P.sum() >= _MOST_SAMPLES:
                raise UnlikeIndexError(f"pieces that {num_bytes} bytes do not hold")


def _packed(values_P: Lengths) -> Lengths:
    """Returns the array in its smallest type; a constant as one element."""
    if not len(values_P):
        return _smallest(values_P)
    # Such as the rows of an archive's pieces, which are one each.
    return _smallest(values_P[:1] if values_P.min() == values_P.max() else values_P)


def _smallest(values_P: Lengths) -> Lengths:
    return values_P.astype(np.min_scalar_type(int(values_P.max(initial=0))))


class ShardFormat(ABC):
    """Finds and reads the samples of one kind of shard. It holds nothing of a shard.

    A format of a user's own is passed to `Shards` as ``format``: a dataclass that overrides `scan` and `row`, and
    `payloads` where a piece's bytes alone are not enough to make its sample. Its repr is part of the names of index and
    cache; so a field such as ``version`` is to change when `scan` or `payloads` do.
    """

    suffixes: tuple[str, ...] = ()
    """Ends of the names of its shards, without dots; for a folder."""
    keeps_rows: bool = False
    """Whether reading one row of a piece takes as long as reading all."""

    library: str = ""
    """The package that reads it, if there is one, and what that package reads."""
    reads: str = ""
    extra: str = ""
    """The extra that installs it."""

    @property
    def identity(self) -> str:
        """Returns its name in an index, with its arguments; empty for a format that is registered."""
        return "" if type(self) in map(FORMATS.get, FORMATS) else repr(self)

    def require(self) -> None:
        """Raises ConfigError, with the command that installs it, if the library is missing."""
        if self.library and importlib.util.find_spec(self.library) is None:
            expected = f"{self.library}, which reads {self.reads}"
            raise ConfigError.of(expected, "none", f"install it: {install_hint(self.extra)}")

    @abstractmethod
    def scan(self, file: ShardFile) -> ShardScan:
        """Finds the pieces of a shard. Raises DataError for one that is truncated or is none."""

    def ranges(self, scan: ShardScan, piece: int, columns: Columns) -> list[tuple[int, int]]:
        """Returns the ranges (start, stop) to read for the columns of a piece, in order; None are all columns."""
        return [scan.span(piece)]

    def row_ranges(self, scan: ShardScan, piece: int, columns: Columns, rows: Rows) -> list[tuple[int, int]]:
        """Returns the ranges to read for some rows of a piece: all of it, or less, from which `payloads` knows them."""
        return self.ranges(scan, piece, columns)

    # Asked for each batch.
    def opened(self, path: str, scan: ShardScan) -> Any:
        """Returns what `payloads` takes instead of ranges, of a local shard that is mapped into memory, else None."""
        return None

    def payloads(self, scan: ShardScan, piece: int, parts: Any, columns: Columns, rows: Rows) -> Sequence[bytes]:
        """Returns the payloads of some rows of a piece, or of all: what is cached. ``parts`` are `RangeParts`, or what
        `opened` returned. Raises UnlikeIndexError if its bytes are not what the index says."""
        return [bytes(parts.range(*scan.span(piece)))]

    @abstractmethod
    def row(self, scan: ShardScan, payload: Any, columns: Columns) -> dict[str, Any]:
        """Returns the raw values of a payload by column."""

    def decoder(self, column: str) -> Callable[[Any], Any] | None:
        """Returns what decodes the raw values of a column; None if they are as they should be."""
        return None


class LibraryFormat(ShardFormat):
    """Has a library that opens shards itself, also behind URLs, and reads the rows of a whole batch."""

    @abstractmethod
    def described(self, url: str, options: Mapping[str, Any]) -> Entry:
        """Returns what the library says of a shard now."""

    @abstractmethod
    def taken(self, scan: ShardScan, opened: Any, rows: Sequence[int], columns: Columns) -> Sequence[bytes]:
        """Returns the payloads of rows of a shard, by number; raises OSError."""

    @abstractmethod
    def counted(self, opened: Any) -> tuple[int, int]:
        """Returns the requests and bytes that `taken` read since the last call."""


FORMATS: Registry[ShardFormat] = Registry("shard format")
"""By the end of a shard's name, without its dot."""


class RangeParts:
    """Ranges of one shard that were read, some of them together."""

    def __init__(self, parts: Sequence[tuple[int, Any]]) -> None:
        """Takes each range's start and content, in order."""
        self._starts = [start for start, _ in parts]
        self._contents = [memoryview(content) for _, content in parts]

    def range(self, start: int, stop: int) -> memoryview:
        """Returns the bytes ``start`` … ``stop``; raises EOFError if they were not read."""
        found = self.find(start, stop)
        if found is None:
            raise EOFError(f"the bytes {start} … {stop} were not read")
        return found

    def find(self, start: int, stop: int) -> memoryview | None:
        """Returns what `range` does, None for bytes that were not read."""
        number = bisect.bisect_right(self._starts, start) - 1
        if number >= 0:
            begin, content = self._starts[number], self._contents[number]
            if stop <= begin + len(content):
                return content[start - begin : stop - begin]
        return None


class ShardIndex:
    """The index of all shards of a data set.

    Args:
        entries: The shards as their servers or file systems describe them now, in the order of their samples.
        shard_format: The format of all.
        folder: Where indices are kept.
        origin: Reads the shards.
        options: For fsspec.

    Raises:
        ConfigError: The folder cannot be made.
        DataError: A shard is truncated, or is not what it was when its index was made, or cannot be read.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        shard_format: ShardFormat,
        folder: str,
        origin: Origin,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.entries, self._folder, self._options = list(entries), folder, dict(options or {})
        self._identity = shard_format.identity
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            cure = f"name another one: index= ({error.strerror})"
            raise ConfigError.of("a folder for the index that this user may make", folder, cure) from error
        # Ranks begin at different shards, and find the others' work done.
        self._checked = dict.fromkeys(range(len(entries)), time.monotonic())
        begin = os.getpid() % len(entries)
        order = [*range(begin, len(entries)), *range(begin)]
        with ThreadPoolExecutor(min(_SCANNERS, len(entries))) as pool:
            made = pool.map(partial(self._scan, shard_format, origin), order)
            scans = dict(zip(order, made, strict=True))
        changed = {shard: before for shard, before in scans.items() if isinstance(before, Entry)}
        if changed:
            first = min(changed)
            raise self._changed(first, changed[first], entries[first], num_changed=len(changed))
        self.scans = [scan for _, scan in sorted(scans.items(), key=itemgetter(0)) if isinstance(scan, ShardScan)]
        """The pieces of each shard."""
        self.first_samples = [0, *itertools.accumulate(int(scan.rows_P.sum()) for scan in self.scans)]
        """The first sample of each shard, and the number of all samples at the end."""
        self._last_row_P = [
            None if (scan.rows_P == 1).all() else np.cumsum(scan.rows_P, dtype=np.int64) for scan in self.scans
        ]
        digest = xxhash.xxh3_64(f"{_VERSION} {self._identity or type(shard_format).__name__}".encode())
        for entry in self.entries:
            digest.update(f"{entry.url.rpartition('/')[2]} {entry.num_bytes} {entry.version}\n".encode())
        self.fingerprint = digest.hexdigest()
        """Changes when a shard does."""

    def check_columns(self, names: Iterable[str]) -> None:
        """Raises DataError if a shard lacks one of these columns."""
        for name in names:
            for entry, scan in zip(self.entries, self.scans, strict=True):
                if name not in scan.columns and len(scan.start_P):
                    known = ", ".join(scan.columns)
                    cure = f"choose among them{did_you_mean(name, scan.columns)}, or leave the shard out"
                    raise DataError.of(f"a column {name!r} in {shown_place(entry.url)}", known, cure)

    def length_N(self) -> npt.NDArray[np.int64]:
        """Returns the bytes of each sample's piece, of a format with one sample a piece."""
        return np.concatenate([scan.length_P for scan in self.scans]).astype(np.int64)

    def __len__(self) -> int:
        return self.first_samples[-1]

    def path_of(self, shard: int) -> Path:
        """Returns the path of a shard's index."""
        url = self.entries[shard].named or self.entries[shard].url
        name = url.rpartition("/")[2].partition("?")[0][-80:]
        return Path(
            self._folder, f"{name}-{xxhash.xxh3_64_hexdigest(f'{_VERSION} {url}{self._identity}'.encode())}.index"
        )

    def place_of(self, index: int) -> tuple[int, int, int]:
        """Returns shard, piece and row of a sample."""
        shard = bisect.bisect_right(self.first_samples, index) - 1
        row = index - self.first_samples[shard]
        last_P = self._last_row_P[shard]
        if last_P is None:
            return shard, row, 0
        piece = int(np.searchsorted(last_P, row, side="right"))
        return shard, piece, row - (int(last_P[piece - 1]) if piece else 0)

    def first_sample(self, shard: int, piece: int) -> int:
        """Returns the first sample of a piece."""
        last_P = self._last_row_P[shard]
        before = piece if last_P is None else int(last_P[piece - 1]) if piece else 0
        return self.first_samples[shard] + before

    def block_of(self, shard: int, piece: int) -> Block:
        """Returns the block of a piece."""
        return shard, int(self.scans[shard].start_P[piece]) // BLOCK_BYTES

    def blocks(self) -> tuple[list[Block], npt.NDArray[np.int64]]:
        """Returns the blocks in the order of their samples, and the first sample of each, int64 (D,)."""
        found, first = list[Block](), list[npt.NDArray[np.int64]]()
        for shard, scan in enumerate(self.scans):
            number_P = scan.start_P.astype(np.int64) // BLOCK_BYTES
            begins = np.flatnonzero(np.diff(number_P, prepend=-1))
            found += [(shard, number) for number in number_P[begins].tolist()]
            before_P = np.cumsum(scan.rows_P, dtype=np.int64) - scan.rows_P
            first.append(self.first_samples[shard] + before_P[begins])
        return found, np.concatenate(first)

    def pieces_of(self, block: Block) -> list[int]:
        """Returns the pieces of a block."""
        shard, number = block
        start_P = self.scans[shard].start_P.astype(np.int64)
        found: list[int] = np.flatnonzero(start_P // BLOCK_BYTES == number).tolist()
        return found

    def check(self, shards: Sequence[int]) -> None:
        """Raises DataError if one of the shards is not what it was when its index was made."""
        for shard in shards:
            entry = self.entries[shard]
            if entry.fixed_name:
                continue
            if is_url(entry.url):
                if time.monotonic() < self._checked[shard] + CHECK_SECONDS:
                    continue
                self._checked[shard] = time.monotonic()
            self._compare(shard)

    def _compare(self, shard: int) -> None:
        entry = self.entries[shard]
        if entry.fixed_name:
            return
        (now,) = describe_shards({entry.url: ""}, self._options, is_known=True)
        if now != entry:
            raise self._changed(shard, entry, now)

    def mismatch(self, shard: int, at: int, words: str) -> DataError:
        """Returns the error of a piece that is not what the index says. Raises DataError if the shard has changed."""
        self._compare(shard)
        path = self.path_of(shard)
        return DataError.of(
            f"the sample of its index at byte {at} of {shown_place(self.entries[shard].url)}",
            words,
            f"restore the shard; or, if it was changed on purpose, remove {path} and begin anew",
        )

    def _changed(self, shard: int, before: Entry, now: Entry, *, num_changed: int = 1) -> DataError:
        path, others = self.path_of(shard), "" if num_changed == 1 else f" and {num_changed - 1} others"
        is_there = is_at_commit(before.url)
        restore = f"name what is there still, {commits_of([before.url])}/…" if is_there else "restore the shard"
        return DataError.of(
            f"{shown_place(before.url)}{others} to be what it was when its index was made ({before.num_bytes} bytes, "
            f"{before.version})",
            f"{now.num_bytes} bytes, {now.version}",
            f"{restore}; or, if it was changed on purpose, remove "
            f"{path if num_changed == 1 else path.with_name('*.index')} and begin anew",
        )

    def _scan(self, shard_format: ShardFormat, origin: Origin, shard: int) -> ShardScan | Entry:
        """Returns a shard's pieces from its index, which is made if there is none; what the shard was if it has changed
        since."""
        entry = self.entries[shard]
        before, scan = self._load(shard_format, shard)
        if scan is not None and _is_same(before, entry):
            return scan
        path = self.path_of(shard)
        with open(path.with_suffix(".lock"), "a", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another rank or job made it while this one waited for the lock.
            before, old = self._load(shard_format, shard)
            if old is not None and _is_same(before, entry):
                return old
            # A hash of git says that its content is another, wherever its samples lie.
            if old is not None and entry.fixed_name:
                return before
            try:
                scan = shard_format.scan(ShardFile(origin, entry))
                self._check(shard_format, scan, entry)
            except OSError as error:
                raise DataError.of(
                    f"to read {shown_place(entry.url)}", without_login(str(error), entry.url), "restore the shard"
                ) from error
            except UnlikeIndexError as error:
                cure = "copy it again"
                raise DataError.of(f"{shown_place(entry.url)} to be a whole shard", str(error), cure) from error
            # It may have changed while it was scanned.
            self._compare(shard)
            if old is not None and old.to_bytes({}) != scan.to_bytes({}):
                return before
            with replacing(path) as partial_path:
                partial_path.write_bytes(
                    scan.to_bytes({"url": entry.url, "bytes": entry.num_bytes, "is": entry.version})
                )
        return scan

    def _load(self, shard_format: ShardFormat, shard: int) -> tuple[Entry, ShardScan | None]:
        """Returns what a shard was when its index was made, and its pieces; None if there is no index."""
        path, entry = self.path_of(shard), self.entries[shard]
        try:
            before, scan = ShardScan.from_bytes(path.read_bytes())
            self._check(shard_format, scan, before)
        except FileNotFoundError:
            return entry, None
        except ValueError as error:
            logger.warning("the index %s is damaged (%s); it is made again", path, error)
            return entry, None
        return before, scan

    @staticmethod
    def _check(shard_format: ShardFormat, scan: ShardScan, entry: Entry) -> None:
        # Where the pieces of the others lie, their library alone knows.
        if not isinstance(shard_format, LibraryFormat):
            scan.check(entry.num_bytes)


def _is_same(before: Entry, now: Entry) -> bool:
    # The URLs may name two commits of the Hub that have the same file.
    return (before.num_bytes, before.version) == (now.num_bytes, now.version)


def describe_shards(
    names: Mapping[str, str],
    options: Mapping[str, Any],
    shard_format: ShardFormat | None = None,
    *,
    is_known: bool = False,
) -> list[Entry]:
    """Returns what servers, file systems or the format's library say now of shards, in order, by the names of
    `listed_shards`; raises DataError if one is missing."""
    urls = list(names)
    if isinstance(shard_format, LibraryFormat):
        return [shard_format.described(url, options) for url in urls]
    return [replace(each, named=names[each.url]) for each in _describe_shards(urls, options, is_known=is_known)]


def _describe_shards(urls: Sequence[str], options: Mapping[str, Any], *, is_known: bool) -> list[Entry]:
    if is_url(urls[0]):
        # fsspec keeps listings, which may be older than the shards; those of the Hub are asked for anew.
        if not is_hub(urls[0]):
            open_file_system(urls[0], options).invalidate_cache()
        return describe_many(urls, options, is_known=is_known)
    with ThreadPoolExecutor(min(STAT_THREADS, len(urls))) as pool:
        return list(pool.map(_described, urls)) if len(urls) > 1 else [_described(urls[0])]


def _described(path: str) -> Entry:
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError.of(
            "a readable shard", path, f"{error.strerror}: restore it or list the shards again"
        ) from error
    return Entry(path, status.st_size, f"mtime={status.st_mtime_ns}")


def _numbered(pattern: str) -> list[str]:
    """Returns the names that ``{000..127}`` stands for."""
    found = _NUMBERS.search(pattern)
    if found is None:
        return [pattern]
    first, last = found[1], found[2]
    numbers = range(int(first), int(last) + 1)
    names = (pattern[: found.start()] + str(n).zfill(len(first)) + pattern[found.end() :] for n in numbers)
    return [each for name in names for each in _numbered(name)]


def listed_shards(shards: Any, options: Mapping[str, Any], suffixes: Container[str]) -> dict[str, str]:
    """Returns the shards that patterns stand for, each once, in the order of their names within a pattern; a folder
    stands for the files in it that end in one of the suffixes. Each has the name that the user knows it by, which
    differs from its own for the Hub's branches."""
    patterns = [os.fspath(each) for each in ([shards] if isinstance(shards, (str, os.PathLike)) else shards)]
    roots = at_commits(patterns, options)
    names = [name for pattern in patterns for name in _numbered(moved(pattern, roots))]
    named = {now: root for root, now in roots.items()}
    urls = {url: moved(url, named) for name in names for url in _found(name, options, suffixes)}
    if not urls:
        raise DataError.of("shards", shards, "check the path")
    return urls


def _found(name: str, options: Mapping[str, Any], suffixes: Container[str]) -> list[str]:
    if is_url(name):
        if "*" in name:
            file_system = open_file_system(name, options)
            return sorted(file_system.unstrip_protocol(each) for each in file_system.glob(_pattern(name)))
        is_one = _is_shard(name, suffixes) or _suffix(name) in COMPRESSED_BY
        return [name] if is_one else _in_folder(name, list_folder(name, options), suffixes)
    name = os.path.abspath(os.path.expanduser(name))
    if os.path.isdir(name) and _suffix(name) not in _FOLDERS:
        with os.scandir(name) as entries:
            return _in_folder(name, [each.path + "/" * each.is_dir() for each in entries], suffixes)
    return sorted(glob.glob(_pattern(name))) if "*" in name and not os.path.exists(name) else [name]


def _pattern(name: str) -> str:
    """Returns a name as a pattern in which ``*`` alone is one."""
    return re.sub(r"([?[])", r"[\1]", name)


def _in_folder(folder: str, found: Sequence[str], suffixes: Container[str]) -> list[str]:
    """Returns the shards among what lies in a folder; raises ConfigError or DataError if they would not be all samples
    of the folder, or not those alone."""
    names = {each.rstrip("/").rpartition("/")[2]: each for each in found}
    log = next((name for name in _TABLE_LOGS if name in names), None)
    if log is not None:
        cure = "name the files that the table's own library lists, such as DeltaTable(…).file_uris()"
        raise DataError.of(f"a folder of shards in {shown_place(folder)}", f"a table whose files {log} lists", cure)
    for name, each in names.items():
        plain = _decompressed(name)
        if plain != name and _suffix(plain) in suffixes and plain not in names:
            raise _compressed(each)
    # What begins so is no data for Spark and pyarrow.
    visible = {name: each for name, each in names.items() if name[:1] not in "._"}
    shards = sorted(each for each in visible.values() if _is_shard(each, suffixes))
    # Caches of Hugging Face's `map` lie beside the shards of the data set.
    listed = [each for each in _listed_by_its_library(folder) if _is_shard(each, suffixes)]
    inner = sorted(name for name, each in visible.items() if each.endswith("/"))
    if inner and not shards and not listed:
        cure = f"name one of them, or the files: {folder}/*/*.…, without what the folders' names say"
        raise DataError.of(f"shards in {shown_place(folder)} itself", f"folders, such as {inner[0]}", cure)
    return listed or shards


def _listed_by_its_library(folder: str) -> list[str]:
    """Returns the shards that Hugging Face's or MosaicML's own list in a local folder names, in its order."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        content = json.loads(Path(folder, "state.json").read_bytes())
        return [os.path.join(folder, each["filename"]) for each in content["_data_files"]]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        content = json.loads(Path(folder, "index.json").read_bytes())
        return [os.path.join(folder, each["raw_data"]["basename"]) for each in content["shards"]]
    return []


def _decompressed(name: str) -> str:
    """Returns the name of a shard after it was decompressed."""
    end = _suffix(name)
    return name if end not in COMPRESSED_BY else name[: -len(end) - 1] + ".tar" * (end == "tgz")


def _compressed(url: str) -> ConfigError:
    command, _ = COMPRESSED_BY[_suffix(url)]
    cure = f"decompress it: {command} < {shown_place(url)} > {shown_place(_decompressed(url))}"
    return ConfigError.of("a plain shard, in which each sample has a place", shown_place(url), cure)


def _suffix(url: str) -> str:
    name = url.partition("?")[0] if is_url(url) else url
    return name.rpartition("/")[2].rpartition(".")[2].lower()


def _is_shard(url: str, suffixes: Container[str]) -> bool:
    # LMDB's lock lies beside its data, with the same suffix.
    return _suffix(url) in suffixes and not url.endswith("lock.mdb")


def suffix_of(urls: Sequence[str]) -> str:
    """Returns the end of all names; raises ConfigError if there are several, or it is not known."""
    suffixes = sorted({_suffix(url) for url in urls})
    if len(suffixes) > 1:
        cure = "make a Shards of each kind, and join them with torch.utils.data.ConcatDataset"
        raise ConfigError.of("shards of one kind", ", ".join(suffixes), cure)
    if suffixes[0] not in FORMATS:
        if suffixes[0] in COMPRESSED_BY:
            raise _compressed(urls[0])
        known = ", ".join(f".{name}" for name in FORMATS)
        cure = "name the shards by their format"
        raise ConfigError.of(f"shards that end in {known}", shown_place(urls[0]), cure)
    return suffixes[0]
