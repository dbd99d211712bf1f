"""URLs: what is read, what is refused and with which words, and that the password stays inside."""

from __future__ import annotations

import copy
import pickle
import re
import traceback
from urllib.parse import unquote

import pytest

from shade.errors import ConfigError, UnknownNameError, shown_place, shown_url, without_login
from shade.store import open_store
from shade.store.url import PASSWORD_VARIABLE, StoreURL, parse_bytes

SECRET = "pä ss@/:?#[]%41"
QUOTED = "p%C3%A4%20ss%40%2F%3A%3F%23%5B%5D%2541"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("memory://", StoreURL("memory")),
        ("local://?capacity=8GiB", StoreURL("local", options=(("capacity", "8GiB"),))),
        ("unix:///run/a%20b.sock", StoreURL("unix", path="/run/a b.sock")),
        (f"unix://:{QUOTED}@/run/r.sock", StoreURL("unix", path="/run/r.sock", password=SECRET)),
        ("redis://host", StoreURL("redis", (("host", 6379),))),
        ("redis://[::1]:7000/3", StoreURL("redis", (("::1", 7000),), database=3)),
        (f"redis://me:{QUOTED}@h:1", StoreURL("redis", (("h", 1),), username="me", password=SECRET)),
        ("rediss://h:1?ca=/etc/c.crt", StoreURL("rediss", (("h", 1),), options=(("ca", "/etc/c.crt"),))),
        ("redis+cluster://a:1,b:2,[::1]", StoreURL("redis+cluster", (("a", 1), ("b", 2), ("::1", 6379)))),
    ],
)
def test_reads_and_writes_back(text: str, expected: StoreURL) -> None:
    url = StoreURL.parse(text)
    assert url == expected
    assert StoreURL.parse(url.reveal()) == url
    assert pickle.loads(pickle.dumps(url)) == url


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("host:6379", "redis://host:6379"),
        ("unix://run/r.sock", "three slashes"),
        ("unix:///", "three slashes"),
        ("redis://", "redis://host"),
        ("redis://h:port", "redis://host"),
        ("redis://h:99999", "redis://host"),
        ("redis://a:1,b:2", r"redis\+cluster://"),
        ("redis://h:1/first", "database"),
        ("redis+cluster://h:1/1", "a cluster has none"),
        ("memory://host", "memory://"),
        ("redis://h?capcity=1GB", r"\(capacity, credentials\)"),
        ("redis://h?ca=x", r"\(capacity, credentials\)"),
        ("unix:///s?ca=x", r"\(capacity\)"),
        ("rediss://h?cat=x", "capacity, ca, cert, key"),
        ("redis://me:pw@h?credentials=tokens:Tokens", "not both"),
        ("redis://h?capacity=1GB&capacity=2GB", "once"),
        ("redis://h?capacity=big", "8GiB"),
        ("redis://h?capacity=0", "8GiB"),
    ],
)
def test_refuses_with_a_cure(text: str, cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        StoreURL.parse(text)


def test_a_provider_of_credentials_takes_the_place_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, "other")
    url = StoreURL.parse("rediss+cluster://h?credentials=tokens:Tokens")
    assert (url.username, url.password) == (None, None)
    assert StoreURL.parse(url.reveal()) == url


def test_an_unknown_scheme_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'redis'"):
        StoreURL.parse("redsi://h")


@pytest.mark.parametrize(
    "text",
    [
        f"redis://me:{QUOTED}@h:1?capacity=1GiB",
        f"redis+cluster://:{QUOTED}@h:1,h:2",
        f"unix://me:{QUOTED}@/r.sock",
    ],
)
def test_the_password_is_hidden_from_people(text: str) -> None:
    url = StoreURL.parse(text)
    for shown in (str(url), repr(url), f"{url}", repr([copy.copy(url)])):
        assert "ss@" not in shown
        assert "%40" not in shown
    assert ":***@" in str(url)


