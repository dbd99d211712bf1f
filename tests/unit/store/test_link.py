"""A server that lies, stalls or hangs up: each is `StoreUnavailableError` in time, and never somebody else's bytes.

The server here is a script of bytes behind a real socket, since no real Redis would say these things.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hiredis
import numpy as np
import pytest
import torch

from shade import process
from shade.errors import StoreAuthError, StoreError, StoreTimeoutError, StoreUnavailableError
from shade.process import register_file_memory, unregister_file_memory
from shade.store import open_store
from shade.store.link import Endpoint
from shade.store.wire import Command
from shade.types import Bytes

HELLO = b"+OK\r\n"
Script = Callable[[list[bytes]], str]


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Script]:
    """Starts a server that greets each client and then answers its first command with the given bytes, once a client:
    the last one's answer is for all who come after."""
    stopping = threading.Event()
    threads: list[threading.Thread] = []

    def serve(listener: socket.socket, answers: list[bytes]) -> None:
        held = []
        with listener:
            while not stopping.is_set():
                try:
                    client, _ = listener.accept()
                except TimeoutError:
                    continue
                held.append(client)
                client.settimeout(5)
                with contextlib.suppress(ConnectionError):
                    while b"CLIENT" in (command := client.recv(1 << 16)):
                        client.sendall(HELLO * command.count(b"CLIENT"))
                    if command:
                        answer = answers.pop(0) if len(answers) > 1 else answers[0]
                        client.sendall(answer.removesuffix(b"<hang up>"))
                        if answer.endswith(b"<hang up>"):
                            client.close()
        for client in held:
            client.close()

    def start(answers: list[bytes]) -> str:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.settimeout(0.05)
        threads.append(threading.Thread(target=serve, args=(listener, answers)))
        threads[-1].start()
        return f"unix://{tmp_path}/s"

    yield start
    stopping.set()
    for thread in threads:
        thread.join(10)


Value = Callable[[bytes], Bytes]


@pytest.fixture
def in_file(tmp_path: Path) -> Iterator[Value]:
    """Puts a value into a mapped file whose pages may be sent, a page behind its beginning."""
    with (tmp_path / "mapped").open("w+b") as file:

        def put(value: bytes) -> memoryview:
            file.write(bytes(mmap.PAGESIZE) + value)
            file.flush()
            memory = memoryview(mmap.mmap(file.fileno(), 0))
            register_file_memory(file.fileno(), torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), len(memory))
            return memory[mmap.PAGESIZE :]

        yield put
        unregister_file_memory(file.fileno())


@pytest.fixture(params=["bytes", "in_file"])
def made(request: pytest.FixtureRequest) -> Value:
    """Makes a value of bytes: in memory of its own, or in a mapped file."""
    return bytes if request.param == "bytes" else request.getfixturevalue("in_file")  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "answer",
    [
        b"<hang up>",
        b"$5\r\nhel<hang up>",
        b"$5\r\nhello<hang up>",
        b"$5<hang up>",
        b"$5\r\nhel",
        b"",
        b"$99999999999999\r\n",
        b"$-7\r\n",
        b"$five\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"*3\r\n$1\r\na\r\n",
        b"x" * 100_000,
    ],
)
def test_half_an_answer_is_none(scripted: Script, answer: bytes) -> None:
    with open_store(scripted([answer]), timeout_seconds=0.2) as store, pytest.raises(StoreUnavailableError):
        store.get_many(["shade:a"])


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"$",
        b"$5\r\n<hang up>",
        b"$5\r\nfo",
        b"$5\r\nfoo\r\nx",
        b"$9999999999\r\nx",
        b"$99999999999999\r\nx",
        b"*1\r\n$1\r\na\r\n",
        b":7\r\n",
        b"$x\r\n",
    ],
)
def test_half_an_answer_fills_no_buffer(scripted: Script, answer: bytes) -> None:
    buffer = memoryview(bytearray(5))
    with open_store(scripted([answer]), timeout_seconds=0.2) as store, pytest.raises(StoreUnavailableError):
        store.get_many_into({"shade:a": buffer})


