"""Reads pieces of shards: the ranges that a format names, those side by side in one request."""

from __future__ import annotations

import collections
import itertools
import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from shade.data._origin.origin import ByteRange, Origin
from shade.data._origin.url_origin import is_url
from shade.data._shards.blocks import coalesced
from shade.data._shards.index import LibraryFormat, RangeParts, ShardFormat, ShardIndex, UnlikeIndexError
from shade.data._shards.tables import TableRows
from shade.data._source.source import CountOrigin
from shade.errors import shown_place

logger = logging.getLogger("shade.data")

GAP_BYTES: Final = 64 << 10
"""Ranges that are no further apart are read in one request (decision 0041)."""
_RECENT_BYTES: Final = 64 << 20
"""Rows of pieces that were read as a whole stay in memory up to so many bytes."""
_WEIGHED_BYTES, _DEAR = 256 << 20, 16
"""After so many bytes that were read for single rows it is said that they are so many times what was used."""
Piece: TypeAlias = "tuple[int, int]"
"""A shard, and a piece of it."""


class PiecesRead(NamedTuple):
    """The result of reading some pieces."""

    parts: dict[int, Any]
    """The ranges, by shard, or what its format opened."""
    failures: dict[Piece, OSError]
    num_requests: int
    num_bytes: int
    is_mapped: bool = False
    """Whether shards are in memory, so that no range was read."""


