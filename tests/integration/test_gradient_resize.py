"""Three ranks save, and one, two or four resume: the residuals of all are still there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shade.checkpoint._session.checkpointer import Checkpointer
from shade.gradient._engine.engine import GradientEngine
from shade.gradient.optim import SparseSGD
from tests.support.gradient_ranks import digest, loss_of, network, play, results_of

pytestmark = pytest.mark.multiprocess

PLACE = "SHADE_TEST_PLACE"


def build() -> tuple[Any, SparseSGD, GradientEngine]:
    model = network()
    optimizer = SparseSGD(model.parameters(), lr=0.1, momentum=0.9)
    settings: dict[str, Any] = {"bucket_bytes": 4 * 4000, "timeout_seconds": 60.0, "density": 0.05, "staleness": 1}
    return model, optimizer, GradientEngine(model, optimizer, **settings)


def checkpointer() -> Checkpointer:
    place = Path(os.environ[PLACE])
    return Checkpointer(persist_to=str(place), run=place.name, every=1000)


def kept(engine: GradientEngine) -> list[float]:
    """The sum of what each bucket keeps."""
    return [float(np.asarray(each["residual"], np.float64).sum()) for each in engine.state_dict()["residuals"]]


def story_of_saving(rank: int, world_size: int) -> list[float]:
    model, optimizer, engine = build()
    with engine, checkpointer() as keeping:
        keeping.attach(model=model, optimizer=optimizer, engine=engine)
        for step in range(6):
            loss_of(model, rank, step).backward()
            engine.step()
        keeping.save()
        keeping.wait_durable(60)
        return kept(engine)


def story_of_resuming_in_another_world(rank: int, world_size: int) -> list[Any]:
    model, optimizer, engine = build()
    with engine, checkpointer() as keeping:
        keeping.attach(model=model, optimizer=optimizer, engine=engine)
        assert keeping.restore_latest()
        taken = kept(engine)
        for step in range(6, 10):
            loss_of(model, rank, step).backward()
            engine.step()
        engine.finish()
        return [taken, engine.step_count, digest(model)]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_what_three_ranks_kept_back_is_there_after_a_restart_with_others(
    world_size: int, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path / run))
    for folder in ("three", "then"):
        (tmp_path / folder).mkdir()
    before = results_of(play([story_of_saving], 3, tmp_path / "three"), story_of_saving)
    after = results_of(
        play([story_of_resuming_in_another_world], world_size, tmp_path / "then"), story_of_resuming_in_another_world
    )
    had, has = np.sum(before, axis=0), np.sum([taken for taken, _, _ in after], axis=0)
    assert float(np.abs(had).max()) > 1e-3
    np.testing.assert_allclose(has, had, atol=1e-4)
    assert {step for _, step, _ in after} == {10}
    assert len({each for _, _, each in after}) == 1
    if world_size == 4:
        assert after[3][0] == [0.0] * len(had)
