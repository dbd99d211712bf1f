"""UrlOrigin in a bucket: objects come through signed URLs, byte for byte as s3fs reads them, or in s3fs's own way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

from shade.data._origin import url_origin as module
from shade.data._origin.origin import ByteRange
from shade.data._origin.url_origin import UrlOrigin
from tests.support.storage_servers import BUCKET, S3Server, public_objects

pytestmark = pytest.mark.multiprocess

NAMES = ("plain.bin", "two words+100%.bin", "naïve/ünder=score&more?.bin", "deep/er/~tilde,(1).bin")


@pytest.fixture(scope="module")
def bucket() -> Iterator[S3Server]:
    with public_objects(dict(zip(NAMES, CONTENTS, strict=True)) | {"said-to-be.gz": b"not compressed"}) as server:
        yield server


def urls() -> list[str]:
    return [f"s3://{BUCKET}/{name}" for name in NAMES]


CONTENTS = [b"%d" % number * 500 for number in range(len(NAMES))]


class Counted:
    """Counts the signed reads, and fails those that it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_reads, self.fails = 0, False
        self._read = module._read_signed
        monkeypatch.setattr(module, "_read_signed", self)

    async def __call__(self, *words: Any) -> bytes:
        self.num_reads += 1
        if self.fails:
            raise RuntimeError("refused")
        return await self._read(*words)


@pytest.fixture
def signed(bucket: S3Server, monkeypatch: pytest.MonkeyPatch) -> Counted:
    del bucket
    return Counted(monkeypatch)


@pytest.mark.parametrize("options", [{}, {"anon": True}, {"config_kwargs": {"signature_version": "s3"}}])
def test_objects_of_any_name_are_read_through_signed_urls(signed: Counted, options: dict[str, Any]) -> None:
    origin = UrlOrigin(options)
    assert origin.read_many(urls()) == CONTENTS
    assert origin.read_many([ByteRange(urls()[2], 7, 19)]) == [b"2" * 12]
    assert signed.num_reads == len(NAMES) + 1
    origin.close()


def test_an_object_comes_as_it_is_stored_whatever_its_headers_say(signed: Counted) -> None:
    origin = UrlOrigin()
    assert origin.read_many([f"s3://{BUCKET}/said-to-be.gz"]) == [b"not compressed"]
    assert signed.num_reads == 1
    origin.close()


def test_what_is_missing_is_said_as_before(signed: Counted) -> None:
    origin = UrlOrigin()
    good, missing = origin.read_many([urls()[0], f"s3://{BUCKET}/gone.bin"])
    assert good == CONTENTS[0]
    assert isinstance(missing, FileNotFoundError)
    (short,) = origin.read_many([ByteRange(urls()[0], 490, 510)])
    assert isinstance(short, OSError)
    assert "gave 10 bytes" in str(short)
    assert "Signature" not in str(short)
    origin.close()


def test_where_no_signed_url_can_be_read_none_is_tried_again(signed: Counted) -> None:
    signed.fails = True
    origin = UrlOrigin(num_threads=1)
    assert origin.read_many(urls()) == CONTENTS
    assert signed.num_reads == 1
    origin.close()


def test_one_that_fails_later_is_read_in_the_other_way_and_the_next_ones_are_signed(signed: Counted) -> None:
    origin = UrlOrigin(num_threads=1)
    assert origin.read_many(urls()[:1]) == CONTENTS[:1]
    signed.fails = True
    assert origin.read_many(urls()[1:2]) == CONTENTS[1:2]
    signed.fails = False
    assert origin.read_many(urls()[2:]) == CONTENTS[2:]
    assert signed.num_reads == len(NAMES)
    origin.close()


def test_a_missing_first_object_does_not_end_it(signed: Counted) -> None:
    origin = UrlOrigin(num_threads=1)
    assert isinstance(origin.read_many([f"s3://{BUCKET}/gone.bin"])[0], FileNotFoundError)
    assert origin.read_many(urls()) == CONTENTS
    assert signed.num_reads == 1 + len(NAMES)
    origin.close()


def test_a_forked_process_reads_too(signed: Counted) -> None:
    origin = UrlOrigin()
    assert origin.read_many(urls()) == CONTENTS
    child = os.fork()
    if child == 0:
        os._exit(0 if origin.read_many(urls()) == CONTENTS and origin._has_signed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    origin.close()


def test_other_schemes_are_not_signed(signed: Counted) -> None:
    fsspec.filesystem("memory").pipe("/signed/none.bin", b"here")
    origin = UrlOrigin()
    assert origin.read_many(["memory://signed/none.bin"]) == [b"here"]
    assert signed.num_reads == 0
    origin.close()
