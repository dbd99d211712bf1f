"""Servers whose logins expire: a provider gives every new connection the present token, and training sees no change."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shade import ShadeDataset, open_store
from shade.errors import ConfigError, StoreAuthError, StoreUnavailableError
from shade.store._servers.local_cluster import LocalCluster
from shade.store._servers.server import find_server_binary
from shade.store.node import Node
from tests.conftest import PASSWORD, documented_rights
from tests.support.tokens import TOKEN_FILE, USER

pytestmark = [pytest.mark.redis, pytest.mark.multiprocess]

N, B = 64, 8
PROVIDER = "credentials=tests.support.tokens:FileTokens"


def knows_names(binary: str) -> bool:
    """Whether a server can announce itself by a host name: Redis 7 and Valkey, not Redis 6."""
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    return "v=6." not in version


class ManagedCluster(LocalCluster):
    """A cluster as clouds rent it out: nodes are known by host names, the user's rights are few, tokens expire."""

    def __init__(self, token_file: Path) -> None:
        super().__init__(3, password=PASSWORD)
        self._token_file, self._tokens = token_file, [secrets.token_hex()]
        token_file.write_text(self._tokens[0])

    def settings_of(self, port: int) -> Mapping[str, str]:
        """See `LocalCluster`."""
        names = {"cluster-announce-hostname": "localhost", "cluster-preferred-endpoint-type": "hostname"}
        rights = {"user": f'{USER} on ">{self._tokens[0]}" {documented_rights()}'}
        return rights | (names if knows_names(find_server_binary()) else {})

    def rotate(self) -> None:
        """Makes a new token; the one before stays valid until the next time, and every connection is cut."""
        self._tokens.append(secrets.token_hex())
        valid = [f">{token}" for token in self._tokens[-2:]]
        for server in self.servers:
            node = Node(server.endpoint(), 5.0)
            changed, _ = node.ask(
                ("ACL", "SETUSER", USER, "resetpass", *valid), ("CLIENT", "KILL", "USER", USER, "SKIPME", "yes")
            )
            assert changed == b"OK"
            node.retire()
        self._token_file.write_text(self._tokens[-1])

    @property
    def token(self) -> str:
        """The present token."""
        return self._tokens[-1]

    @property
    def managed_url(self) -> str:
        """The address, and where the tokens come from."""
        (_, port), *_ = self.url.addresses
        return f"redis+cluster://localhost:{port}?{PROVIDER}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedCluster]:
    token_file = tmp_path_factory.mktemp("tokens") / "token"
    with pytest.MonkeyPatch.context() as patch, ManagedCluster(token_file) as cluster:
        patch.setattr("shade.cache.breaker.SLOW_SECONDS", 60.0)  # a busy machine is no reason to leave the cache alone
        patch.setenv(TOKEN_FILE, str(token_file))
        yield cluster


@pytest.mark.parametrize(
    ("num_batches", "num_rotations"), [(400, 5), pytest.param(10_000, 40, marks=pytest.mark.slow)], ids=str
)
def test_training_sees_nothing_of_tokens_that_expire(
    cluster: ManagedCluster, num_batches: int, num_rotations: int
) -> None:
    items = TensorDataset(torch.arange(N) * 1.5 + num_batches)
    with contextlib.closing(ShadeDataset(items, cache=cluster.managed_url, working_set_fraction=1.0)) as dataset:
        batches = [range(start, start + B) for start in range(0, N, B)]
        for batch in batches:
            dataset.__getitems__(batch)
        before = dataset.stats()
        for number in range(num_batches):
            if number % (num_batches // num_rotations) == 0:
                cluster.rotate()
            batch = batches[number % len(batches)]
            assert [item[0].item() for item in dataset.__getitems__(batch)] == [
                1.5 * index + num_batches for index in batch
            ]
        after = dataset.stats()
    assert after["hits"] - before["hits"] == num_batches * B
    assert after["store_errors"] == 0


def test_workers_ask_for_tokens_of_their_own(cluster: ManagedCluster) -> None:
    items = TensorDataset(torch.arange(N))
    with contextlib.closing(ShadeDataset(items, cache=cluster.managed_url, working_set_fraction=1.0)) as dataset:
        for _ in range(2):
            cluster.rotate()
            loader = DataLoader(dataset, batch_size=B, num_workers=2)
            assert torch.cat([batch[0] for batch in loader]).tolist() == list(range(N))
        assert dataset.stats()["hits"] == N
        assert dataset.stats()["store_errors"] == 0


def test_an_old_token_is_a_refused_login(
    cluster: ManagedCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "old").write_text(cluster.token)
    cluster.rotate()
    cluster.rotate()
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "old"))
    with open_store(cluster.managed_url) as store, pytest.raises(StoreAuthError, match="WRONGPASS"):
        store.ping()


def test_a_token_service_that_is_out_is_a_server_that_cannot_be_reached(cluster: ManagedCluster) -> None:
    url = cluster.managed_url.replace("FileTokens", "NoTokens")
    with open_store(url) as store, pytest.raises(StoreUnavailableError, match="the token service is out"):
        store.ping()


@pytest.mark.parametrize("name", ["tests.support.tokens:Nothing", "no_such_module:Tokens", "json:loads", "json"])
def test_what_is_no_provider_is_refused_by_name(cluster: ManagedCluster, name: str) -> None:
    url = cluster.managed_url.replace("tests.support.tokens:FileTokens", name)
    with open_store(url) as store, pytest.raises(ConfigError, match=name):
        store.ping()
