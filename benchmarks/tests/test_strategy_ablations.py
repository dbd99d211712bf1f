"""The ablations of the asymmetric strategy are rows of the table and copy in the background; `naive` in equal parts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shade.checkpoint._buffer.tensor_copy import Copying
from shade.checkpoint._capture.layout import TensorSpec, lay_out
from shade.checkpoint._strategies import STRATEGIES
from shade.checkpoint._strategies.asymmetric import Asymmetric

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from strategy_ablations import ABLATIONS, AsymmetricNaive
from strategy_methods import OURS

MIB = 2**20


@pytest.fixture(params=ABLATIONS, ids=lambda kind: kind.__name__)
def strategy(request: pytest.FixtureRequest) -> Iterator[Asymmetric]:
    made: Asymmetric = request.param()
    made._windows.seconds = lambda: ([1.0] * 4, [3.0] * 4)  # type: ignore[method-assign]
    made._windows.cores_left = lambda: 0  # type: ignore[method-assign]
    yield made
    made.close()


def test_they_copy_the_whole_state_in_the_background(strategy: Asymmetric) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    strategy.attach([model], [torch.optim.SGD(model.parameters(), 0.01)])
    live = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in live.items()}, 0, 1)
    copying = Copying(live, layout.entries, torch.zeros(layout.num_bytes, dtype=torch.uint8), frozenset(live))
    strategy.begin(copying)
    forward, backward = strategy.partitions
    assert sum(forward) + sum(backward) == 16 * MIB
    assert copying.names != []
    if isinstance(strategy, AsymmetricNaive):
        assert max(*forward, *backward) - min(*forward, *backward) <= 1
    else:
        assert sum(forward) < sum(backward)
    strategy.wait()
    assert copying.names == []


def test_each_is_a_row_of_the_table() -> None:
    names = [name for name in STRATEGIES if STRATEGIES.get(name) in ABLATIONS]
    assert len(names) == len(ABLATIONS)
    assert set(names) <= set(OURS)
