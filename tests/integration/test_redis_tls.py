"""TLS that does not come about is a refusal, said as such: who cannot prove himself, on either side, gets no bytes."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shade.errors import ConfigError, StoreAuthError, StoreUnavailableError
from shade.store import open_store
from shade.store._servers.local_cluster import free_ports
from shade.store._servers.server import LocalServer
from tests.conftest import Place

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def place(get_place: Callable[[str], Place]) -> Place:
    return get_place("rediss")


def _with_options(place: Place, query: str) -> str:
    return place.url.partition("?")[0] + query


@pytest.mark.parametrize("query", ["", "?ca={0}/ca.crt"], ids=["server-not-trusted", "client-not-proven"])
def test_no_trust_no_bytes(place: Place, certificates: Path, query: str) -> None:
    with (
        open_store(_with_options(place, query.format(certificates)), timeout_seconds=1) as store,
        pytest.raises(StoreAuthError, match="TLS"),
    ):
        store.ping()


def test_a_certificate_is_for_a_name(place: Place) -> None:
    with open_store(place.url.replace("127.0.0.1", "localhost")) as store, pytest.raises(StoreAuthError):
        store.ping()


def test_certificates_that_cannot_be_read(place: Place) -> None:
    with open_store(_with_options(place, "?ca=/none.crt")) as store, pytest.raises(ConfigError, match=r"/none\.crt"):
        store.ping()


class TlsDoor:
    """Speaks TLS for a server that was built without it."""

    def __init__(self, port: int, certificates: Path) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates / "node.crt", certificates / "node.key")
        self._target = port
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the door was closed
            while True:
                visitor, _ = self._door.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(visitor,)))
                self._threads[-1].start()

    def _serve(self, visitor: socket.socket) -> None:
        with visitor, contextlib.suppress(OSError):
            near = self._context.wrap_socket(visitor, server_side=True)
            with near, socket.create_connection(("127.0.0.1", self._target)) as far:
                while question := near.recv(1 << 16):
                    far.sendall(question)
                    near.sendall(far.recv(1 << 16))

    def close(self) -> None:
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for thread in self._threads:
            thread.join(5)


@pytest.mark.parametrize("cluster", ["", "+cluster"])
def test_tls_and_plain_ports_are_told_apart(cluster: str, tmp_path: Path, certificates: Path) -> None:
    (port,) = free_ports(1)
    with LocalServer(directory=tmp_path, settings={"port": str(port)}):
        door = TlsDoor(port, certificates)
        try:
            plain, encrypted = f"127.0.0.1:{port}", f"127.0.0.1:{door.port}"
            ca = f"?ca={certificates}/ca.crt"
            for url, cure in (
                (f"redis{cluster}://{encrypted}", r"write rediss:// \(rediss\+cluster:// for a cluster\)"),
                (f"rediss{cluster}://{plain}{ca}", r"write redis:// \(redis\+cluster:// for a cluster\)"),
            ):
                with open_store(url, timeout_seconds=1) as store, pytest.raises(ConfigError, match=cure):
                    store.ping()
            for url in (f"rediss://{encrypted}{ca}", f"redis://{plain}"):
                with open_store(url, timeout_seconds=5) as store:
                    store.ping()
        finally:
            door.close()


def test_a_dead_port_is_neither(tmp_path: Path) -> None:
    for scheme in ("redis", "rediss"):
        with open_store(f"{scheme}://127.0.0.1:1") as store, pytest.raises(StoreUnavailableError, match="refused"):
            store.ping()
