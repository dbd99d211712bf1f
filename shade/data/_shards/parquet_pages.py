"""Pages of Parquet: a few rows of a row group without the rest of it, where the file has page indexes.

pyarrow reads column chunks as a whole. So it gets a chunk in which each page that was not read is replaced by one of as
many nulls, a few bytes long; those rows are not returned. That needs a column that may be null and is not repeated,
such as those of Hugging Face's pictures (a struct of bytes and a path). Of other columns the chunk is read whole.

`datasets` writes the indexes; pyarrow does with ``write_page_index=True``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shade.data._shards.index import RangeParts

_DICTIONARY_ENCODINGS: Final = (2, 8)
_DATA_PAGES: Final = (0, 3)
DAMAGED: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading a footer or a page index raises that is not as it should be."""


class ChunkPages(NamedTuple):
    """The data pages of a column chunk. Legend: P pages."""

    num_coded: int
    """How many of the first ones need the chunk's dictionary."""
    start_P: npt.NDArray[np.int64]
    length_P: npt.NDArray[np.int64]
    row_P: npt.NDArray[np.int64]
    """The first row of each."""

    def ranges(self, rows: Sequence[int], start: int) -> list[tuple[int, int]]:
        """Returns the ranges to read for rows, of a chunk that begins at ``start``, perhaps with a dictionary."""
        pages = np.unique(np.searchsorted(self.row_P, rows, side="right") - 1)
        first = [(start, int(self.start_P[0]))] if pages[0] < self.num_coded and start < self.start_P[0] else []
        return first + [(int(self.start_P[page]), int(self.start_P[page] + self.length_P[page])) for page in pages]

    def content(self, parts: RangeParts, start: int, has_N: npt.NDArray[np.bool_]) -> bytes:
        """Returns the chunk with nulls in place of pages that were not read, whose rows are taken out of ``has_N``."""
        dictionary = parts.find(start, int(self.start_P[0]))
        content, num_nulls = [dictionary or b""], 0
        for page, (first, last) in enumerate(zip(self.row_P, [*self.row_P[1:], len(has_N)], strict=True)):
            at = int(self.start_P[page])
            found = parts.find(at, at + int(self.length_P[page]))
            if found is None or (page < self.num_coded and dictionary is None):
                has_N[first:last] = False
                num_nulls += int(last - first)
                continue
            content += [_nulls(num_nulls), found]
            num_nulls = 0
        return b"".join([*content, _nulls(num_nulls)])


def check_statistics(footer: bytes, schema: Any) -> None:
    """Raises one of `DAMAGED` for statistics of sizes that are of other columns: pyarrow would end the process when it
    is asked for the place of such a chunk."""
    for group in _fields(footer, 0)[0][4]:
        for number, chunk in enumerate(group[1]):
            column, sizes = schema.column(number), chunk[3].get(16, {})
            levels = {2: column.max_repetition_level, 3: column.max_definition_level}
            is_of_bytes = column.physical_type == "BYTE_ARRAY"
            if (1 in sizes and not is_of_bytes) or any(
                len(sizes.get(key, ())) not in (0, n + 1) for key, n in levels.items()
            ):
                raise ValueError(f"statistics of other values than those of the column {column.path}")


def page_table(footer: bytes, schema: Any, read: Callable[[int, int], bytes]) -> bytes:
    """Returns the pages of all column chunks of a file in a form that `pages_of` reads, of which ``read`` returns a
    range."""
    found = list[Any]()
    for group in _fields(footer, 0)[0][4]:
        for number, chunk in enumerate(group[1]):
            column = schema.column(number)
            if 4 not in chunk or column.max_repetition_level or not column.max_definition_level:
                found += [0, 0]
                continue
            places = _fields(read(chunk[4], chunk[4] + chunk[5]), 0)[0][1]
            rows = [place[3] for place in places]
            if rows != sorted({0, *rows}) or rows[-1] >= group[3] or any(min(*place.values()) < 0 for place in places):
                raise ValueError(f"pages that begin at rows {rows} of {group[3]}")
            counts = chunk[3].get(13)
            coded = [each[3] for each in counts or () if each[1] in _DATA_PAGES and each[2] in _DICTIONARY_ENCODINGS]
            found += [len(places), len(places) if counts is None else sum(coded)]
            found += [place[key] for key in (1, 2, 3) for place in places]
    return np.array(found, np.int64).tobytes()


def pages_of(table: bytes) -> list[ChunkPages | None]:
    """Returns the pages of each chunk, row group by row group; None where they cannot be read one by one."""
    values, at, found = np.frombuffer(table, np.int64), 0, list[ChunkPages | None]()
    while at < len(values):
        num, num_coded = values[at : at + 2].tolist()
        places = values[at + 2 : at + 2 + 3 * num].reshape(3, num)
        found.append(ChunkPages(num_coded, *places) if num else None)
        at += 2 + 3 * num
    return found


def _nulls(count: int) -> bytes:
    """Returns a data page, version 2, of so many nulls, which have no definition level above 0."""
    if not count:
        return b""
    levels = _number(count << 1) + b"\0"
    size, one = _integer(len(levels)), _integer(count)
    # Type, sizes; field 8: values, nulls, rows, encoding, length of both kinds of levels, not compressed.
    inner = one + one + one + _integer(0) + size + _integer(0) + b"\x12\0"
    return _integer(3) + size + size + b"\x5c" + inner + b"\0" + levels


def _integer(value: int) -> bytes:
    return b"\x15" + _number(value << 1)


def _number(value: int) -> bytes:
    found = bytearray()
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _fields(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """Returns the fields of a struct in Thrift's compact protocol by their numbers, and where it ends."""
    found, number = dict[int, Any](), 0
    while head := data[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _value(data, at, 4)
        # Another reader may take the first of two, or a part of each.
        if number in found or not 0 < number < 2**15:
            raise ValueError(f"a field {number} where none can be")
        found[number], at = _value(data, at, head & 15)
    return found, at + 1


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in (1, 2):
        return kind == 1, at
    if kind == 3:
        return data[at], at + 1
    if kind == 7:
        return None, at + 8
    if kind == 12:
        return _fields(data, at)
    if kind in (9, 10):
        inner, length, at = data[at] & 15, data[at] >> 4, at + 1
        if length == 15:
            length, at = _unsigned(data, at)
        if length > len(data) - at:
            raise ValueError(f"a list of {length} items in {len(data) - at} bytes")
        items = []
        for _ in range(length):
            # A bool of a list has a byte of its own.
            item, at = _value(data, at, 3 if inner in (1, 2) else inner)
            items.append(item)
        return items, at
    value, at = _unsigned(data, at)
    return (data[at : at + value], at + value) if kind == 8 else ((value >> 1) ^ -(value & 1), at)


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
