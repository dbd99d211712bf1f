"""Groups of ranks: what they exchange, that every wait ends, and that closing one is always safe."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shade.errors import ConfigError, PeerLostError
from shade.rank_group import (
    GlooGroup,
    SingleProcessGroup,
    agreed_name,
    current_group,
    free_group,
    new_gloo_group,
    ranks_of,
    reason_of,
)

SECONDS = 60


def on_ranks(world_size: int, folder: Path, act: Callable[[int], Any]) -> list[str]:
    """Runs ``act(rank)`` on the ranks of a gloo world, each a forked process; returns what each returned, as text."""

    def enter(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
        try:
            outcome = str(act(rank))
        except Exception:  # noqa: BLE001 - the test shows it
            outcome = traceback.format_exc()
        (folder / f"outcome-{rank}").write_text(outcome)
        os._exit(0)  # no destructor has a say

    processes = [multiprocessing.get_context("fork").Process(target=enter, args=(rank,)) for rank in range(world_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        process.kill()
    found = [folder / f"outcome-{rank}" for rank in range(world_size)]
    return [each.read_text() if each.exists() else "no outcome" for each in found]


# ── one rank ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_alone_everything_comes_back() -> None:
    group = current_group("a test")
    assert isinstance(group, SingleProcessGroup)
    assert (group.rank, group.world_size) == (0, 1)
    assert group.gather({"a": 1}) == [{"a": 1}]
    assert group.share([2]) == [2]
    fields_N = np.arange(3, dtype=np.int64)
    gathered_WN = group.gather_fields(fields_N)
    fields_N[0] = 9
    assert gathered_WN.tolist() == [[0, 1, 2]]
    tensor = torch.ones(2)
    group.broadcast(tensor, 0)
    assert tensor.tolist() == [1.0, 1.0]
    assert len({agreed_name(group) for _ in range(20)}) == 20
    group.close()
    group.close()


def test_ranks_of_what_the_caller_says() -> None:
    assert ranks_of(None, None, 4) == (1, 0, False)
    assert ranks_of(4, 2, 4) == (4, 2, False)
    with pytest.raises(ConfigError, match="a rank below num_replicas=4"):
        ranks_of(4, 4, 4)
    with pytest.raises(ConfigError, match="batch_size ≥ 1"):
        ranks_of(None, None, 0)
    with pytest.raises(ConfigError, match="the second argument is num_replicas, as in DistributedSampler"):
        ranks_of(8, None, 8)


def test_a_reason_is_the_first_error_without_the_backends_advice() -> None:
    second = ValueError("no such group")
    second.__context__ = RuntimeError("[pair.cc:545] Connection closed by peer. This is typically caused by a remote")
    assert reason_of(second) == "RuntimeError: Connection closed by peer"
    assert reason_of(RuntimeError("timed out")) == "RuntimeError: timed out"


# ── several ranks ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.multiprocess
def test_ranks_exchange_messages_numbers_and_tensors(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        group = current_group("a test")
        tensor = torch.full((2, 2), float(rank))
        group.broadcast(tensor, 1)
        found = [
            (group.rank, group.world_size),
            group.gather({"rank": rank, "long": "x" * rank}),
            group.share(f"from {rank}"),
            group.gather_fields(np.array([rank, -rank])).tolist(),
            tensor.tolist(),
        ]
        name = agreed_name(group)
        assert group.gather(name) == [name] * 3
        group.close()
        return found

    everything = "[{'rank': 0, 'long': ''}, {'rank': 1, 'long': 'x'}, {'rank': 2, 'long': 'xx'}]"
    numbers = "[[0, 0], [1, -1], [2, -2]], [[1.0, 1.0], [1.0, 1.0]]"
    expected = [f"[({rank}, 3), {everything}, 'from 0', {numbers}]" for rank in range(3)]
    assert on_ranks(3, tmp_path, act) == expected


@pytest.mark.multiprocess
def test_a_part_of_the_ranks_makes_a_group_that_the_others_are_not_asked_for(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        if rank == 0:
            return "not asked"
        group = GlooGroup("a test", [1, 2])
        found = group.gather(rank), group.rank, group.world_size
        group.close()
        return found

    assert on_ranks(3, tmp_path, act) == ["not asked", "([1, 2], 0, 2)", "([1, 2], 1, 2)"]


@pytest.mark.multiprocess
def test_a_silent_rank_is_named_with_what_was_waited_for(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        group = GlooGroup("the plans", timeout_seconds=1)
        if rank == 1:
            time.sleep(4)
            return "was silent"
        messages = []
        for call in (lambda: group.broadcast(torch.ones(1), 1), lambda: group.gather(None)):
            with pytest.raises(PeerLostError) as caught:
                call()
            assert caught.value.__cause__ is None
            assert caught.value.__context__ is None
            messages.append(str(caught.value))
        return messages

    heard, silent = on_ranks(2, tmp_path, act)
    assert silent == "was silent"
    assert "expected what rank 1 sends within 1 s for the plans, got on rank 0 of 2: RuntimeError: " in heard
    assert "expected every rank's numbers within 1 s for the plans" in heard  # at once: the group is unusable
    assert "see the lost rank's log, then restart from the last checkpoint" in heard


@pytest.mark.multiprocess
def test_a_dead_rank_is_heard_of_at_once(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        group = GlooGroup("the plans")
        if rank == 1:
            os._exit(0)
        with pytest.raises(PeerLostError, match="expected every rank's numbers within 1800 s for the plans"):
            group.gather(None)
        return "heard"

    assert on_ranks(2, tmp_path, act) == ["heard", "no outcome"]


@pytest.mark.multiprocess
def test_a_rank_that_gives_up_breaks_its_connections_while_its_error_lives(tmp_path: Path) -> None:
    """The error's traceback must not keep the group alive: the others would wait for their own timeout."""

    def act(rank: int) -> Any:
        gc.disable()
        group = GlooGroup("the plans", timeout_seconds=1 if rank == 0 else SECONDS / 2)
        if rank == 0:
            with pytest.raises(PeerLostError) as caught:
                group.gather(None)
            group.close()
            time.sleep(5)
            return type(caught.value).__name__
        time.sleep(3)
        begun = time.monotonic()
        with pytest.raises(PeerLostError):
            group.gather(None)
        return "at once" if time.monotonic() - begun < 10 else "late"

    assert on_ranks(2, tmp_path, act) == ["PeerLostError", "at once"]