def test_an_error_in_place_of_a_large_value_has_its_name(scripted: Script) -> None:
    refusing = scripted([b"-NOPERM this user has no permissions\r\n"])
    with open_store(refusing, timeout_seconds=0.2) as store, pytest.raises(StoreAuthError, match="NOPERM"):
        store.get_many_into({"shade:a": memoryview(bytearray(5))})


def test_a_late_large_value_is_not_taken_for_the_next_one(scripted: Script) -> None:
    with open_store(scripted([b"$5\r\nfo", b"$3\r\nbar\r\n"]), timeout_seconds=0.2) as store:
        with pytest.raises(StoreTimeoutError, match=r"no progress within 0\.2 s"):
            store.get_many_into({"shade:a": memoryview(bytearray(5))})
        buffer = memoryview(bytearray(3))
        assert store.get_many_into({"shade:b": buffer}) == [True]
        assert bytes(buffer) == b"bar"


def test_a_late_answer_is_not_taken_for_the_next_one(scripted: Script) -> None:
    """1. The reply to `a` arrives half; we give up. 2. The rest is under way. 3. `b` must not read it."""
    with open_store(scripted([b"$5\r\nfo", b"$3\r\nbar\r\n"]), timeout_seconds=0.2) as store:
        with pytest.raises(StoreUnavailableError, match=r"0\.2 s"):
            store.get_many(["shade:a"])
        assert store.get_many(["shade:b"]) == [b"bar"]


def test_a_server_that_hung_up_while_we_were_idle_costs_no_error(scripted: Script) -> None:
    with open_store(scripted([b"$3\r\nfoo\r\n<hang up>", b"$3\r\nbar\r\n"]), timeout_seconds=0.2) as store:
        assert store.get_many(["shade:a"]) == [b"foo"]
        assert store.get_many(["shade:b"]) == [b"bar"]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"-NOAUTH Authentication required.\r\n", StoreAuthError),
        (b"-NOPERM no permissions\r\n", StoreAuthError),
        (b"-LOADING Redis is loading the dataset in memory\r\n", StoreUnavailableError),
        (b"-ERR max number of clients reached\r\n", StoreUnavailableError),
        (b"-BUSY running a script\r\n", StoreUnavailableError),
        (b"-WRONGTYPE Operation against a key\r\n", StoreError),
        (b":1\r\n", StoreError),
        (b"*0\r\n", StoreError),
    ],
)
def test_errors_have_their_names(scripted: Script, answer: bytes, error: type[StoreError]) -> None:
    with open_store(scripted([answer]), timeout_seconds=0.2) as store, pytest.raises(error) as raised:
        store.get_many(["shade:a"])
    assert type(raised.value) is error


@pytest.fixture
def interrupts() -> Iterator[threading.Thread]:
    """Interrupts the test 0.1 s after it is started, once: a signal that comes just before a read begins is seen only
    when the next one ends the read, so it is sent until it was seen."""
    is_seen, test = threading.Event(), threading.get_ident()

    def see(*_: object) -> None:
        if not is_seen.is_set():
            is_seen.set()
            raise KeyboardInterrupt

    def send() -> None:
        while not is_seen.wait(0.1):
            signal.pthread_kill(test, signal.SIGINT)

    before = signal.signal(signal.SIGINT, see)
    sender = threading.Thread(target=send)
    yield sender
    is_seen.set()
    sender.join()
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_in_the_middle_leaves_nothing_behind(scripted: Script, interrupts: threading.Thread) -> None:
    """Ctrl-C while a reply is read: the connection is dropped, not kept with half a reply in it."""
    with open_store(scripted([b"$3\r\nf", b"$3\r\nbar\r\n"]), timeout_seconds=30) as store:
        interrupts.start()
        with pytest.raises(KeyboardInterrupt):
            store.get_many(["shade:a"])
        assert store.get_many(["shade:b"]) == [b"bar"]


