"""States leave for other libraries and come back, and nothing that a file brings along is executed."""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from shade.checkpoint._capture.app_state import RandomState
from shade.checkpoint._capture.flatten import flatten
from shade.checkpoint._interchange.export import (
    FORMS,
    export,
    load_state,
    plain,
    save_safetensors,
    save_state,
    state_of,
)
from shade.errors import ConfigError, CorruptCheckpointError, StorageError
from tests.support.states import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


class Snapshot:
    """As small as a source can be."""

    def __init__(self, state: Any) -> None:
        self.tree, self._tensors = flatten(state)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = torch.nn.Sequential(OrderedDict(a=torch.nn.Linear(3, 4), norm=torch.nn.BatchNorm1d(4)))
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return module, optimizer


def state() -> dict[str, Any]:
    module, optimizer = build()
    model = module.state_dict()
    return {
        "model": model,
        "optimizer": optimizer.state_dict(),
        "random": RandomState().state_dict(),
        "misc": {
            "tied": model["a.weight"],
            "half": torch.rand(3).bfloat16(),
            "complex": torch.rand(2, dtype=torch.complex128),
            "empty": torch.empty(0, 3),
            "scalar": np.float32(0.1),
            "strings": np.array(["a", "bc"]),
            "scores": [0.5] * 1000,
            "un\udc80decodable": torch.ones(1),
            "nested": (1, [torch.ones(2), None], deque([1], 3)),
            "blob": bytes(1000),
            "default": defaultdict(int, a=1),
            5: {"a.b/c@%": torch.full((1,), 5.0)},
        },
    }


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_a_state_comes_back_as_it_was(form: str, tmp_path: Path) -> None:
    original = state()
    save_state(original, tmp_path / "file", form)
    found = load_state(tmp_path / "file", form)
    assert_same(found, original)
    assert found["misc"]["tied"].data_ptr() == found["model"]["a.weight"].data_ptr()
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("form", list(FORMS))
def test_training_goes_on_from_what_comes_back(form: str, tmp_path: Path) -> None:
    save_state(state(), tmp_path / "file", form)
    found = load_state(tmp_path / "file", form)
    module, optimizer = build()
    for value in (*module.state_dict().values(), *(each["exp_avg"] for each in optimizer.state.values())):
        value.zero_()
    module.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    assert_same(module.state_dict(), state()["model"])
    assert_same(optimizer.state_dict(), state()["optimizer"])


def test_others_read_what_is_exported(tmp_path: Path) -> None:
    original = state()
    weight = original["model"]["a.weight"]
    snapshot = Snapshot(original)
    export(snapshot, tmp_path / "all.safetensors", "safetensors")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "all.safetensors")["model/a.weight"], weight)
    export(snapshot, tmp_path / "model.safetensors", "safetensors", only="model")
    module, _ = build()
    safetensors.torch.load_model(module, str(tmp_path / "model.safetensors"))
    export(snapshot, tmp_path / "all.pt", "torch")
    assert torch.equal(torch.load(tmp_path / "all.pt", weights_only=True)["model"]["a.weight"], weight)
    export(snapshot, tmp_path / "all.dcp", "dcp")
    wanted = {"model": {name: torch.zeros_like(tensor) for name, tensor in original["model"].items()}}
    dcp.load(wanted, checkpoint_id=tmp_path / "all.dcp", no_dist=True)
    assert_same(wanted["model"], dict(original["model"]))
    dcp_to_torch_save(tmp_path / "all.dcp", tmp_path / "converted.pt")
    assert torch.equal(torch.load(tmp_path / "converted.pt", weights_only=False)["model"]["a.weight"], weight)


