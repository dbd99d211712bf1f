"""A testbed's hosts have the network they were given, two testbeds never meet, and nothing is left behind.

The namespaces are real; where a machine cannot make them, the tests that need them are skipped and say why. Rates are
measured with ordinary sockets and compared with the rate that was asked for, with room for a machine that is busy.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.network_bed import GUARD_SECONDS, NOT_HERE, TESTBED, Bed, call

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]
REDUCE = """
import os, sys, torch
import torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://10.77.0.1:5556", rank=int(os.environ["TESTBED_HOST"]), world_size=2)
numbers = torch.full((250_000,), float(dist.get_rank() + 1))
dist.all_reduce(numbers)
assert numbers.eq(3).all()
dist.destroy_process_group()
"""


@pytest.fixture
def make() -> Iterator[Callable[[], Bed]]:
    """Gives testbeds of their own names, none of them up yet, and ends them all."""
    beds: list[Bed] = []

    def build() -> Bed:
        beds.append(Bed(f"test{os.getpid()}_{len(beds)}"))
        return beds[-1]

    yield build
    for bed in beds:
        bed.end()


@pytest.fixture
def bed(make: Callable[[], Bed]) -> Bed:
    return make()


def namespaces() -> set[str]:
    done = subprocess.run(
        ["ip", "netns", "list"],
        env={"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
        capture_output=True,
        text=True,
        check=True,
    )
    return {line.split()[0] for line in done.stdout.splitlines()}


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GUARD_SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def rates_told(server: subprocess.Popen[str]) -> list[float]:
    out, complaint = server.communicate(timeout=GUARD_SECONDS)
    assert server.returncode == 0, complaint
    return [float(line) for line in out.split()]


def test_what_is_sent_keeps_to_the_rate_and_is_counted(bed: Bed) -> None:
    bed("up", "--hosts", 2, "--rate", "20mbit")
    server = bed.serve(0, num_connections=2)
    before = bed.status()[1]["bytes_sent"]
    assert bed.send(1, to=0, seconds=1.5).wait(GUARD_SECONDS) == 0
    row = bed.status()[1]
    assert row["rate"] == "20mbit"
    assert 0.5 * 20e6 * 1.5 / 8 <= row["bytes_sent"] - before <= 1.5 * 20e6 * 1.5 / 8
    bed("rate", "60mbit")
    assert bed.send(1, to=0, seconds=1.0).wait(GUARD_SECONDS) == 0
    slow, fast = rates_told(server)
    assert 0.6 * 20e6 <= slow <= 1.05 * 20e6
    assert 0.6 * 60e6 <= fast <= 1.05 * 60e6


def test_two_senders_share_what_the_receiver_may_receive(bed: Bed) -> None:
    bed("up", "--hosts", 3, "--rate", "20mbit")
    before = bed.status()[0]["bytes_received"]
    server = bed.serve(0, num_connections=2)
    began = time.monotonic()
    senders = [bed.send(host, to=0, seconds=1.0) for host in (1, 2)]
    assert len(rates_told(server)) == 2
    seconds = time.monotonic() - began
    assert [sender.wait(GUARD_SECONDS) for sender in senders] == [0, 0]
    assert (bed.status()[0]["bytes_received"] - before) * 8 <= 1.1 * 20e6 * seconds


def test_a_host_that_was_cut_off_is_back_when_mended(bed: Bed) -> None:
    bed("up", "--hosts", 2, "--rate", "unlimited")
    server = bed.serve(0, num_connections=2)
    bed("cut", 1)
    assert [row["is_cut"] for row in bed.status()] == [False, True]
    assert bed.send(1, to=0, seconds=0, patience=0.5).wait(GUARD_SECONDS) == 1
    bed("mend", 1)
    assert [row["is_cut"] for row in bed.status()] == [False, False]
    sender = bed.send(1, to=0, seconds=1.5)  # and a connection that is cut in the middle goes on
    before = bed.status()[1]["bytes_sent"]
    wait_for(lambda: bed.status()[1]["bytes_sent"] > before + 100_000)
    bed("cut", 1)
    received = bed.status()[0]["bytes_received"]
    time.sleep(0.3)
    assert bed.status()[0]["bytes_received"] - received < 10_000
    bed("mend", 1)
    assert sender.wait(GUARD_SECONDS) == 0
    assert server.poll() is None or server.returncode == 0


def test_the_rate_follows_a_trace_again_and_again(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("# a link that varies\n0.3 20mbit\n\n0.3 1.5gbit  # at night\n")
    bed("up", "--hosts", 2, "--trace", str(tmp_path / "trace"))
    for rate in ("20mbit", "1.5gbit", "20mbit"):
        wait_for(lambda rate=rate: [row["rate"] for row in bed.status()] == [rate] * 2)  # type: ignore[misc]
    assert bed.status()[0]["follows_trace"]
    bed("rate", "100mbit")
    assert not bed.status()[0]["follows_trace"]
    time.sleep(0.7)
    assert [row["rate"] for row in bed.status()] == ["100mbit"] * 2


def test_two_testbeds_never_meet(make: Callable[[], Bed]) -> None:
    before = namespaces() if shutil.which("ip", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") else set()
    one, other = make(), make()
    one("up", "--hosts", 1, "--rate", "unlimited")
    other("up", "--hosts", 2, "--rate", "unlimited")
    one.serve(0, num_connections=1)
    sender = other.send(1, to=0, seconds=0, patience=1.0)
    _, complaint = sender.communicate(timeout=GUARD_SECONDS)
    assert "refused" in complaint  # its own host 0 answered, where nobody listens
    other("down")
    assert one.status()[0]["processes"]
    one("down")
    assert namespaces() == before


def test_what_a_crashed_up_left_is_cleared(bed: Bed) -> None:
    bed("up", "--hosts", 3)
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    subprocess.run(["ip", "netns", "delete", f"shade.{bed.name}.switch"], env={"PATH": path}, check=True)
    assert bed.status() == []
    bed("up", "--hosts", 2)
    assert [row["host"] for row in bed.status()] == [0, 1]


def test_one_in_use_is_not_taken_away_and_down_ends_what_runs_there(bed: Bed) -> None:
    bed("up", "--hosts", 2)
    sleeper = bed.start(1, "sleep", 1000)
    wait_for(lambda: bed.status()[1]["processes"] == [sleeper.pid])  # exec becomes the command: signals reach it
    refused = call("up", "--name", bed.name)
    assert refused.returncode == 2
    assert str(sleeper.pid) in refused.stderr
    assert sleeper.poll() is None
    bed("down")
    assert sleeper.wait(GUARD_SECONDS) != 0
    assert bed.status() == []


def test_a_command_gets_its_place_and_gives_its_status(bed: Bed) -> None:
    bed("up", "--hosts", 2)
    script = "echo $TESTBED_HOST $TESTBED_ADDRESS $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME; exit 7"
    process = bed.start(1, "sh", "-c", script)
    out, _ = process.communicate(timeout=GUARD_SECONDS)
    assert (out, process.returncode) == ("1 10.77.0.2 eth0 eth0\n", 7)
    for words, sentence in ((("exec", 2, "--", "true"), "from 0 to 1, got 2"), (("exec", 0), "expected a command")):
        refused = call(*words, SHADE_TESTBED=bed.name)
        assert refused.returncode == 2
        assert sentence in refused.stderr


def test_gloo_forms_over_it(bed: Bed) -> None:
    bed("up", "--hosts", 2, "--rate", "200mbit")
    ranks = [bed.start(host, sys.executable, "-c", REDUCE) for host in (0, 1)]
    for rank in ranks:
        _, complaint = rank.communicate(timeout=GUARD_SECONDS)
        assert rank.returncode == 0, complaint
    assert all(row["bytes_sent"] > 1_000_000 for row in bed.status())  # a million bytes of float32 each way


def test_help_teaches() -> None:
    told = call("--help")
    assert told.returncode == 0
    for word in ("up --hosts 2", "exec 0 --", "--trace", "cut 1", "mend 1", "down", "10.77.0.", "GLOO_SOCKET_IFNAME"):
        assert word in told.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "VERB"),
        (("up", "--rate", "10"), "such as 100mbit, or unlimited; got '10'"),
        (("up", "--rate", "1mbit", "--trace", "{good}"), "not allowed with"),
        (("up", "--trace", "{folder}/absent"), "cannot read"),
        (("up", "--trace", "{trace}"), "trace:2: expected seconds and a rate, such as 20 100mbit; got 'fast 10mbit'"),
        (("up", "--trace", "{empty}"), "expected lines such as"),
        (("up", "--name", "a.b"), "letters, digits or _"),
        (("up", "--hosts", "two"), "invalid int value"),
        (("rate",), "required"),
        (("cut",), "HOST"),
    ],
)
def test_a_mistake_is_one_line_with_its_cure(tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    (tmp_path / "trace").write_text("1 10mbit\nfast 10mbit\n")
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "good").write_text("1 10mbit\n")
    places = {"good": tmp_path / "good", "trace": tmp_path / "trace", "empty": tmp_path / "empty", "folder": tmp_path}
    told = call(*(word.format(**places) for word in words))
    assert told.returncode == 2
    assert sentence in told.stderr
    assert told.stderr.startswith("testbed: ")
    assert told.stderr.count("\n") == 1


def test_what_a_machine_lacks_is_one_line_with_its_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(TESTBED))["main"]
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["status"]) == NOT_HERE
    assert "need root; try sudo" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert main(["status"]) == NOT_HERE
    assert "apt-get install iproute2" in capsys.readouterr().err
