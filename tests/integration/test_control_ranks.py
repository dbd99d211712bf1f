"""Ranks as real processes tell the server, the controller on rank 0 hears them; one that is killed stops nobody."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from shade.control.controller import Controller
from shade.control.server import TOKEN_VARIABLE, TelemetryServer
from shade.types import StepReport
from tests.support.launching import ROOT, environment

pytestmark = [pytest.mark.multiprocess, pytest.mark.redis]

NUM_STEPS, NUM_RANKS = 40, 3
HIDDEN = (0.1 / 0.9) ** (1 / 6)  # of the compute, what the exchange beside it is to take
RANK = f"""\
import sys, time
from shade.control.client import TelemetryClient
from shade.types import StepReport
url, rank, forever = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
with TelemetryClient(url) as client:
    for step in range(10**9 if forever else {NUM_STEPS}):
        client.report(StepReport(step, rank, 8, 0.2, 0.01, 0.1, 0.0, 0.0, 10**6, 10**6, 0.01, 1.0))
        time.sleep(0.01)
assert (client.num_sent, client.num_dropped) == ({NUM_STEPS}, 0)
"""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[TelemetryServer]:
    """Asks for a token, which the ranks have in their environment."""
    monkeypatch.setenv(TOKEN_VARIABLE, "between us")
    with TelemetryServer() as made:
        yield made


def rank(url: str, number: int, forever: bool = False) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", RANK, url, str(number), str(forever)]
    return subprocess.Popen(words, env={**environment(), TOKEN_VARIABLE: "between us"}, cwd=ROOT)


def test_what_the_ranks_tell_is_what_is_decided_on(server: TelemetryServer) -> None:
    with ExitStack() as ranks:
        started = [ranks.enter_context(rank(server.url, number)) for number in range(NUM_RANKS)]
    assert [each.returncode for each in started] == [0] * NUM_RANKS
    heard = server.drain()
    assert len(heard) == NUM_RANKS * NUM_STEPS
    assert [each["step"] for each in server.state()["ranks"]] == [NUM_STEPS - 1] * NUM_RANKS
    direct, over_the_wire = Controller(NUM_RANKS, density=0.001), Controller(NUM_RANKS, density=0.001)
    for report in heard:
        over_the_wire.observe(report)
    for step in range(NUM_STEPS):
        for number in range(NUM_RANKS):
            direct.observe(StepReport(step, number, 8, 0.2, 0.01, 0.1, 0.0, 0.0, 10**6, 10**6, 0.01, 1.0))
    decision = over_the_wire.decide(NUM_STEPS)
    assert decision == direct.decide(NUM_STEPS)
    assert decision is not None
    assert decision.density * (0.01 / 0.001) == pytest.approx(HIDDEN * 0.2, rel=0.025)  # half a step of the search


def test_a_rank_that_is_killed_falls_silent_and_the_others_are_heard(server: TelemetryServer) -> None:
    with rank(server.url, 1, forever=True) as doomed:
        while not server.state()["ranks"]:
            time.sleep(0.02)
        doomed.send_signal(signal.SIGKILL)
    with rank(server.url, 0) as survivor:
        pass
    assert survivor.returncode == 0
    alive, dead = server.state()["ranks"]
    assert (alive["rank"], alive["step"]) == (0, NUM_STEPS - 1)
    assert dead["silent_seconds"] > alive["silent_seconds"]
    controller = Controller(2, density=0.001)
    for report in server.drain():
        controller.observe(report)
    assert len(controller.state_dict()["open"]) <= 16
