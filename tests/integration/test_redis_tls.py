"""TLS that does not come about is a refusal, said as such: who cannot prove himself, on either side, gets no bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shade.errors import ConfigError, StoreAuthError, StoreUnavailableError
from shade.store import StoreURL, open_store
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


def test_a_server_without_tls_is_not_taken_for_one(get_place: Callable[[str], Place]) -> None:
    plain = StoreURL.parse(get_place("redis").url)
    (host, port), *_ = plain.addresses
    with open_store(f"rediss://{host}:{port}") as store, pytest.raises(StoreUnavailableError):
        store.ping()