class PieceReader:
    """Reads pieces for one process; a copy in another one begins without pieces in memory.

    Args:
        index: Where the samples of the shards are.
        shard_format: What a piece of these shards is.
        origin: Reads ranges of bytes.
        columns: The columns that are wanted, or None for all.
    """

    def __init__(self, index: ShardIndex, shard_format: ShardFormat, origin: Origin, columns: list[str] | None) -> None:
        self._index, self._format, self._origin, self._columns = index, shard_format, origin, columns
        self._begin_empty()

    def _begin_empty(self) -> None:
        self._recent: collections.OrderedDict[Piece, Sequence[bytes]] = collections.OrderedDict()
        self._recent_bytes, self._keeping = 0, threading.Lock()
        self._num_read: float = 0
        """Bytes that were read for single rows, as long as nothing was said of that."""
        self._num_used = self._num_rows = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_recent", "_keeping")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._begin_empty()

    def read(self, rows: Mapping[Piece, list[int] | None], count: CountOrigin) -> Iterator[tuple[Piece, Sequence[Any]]]:
        """Yields pieces with the payloads of the rows that are wanted of each, None for all; a piece that cannot be
        read has an OSError for each."""
        with self._keeping:
            recent = {
                piece: self._recent[piece]
                for piece, wanted in rows.items()
                if piece in self._recent and _holds(self._recent[piece], wanted)
            }
        self._index.check(list({shard for shard, _ in recent}))
        for piece, whole in recent.items():
            wanted = rows[piece]
            yield piece, whole if wanted is None else [whole[row] for row in wanted]
        absent = {piece: wanted for piece, wanted in rows.items() if piece not in recent}
        yield from self.made(absent, self.ranges(absent), count)

    def made(
        self, rows: Mapping[Piece, list[int] | None], read: PiecesRead, count: CountOrigin
    ) -> Iterator[tuple[Piece, Sequence[Any]]]:
        """Yields what `read` does of pieces whose ranges were read."""
        if isinstance(self._format, LibraryFormat):
            yield from self._taken(self._format, rows, read, count)
            return
        count(read.num_requests, read.num_bytes)
        if not read.is_mapped and self._format.keeps_rows and None not in rows.values():
            self._num_read += read.num_bytes
        for piece, wanted in rows.items():
            if piece in read.failures:
                length = int(self._index.scans[piece[0]].rows_P[piece[1]]) if wanted is None else len(wanted)
                yield piece, [read.failures[piece]] * length
                continue
            keeps = self._format.keeps_rows and not read.is_mapped and wanted is not None
            payloads = self._payloads(piece, read.parts[piece[0]], None if keeps else wanted)
            if read.is_mapped:
                count(0, _held_bytes(payloads))
            # Neighbours of a row are often wanted next, and reading one takes as long as reading all.
            if keeps:
                self._remember(piece, payloads)
                payloads = [payloads[row] for row in wanted or ()]
                self._weigh(piece[0], payloads)
            yield piece, payloads

    def _taken(
        self, library: LibraryFormat, rows: Mapping[Piece, list[int] | None], read: PiecesRead, count: CountOrigin
    ) -> Iterator[tuple[Piece, Sequence[Any]]]:
        for shard, opened in read.parts.items():
            scan, first = self._index.scans[shard], self._index.first_samples[shard]
            mine = {
                piece: range(int(scan.rows_P[piece[1]])) if wanted is None else wanted
                for piece, wanted in rows.items()
                if piece[0] == shard
            }
            numbers = [self._index.first_sample(*piece) - first + row for piece, each in mine.items() for row in each]
            try:
                payloads: Iterator[Any] = iter(library.taken(scan, opened, numbers, self._columns))
            except OSError as error:
                payloads = itertools.repeat(error)
            count(*library.counted(opened))
            for piece, each in mine.items():
                yield piece, list(itertools.islice(payloads, len(each)))

    def _row_ranges(self, piece: Piece, rows: list[int] | None) -> list[tuple[int, int]]:
        return self._format.row_ranges(self._index.scans[piece[0]], piece[1], self._columns, rows)

    def _payloads(self, piece: Piece, parts: Any, rows: list[int] | None) -> Sequence[bytes]:
        shard, number = piece
        scan = self._index.scans[shard]
        try:
            return self._format.payloads(scan, number, parts, self._columns, rows)
        except UnlikeIndexError as error:
            raise self._index.mismatch(shard, int(scan.start_P[number]), str(error)) from error

    def _weigh(self, shard: int, payloads: Sequence[bytes]) -> None:
        """Says once if far more is read than used."""
        self._num_used += sum(map(len, payloads))
        self._num_rows += len(payloads)
        if _WEIGHED_BYTES < self._num_read > _DEAR * self._num_used:
            logger.warning(
                "a row of %s takes %.1f MB to read, %d times its size, because all is read that was written together; "
                "pass disk= or shuffle_window=, or write less together (pyarrow.parquet.write_table(…, "
                "write_page_index=True, write_batch_size=8, data_page_size=65536))",
                shown_place(self._index.entries[shard].url),
                self._num_read / self._num_rows / 1e6,
                self._num_read // max(1, self._num_used),
            )
            self._num_read = -math.inf

    def _remember(self, piece: Piece, payloads: Sequence[bytes]) -> None:
        with self._keeping:
            # Another thread read it too, or other pages of it were read.
            before = self._recent.pop(piece, None)
            self._recent[piece] = payloads
            self._recent_bytes += _held_bytes(payloads) - (0 if before is None else _held_bytes(before))
            while self._recent_bytes > _RECENT_BYTES and len(self._recent) > 1:
                _, oldest = self._recent.popitem(last=False)
                self._recent_bytes -= _held_bytes(oldest)

    def ranges(self, pieces: Mapping[Piece, list[int] | None]) -> PiecesRead:
        """Reads the ranges of pieces, for some rows of each, None for all. Counts nothing, because a thread of its own
        may do it."""
        scans, entries = self._index.scans, self._index.entries
        by_shard = collections.defaultdict[int, list[Piece]](list)
        for piece in pieces:
            by_shard[piece[0]].append(piece)
        if isinstance(self._format, LibraryFormat) or not is_url(entries[0].url):
            opened = {shard: self._format.opened(entries[shard].url, scans[shard]) for shard in by_shard}
            if None not in opened.values():
                self._index.check(list(by_shard))
                return PiecesRead(opened, {}, sum(map(len, by_shard.values())), 0, is_mapped=True)
        places, owners = list[ByteRange](), list[int]()
        for shard, each in by_shard.items():
            ranges = [r for piece in each for r in self._row_ranges(piece, pieces[piece])]
            for start, stop in coalesced(ranges, GAP_BYTES):
                places.append(ByteRange(entries[shard].url, start, stop))
                owners.append(shard)
        contents = self._origin.read_many(places, [place.stop - place.start for place in places])
        # After the read, so that a shard that changed meanwhile is noticed.
        self._index.check(list(by_shard))
        read = [content for content in contents if not isinstance(content, OSError)]
        parts = collections.defaultdict[int, list[tuple[int, Any]]](list)
        failed = collections.defaultdict[int, list[tuple[ByteRange, OSError]]](list)
        for shard, place, content in zip(owners, places, contents, strict=True):
            if isinstance(content, OSError):
                failed[shard].append((place, content))
            else:
                parts[shard].append((place.start, content))
        failures = {
            (shard, piece): error
            for shard, errors in failed.items()
            for place, error in errors
            for _, piece in by_shard[shard]
            if any(
                place.start <= start < place.stop for start, _ in self._row_ranges((shard, piece), pieces[shard, piece])
            )
        }
        found = {shard: RangeParts(parts[shard]) for shard in by_shard}
        return PiecesRead(found, failures, len(read), sum(map(len, read)))


def _holds(payloads: Sequence[bytes], wanted: list[int] | None) -> bool:
    """Returns whether rows are among those whose pages were read."""
    has_N = payloads.has_N if isinstance(payloads, TableRows) else None
    return has_N is None or bool((has_N if wanted is None else has_N[wanted]).all())


def _held_bytes(payloads: Sequence[bytes]) -> int:
    """Returns the memory that payloads take, those of a table before they are made."""
    return payloads.num_bytes if isinstance(payloads, TableRows) else sum(map(len, payloads))