class Tied(torch.nn.Module):
    """Weights and buffers that are one, or parts of one, and names that a path would escape."""

    def __init__(self, *, tie: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleDict({"in/out": torch.nn.Embedding(6, 4), "é 50%": torch.nn.Linear(4, 6)})
        self.head = torch.nn.Linear(4, 6, bias=False)
        table = torch.rand(8)
        for name in ("whole", "same"):
            self.register_buffer(name, table if tie else torch.zeros(8))
        for name, part in (("first", slice(0, 5)), ("last", slice(3, 8))):
            self.register_buffer(name, table[part] if tie else torch.zeros(5))
        if tie:
            self.head.weight = self.layers["in/out"].weight


@pytest.mark.parametrize("form", ["safetensors", "several safetensors", "torch"])
def test_tied_weights_load_strictly_elsewhere(form: str, tmp_path: Path) -> None:
    source, path = Tied(), tmp_path / "model"
    if form == "torch":
        save_state(source.state_dict(), path, form)
        found = torch.load(path)
    elif form == "safetensors":
        save_state(source.state_dict(), path, form)
        found = safetensors.torch.load_file(path)
    else:
        save_safetensors(source.state_dict(), path, max_file_bytes=100)
        found = {}
        for file in path.glob("*.safetensors"):
            found |= safetensors.torch.load_file(file)
        index = json.loads((path / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == found.keys()
    for tie in (True, False):
        target = Tied(tie=tie)
        for parameter in target.parameters():
            torch.nn.init.zeros_(parameter)
        target.load_state_dict(found, strict=True)
        assert_same(dict(target.state_dict()), dict(source.state_dict()))
    if form != "torch":
        again = load_state(path, "safetensors")
        assert again["head.weight"] is again["layers.in/out.weight"], "one again"


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_a_safetensors_file_names_the_types_that_a_snapshot_stores_as_bytes(dtype: torch.dtype, tmp_path: Path) -> None:
    scale = torch.full((4,), 4.0).to(dtype)
    state = {
        "scale": scale,
        "tied": scale,
        "plain": torch.arange(3, dtype=torch.uint8),
        "codes": scale.view(torch.uint8),
    }
    save_state(state, tmp_path / "own.safetensors", "safetensors")
    found = safetensors.torch.load_file(tmp_path / "own.safetensors")
    assert [found[name].dtype for name in ("scale", "tied", "plain")] == [dtype, dtype, torch.uint8]
    assert torch.equal(found["scale"].float(), torch.full((4,), 4.0))
    assert_same(load_state(tmp_path / "own.safetensors", "safetensors"), state)


def test_a_part_is_asked_for_by_name() -> None:
    assert_same(state_of(Snapshot(state()), "model"), state()["model"])
    for value in (state(), [1]):
        with pytest.raises(ConfigError, match="'modle'"):
            state_of(Snapshot(value), "modle")


def test_files_of_others_are_read(tmp_path: Path) -> None:
    tensors = {"b": torch.rand(3), "a": torch.rand(2).bfloat16()}
    safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors")
    found = load_state(tmp_path / "theirs.safetensors", "safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    torch.save({"model": tensors, "epoch": 3}, tmp_path / "theirs.pt")
    assert load_state(tmp_path / "theirs.pt", "torch")["epoch"] == 3
    torch_save_to_dcp(tmp_path / "theirs.pt", tmp_path / "theirs.dcp")
    found = load_state(tmp_path / "theirs.dcp", "dcp")
    assert found["epoch"] == 3
    assert torch.equal(found["model"]["b"], tensors["b"])


def test_a_large_state_is_split_into_files_with_an_index(tmp_path: Path) -> None:
    original = {f"layer{number}": torch.rand(100) for number in range(10)}
    save_safetensors(original, tmp_path / "model", max_file_bytes=1000)
    files = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert files == [f"model-{number:05}-of-00005.safetensors" for number in range(1, 6)]
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4000
    for name, file in index["weight_map"].items():
        assert torch.equal(safetensors.torch.load_file(tmp_path / "model" / file)[name], original[name])
    assert_same(load_state(tmp_path / "model", "safetensors"), original)
    assert_same(load_state(tmp_path / "model" / "model.safetensors.index.json", "safetensors"), original)
    (tmp_path / "model" / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigError, match="5 in"):
        load_state(tmp_path / "model", "safetensors")


def test_an_index_names_no_files_elsewhere(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    (tmp_path / "inside").mkdir()
    index = tmp_path / "inside" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(CorruptCheckpointError, match="beside"):
        load_state(index, "safetensors")


class Trap:
    """Does something when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.target,)


def test_nothing_that_a_file_brings_along_is_executed(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    torch.save({"a": Trap(sprung)}, tmp_path / "trap.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Trap(sprung), 2))
    dcp.save({"a": Trap(sprung)}, checkpoint_id=tmp_path / "trap.dcp", no_dist=True)
    dcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "metadata.dcp", no_dist=True)
    (tmp_path / "metadata.dcp" / ".metadata").write_bytes(pickle.dumps(Trap(sprung), 2))
    for name, form in (("trap.pt", "torch"), ("plain.pt", "torch"), ("trap.dcp", "dcp"), ("metadata.dcp", "dcp")):
        with pytest.raises(CorruptCheckpointError):
            load_state(tmp_path / name, form)
        assert not sprung.exists(), name


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("content", [b"", b"x" * 100, struct.pack("<Q", 2**60) + b"{}", pickle.dumps([1], 2)])
def test_files_that_are_none_are_refused(form: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if form == "dcp":
        path.mkdir()
        with pytest.raises(CorruptCheckpointError):
            load_state(path, form)
        (path / ".metadata").write_bytes(content)
    else:
        path.write_bytes(content)
    with pytest.raises(CorruptCheckpointError):
        load_state(path, form)


@pytest.mark.parametrize("form", list(FORMS))
def test_a_path_appears_whole_or_not_at_all(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nothing at"):
        load_state(tmp_path / "file", form)
    save_state({"a": torch.ones(2)}, tmp_path / "new" / "file", form)
    with pytest.raises(ConfigError, match="remove it"):
        save_state({"a": torch.ones(2)}, tmp_path / "new" / "file", form)

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match="No space left"):
        save_state({"a": torch.ones(2)}, tmp_path / "full", form)
    assert os.listdir(tmp_path) == ["new"]


def test_what_cannot_be_done_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="safetensors, torch, dcp"):
        save_state({}, tmp_path / "file", "pickle")
    with pytest.raises(ConfigError, match="'shade'"):
        save_state({"shade": 1}, tmp_path / "file", "dcp")
    with pytest.raises(ConfigError, match="for DCP"):
        save_state([1], tmp_path / "file", "dcp")
    assert os.listdir(tmp_path) == []
    save_state({"a": torch.ones(1)}, tmp_path / "file", "safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ConfigError, match=r"shade\[checkpoint\]"):
        load_state(tmp_path / "file", "safetensors")


def test_a_part_of_a_large_memory_does_not_take_it_along(tmp_path: Path) -> None:
    whole = torch.zeros(1_000_000)
    parts = {"a": whole[:10], "b": whole[10:20], "again": whole[:10]}
    save_state(parts, tmp_path / "file", "torch")
    assert (tmp_path / "file").stat().st_size < 10_000
    found = load_state(tmp_path / "file", "torch")
    assert found["a"].data_ptr() == found["again"].data_ptr()
    assert plain({"whole": whole})["whole"] is whole


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (np.datetime64("2024-01-01"), "2024-01-01"),
        (np.datetime64("2024-01-01T00:00:01", "ns"), "2024-01-01T00:00:01.000000000"),
        (np.timedelta64(3, "s"), "3 seconds"),
        (np.array(["2024-01-01", "NaT"], dtype="M8[D]"), ["2024-01-01", "NaT"]),
        (np.array(["a", "bc"]), ["a", "bc"]),
        (np.longdouble(0.5), 0.5),
        (np.array([0.5], dtype=np.longdouble), [0.5]),
        ({np.int64(3), np.str_("a")}, {3, "a"}),
        (frozenset([np.float32(0.5)]), {0.5}),
        ({np.int8(-3): np.bool_(True)}, {-3: True}),
    ],
)
def test_whatever_can_be_saved_opens_with_torch_load(value: object, wanted: object, tmp_path: Path) -> None:
    flatten({"value": value})
    export = tmp_path / "state.pt"
    save_state({"value": value}, export, "torch")
    assert torch.load(export, weights_only=True) == {"value": wanted}