@pytest.mark.parametrize(
    "text",
    [
        "redis://u:hunter2@h:x",
        "redsi://u:hunter2@h",
        "redis://u:hun/ter2@h",
        "redis://u:hunter2@h?what=1",
        "redis://h:6379?password=hunter2",
        "redis://h:6379/0?username=me&password=hunter2",
        "redis://me:a?hunter2@h:6379/0",
        "redis://me:a?hunter2x&hunter2y=1@h:6379",
        "redis://me:a?hunter2=1",
        "redis://h?password=me@hunter2",
        "rediss://h?ca=1&hunter2",
        "unix:///run/redis.sock?password=hunter2",
        "unix://hunter2/run/redis.sock:x@h",
        "me:hunter2@127.0.0.1:6379",
        "me:hunter2@h://",
        "Redis://me:hunter2@h:6379",
        "redis:/me:hunter2@h:6379",
        "redis//me:hunter2@h",
        "redis:me:hunter2",
        "redis://me:hunter2",
        "redis://me:hunter2/0",
        "local://me:hunter2",
    ],
)
def test_nor_is_it_in_a_refusal(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        StoreURL.parse(text)
    assert "ter2" not in "".join(traceback.format_exception(refused.value))


def test_a_login_in_the_query_is_answered_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"got 'password'.*before the host, or into SHADE_REDIS_PASSWORD"):
        StoreURL.parse("redis://h:6379?password=hunter2")
    with pytest.raises(ConfigError, match="%3F"):
        StoreURL.parse("redis://me:a?hunter2@h:6379")
    assert StoreURL.parse("redis://me:a%3Fhunter2@h:6379").password == "a?hunter2"


@pytest.mark.parametrize("text", ["redsi://h:6379/0", "host:6379", "locl", "redis://[::1]:x,b", "unix:///run/r.sock"])
def test_what_is_no_secret_is_shown(text: str) -> None:
    assert shown_url(text) == text.replace("[::1]:x,b", "***")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://key:hunter2@bucket/a/b c", "s3://***@bucket/a/b c"),
        ("s3://key:hun/ter2@bucket", "s3://***@bucket"),
        ("s3://bucket/a?secret=hunter2", "s3://bucket/a?***"),
        ("sftp://u:p?hunter2@host/a", "sftp://***?***"),
        ("s3://key:hunter2", "s3://***"),
        ("s3://bucket/run-1/x.pt", "s3://bucket/run-1/x.pt"),
        ("gs://a.b-c/deep/er", "gs://a.b-c/deep/er"),
        ("/mnt/a@b/c d", "/mnt/a@b/c d"),
        ("some folder/x", "some folder/x"),
    ],
)
def test_a_storage_url_is_shown_without_its_login_and_a_path_whole(text: str, shown: str) -> None:
    assert shown_place(text) == shown


@pytest.mark.parametrize(
    "url", ["sftp://me:hunter%202@h/x", "s3://key:hun/ter2@b", "https://h/x?sig=hunter%202", "sftp://me:p?hunter2@h/x"]
)
def test_nor_is_it_in_what_another_library_says(url: str) -> None:
    words = without_login(f"cannot reach {url}, which is {unquote(url)}; /x of h is away", url)
    assert not re.search("hun|ter", words)
    assert words.endswith("is away")


def test_credentials_come_from_the_environment_where_the_url_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADE_REDIS_PASSWORD", SECRET)
    monkeypatch.setenv("SHADE_REDIS_USERNAME", "me")
    assert StoreURL.parse("redis://h").password == SECRET
    assert StoreURL.parse("redis+cluster://h").username == "me"
    assert StoreURL.parse("redis://you:own@h").password == "own"
    assert StoreURL.parse("redis://you:own@h").username == "you"
    assert StoreURL.parse("memory://").password is None
    assert StoreURL.parse("unix:///run/r.sock").password is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("1B", 1),
        ("500MB", 500_000_000),
        ("8GiB", 8 << 30),
        ("1.5 kib", 1536),
        ("2tb", 2 * 10**12),
    ],
)
def test_amounts_of_memory(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected
    assert StoreURL.parse(f"memory://?capacity={text}").capacity_bytes == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "0", "1 parsec", "1e9", "nan", "1GiBs"])
def test_no_amount_of_memory(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


@pytest.mark.parametrize("timeout_seconds", [0, -1.0, float("nan")])
def test_a_timeout_must_be_positive(timeout_seconds: float) -> None:
    with pytest.raises(ConfigError, match="timeout"):
        open_store("memory://", timeout_seconds=timeout_seconds)
