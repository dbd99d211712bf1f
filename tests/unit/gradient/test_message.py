"""A message comes back whole or is refused: cut short, flipped, of another version or another bucket."""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc

import numpy as np
import pytest
import xxhash

from shade.errors import ConfigError, PayloadError
from shade.gradient._comm import message as message_format
from shade.gradient._comm.message import HEADER_BYTES, MessageHeader, pack, unpack
from shade.gradient._compress.compressor import Sparse
from shade.gradient._compress.quantiser import QUANTISERS


def drawn(size: int, density: float, seed: int = 0) -> Sparse:
    rng = np.random.default_rng(seed)
    indices = np.flatnonzero(rng.random(size) < density).astype(np.uint32)
    return Sparse(indices, rng.standard_normal(len(indices)).astype(np.float32), size)


def header_of(sparse: Sparse, quantiser: str = "bf16") -> MessageHeader:
    return MessageHeader(
        generation=3,
        step=2**40,
        bucket=7,
        size=sparse.size,
        count=sparse.count,
        weight=96.5,
        quantiser=quantiser,
        density_proposal=0.02,
        effective_step=2**40 + 2,
    )


def message(density: float = 0.02, size: int = 4000) -> np.ndarray:
    sparse = drawn(size, density)
    return pack(header_of(sparse), sparse, QUANTISERS.get("bf16")())


def signed(data: np.ndarray, **fields: object) -> np.ndarray:
    """With fields of the header changed and the checksum made right again: a wrong sender, not a wrong line."""
    names = "magic version flags generation step bucket size count weight density name effective num_indices num_values"
    values = dict(zip(names.split(), message_format._FIELDS.unpack_from(data.data), strict=True)) | fields
    head = message_format._FIELDS.pack(*values.values())
    body = data[HEADER_BYTES:].tobytes()
    checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(head + body))
    return np.frombuffer(head + checksum + body, dtype=np.uint8)


@pytest.mark.parametrize("quantiser", list(QUANTISERS))
@pytest.mark.parametrize(("size", "density"), [(30_000, 0.01), (30_000, 1.0), (30_000, 0.0), (1, 1.0), (0, 0.0)])
def test_a_message_comes_back(quantiser: str, size: int, density: float) -> None:
    sparse, coder = drawn(size, density), QUANTISERS.get(quantiser)()
    header = header_of(sparse, quantiser)
    for flag in (True, False):
        header = dataclasses.replace(header, is_finite=flag)
        data = pack(header, sparse, coder)
        for form in (data, data.tobytes()):
            found, again = unpack(form, size)
            assert found == header
            assert again.size == size
            np.testing.assert_array_equal(again.indices_K, sparse.indices_K)
            np.testing.assert_array_equal(again.values_K, coder.decode(coder.encode(sparse.values_K), sparse.count))


def test_an_element_takes_at_most_three_and_a_half_bytes() -> None:
    sparse = drawn(2_000_000, 0.01)
    data = pack(header_of(sparse), sparse, QUANTISERS.get("bf16")())
    assert len(data) / sparse.count < 3.2


def test_every_flipped_bit_is_noticed() -> None:
    data = message(0.01)
    for place in range(len(data)):
        for bit in range(8):
            hostile = data.copy()
            hostile[place] ^= 1 << bit
            with pytest.raises(PayloadError):
                unpack(hostile, 4000)


def test_every_length_but_the_right_one_is_noticed() -> None:
    data = message()
    for length in range(len(data)):
        with pytest.raises(PayloadError, match="bytes"):
            unpack(data[:length])
    with pytest.raises(PayloadError, match=f"expected {len(data)} bytes, as the header says, got {len(data) + 1}"):
        unpack(np.append(data, np.uint8(0)))


def test_random_damage_is_noticed() -> None:
    data, rng = message(), np.random.default_rng(5)
    for _ in range(3000):
        hostile = data.copy()
        start = int(rng.integers(len(data)))
        length = int(rng.integers(1, 60))
        hostile[start : start + length] = rng.integers(0, 256, len(hostile[start : start + length]), dtype=np.uint8)
        if rng.random() < 0.3:
            hostile = np.roll(hostile, int(rng.integers(1, len(data))))
        if not np.array_equal(hostile, data):
            with pytest.raises(PayloadError):
                unpack(hostile)


def test_noise_is_no_message() -> None:
    rng = np.random.default_rng(6)
    for length in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, 500):
        with pytest.raises(PayloadError):
            unpack(rng.integers(0, 256, length, dtype=np.uint8))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"magic": b"HTTP"}, "begins with b'SHDG', got b'HTTP'"),
        ({"version": 2}, "a message of version 1, got 2"),
        ({"count": 2**63}, "count ≤ size"),
        ({"size": 2**32}, "count ≤ size"),
        ({"size": 2**32 - 1, "count": 2**32 - 1}, "indices and values of 4294967295 elements"),
        ({"count": 1}, "indices and values of 1 elements"),
        ({"size": 10, "count": 10}, "indices and values of 10 elements"),
        ({"num_indices": 2**62, "num_values": 2**62}, "as the header says"),
        ({"num_indices": 0}, "as the header says"),
        ({"weight": float("nan")}, "finite weight"),
        ({"weight": -1.0}, "finite weight"),
        ({"density": float("inf")}, "finite density"),
        ({"name": b"gzip"}, "no quantiser named 'gzip'"),
        ({"name": b"\xff\xfe"}, "no quantiser named"),
        ({"name": b"none"}, "indices and values"),
        ({"flags": 2}, "count ≤ size"),
    ],
)
def test_a_senders_nonsense_is_refused_without_allocating_for_it(fields: dict[str, object], complaint: str) -> None:
    hostile = signed(message(), **fields)
    tracemalloc.start()
    with pytest.raises(PayloadError, match=complaint):
        unpack(hostile)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 200_000


def test_another_bucket_is_refused() -> None:
    with pytest.raises(PayloadError, match="a bucket of 4001 elements, got 4000; give every rank the same model"):
        unpack(message(), 4001)
    with pytest.raises(PayloadError, match="indices below 20"):
        unpack(signed(message(0.002), size=20))


def test_a_header_must_fit_its_bucket() -> None:
    sparse, coder = drawn(100, 0.5), QUANTISERS.get("bf16")()
    with pytest.raises(ConfigError, match="make it from the bucket"):
        pack(dataclasses.replace(header_of(sparse), size=99), sparse, coder)
    with pytest.raises(ConfigError, match="at most 16 bytes"):
        pack(dataclasses.replace(header_of(sparse), quantiser="a" * 17), sparse, coder)
