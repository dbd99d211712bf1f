"""The training script with every sampling mode and every policy, two epochs of a tiny data set each.

In this process: what a rank does, without the launcher around it. The server is a real one.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from shade import TrainSession
from shade.config import ACCESS_LOG, CACHE_URL, RUN_FILE, RunConfig
from shade.policy import POLICIES
from shade.sampling import MODES
from shade.store._servers.server import LocalServer
from tests.support.launching import ROOT, make_images, rows, saved_step

pytestmark = pytest.mark.multiprocess

ONLINE = [name for name in POLICIES if not POLICIES.get(name).offline]
Train = Callable[..., list[dict[str, object]]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 images."""
    return make_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """benchmarks/bench_cifar10.py, as a module."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("bench_cifar10")
    sys.path.remove(str(ROOT / "benchmarks"))
    for name in ("bench_cifar10", "networks"):
        del sys.modules[name]


@pytest.fixture
def train(data: Path, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    """Trains two epochs with some settings; returns the metrics."""
    root = logging.getLogger()
    handlers, level, generator = list(root.handlers), root.level, torch.get_rng_state()
    (tmp_path / "out").mkdir()
    with LocalServer() as server:

        def run(**settings: object) -> list[dict[str, object]]:
            plan = {
                "out": str(tmp_path / "out"),
                "script": "",
                "train_paths": (str(data),),
                "val_paths": (str(data),),
                "epochs": 2,
                "network": "cnn",
                "batch_size": 8,
                "cache": f"unix://{server.socket_path}",
                "working_set_fraction": 0.4,
                "workers": 0,
            }
            config = RunConfig(**(plan | settings))
            monkeypatch.delenv(CACHE_URL, raising=False)
            monkeypatch.delenv(RUN_FILE, raising=False)
            monkeypatch.setenv(ACCESS_LOG, str(tmp_path / "out" / "train.log"))
            config.save()
            with TrainSession(config) as session:
                script.train(session, config)
            return rows(tmp_path / "out")

        yield run
    root.handlers[:], root.level = handlers, level
    torch.set_rng_state(generator)


@pytest.mark.parametrize(
    "policy", [pytest.param(each, marks=[] if each in ("plan", "shade") else pytest.mark.slow) for each in ONLINE]
)
def test_every_policy_that_a_run_may_use(policy: str, train: Train) -> None:
    first, second = train(policy=policy)
    assert (first["samples"], first["hits"], second["store_errors"]) == (48, 0, 0)
    assert 0 < second["resident_bytes"] <= second["capacity_bytes"]  # type: ignore[operator]
    if policy not in ("lru", "fifo"):  # a scan of the whole data set leaves these two nothing to hit
        assert second["hits"] > 0  # type: ignore[operator]


@pytest.mark.parametrize("mode", list(MODES))
def test_every_sampling_mode(mode: str, train: Train) -> None:
    first, second = train(sampling=mode)
    assert first["samples"] == 48
    assert second["hits"] > 0  # type: ignore[operator]
    assert second["loss"] == second["loss"]
    assert second["val_accuracy"] is not None


def test_pads_repeats_cached_samples(train: Train) -> None:
    _, second = train(sampling="pads", replication_factor=3.0)
    assert second["samples"] == 48
    assert second["hits"] > 48 // 2  # type: ignore[operator]


def test_without_a_cache_it_trains_all_the_same(train: Train, tmp_path: Path) -> None:
    first, second = train(cache="none")
    assert (first["samples"], first["capacity_bytes"], second["val_accuracy"] is None) == (48, 0, False)
    assert (tmp_path / "out" / "trace.npz").exists()


@pytest.mark.parametrize("steps", [1, 6, 8])
def test_steps_end_a_run_in_mid_epoch_and_the_checkpoint_says_where(steps: int, train: Train, tmp_path: Path) -> None:
    train(steps=steps)
    assert saved_step(tmp_path / "out") == steps
    logged = (tmp_path / "out" / "train.log").read_text().splitlines()
    counted = sum(row["hits"] + row["misses"] for row in rows(tmp_path / "out"))
    assert sum(line.startswith(("hitting", "miss")) for line in logged) == counted
