"""What the launcher asks of a Checkpointer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shade.checkpoint._strategies import STRATEGIES
from shade.config import RunConfig
from shade.train.snapshots import Snapshots


@pytest.mark.parametrize(
    ("given", "expected"), [(None, STRATEGIES.get("pccheck").config.every), ("7", "7")], ids=["none", "given"]
)
def test_where_no_interval_is_given_the_strategys_own_holds(
    tmp_path: Path, run: str, given: str | None, expected: str
) -> None:
    config = RunConfig(
        str(tmp_path / "out"), "s.py", ("d",), run=run, checkpoint_strategy="pccheck", checkpoint_every=given
    )
    snapshots = Snapshots(config, {"model": torch.nn.Linear(1, 1)}, None)
    try:
        assert snapshots._checkpointer.config.every == expected
    finally:
        snapshots.close(None, None, None)
