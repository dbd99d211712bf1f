"""What ``shade top`` shows: in a pipe one look, on a terminal again and again until it is told to end."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shade.checkpoint._preemption.recovery_estimate import Loss, RecoveryEstimate
from shade.cli import main, top
from shade.control.server import TOKEN_VARIABLE, TelemetryServer
from shade.store._servers.server import LocalServer
from shade.types import Decision, StepReport

Capture = pytest.CaptureFixture[str]
GAUGES = [
    RecoveryEstimate(
        9, Loss(3, 1.25, 0.4, "shared memory"), Loss(5, 2.0, None, "cluster memory"), Loss(9, 4.0, None, None)
    ),
    RecoveryEstimate(9, Loss(1, 0.5, 0.1, "storage"), Loss(1, 0.5, 0.1, "storage"), Loss(1, 0.5, 0.1, "storage")),
    RecoveryEstimate(9, *[Loss(9, 30.0, None, None)] * 3),
]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[TelemetryServer]:
    """Two ranks have told of ten steps, and something was decided."""
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with TelemetryServer() as made:
        for step in range(10):
            for rank in range(2):
                made.hear(StepReport(step, rank, 32, 0.3, 0.01, 0.2, 0.05, 0.1, 1_500_000, 3_000_000, 0.0125, 2.0))
        made.hear(Decision(0.02, (), 12, "density 1.250% → 2.000%\x1b[31m: the link"))
        yield made


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder as a run leaves it."""
    told = {"saves": 1, "if_ended_now": GAUGES[0].row()}
    rows: list[dict[str, Any]] = [
        {"kind": "epoch", "epoch": 0, "rank": 0, "hits": 1, "misses": 9, "loss": 2.5},
        {"kind": "epoch", "epoch": 1, "rank": 0, "hits": 85, "misses": 15, "loss": 1.25, "checkpoint": told},
        {"kind": "epoch", "epoch": 1, "rank": 1, "hits": 0, "misses": 15, "loss": 1.25, "checkpoint": {}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"kind": "ep')
    progress = {"epoch": 2, "step": 7, "num_steps": 50, "samples_per_second": 1234.5, "hit_ratio": 0.9}
    (tmp_path / "progress.json").write_text(json.dumps({**progress, "waiting_fraction": 0.03}))
    return tmp_path


@pytest.mark.redis
def test_one_look_at_a_server(server: TelemetryServer, capsys: Capture) -> None:
    assert main(["top", server.url, "--once"]) == 0
    told = capsys.readouterr().out
    row = next(line.split() for line in told.splitlines() if line.split()[:2] == ["1", "9"])
    assert row[2:9] == ["80.0", "1.250%", "0.300", "s", "0.200", "s", "25.0%"]
    assert row[9:13] == ["1.5", "MB", "3.0", "MB"]
    assert "all ranks: 160.0 samples/s" in told
    assert "decision 1, from step 12: density 1.250% → 2.000%?[31m: the link" in told
    assert "\x1b" not in told


def test_one_look_at_a_run(run: Path, capsys: Capture) -> None:
    assert main(["top", str(run)]) == 0  # no terminal: one look
    assert capsys.readouterr().out.splitlines() == [
        str(run),
        "epoch 3, step 7 of 50: 1,234 samples/s, hits 90.0%, waits 3.0% for data",
        "epoch 2 is done: hits 85.0%, loss 1.25",
        f"when it last wrote: {GAUGES[0]}",
    ]


def test_before_the_first_step_a_run_says_what_it_does(run: Path, capsys: Capture) -> None:
    (run / "progress.json").write_text(json.dumps({"note": "loading the \x1bfirst batch"}))
    assert main(["top", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "loading the ?first batch"


@pytest.mark.multiprocess
def test_one_look_tells_of_reads_stalls_and_memory(run: Path, capsys: Capture) -> None:
    with LocalServer(settings={"maxmemory": "64mb"}) as cache:
        progress = json.loads((run / "progress.json").read_text())
        stalls = {"origin": 2.0, "cache": 0.5, "decode": 1.0, "transform": 0.25, "wait": 0.25}
        more = {"origin_reads": 1234, "num_ranks": 4, "step_seconds": 6.0, "stall_seconds": stalls}
        (run / "progress.json").write_text(json.dumps(progress | more | {"cache": f"unix://{cache.socket_path}"}))
        assert main(["top", str(run)]) == 0
        told = capsys.readouterr().out.splitlines()
    assert told[2] == (
        "read 1,234 from the origin in this epoch, rank 0 of 4; "
        "time: step 60.0% · origin 20.0% · decode 10.0% · cache 5.0% · transform 2.5% · wait 2.5%"
    )
    heads, node = (line.split() for line in told[-2:])
    assert heads == ["cache", "node", "role", "memory", "of", "full", "entries"]
    assert node[1] == "primary"
    assert node[4:6] == ["67.1", "MB"]


def test_a_cache_that_is_gone_is_told_and_the_rest_is_shown(run: Path, capsys: Capture) -> None:
    progress = json.loads((run / "progress.json").read_text())
    (run / "progress.json").write_text(json.dumps(progress | {"cache": "redis://:***@127.0.0.1:1"}))
    assert main(["top", str(run)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[1].startswith("epoch 3, step 7 of 50")
    assert told[-1].startswith("cache nodes: no answer")


@pytest.mark.parametrize("url", ["memory://", "local://", "file:///etc/passwd", 7, "redis://[", "unix://"])
def test_a_run_that_names_no_server_starts_none(run: Path, url: object, capsys: Capture) -> None:
    progress = json.loads((run / "progress.json").read_text())
    (run / "progress.json").write_text(json.dumps(progress | {"cache": url, "stall_seconds": [1], "origin_reads": "x"}))
    assert main(["top", str(run)]) == 0
    told = capsys.readouterr().out
    assert "cache node " not in told


def test_the_gauge_of_this_moment_comes_first(run: Path, capsys: Capture) -> None:
    progress = json.loads((run / "progress.json").read_text())
    (run / "progress.json").write_text(json.dumps(progress | {"if_ended_now": GAUGES[1].row()}))
    assert main(["top", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(GAUGES[1])


@pytest.mark.parametrize("gauge", GAUGES)
def test_the_gauge_is_told_as_the_gauge_tells_it(gauge: RecoveryEstimate) -> None:
    assert top.gauge(gauge.row()) == str(gauge)


@pytest.mark.parametrize(
    "state", [{}, {"ranks": []}, {"ranks": [3, None]}, {"ranks": [{"rank": "x", "step": None}], "decision": 3},
              {"ranks": [{"step": 1e400}], "decision": {"reason": 7, "effective_step": []}}]
)  # fmt: skip
def test_whatever_a_server_says_is_shown(state: dict[str, Any]) -> None:
    assert all(isinstance(line, str) for line in top.of_server(state))


def test_an_empty_folder_has_no_figures(tmp_path: Path) -> None:
    assert top.of_run(tmp_path) == ["no figures yet"]
    (tmp_path / "progress.json").write_text("[1")
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\n3\n[]\n")
    assert top.of_run(tmp_path) == ["no figures yet"]


@pytest.mark.parametrize("words", [["nowhere"], ["http://127.0.0.1:1"], ["ftp://x"], [".", "--interval", "0"]])
def test_what_is_not_there_is_one_line(words: list[str], capsys: Capture) -> None:
    assert main(["top", *words, "--once"]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)


class Terminal:
    """``shade top`` on a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.ours, theirs = pty.openpty()
        self.before = termios.tcgetattr(theirs)
        program = "import sys; from shade.cli import main; sys.exit(main())"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "top", *words, "--interval", "0.05"],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**os.environ, "COLUMNS": "60", "LINES": "12", "TERM": "xterm"},
        )  # fmt: skip
        self._theirs = theirs
        self.seen = ""

    def read_until(self, true: Callable[[str], bool]) -> None:
        until = time.monotonic() + 60
        while not true(self.seen) and time.monotonic() < until:
            if select.select([self.ours], [], [], 0.1)[0]:
                self.seen += os.read(self.ours, 65536).decode(errors="replace")
        assert true(self.seen), self.seen[-2000:]

    def end(self) -> int:
        self.read_until(lambda seen: seen.endswith("\x1b[?25h\x1b[?1049l"))  # first: a full terminal blocks its writer
        code = self.process.wait(60)
        after = termios.tcgetattr(self._theirs)
        assert after == self.before
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self._theirs)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def make(*words: str) -> Terminal:
        made.append(Terminal(*words))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.multiprocess
@pytest.mark.redis
def test_on_a_terminal_it_is_drawn_again_until_q(
    server: TelemetryServer, terminal: Callable[..., Terminal], run: Path
) -> None:
    shown = terminal(server.url, str(run))
    shown.read_until(lambda seen: seen.count("all ranks: 160.0 samples/s") >= 2)
    server.hear(StepReport(77_777, 0, 32, 0.3, 0.01, 0.2, 0.05, 0.1, 1, 1, 0.01, 2.0))
    shown.read_until(lambda seen: "77777" in seen)
    os.write(shown.ours, b"xq")
    assert shown.end() == 0
    screens = shown.seen.split("\x1b[H")
    assert screens[0] == "\x1b[?1049h"
    assert screens[1].startswith("\x1b[?25l")
    lines = re.sub(r"\x1b\[\??\d*[a-zA-Z]", "", screens[2]).split("\r\n")
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 60


@pytest.mark.multiprocess
@pytest.mark.redis
def test_a_server_that_goes_is_told_and_ctrl_c_ends_it(
    server: TelemetryServer, terminal: Callable[..., Terminal]
) -> None:
    shown = terminal(server.url)
    shown.read_until(lambda seen: "all ranks" in seen)
    server.close()
    shown.read_until(lambda seen: "no answer" in seen)
    shown.process.send_signal(signal.SIGINT)
    assert shown.end() == 0
