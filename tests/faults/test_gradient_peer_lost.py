"""A rank dies, or stands still, in the middle of training: every other rank says so in time, and none is ahead."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shade.errors import PeerLostError
from shade.gradient._comm.step import StepState
from shade.gradient._engine.engine import GradientEngine
from shade.gradient.optim import SparseSGD
from tests.support.gradient_ranks import digest, loss_of, network

pytestmark = pytest.mark.multiprocess

TIMEOUT_SECONDS = 4.0
FAULT_STEP = 5


def _train(rank: int, world_size: int, folder: str, fault: int, staleness: int) -> None:
    """Trains until the last rank meets its fault; survivors write down what they saw."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    model = network()
    engine = GradientEngine(
        model,
        SparseSGD(model.parameters(), lr=0.1),
        density=0.05,
        quantiser="none",
        staleness=staleness,
        bucket_bytes=4 * 4000,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    outcome: dict[str, Any] = {"raised": []}
    for step in range(FAULT_STEP + 3):
        if (rank, step) == (world_size - 1, FAULT_STEP):
            if engine._late is not None:
                engine._late.wait(StepState.MERGED)  # else it depends on the moment whether the step before counts
            time.sleep(0.5)
            Path(folder, "fault").touch()
            os.kill(os.getpid(), fault)
        loss = loss_of(model, rank, step)
        expected = [np.array(each["residual"], np.float64) for each in engine.state_dict()["residuals"]]
        for bucket_state, kept in zip(engine._bucket_states, expected, strict=True):
            own = torch.autograd.grad(loss, bucket_state.bucket.parameters, retain_graph=True)
            for gradient, view in zip(own, bucket_state.bucket.views(torch.from_numpy(kept)), strict=True):
                view += gradient
        began = time.monotonic()
        try:
            loss.backward()
            engine.step()
        except PeerLostError as error:
            outcome["raised"].append([step, time.monotonic() - began, str(error)])
            if staleness == 0 and len(outcome["raised"]) == 1:
                kept = [np.array(each["residual"], np.float64) for each in engine.state_dict()["residuals"]]
                outcome["lost"] = float(max(np.abs(a - b).max() for a, b in zip(kept, expected, strict=True)))
    outcome["digest"] = digest(model)
    began = time.monotonic()
    engine.close()
    outcome["closing"] = time.monotonic() - began
    Path(folder, f"{rank}.json").write_text(json.dumps(outcome))
    os._exit(0)  # the trainer's own group still waits for the lost rank


def _play(folder: Path, fault: int, staleness: int) -> list[dict[str, Any]]:
    context = mp.get_context("spawn")
    ranks = [context.Process(target=_train, args=(rank, 3, str(folder), fault, staleness)) for rank in range(3)]
    for each in ranks:
        each.start()
    try:
        for each in ranks[:2]:
            each.join(120)
            assert each.exitcode == 0
    finally:
        for each in ranks:
            each.kill()
            each.join()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "staleness"),
    [
        pytest.param(signal.SIGKILL, 0, id="killed"),
        pytest.param(signal.SIGSTOP, 1, id="stopped-late"),
        pytest.param(signal.SIGKILL, 1, id="killed-late"),
        pytest.param(signal.SIGSTOP, 0, id="stopped"),
    ],
)
def test_every_survivor_hears_of_a_lost_rank_in_time(fault: int, staleness: int, tmp_path: Path) -> None:
    survivors = _play(tmp_path, fault, staleness)
    assert (tmp_path / "fault").exists()
    first_failed = FAULT_STEP + staleness
    for each in survivors:
        steps = [step for step, _, _ in each["raised"]]
        assert steps == list(range(first_failed, FAULT_STEP + 3))
        _, waited, message = each["raised"][0]
        assert waited < 3 * TIMEOUT_SECONDS
        assert "3 ranks of generation 0" in message
        assert each["closing"] < 3 * TIMEOUT_SECONDS
        assert each.get("lost", 0.0) < 1e-6  # what was chosen for the lost rank is kept
    assert survivors[0]["digest"] == survivors[1]["digest"]