def test_a_slow_network_is_no_stalled_server(tmp_path: Path, made: Value) -> None:
    """A value that takes several timeouts to send, and never one without progress."""
    value = made(b"v" * 8_000_000)
    taken_seconds = 0.0

    def read_slowly(listener: socket.socket) -> None:
        nonlocal taken_seconds
        client, _ = listener.accept()
        with client:
            while b"CLIENT" in (part := client.recv(1 << 16)):
                client.sendall(HELLO * part.count(b"CLIENT"))
            begin = time.monotonic()
            while not part.endswith(b"v\r\n"):
                time.sleep(0.02)
                if not (more := client.recv(1 << 18)):
                    return
                part = part[-3:] + more
            taken_seconds = time.monotonic() - begin
            client.sendall(b"+OK\r\n")

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        reader = threading.Thread(target=read_slowly, args=(listener,))
        reader.start()
        with open_store(f"unix://{tmp_path}/s", timeout_seconds=0.2) as store:
            assert store.set_many({"shade:a": value}) == [True]
        reader.join(10)
    assert taken_seconds > 0.2


@pytest.fixture
def deaf(tmp_path: Path) -> Iterator[str]:
    """The address of a server that greets, and reads nothing after that."""

    def greet(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client:
            while b"CLIENT" in (part := client.recv(1 << 16)):
                client.sendall(HELLO * part.count(b"CLIENT"))
            over.wait(30)

    over = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        greeter = threading.Thread(target=greet, args=(listener,))
        greeter.start()
        yield f"unix://{tmp_path}/s"
        over.set()
        greeter.join(10)


def test_a_server_that_reads_nothing_is_noticed_while_a_value_is_sent(deaf: str, made: Value) -> None:
    value = made(b"v" * 8_000_000)
    with open_store(deaf, timeout_seconds=0.2) as store, pytest.raises(StoreTimeoutError, match="could not send to"):
        store.set_many({"shade:a": value})


def test_an_interrupt_while_a_value_is_sent_closes_the_connection(
    deaf: str, interrupts: threading.Thread, made: Value
) -> None:
    value = made(b"v" * 8_000_000)
    with open_store(deaf, timeout_seconds=30) as store:
        interrupts.start()
        with pytest.raises(KeyboardInterrupt):
            store.set_many({"shade:a": value})
        assert store._node._idle == []  # type: ignore[attr-defined]


@contextlib.contextmanager
def listening(tmp_path: Path, num_bytes: int) -> Iterator[tuple[str, bytearray]]:
    """The address of a server that takes one batch of so many bytes, and what it has received."""
    received = bytearray()

    def take(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client:
            while b"CLIENT" in (part := client.recv(1 << 16)):
                client.sendall(HELLO * part.count(b"CLIENT"))
            while part:
                received.extend(part)
                if len(received) >= num_bytes:
                    break
                part = client.recv(1 << 16)
            client.sendall(b"+OK\r\n" * received.count(b"SET\r\n"))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        taker = threading.Thread(target=take, args=(listener,))
        taker.start()
        yield f"unix://{tmp_path}/s", received
        taker.join(10)


NUMBERS = np.arange(1_000_000, dtype=np.uint32).tobytes()
"""4 MB in which no two words are equal."""


class Sendfile:
    """os.sendfile, watched: it sends at most so many bytes, and fails from a call on."""

    def __init__(self, most: int = 1 << 30, fails_at: int = 1 << 30, with_number: int | None = None) -> None:
        self.sent, self._calls, self._call = 0, 0, os.sendfile
        self._most, self._fails_at, self._with_number = most, fails_at, with_number

    def __call__(self, target: int, source: int, start: int, count: int) -> int:
        self._calls += 1
        if self._calls >= self._fails_at:
            if self._with_number is None:
                return 0  # as at the end of a file that was cut
            raise OSError(self._with_number, os.strerror(self._with_number))
        sent = self._call(target, source, start, min(count, self._most))
        self.sent += sent
        return sent


@pytest.mark.parametrize(
    ("how", "num_sent"),
    [
        ({}, len(NUMBERS)),
        ({"most": 70_001}, len(NUMBERS)),
        ({"fails_at": 1, "with_number": errno.EINVAL}, 0),
        ({"most": 100_001, "fails_at": 3, "with_number": errno.ENOSYS}, 200_002),
        ({"most": 70_001, "fails_at": 2}, 70_001),
    ],
)
def test_a_value_in_a_file_arrives_whole_and_from_the_file_where_that_can_be(
    tmp_path: Path, in_file: Value, monkeypatch: pytest.MonkeyPatch, how: dict[str, int], num_sent: int
) -> None:
    watched = Sendfile(**how)
    items: dict[str, Bytes] = {"shade:a": in_file(NUMBERS), "shade:b": NUMBERS[::-1]}
    expected = b"".join(b"".join(_pieces((b"SET", key, value))) for key, value in items.items())
    monkeypatch.setattr(os, "sendfile", watched)
    with listening(tmp_path, len(expected)) as (url, received), open_store(url, timeout_seconds=10) as store:
        assert store.set_many(items) == [True, True]
    assert bytes(received) == expected
    assert watched.sent == num_sent


def test_only_what_lies_in_a_file_as_a_whole_is_sent_from_it(
    tmp_path: Path, in_file: Value, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = memoryview(in_file(NUMBERS))
    with (tmp_path / "other").open("w+b") as other:
        other.write(NUMBERS)
        other.flush()
        unknown = memoryview(mmap.mmap(other.fileno(), 0))
        known = torch.frombuffer(unknown, dtype=torch.uint8).data_ptr() + 1
        register_file_memory(other.fileno(), known, len(unknown) - 1)  # all of it but the first byte
        values = [unknown, inside.toreadonly(), inside[::2], inside.tobytes(), bytearray(NUMBERS)]
        items: dict[str, Bytes] = {f"shade:{number}": value for number, value in enumerate(values)}
        expected = b"".join(b"".join(_pieces((b"SET", key, value))) for key, value in items.items())
        watched = Sendfile()
        monkeypatch.setattr(os, "sendfile", watched)
        with listening(tmp_path, len(expected)) as (url, received), open_store(url, timeout_seconds=10) as store:
            assert store.set_many(items) == [True] * len(items)
        unregister_file_memory(other.fileno())
    assert bytes(received) == expected
    assert watched.sent == 0


def test_what_is_withdrawn_is_copied(tmp_path: Path, in_file: Value, monkeypatch: pytest.MonkeyPatch) -> None:
    value = in_file(NUMBERS)
    address = torch.frombuffer(value, dtype=torch.uint8).data_ptr()
    (descriptor,) = [each for each, memory in process._file_memory.items() if address in memory]
    unregister_file_memory(descriptor)
    unregister_file_memory(descriptor)
    watched = Sendfile()
    monkeypatch.setattr(os, "sendfile", watched)
    expected = b"".join(_pieces((b"SET", "shade:a", value)))
    with listening(tmp_path, len(expected)) as (url, received), open_store(url, timeout_seconds=10) as store:
        assert store.set_many({"shade:a": value}) == [True]
    assert bytes(received) == expected
    assert watched.sent == 0


def _pieces(*commands: Command) -> list[Bytes]:
    return list(Endpoint(path="/none").connection(1.0).pack_commands(commands))


def _parsed(*commands: Command) -> list[object]:
    """What another client's parser reads in what we would send."""
    reader = hiredis.Reader()
    reader.feed(b"".join(_pieces(*commands)))
    words = [reader.gets() for _ in commands]
    assert not reader.has_data()
    return words


def test_words() -> None:
    assert _parsed(("INCRBY", "ключ", -3), (b"GET", "a")) == [[b"INCRBY", "ключ".encode(), b"-3"], [b"GET", b"a"]]


SQUARE = memoryview(b"abcdefgh").cast("H", [2, 2])
LONG = memoryview(bytes(range(256)) * 64)


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b"\r\n", b"x" * 1000, b"x" * 10_000, bytearray(10_000), memoryview(b""), memoryview(b"0123")[::2]),
        *(SQUARE, LONG, LONG[::2], LONG.cast("H", [64, 128])),
    ],
)
def test_values(value: Bytes) -> None:
    assert _parsed((b"SET", "k", value), (b"SET", "k", value, b"NX")) == [
        [b"SET", b"k", bytes(value)],
        [b"SET", b"k", bytes(value), b"NX"],
    ]


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_a_large_value_is_not_copied(form: Callable[[bytes], Bytes]) -> None:
    value = form(b"v" * 10_000)
    large = max(_pieces((b"SET", "k", value)), key=len)
    assert large is value or (isinstance(large, memoryview) and large.obj is memoryview(value).obj)
