"""Keys: there and back, and even over a cluster."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from shade.errors import ConfigError
from shade.store.keys import NUM_SLOTS, SampleKeys, balanced_tags

KEYS = SampleKeys("9f2c41d07ab3e655")


@given(st.integers(0, 2**40))
def test_an_index_comes_back_from_its_key(index: int) -> None:
    key = KEYS.key(index)
    assert KEYS.index_of(key) == index
    assert KEYS.many([index]) == [key]
    assert KEYS.many(np.array([index])) == [key]
    assert key.startswith(KEYS.prefix)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "shade:9f2c41d07ab3e655:{0}",
        KEYS.counter_key("7"),
        SampleKeys("another").key(7),
        KEYS.key(7) + "x",
        KEYS.key(8).replace("}8", "}9"),
        KEYS.key(7).replace("}7", "}07"),
        KEYS.key(7).replace("}7", "}٧"),
    ],
)
def test_no_sample_of_ours(key: str) -> None:
    assert KEYS.index_of(key) is None


@pytest.mark.parametrize("num_nodes", [3, 5, 16, 64])
@pytest.mark.parametrize("num_samples", [300, 50_000])
def test_nodes_get_equal_shares(num_nodes: int, num_samples: int) -> None:
    node_N = np.array([key_slot(key.encode()) * num_nodes // NUM_SLOTS for key in KEYS.many(range(num_samples))])
    share_W = np.bincount(node_N, minlength=num_nodes)
    mean = num_samples / num_nodes
    assert share_W.max() <= 1.03 * mean + 2
    assert share_W.min() >= 0.97 * mean - 2


def test_every_bucket_is_in_its_own_part() -> None:
    for num_buckets in (1, 2, 64, 4096):
        tags = balanced_tags(num_buckets)
        assert [key_slot(tag.encode()) * num_buckets // NUM_SLOTS for tag in tags] == list(range(num_buckets))


def test_keys_are_part_of_the_address_and_never_change() -> None:
    """Another version of this package, sharing the cache, must find what this one wrote."""
    golden = ["shade:n:{1bz}0", "shade:n:{22y}1", "shade:n:{99}4095", "shade:n:{1bz}4096"]
    assert SampleKeys("n").many([0, 1, 4095, 4096]) == golden


def test_the_longest_key_is_announced() -> None:
    assert max(map(len, KEYS.many(range(9_990_000, 10_000_000)))) <= KEYS.key_length


def test_travels_by_pickle() -> None:
    assert pickle.loads(pickle.dumps(KEYS)).many(range(100)) == KEYS.many(range(100))


@pytest.mark.parametrize("namespace", ["", "a:b", "a{b", "a b", "a*", "ä"])
def test_namespaces_that_would_mean_something(namespace: str) -> None:
    with pytest.raises(ConfigError):
        SampleKeys(namespace)


@pytest.mark.parametrize("num_buckets", [0, 3, 32768])
def test_numbers_of_buckets(num_buckets: int) -> None:
    with pytest.raises(ConfigError):
        SampleKeys("n", num_buckets)
