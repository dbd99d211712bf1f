"""BucketClient by itself, in a process that never forks: what s3fs would have read, with s3fs's settings."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

from shade.data._origin.bucket_client import BucketClient
from tests.support.storage_servers import BUCKET, S3Server, public_objects

pytestmark = pytest.mark.multiprocess
pytest.importorskip("obstore", reason="pip install 'torch-shade[s3]'")

NAMES = ["plain.bin", "two words+100%.bin", "naïve/ünder=score&more?.bin", "deep/er/~tilde,(1).bin", "a#b%20c.bin"]
CONTENTS = {name: f"{number}" * 500 for number, name in enumerate(NAMES)} | {
    "empty.bin": "",
    "said.gz": "not compressed",
}

SCRIPT = """
import json, sys
from datetime import timedelta
from shade.data._origin import bucket_client
from shade.data._origin.url_origin import open_file_system
options, words = json.loads(sys.argv[1])
bucket_client._LOGIN_TIME = timedelta(seconds=-1)
client = bucket_client.BucketClient.of(open_file_system("s3://", options))
login, num_logins = client._login, 0
def counted():
    global num_logins
    num_logins += 1
    return login()
client._login = counted
found = []
for url, start, stop in words:
    try:
        found.append(client.read(url, start, stop).decode())
    except Exception as error:
        found.append(type(error).__name__)
print(json.dumps([found, num_logins]))
"""


@pytest.fixture(scope="module")
def bucket() -> Iterator[S3Server]:
    with public_objects({name: content.encode() for name, content in CONTENTS.items()}) as server:
        yield server


def read(options: dict[str, Any], words: list[Any]) -> tuple[list[str], int]:
    """Reads in another process; returns what came, and how often it was asked for a login."""
    command = [sys.executable, "-c", SCRIPT, json.dumps([options, words])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found, num_logins = json.loads(done.stdout)
    return found, num_logins


@pytest.mark.parametrize("is_anonymous", [False, True])
def test_objects_of_any_name_and_ranges_of_them(bucket: S3Server, is_anonymous: bool) -> None:
    del bucket
    urls = [f"s3://{BUCKET}/{name}" for name in CONTENTS]
    words = [[url, None, None] for url in urls] + [[urls[2], 7, 19], [urls[1], 499, None], [urls[0][:-1], None, None]]
    found, num_logins = read({"anon": is_anonymous}, words)
    assert found == [*CONTENTS.values(), "2" * 12, "1", "FileNotFoundError"]
    # A login that is said to have expired is asked for again, so one that is renewed in the middle of a run is used.
    assert num_logins == 0 if is_anonymous else num_logins >= len(words)


@pytest.mark.parametrize(
    "options",
    [
        {"requester_pays": True},
        {"s3_additional_kwargs": {"SSECustomerAlgorithm": "AES256"}},
        {"version_aware": True},
        {"client_kwargs": {"verify": False}},
        {"config_kwargs": {"proxies": {"http": "http://127.0.0.1:1"}}},
    ],
)
def test_what_it_does_not_know_is_left_to_s3fs(options: dict[str, Any]) -> None:
    assert BucketClient.of(fsspec.filesystem("s3", skip_instance_cache=True, **options)) is None