@pytest.mark.multiprocess
def test_closing_is_safe_whenever_it_happens(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        groups = dist.distributed_c10d._world.pg_map
        twice, late, formed, known = (GlooGroup("a test") for _ in range(4))
        raw = new_gloo_group(None, 60)
        before = len(groups)
        twice.close()
        twice.close()
        assert len(groups) == before - 1
        with pytest.raises(PeerLostError, match="the group is closed"):
            twice.gather(None)
        child = os.fork()
        if child == 0:  # has no threads of gloo, for which freeing a group waits
            late.close()
            os._exit(len(groups) != before - 1)
        assert os.waitpid(child, 0)[1] == 0
        late.gather(None)
        late.close()
        free_group(raw)
        free_group(raw)
        dist.destroy_process_group()
        formed.close()
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/again", rank=rank, world_size=2)
        known.close()
        return "closed"

    assert on_ranks(2, tmp_path, act) == ["closed", "closed"]


@pytest.mark.multiprocess
def test_a_script_that_ends_waits_for_a_thread_that_waits_for_ranks() -> None:
    """Unwound by force inside a collective, it would abort the process."""
    script = """
import threading, time
from shade.rank_group import inside_torch
entered = threading.Event()
def wait():
    with inside_torch():
        entered.set()
        time.sleep(0.5)
        print("came back", flush=True)
threading.Thread(target=wait, daemon=True).start()
entered.wait()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout == "came back\n"
