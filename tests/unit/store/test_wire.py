"""Commands as bytes on the wire, judged by another client's parser."""

from __future__ import annotations

import hiredis
import pytest

from shade.store.wire import Command, pack, pack_keys, pack_set
from shade.types import Bytes


def _parsed(command: Command) -> object:
    reader = hiredis.Reader()
    reader.feed(b"".join(command))
    words = reader.gets()
    assert not reader.has_data()
    return words


def test_words() -> None:
    assert _parsed(pack("INCRBY", "ключ", -3)) == [b"INCRBY", "ключ".encode(), b"-3"]


def test_keys() -> None:
    first, second = pack_keys(b"GET", ["a", "ключ"])
    assert _parsed(first) == [b"GET", b"a"]
    assert _parsed(second) == [b"GET", "ключ".encode()]


SQUARE = memoryview(b"abcdefgh").cast("H", [2, 2])


@pytest.mark.parametrize("value", [b"", b"\r\n", b"x" * 1000, memoryview(b""), memoryview(b"0123")[::2], SQUARE])
def test_values(value: Bytes) -> None:
    assert _parsed(pack_set("k", value)) == [b"SET", b"k", bytes(value)]
    assert _parsed(pack_set("k", value, only_if_absent=True)) == [b"SET", b"k", bytes(value), b"NX"]


def test_a_value_is_not_copied() -> None:
    value = bytearray(b"v" * 100)
    assert pack_set("k", value)[1] is value
    view = memoryview(value)[10:]
    piece = pack_set("k", view)[1]
    assert isinstance(piece, memoryview)
    assert piece.obj is value
