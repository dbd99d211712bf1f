"""Ranks that hold different bits are found and made the same again, over real processes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shade.errors import ConfigError, GradientError
from shade.gradient._comm.transport import Transport
from shade.gradient._compress.bucket import Bucket, plan_buckets
from shade.gradient._compress.compressor import Sparse
from shade.gradient._engine.consistency import Consistency
from shade.gradient.optim import SparseSGD
from tests.support.gradient_ranks import digest, network, play, results_of

pytestmark = pytest.mark.multiprocess


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def step(optimizer: SparseSGD, buckets: list[Bucket], number: int) -> None:
    """The same on every rank."""
    rng = np.random.default_rng(number)
    for bucket in buckets:
        indices = np.sort(rng.choice(bucket.size, 20, replace=False)).astype(np.uint32)
        optimizer.apply(bucket, Sparse(indices, rng.standard_normal(20).astype(np.float32), bucket.size))


def story_of_drift(rank: int, world_size: int) -> list[Any]:
    """Breaks a weight on the last rank, a momentum on the last, a whole bucket on the first, in turn."""
    heard = _Lines()
    logging.getLogger("shade.gradient").addHandler(heard)
    model = network()
    optimizer = SparseSGD(model.parameters(), lr=0.1, momentum=0.9)
    buckets = plan_buckets(optimizer.param_groups, bucket_bytes=16_000)
    transport = Transport(timeout_seconds=60)
    consistency = Consistency(transport, optimizer, buckets, every=5)
    found: list[Any] = []
    for number in range(1, 21):
        step(optimizer, buckets, number)
        if number == 4 and rank == world_size - 1:
            buckets[0].weights_D.view(torch.int32)[7] ^= 1
        if number == 9 and rank == world_size - 1:
            moment = optimizer.state[buckets[1].parameters[0]]["momentum_buffer"]
            moment.view(-1)[3] += 1.0
        if number == 14 and rank == 0:
            optimizer.flush()
        found.append(consistency.after_step(number))
    transport.close()
    clean_model = network()
    clean = SparseSGD(clean_model.parameters(), lr=0.1, momentum=0.9)
    clean_buckets = plan_buckets(clean.param_groups, bucket_bytes=16_000)
    for number in range(1, 21):
        step(clean, clean_buckets, number)
    counts = [consistency.num_checks, consistency.num_repairs, len(buckets)]
    return [[each for each in found if each], digest(model), digest(clean_model), counts, heard.lines[:1]]


def story_of_another_form(rank: int, world_size: int) -> str:
    """One rank has momentum, the others none yet."""
    parameter = torch.nn.Parameter(torch.zeros(64))
    optimizer = SparseSGD([parameter], lr=0.1, momentum=0.9)
    bucket = Bucket([parameter])
    if rank == 0:
        optimizer.apply(bucket, Sparse(np.zeros(1, np.uint32), np.ones(1, np.float32), 64))
    transport = Transport(timeout_seconds=60)
    try:
        Consistency(transport, optimizer, [bucket]).check()
    except GradientError as error:
        return str(error)
    finally:
        transport.close()
    return ""


@pytest.mark.multiprocess
def test_drift_is_found_and_repaired_by_what_most_ranks_hold(tmp_path: Path) -> None:
    outcomes = play([story_of_drift, story_of_another_form], 3, tmp_path)
    stories = results_of(outcomes, story_of_drift)
    for found, drifted, clean, counts, lines in stories:
        num_buckets = counts[2]
        assert num_buckets >= 3
        assert found[:2] == [[0], [1]]
        assert len(found) == 3, "a flush on one rank is drift, too"
        assert drifted == clean, "the rank that drifted was not taken for the right one, and all went on alike"
        assert counts[:2] == [4, sum(map(len, found))]
        assert lines == ["bucket 0 of rank [2] is not what rank 0 has; repaired"]
    for message in results_of(outcomes, story_of_another_form):
        assert "state of the same form in bucket 0 on every rank" in message


def test_a_single_rank_has_nothing_to_compare() -> None:
    parameter = torch.nn.Parameter(torch.zeros(8))
    optimizer = SparseSGD([parameter], lr=0.1)
    consistency = Consistency(Transport(), optimizer, [Bucket([parameter])], every=2)
    assert [consistency.after_step(number) for number in (1, 2)] == [[], []]
    assert consistency.num_checks == 1
    with pytest.raises(ConfigError, match="every ≥ 1"):
        Consistency(Transport(), optimizer, [], every=0)
