"""The engine for DeepSpeed by itself: states go in and come out, and what is no state of ours is refused.

What DeepSpeed does with it is in tests/integration/test_deepspeed.py. Skipped where DeepSpeed is not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from shade.errors import CheckpointError, ConfigError, CorruptCheckpointError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("DS_ACCELERATOR", "cpu")
        warnings.simplefilter("ignore")  # DeepSpeed's own
        yield importlib.import_module("shade.checkpoint.deepspeed")


@pytest.fixture
def engine(module: ModuleType, tmp_path: Path) -> Iterator[Any]:
    made = module.ShadeCheckpointEngine(persist_to=str(tmp_path / "volume"))
    yield made
    made.cleanup()


def state(module: ModuleType, value: float = 0.0) -> dict[str, Any]:
    """As DeepSpeed's first ZeRO stages have it."""
    weights = OrderedDict(weight=torch.arange(2000.0) + value, bias=torch.zeros(3))
    weights._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    return {
        "module": weights,
        "loss_scaler": module.LossScaler(scale=128.0),
        "dynamic": module.DynamicLossScaler(
            init_scale=2.0**16, scale_window=1000, min_scale=1, delayed_shift=2, consecutive_hysteresis=False
        ),
        "zero_stage": module.ZeroStageEnum.gradients,
        "param_slice_mappings": [OrderedDict(weight=module.fragment_address(numel=5, start=2))],
        "param_shapes": [OrderedDict(weight=torch.Size([2000]))],
        "words": ("a", ["b", None]),
    }


def saved(module: ModuleType, engine: Any, folder: Path, tag: str, value: float = 0.0) -> str:
    """A checkpoint of one state; its path."""
    info = module.CheckpointCommitInfo(tag=tag, save_dir=str(folder), save_latest=True)
    path = str(folder / tag / "mp_rank_00_model_states.pt")
    engine.create(info)
    engine.save(state(module, value), path)
    assert engine.commit(info)
    return path


def test_what_goes_in_comes_out(module: ModuleType, engine: Any, tmp_path: Path) -> None:
    path = saved(module, engine, tmp_path, "global_step7")
    found, expected = engine.load(path, map_location="cpu"), state(module)
    assert torch.equal(found["module"]["weight"], expected["module"]["weight"])
    assert found["module"]._metadata == {"": {"version": 1}}
    assert type(found["loss_scaler"]) is module.LossScaler
    assert found["loss_scaler"].cur_scale == 128.0
    assert vars(found["dynamic"]) == vars(expected["dynamic"])
    assert found["zero_stage"] is module.ZeroStageEnum.gradients
    assert found["param_slice_mappings"] == expected["param_slice_mappings"]
    assert found["param_shapes"] == expected["param_shapes"]
    assert found["words"] == expected["words"]
    assert [snapshot.record.step for snapshot in engine.checkpointer.list()] == [7]


def test_a_state_is_not_changed_by_saving_it(module: ModuleType) -> None:
    given = state(module)
    made = module.plain(given)
    assert type(given["loss_scaler"]) is module.LossScaler
    assert made["module"] is given["module"]  # nothing of DeepSpeed's in there: not even copied
    assert module.plain({"a": [1, (2, 3)]}) == {"a": [1, (2, 3)]}


def test_each_tag_is_its_own(module: ModuleType, engine: Any, tmp_path: Path) -> None:
    first = saved(module, engine, tmp_path, "global_step7")
    second = saved(module, engine, tmp_path, "global_step9", 1.0)
    third = saved(module, engine, tmp_path, "final", 2.0)  # without a number: the next
    found = [float(engine.load(path)["module"]["weight"][0]) for path in (first, second, third)]
    assert found == [0.0, 1.0, 2.0]
    assert [snapshot.record.step for snapshot in engine.checkpointer.list()] == [10, 9, 7]


def test_two_tags_two_folders_and_a_copy_of_one_number_are_told_apart(
    module: ModuleType, engine: Any, tmp_path: Path
) -> None:
    copied = saved(module, engine, tmp_path / "one", "a7")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    paths = [saved(module, engine, tmp_path / folder, tag, 1.0 + number) for number, (folder, tag) in enumerate(PAIRS)]
    found = [float(engine.load(path)["module"]["weight"][0]) for path in [copied.replace("one", "copy"), *paths[1:]]]
    assert found == [0.0, 2.0, 3.0]
    assert float(engine.load(copied)["module"]["weight"][0]) == 1.0  # saved again in its place


PAIRS = [("one", "a7"), ("one", "b7"), ("two", "a7")]


def test_a_snapshot_that_is_gone_is_said(module: ModuleType, engine: Any, tmp_path: Path) -> None:
    path = saved(module, engine, tmp_path, "global_step7")
    note = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps(note | {"step": 8}))
    with pytest.raises(CheckpointError, match=r"a snapshot of step 8 for 'global_step7', got 'others, of steps 7'"):
        engine.load(path)


@pytest.mark.parametrize("content", [b"", b"{}", b"PK\x03\x04", b'{"shade.deepspeed": 1}', b"[1]"])
def test_what_is_no_note(engine: Any, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="leave the engine as DeepSpeed has it"):
        engine.load(str(path))
    with pytest.raises(CheckpointError, match="a note of ours"):
        engine.load(str(tmp_path / "none.pt"))


def test_an_object_of_another_class_is_neither_saved_nor_made(module: ModuleType, engine: Any, tmp_path: Path) -> None:
    info = module.CheckpointCommitInfo(tag="1", save_dir=str(tmp_path), save_latest=True)
    engine.create(info)
    engine.save({"scaler": object()}, str(tmp_path / "1" / "x.pt"))
    with pytest.raises(ConfigError, match="give its state as dicts"):
        engine.commit(info)
    assert not list(tmp_path.rglob("*.pt"))
    with pytest.raises(CorruptCheckpointError, match="got 'system'"):
        module.from_plain({"%deepspeed": "system", "fields": {}})
    with pytest.raises(ConfigError, match="give it another name"):
        module.plain({"%deepspeed": 1})
    with pytest.raises(CheckpointError, match="give its state as dicts"):  # that the last save failed is said once more
        engine.cleanup()


@pytest.mark.multiprocess
def test_without_deepspeed_the_extra_is_named() -> None:
    import subprocess
    import sys

    hidden = "import sys; sys.modules['deepspeed'] = None\nimport shade.checkpoint.deepspeed"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert "pip install 'torch-shade[deepspeed]'" in done.stderr
