"""The compiled loops give the bits of the oracle, on every processor; without a compiler they are refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shade.errors import ConfigError
from shade.gradient._compress.correction import AdamCorrection
from shade.gradient._kernels import build as building
from shade.gradient._kernels.build import build, prepare
from shade.gradient._kernels.lines import LINE, OVERFLOW, TILE, aligned_zeros, as_lines
from tests.support import kernel_oracle as oracle

WAYS = {"numpy": oracle, "numba": prepare()}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
SIZES = (0, 1, 15, 16, 17, 63, 64, 65, 100, TILE - 1, TILE, TILE + 1, 3 * TILE + 33)


def bucket(size: int) -> tuple[np.ndarray, np.ndarray]:
    """A gradient and a residual, off the alignment that a rest has."""
    rng = np.random.default_rng(size)
    room = rng.standard_normal((2, size + 1), dtype=np.float32)
    return room[0, 1:], room[1, 1:]


def elements(way: Any, size: int, threshold: float, room: int | None = None) -> tuple[bytes, ...] | int:
    """All that a walk for elements leaves behind."""
    gradient_D, residual_D = bucket(size)
    rest_D, room = aligned_zeros(size), size + TILE if room is None else room
    places, values = np.zeros(room, dtype=np.uint32), np.zeros(room, dtype=np.float32)
    count = way.pick_elements(gradient_D, residual_D, rest_D, threshold, places, values)
    return count if count == OVERFLOW else (places[:count].tobytes(), values[:count].tobytes(), rest_D.tobytes())


def lines(way: Any, size: int, threshold: float, room: int | None = None) -> tuple[bytes, ...] | int:
    """All that a walk for lines leaves behind."""
    gradient_D, residual_D = bucket(size)
    rest_D, room = aligned_zeros(size), (size + TILE) // LINE + 1 if room is None else room
    places, values = np.zeros(room, dtype=np.uint32), np.zeros(room * LINE, dtype=np.float32)
    count = way.pick_lines(gradient_D, residual_D, rest_D, 0.25, threshold, places, values)
    if count == OVERFLOW:
        return count
    return places[:count].tobytes(), values[: count * LINE].tobytes(), rest_D.tobytes()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 4095, 4096, 4097, 3 * 4096 + 100])
def test_every_way_picks_the_same_of_each_chunk(size: int) -> None:
    """Coarse values, so that many are equal: the first of them are picked."""
    gradient_D, residual_D = (np.round(each * 4) / 4 for each in bucket(size))
    for density in (1e-5, 1 / 64, 0.3, 1.0):
        left = []
        for way in WAYS.values():
            rest_D, places, values = aligned_zeros(size), np.zeros(size, np.uint32), np.zeros(size, np.float32)
            count = way.pick_chunks(gradient_D, residual_D, rest_D, density, places, values)
            left.append((places[:count].tobytes(), values[:count].tobytes(), rest_D.tobytes()))
        assert left[0] == left[1]


@each_way
def test_chunks_that_are_not_finite_are_refused(way: Any) -> None:
    for place, bad in ((0, np.nan), (5000, np.inf), (4095, -np.inf)):
        gradient_D, residual_D, places = bucket(5001)[0].copy(), np.zeros(5001, np.float32), np.zeros(100, np.uint32)
        gradient_D[place] = bad
        assert way.pick_chunks(gradient_D, residual_D, aligned_zeros(5001), 1e-5, places, places.view("f4")) == OVERFLOW


def momentum(way: Any, size: int) -> bytes:
    """What a step of momentum leaves behind."""
    velocity_D, gradient_D = bucket(size)
    gained_D = aligned_zeros(size)
    way.gain_momentum(velocity_D, gradient_D, 0.9, gained_D)
    return gained_D.tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_every_way_gains_the_same_momentum(size: int) -> None:
    """Rounded after the product and after the sum: nowhere fused into one."""
    velocity_D, gradient_D = bucket(size)
    expected = (np.float32(0.9) * velocity_D + gradient_D).tobytes()
    assert [momentum(way, size) for way in WAYS.values()] == [expected] * len(WAYS)


def adam(way: Any, size: int) -> bytes:
    """What a step of Adam's moments leaves behind."""
    first_D, second_D = bucket(size)
    results = np.empty((3, size), dtype=np.float32)
    coefficients = AdamCorrection((0.9, 0.999)).coefficients(3)
    new_first_D, new_second_D, direction_D = results
    way.gain_adam(first_D, second_D**2, first_D[::-1].copy(), coefficients, new_first_D, new_second_D, direction_D)
    return results.tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_every_way_gains_the_same_moments(size: int) -> None:
    assert {adam(way, size) for way in WAYS.values()} == {adam(oracle, size)}


