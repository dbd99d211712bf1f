"""When compressing pays: the model's lines, its verdicts, and what it asks before it gives one."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from shade.checkpoint._pacing.write_cost import PARTS, PATIENCE, CostModel, Line
from shade.testing import ManualClock
from shade.types import Bytes


def test_a_line_through_points_of_a_line_is_that_line() -> None:
    points = [(float(n), 0.002 + 3e-9 * n) for n in (1, 1000, 2**20, 2**22)]
    line = Line.fit(points)
    assert line.alpha == pytest.approx(0.002)
    assert line.beta == pytest.approx(3e-9)
    assert line.at(10**6) == pytest.approx(0.005)


def test_no_cost_is_negative() -> None:
    falling = Line.fit([(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)])
    assert (falling.alpha, falling.beta) == (2.0, 0.0)
    steep = Line.fit([(1.0, 0.0), (2.0, 1.0), (3.0, 2.0)])
    assert steep.alpha == 0.0
    assert steep.beta > 0
    assert Line.fit([(5.0, 2.0)]) == Line(2.0, 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_line_through_noisy_points_is_near(seed: int) -> None:
    dice = random.Random(seed)
    alpha, beta = dice.uniform(0, 0.01), dice.uniform(1e-10, 1e-8)
    points = [(float(n), (alpha + beta * n) * dice.uniform(0.98, 1.02)) for n in (2**18, 2**19, 2**20, 2**21, 2**22)]
    line = Line.fit(points)
    assert line.at(2**22) == pytest.approx(alpha + beta * 2**22, rel=0.05)


class Machine:
    """A disk and a codec whose costs are known."""

    def __init__(self, write: tuple[float, float], encode: tuple[float, float], ratio: float) -> None:
        self.clock = ManualClock()
        self.written: list[int] = []
        self.encoded: list[int] = []
        self._write, self._encode, self._ratio = write, encode, ratio
        self.model = CostModel(self.write, self.clock)

    def write(self, num_bytes: int) -> float:
        self.written.append(num_bytes)
        return self._write[0] + self._write[1] * num_bytes

    def encode(self, data: memoryview) -> Bytes:
        self.encoded.append(len(data))
        self.clock.advance(self._encode[0] + self._encode[1] * len(data))
        return bytes(round(self._ratio * len(data)))


@pytest.mark.parametrize("seed", range(100))
def test_the_verdict_is_the_inequality(seed: int) -> None:
    dice = random.Random(seed)
    write = (10 ** dice.uniform(-5, -2), 10 ** dice.uniform(-10, -8))
    encode = (10 ** dice.uniform(-6, -3), 10 ** dice.uniform(-10, -8))
    ratio = dice.uniform(0.01, 1.0)
    machine = Machine(write, encode, ratio)
    data = memoryview(np.zeros(2**20, np.uint8).data)
    with_it = encode[0] + encode[1] * len(data) + write[0] + write[1] * ratio * len(data)
    without = write[0] + write[1] * len(data)
    if abs(with_it - without) > 0.01 * without:
        assert machine.model.pays("codec", 0, data, machine.encode) is (with_it < without)


@pytest.mark.parametrize(
    ("encode", "ratio", "pays"),
    [(0.2e-8, 0.99, True), (0.9e-8, 0.99, True), (1.1e-8, 0.01, False), (0.2e-8, 1.0, False)],
)
def test_a_chunk_that_is_compressed_beside_a_write_costs_the_longer_of_both(
    encode: float, ratio: float, pays: bool
) -> None:
    machine = Machine((1e-3, 1e-8), (0.0, encode), ratio)
    data = memoryview(bytes(2**20))
    assert machine.model.pays("codec", 0, data, machine.encode, overlaps=True) is pays
    if pays:
        for _ in range(3):
            machine.model.learn("codec", 0, data, machine.encode(data), overlaps=True)
            assert machine.model.pays("codec", 0, data, machine.encode, overlaps=True)


def test_what_is_measured_is_measured_once_a_codec() -> None:
    machine = Machine((1e-3, 1e-9), (1e-4, 1e-10), 0.5)
    data = memoryview(bytes(2**20))
    for _ in range(5):
        machine.model.pays("codec", 0, data, machine.encode)
    num_probes, num_samples = len(machine.written), len(machine.encoded)
    assert len(set(machine.written)) == len(set(machine.encoded)) == 5
    machine.model.pays("codec", 0, data, machine.encode)
    assert (len(machine.written), len(machine.encoded)) == (num_probes, num_samples)
    machine.model.pays("other", 0, data, machine.encode)
    assert len(machine.written) == num_probes
    assert len(machine.encoded) == 2 * num_samples


def test_what_cannot_be_encoded_is_not_and_is_asked_again() -> None:
    machine = Machine((1e-3, 1e-9), (0.0, 0.0), 0.5)
    assert not machine.model.pays("codec", 0, memoryview(bytes(4096)), lambda data: None)
    assert machine.model.pays("codec", 0, memoryview(bytes(4096)), machine.encode)


def test_each_piece_is_judged_by_what_it_shrinks_to() -> None:
    """A codec that is quick enough for what it halves, and not for what it takes a tenth from."""
    machine, data = Machine((1e-3, 1e-9), (0.0, 3e-10), 0.9), memoryview(bytes(2**20))
    assert not machine.model.pays("codec", 0, data, machine.encode)
    good = Machine((1e-3, 1e-9), (0.0, 3e-10), 0.5)
    assert machine.model.pays("codec", 1, data, good.encode)
    assert good.encoded == [2**20 // PARTS[0]], "a sixteenth tells"
    assert not machine.model.pays("codec", 0, data, machine.encode)
    machine.model.learn("codec", 1, data, bytes(len(data) * 9 // 10))
    assert not machine.model.pays("codec", 1, data, good.encode), "the whole of it did not do as its beginning"


def test_what_did_not_pay_is_left_alone_for_longer_and_longer() -> None:
    machine, data = Machine((1e-3, 1e-9), (0.0, 3e-10), 0.9), memoryview(bytes(2**20))
    machine.model.pays("codec", 0, data, machine.encode)
    asked = []
    for snapshot in range(100):
        machine.encoded.clear()
        assert not machine.model.pays("codec", 0, data, machine.encode)
        asked += [snapshot] * len(machine.encoded)
    gaps = [later - sooner for sooner, later in pairwise(asked)]
    assert gaps[:3] == [3, 5, 9]
    assert set(gaps[2:]) == {PATIENCE + 1}


def test_what_was_not_kept_is_tried_again_and_patience_is_new_once_it_pays() -> None:
    machine, data = Machine((1e-3, 1e-9), (0.0, 3e-10), 0.5), memoryview(bytes(2**20))

    def snapshots_until_it_is_tried() -> int:
        return next(number for number in range(100) if machine.model.pays("codec", 0, data, machine.encode))

    assert snapshots_until_it_is_tried() == 0
    for left_alone in (1, 2, 4, 8, 8):
        machine.model.learn("codec", 0, data, None)
        assert snapshots_until_it_is_tried() == left_alone
    machine.model.learn("codec", 0, data, machine.encode(data))
    assert snapshots_until_it_is_tried() == 0
    machine.model.learn("codec", 0, data, None)
    assert snapshots_until_it_is_tried() == 1


def test_where_no_ratio_would_do_nothing_is_tried() -> None:
    machine, data = Machine((1e-3, 1e-10), (0.0, 3e-10), 0.01), memoryview(bytes(2**20))
    assert not machine.model.pays("codec", 0, data, machine.encode)
    machine.encoded.clear()
    assert not any(machine.model.pays("codec", number, data, machine.encode) for number in range(100))
    assert not machine.encoded


def test_samples_are_whole_items() -> None:
    machine = Machine((1e-3, 1e-9), (0.0, 0.0), 0.5)
    machine.model.pays("codec", 0, memoryview(bytes(1000)), machine.encode)
    assert all(length % 8 == 0 for length in machine.encoded)
    machine.encoded.clear()
    machine.model.pays("other", 0, memoryview(bytes(5)), machine.encode)
    assert set(machine.encoded) == {5}
