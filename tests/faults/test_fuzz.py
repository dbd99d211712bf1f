"""Mutated bytes of everything that is read from outside: a reader returns, or raises one of our named errors.

Seeds are the stored files of tests/golden. ``SHADE_FUZZ`` says how many inputs each reader gets, and
``SHADE_FUZZ_SEED`` with which seed; the soak takes 20,000. A checksum is made right again where there is one:
otherwise no mutant would come past it.
"""

from __future__ import annotations

import os
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shade.cache.entry import FORMAT_ITEM, HEADER_BYTES, seal, unseal
from shade.checkpoint._codecs.zstd_frames import Frames
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import Commit, Manifest
from shade.config import RunConfig
from shade.control import message as telemetry
from shade.data import Shards
from shade.data._source import item_codec
from shade.errors import ShadeError
from shade.gradient._comm import message
from shade.store import StoreURL

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
NUM_INPUTS, SEED = int(os.environ.get("SHADE_FUZZ", "20000")), int(os.environ.get("SHADE_FUZZ_SEED", "0"))
WORDS = (
    b"",
    b"\0",
    b"\xff",
    b"-1",
    b"1e999",
    b"[[[[",
    b"{}",
    b"null",
    b'"',
    b"\xc3",
    b"9" * 30,
    b"A" * 300,
    b"\0" * 64,
)
MOST_GROWTH = 300 << 20
"""Bytes by which the process may grow over all inputs of a reader."""


def mutated(seed: bytes, rng: random.Random) -> bytes:
    """One to four changes: a bit, a byte, a part cut out, doubled or moved, a word put in."""
    data = bytearray(seed)
    for _ in range(rng.randrange(1, 5)):
        at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        end = min(end, at + rng.choice((1, 4, 16, 4096)))
        kind = rng.randrange(6)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[at % len(data)] = rng.randrange(256)
        elif kind == 2:
            del data[at:end]
        elif kind == 3:
            data[at:at] = data[at:end]
        elif kind == 4:
            data[at:end] = rng.choice(WORDS)
        else:
            data[at : at + 4] = rng.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1)).to_bytes(4, "little")
    return bytes(data)


def read_entry(data: bytes) -> None:
    unseal(3, data, FORMAT_ITEM)


def read_item(data: bytes) -> None:
    item_codec.decode(unseal(3, seal(3, data, FORMAT_ITEM), FORMAT_ITEM))


def read_manifest(data: bytes) -> None:
    Manifest.parse(data, digest_of(data))


def read_url(data: bytes) -> None:
    StoreURL.parse(data.decode("utf-8", "replace"))


def read_message(data: bytes) -> None:
    if len(data) >= message.HEADER_BYTES:
        right = bytearray(data)
        size = message._FIELDS.size
        checksum = message._CHECKSUM.pack(message._digest(message.np.frombuffer(bytes(right), message.np.uint8)))
        right[size : size + len(checksum)] = checksum
        data = bytes(right)
    message.unpack(data)


def golden(name: str) -> bytes:
    return (GOLDEN / name).read_bytes()


URLS = b"redis+cluster://user:p%40ss@10.0.0.1:7000,[::1]:7001?capacity=8GiB"
SHARDS = ("libarchive-pax.tar", "libarchive.zip", "streaming.mds", "polars.arrow", "polars.parquet")
READERS: dict[str, tuple[Callable[[bytes], Any], bytes]] = {
    "cache entry": (read_entry, seal(3, golden("entry.item")[HEADER_BYTES:], FORMAT_ITEM)),
    "item in a sealed entry": (read_item, golden("entry.item")[HEADER_BYTES:]),
    "manifest": (read_manifest, golden("snapshot/rank-0.json")),
    "commit record": (Commit.parse, golden("snapshot/commit.json")),
    "gradient message": (read_message, golden("message.bin")),
    "zstd chunk": (lambda data: Frames("zstd").unpack(data, 0, 1 << 20, 4), golden("chunk.zstd")),
    "telemetry": (telemetry.read, golden("telemetry.jsonl").splitlines()[0]),
    "store URL": (read_url, URLS),
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", READERS)
def test_fuzz_raises_named_errors_only_and_keeps_memory_bounded(name: str) -> None:
    read, seed = READERS[name]
    rng, began, accepted = random.Random(f"{SEED} {name}"), time.monotonic(), 0
    read(seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for _ in range(NUM_INPUTS):
        data = mutated(seed, rng)
        try:
            read(data)
            accepted += 1
        except ShadeError:
            pass
        except Exception as error:  # noqa: BLE001 - any other is what this test is for
            pytest.fail(f"{name}: {type(error).__name__}: {error} on {data!r}")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    told = f"{NUM_INPUTS:,} inputs, {accepted:,} accepted, {time.monotonic() - began:.1f} s, {grown / 1e6:.0f} MB"
    sys.stderr.write(f"{name}: {told}\n")
    assert accepted < NUM_INPUTS
    assert grown < MOST_GROWTH


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SHARDS)
def test_fuzz_of_a_shard(name: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    seed, rng = golden(f"shards/{name}"), random.Random(f"{SEED} {name}")
    accepted = 0
    for number in range(NUM_INPUTS // 20):
        path = tmp_path / f"{number}{Path(name).suffix}"
        path.write_bytes(data := mutated(seed, rng))
        try:
            with Shards(path, index=tmp_path / "index") as shards:
                for index in range(len(shards)):
                    shards[index]
            accepted += 1
        except ShadeError:
            pass
        except Exception as error:  # noqa: BLE001 - as above
            pytest.fail(f"{name}: {type(error).__name__}: {error} on input {number} of seed {SEED}, {len(data)} bytes")
        path.unlink()
    sys.stderr.write(f"{name}: {NUM_INPUTS // 20:,} inputs, {accepted:,} accepted\n")
    assert accepted < NUM_INPUTS // 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fuzz_of_a_run_file(tmp_path: Path) -> None:
    RunConfig(str(tmp_path), "script.py", ("data",)).save()
    path = tmp_path / "run.json"
    seed, rng = path.read_bytes(), random.Random(SEED)
    for _ in range(NUM_INPUTS // 10):
        path.write_bytes(data := mutated(seed, rng))
        try:
            RunConfig.load(path)
        except ShadeError:
            pass
        except Exception as error:  # noqa: BLE001 - any other is what this test is for
            pytest.fail(f"run.json: {type(error).__name__}: {error} on {data!r}")