@pytest.mark.parametrize("size", SIZES)
def test_without_a_first_moment_all_else_is_the_same(size: int) -> None:
    gradient_D, second_D = bucket(size)
    coefficients = AdamCorrection((0.0, 0.999)).coefficients(3)
    _, expected_D, direction_D = expected = np.empty((3, size), dtype=np.float32)
    oracle.gain_adam(np.zeros(size, np.float32), second_D**2, gradient_D, coefficients, *expected)
    for way in WAYS.values():
        found = np.empty((2, size), dtype=np.float32)
        way.gain_second(second_D**2, gradient_D, coefficients, *found)
        assert found.tobytes() == np.stack([expected_D, direction_D]).tobytes()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threshold", [0.0, 0.7, 2.5, np.inf])
def test_every_way_finds_the_same_elements(size: int, threshold: float) -> None:
    expected = elements(oracle, size, threshold)
    assert [elements(way, size, threshold) for way in WAYS.values()] == [expected] * len(WAYS)
    gradient_D, residual_D = bucket(size)
    sum_D = gradient_D + residual_D
    is_picked = np.abs(sum_D) >= np.float32(threshold)
    assert expected == (
        np.flatnonzero(is_picked).astype(np.uint32).tobytes(),
        sum_D[is_picked].tobytes(),
        np.where(is_picked, np.float32(0), sum_D).tobytes(),
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threshold", [0.0, 1.5, 4.0, np.inf])
def test_every_way_finds_the_same_lines(size: int, threshold: float) -> None:
    expected = lines(oracle, size, threshold)
    assert [lines(way, size, threshold) for way in WAYS.values()] == [expected] * len(WAYS)
    gradient_D, residual_D = bucket(size)
    sum_L = as_lines(gradient_D + residual_D)
    is_picked = oracle.line_energy(sum_L, np.float32(0.25)) >= np.float32(threshold)
    np.testing.assert_allclose(
        oracle.line_energy(sum_L, np.float32(0.25)), (sum_L.astype(np.float64) ** 2).sum(axis=1) / 16, rtol=1e-5
    )
    assert isinstance(expected, tuple)
    assert expected[0] == np.flatnonzero(is_picked).astype(np.uint32).tobytes()
    assert expected[1] == sum_L[is_picked].tobytes()
    assert expected[2] == np.where(is_picked[:, None], np.float32(0), sum_L).reshape(-1)[:size].tobytes()


@each_way
def test_nothing_is_written_beyond_the_room(way: Any) -> None:
    size = 3 * TILE + 33
    assert elements(way, size, 0.0, room=size - 1) == OVERFLOW
    assert elements(way, size, 0.0, room=TILE) == OVERFLOW
    assert lines(way, size, 0.0, room=size // LINE) == OVERFLOW
    assert isinstance(elements(way, size, 0.0, room=size), tuple)
    assert isinstance(lines(way, size, 0.0, room=-(-size // LINE)), tuple)
    places, values = np.full(size, 7, dtype=np.uint32), np.full(size, 7, dtype=np.float32)
    way.pick_elements(*bucket(size), aligned_zeros(size), 0.0, places[: 2 * TILE], values[: 2 * TILE])
    assert (places[2 * TILE :] == 7).all()
    assert (values[2 * TILE :] == 7).all()


@each_way
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 5, TILE + 3, TILE + 20])
def test_what_is_not_finite_is_always_picked(way: Any, bad: float, place: int) -> None:
    size = TILE + 21
    gradient_D, residual_D = bucket(size)
    gradient_D[place] = bad
    places, values = np.zeros(2 * size, dtype=np.uint32), np.zeros(16 * size, dtype=np.float32)
    assert way.pick_elements(gradient_D, residual_D, aligned_zeros(size), np.inf, places, values) == 1
    assert places[0] == place
    assert way.pick_lines(gradient_D, residual_D, aligned_zeros(size), 1.0, np.inf, places, values) == 1
    assert places[0] == place // LINE
    assert not np.isfinite(values[:LINE]).all()


@each_way
def test_samples_are_the_lines_asked_for(way: Any) -> None:
    gradient_D, residual_D = bucket(1000)
    sample_L = np.zeros((len(range(2, 62, 7)), LINE), dtype=np.float32)
    way.add_sample(gradient_D, residual_D, 2, 7, sample_L)
    np.testing.assert_array_equal(sample_L, (gradient_D + residual_D)[:992].reshape(-1, LINE)[2::7])
    energy_L = way.line_energy(sample_L, np.float32(0.5))
    np.testing.assert_array_equal(energy_L, oracle.line_energy(sample_L, np.float32(0.5)))


@each_way
def test_elements_are_named_and_losses_kept(way: Any) -> None:
    named = np.zeros((2, LINE), dtype=np.uint32)
    way.name_elements(np.array([1, 2**28 - 1], dtype=np.uint32), named)
    assert named.tolist() == [list(range(16, 32)), list(range(2**32 - 16, 2**32))]
    rest_D, places = np.full(9, 7, dtype=np.float32), np.array([2, 8], dtype=np.uint32)
    way.keep_lost(rest_D, places, np.array([1.5, 3], np.float32), np.array([1, 3.25], np.float32))
    assert rest_D.tolist() == [7, 7, 0.5, 7, 7, 7, 7, 7, -0.25]
    way.clear(rest_D, np.array([2, 7], dtype=np.uint32))
    assert rest_D.tolist() == [7, 7, 0, 7, 7, 7, 7, 0, -0.25]


@each_way
@pytest.mark.parametrize("unit", [1, LINE])
def test_what_is_too_much_goes_back(way: Any, unit: int) -> None:
    """The bucket's last line is a short one: what is filled up there goes nowhere."""
    size = 20 * unit - (unit - 1)
    rest_D, places = np.zeros(size + 1, dtype=np.float32), np.array([1, 3, 8, 19], dtype=np.uint32)
    values = np.arange(4 * unit, dtype=np.float32).reshape(4, unit) + 1
    values[3, 1:] = 0
    given = values.copy()
    assert way.put_back(rest_D[:size], places, values, np.array([False, True, True, False])) == 2
    assert places[:2].tolist() == [3, 8]
    assert (values[:2] == given[1:3]).all()
    expected_D = np.zeros(20 * unit, dtype=np.float32)
    expected_D[unit : 2 * unit], expected_D[19 * unit :] = given[0], given[3]
    assert rest_D[:size].tolist() == expected_D[:size].tolist()
    assert rest_D[size] == 0


def test_without_a_compiler_the_loops_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_built", {})
    monkeypatch.setitem(sys.modules, "shade.gradient._kernels.loops", None)
    cure = "expected numba to compile shade.gradient._kernels.loops, got 'ModuleNotFoundError.*another version"
    with pytest.raises(ConfigError, match=cure):
        prepare()
    with pytest.raises(ConfigError, match="has no attribute 'probe'"):
        build("lines")
    monkeypatch.undo()
    assert prepare() is WAYS["numba"], "after the cure it works"


@pytest.mark.parametrize("loops", ["loops", "index_loops", "step_loops"])
def test_every_module_of_loops_compiles_with_the_numba_that_is_installed(loops: str) -> None:
    assert build(loops).__name__ == f"shade.gradient._kernels.{loops}"


def test_threads_that_ask_at_once_get_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(building, "_built", {})
    monkeypatch.setattr(building, "_build", lambda name: asked.append(name) or oracle)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: prepare(), range(8))) == {oracle}
    assert asked == ["shade.gradient._kernels.loops"]


PROGRAM = """
import numpy as np
from tests.unit.gradient.test_kernels import SIZES, WAYS, adam, elements, lines, momentum
oracle, loops = WAYS.values()
for size in SIZES:
    assert elements(loops, size, 2.5) == elements(oracle, size, 2.5), size
    assert lines(loops, size, 4.0) == lines(oracle, size, 4.0), size
    assert momentum(loops, size) == momentum(oracle, size), size
    assert adam(loops, size) == adam(oracle, size), size
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("processor", ["generic", "haswell"])
def test_lesser_processors_get_the_same_bits(processor: str, tmp_path: object) -> None:
    features = {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | features, check=True, timeout=120)
