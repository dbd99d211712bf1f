"""An entry is the payload that was sealed for that sample in that form, or an error: never a wrong sample."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shade.cache.entry import FORMAT_ENCODED, FORMAT_ITEM, HEADER_BYTES, seal, unseal
from shade.errors import CorruptEntryError

payloads = st.binary(max_size=300)
indices = st.integers(0, 2**40)


@given(indices, payloads, st.sampled_from([FORMAT_ENCODED, FORMAT_ITEM]))
def test_comes_back_as_sealed(index: int, payload: bytes, form: int) -> None:
    entry = seal(index, payload, form)
    assert len(entry) == HEADER_BYTES + len(payload)
    assert bytes(unseal(index, entry, form)) == payload


@given(indices, payloads, st.data())
def test_any_flipped_bit_is_noticed(index: int, payload: bytes, data: st.DataObject) -> None:
    entry = bytearray(seal(index, payload, FORMAT_ENCODED))
    bit = data.draw(st.integers(0, 8 * len(entry) - 1))
    entry[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptEntryError):
        unseal(index, bytes(entry), FORMAT_ENCODED)


def test_every_single_bit_of_one_entry() -> None:
    entry = seal(7, b"forty-two bytes of some file or other, say", FORMAT_ENCODED)
    for bit in range(8 * len(entry)):
        damaged = bytearray(entry)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptEntryError):
            unseal(7, bytes(damaged), FORMAT_ENCODED)


@given(indices, payloads, st.data())
def test_a_piece_of_an_entry_is_no_entry(index: int, payload: bytes, data: st.DataObject) -> None:
    entry = seal(index, payload, FORMAT_ENCODED)
    length = data.draw(st.integers(0, len(entry) - 1))
    for piece in (entry[:length], entry[len(entry) - length :] if length else b"", entry + b"x"):
        with pytest.raises(CorruptEntryError):
            unseal(index, piece, FORMAT_ENCODED)


@given(indices, indices, payloads)
def test_another_samples_entry_is_refused(mine: int, other: int, payload: bytes) -> None:
    if mine != other:
        with pytest.raises(CorruptEntryError):
            unseal(mine, seal(other, payload, FORMAT_ITEM), FORMAT_ITEM)


@given(indices, payloads)
def test_another_form_is_refused(index: int, payload: bytes) -> None:
    with pytest.raises(CorruptEntryError):
        unseal(index, seal(index, payload, FORMAT_ITEM), FORMAT_ENCODED)


@given(indices, st.binary(max_size=100))
def test_foreign_bytes_are_refused(index: int, entry: bytes) -> None:
    with pytest.raises(CorruptEntryError):
        unseal(index, entry, FORMAT_ENCODED)


def test_what_the_store_has_checked_is_not_read_again_but_its_header_is() -> None:
    entry = bytearray(seal(7, b"payload", 1))
    entry[-1] ^= 1
    assert unseal(7, bytes(entry), 1, is_checked=True) == b"payloae"
    with pytest.raises(CorruptEntryError, match="header"):
        unseal(7, bytes(entry), 2, is_checked=True)
    with pytest.raises(CorruptEntryError, match="header"):
        unseal(7, bytes(entry)[:-1], 1, is_checked=True)
