"""The losses of a run lie on disk epoch by epoch, whole or not at all, and a resumed epoch has both its parts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shade.errors import DataError
from shade.importance import ImportanceTable
from shade.trajectory import LossRecorder, Samples, Trajectory, array_of
from shade.types import Floats

N = 5
WHO = Samples(tuple(f"/data/{n}.png" for n in range(N)), (0, 1, 0, 1, 0))


def losses(**known: float) -> Floats:
    loss_N = np.full(N, np.nan, dtype=np.float32)
    for name, value in known.items():
        loss_N[int(name[1:])] = value
    return loss_N


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    recorder = LossRecorder(tmp_path / "losses", lambda: WHO)
    recorder.end_epoch(0, losses(s0=1.5, s1=1e9, s4=0.25))
    recorder.end_epoch(2, losses(s2=3.0))
    found = Trajectory.load(tmp_path / "losses")
    assert (found.epochs, found.num_samples, found.samples) == ((0, 2), N, WHO)
    first, second = found.losses()
    np.testing.assert_array_equal(first, losses(s0=1.5, s1=65504.0, s4=0.25))
    np.testing.assert_array_equal(second, losses(s2=3.0))
    assert not list((tmp_path / "losses").glob(".*.new"))


def test_the_parts_of_a_resumed_epoch_complete_each_other(tmp_path: Path) -> None:
    for part in (losses(s0=1.0, s1=2.0), losses(s1=4.0, s2=8.0)):
        LossRecorder(tmp_path, lambda: WHO).end_epoch(7, part)
    np.testing.assert_array_equal(next(Trajectory.load(tmp_path).losses()), losses(s0=1.0, s1=4.0, s2=8.0))


def test_an_epoch_without_a_report_leaves_nothing_behind(tmp_path: Path) -> None:
    LossRecorder(tmp_path / "losses", lambda: WHO).end_epoch(0, losses())
    assert not (tmp_path / "losses").exists()
    with pytest.raises(DataError, match=r"sampler\.report"):
        Trajectory.load(tmp_path / "losses")


def test_samples_without_names_go_by_their_index(tmp_path: Path) -> None:
    LossRecorder(tmp_path, Samples).end_epoch(0, losses(s0=1.0))
    assert Trajectory.load(tmp_path).samples == Samples()
    (tmp_path / "samples.json.gz").write_bytes(b"torn")
    assert Trajectory.load(tmp_path).samples == Samples()


@pytest.mark.parametrize("dtype", ["|O", [("a", "<f8"), ("b", "|O")]])
def test_an_array_of_objects_is_refused(dtype: Any) -> None:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": (2,)})
    stream.write(bytes(64))  # NumPy takes a pointer of zeros for None
    with pytest.raises(ValueError, match="save numbers"):
        array_of(stream.getvalue())


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY torn", b"PK\x03\x04"])
def test_a_damaged_epoch_is_named(tmp_path: Path, content: bytes) -> None:
    LossRecorder(tmp_path, lambda: WHO).end_epoch(0, losses(s0=1.0))
    (tmp_path / "00001.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"00001\.npy"):
        Trajectory.load(tmp_path)


def test_losses_of_another_data_set_are_refused(tmp_path: Path) -> None:
    LossRecorder(tmp_path, lambda: WHO).end_epoch(0, losses(s0=1.0))
    np.save(tmp_path / "00001.npy", np.zeros(N + 1, np.float16))
    with pytest.raises(DataError, match="one data set"):
        Trajectory.load(tmp_path)


@pytest.mark.filterwarnings("ignore:report.. got a loss that is")
def test_the_table_gives_what_was_reported_and_forgets_it() -> None:
    table = ImportanceTable(N)
    table.update(np.array([1, 3]), np.array([2.0, np.inf], np.float32))
    table.update(np.array([1]), np.array([1.0], np.float32))
    np.testing.assert_array_equal(table.take_losses(), losses(s1=1.0))
    assert np.isnan(table.take_losses()).all()
    assert table.score_N[1] == 1.5, "the score is an average, the loss is not"
    assert table.takes_losses
    assert not ImportanceTable(N, "grad-norm").takes_losses
