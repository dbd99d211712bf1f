"""What ranks tell arrives, comes out as JSON and as a page for Prometheus, and nothing a network says does harm."""

from __future__ import annotations

import http.client
import json
import logging
import math
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shade.control import message, server
from shade.control.client import QUEUE_LENGTH, TelemetryClient, fetch_state
from shade.control.server import (
    COUNTERS,
    MOST_BODY_BYTES,
    MOST_RANKS,
    NUM_STEPS,
    TOKEN_VARIABLE,
    History,
    TelemetryServer,
)
from shade.errors import ConfigError, DataError
from shade.testing import ManualClock
from shade.types import Decision, StepReport

DECISION = Decision(0.02, (30, 10), 12, "density 1.000% → 2.000%: …")


def report(step: int, rank: int = 0, **changed: Any) -> StepReport:
    return replace(StepReport(step, rank, 32, 0.3, 0.01, 0.2, 0.05, 0.1, 1000, 2000, 0.01, 3.5), **changed)


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.fixture
def listening() -> Iterator[TelemetryServer]:
    with TelemetryServer() as made:
        yield made


def ask(
    url: str, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def wait_for(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come to that in ten seconds")


class TestMessages:
    """Lines of JSON."""

    @pytest.mark.parametrize("told", [report(7, 3), DECISION, replace(DECISION, batch_sizes=())])
    def test_what_is_written_is_read(self, told: StepReport | Decision) -> None:
        assert message.read(message.line(told)) == told
        assert message.line(told).count(b"\n") == 1

    def test_numbers_of_numpy_are_numbers(self) -> None:
        odd = report(1, gradient_norm=np.float32(2.5), bytes_sent=np.int64(7))
        assert message.read(message.line(odd)) == report(1, gradient_norm=2.5, bytes_sent=7)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_number_that_is_none_is_refused(self, value: float) -> None:
        with pytest.raises(DataError, match="gradient_norm"):
            message.read(message.line(report(1, gradient_norm=value)))

    @pytest.mark.parametrize(
        "data",
        [b"", b"x", b"[]", b"{}", b"\xff\xfe", b'{"report": 1}', b'{"report": {}}', b'{"report": {"step": 1}}',
         b'{"other": {}}', b"[" * 10_000, b"9" * 20_000],
    )  # fmt: skip
    def test_what_is_no_message_is_refused(self, data: bytes) -> None:
        with pytest.raises(DataError, match="expected"):
            message.read(data)

    @pytest.mark.parametrize(
        ("field", "value"),
        [("step", -1), ("step", 1.5), ("step", True), ("step", 2**70), ("rank", "0"), ("density", None),
         ("density", "0.1"), ("compute_seconds", [1]), ("bytes_sent", 1e30), ("gradient_norm", 10**400), ("more", 1)],
    )  # fmt: skip
    def test_a_field_that_cannot_be_is_refused(self, field: str, value: Any) -> None:
        with pytest.raises(DataError, match=field):
            message.read(json.dumps({"report": {**asdict(report(1)), field: value}}).encode())

    @given(st.binary(max_size=200))
    def test_no_bytes_do_harm(self, data: bytes) -> None:
        with pytest.raises(DataError):
            message.read(data)


class TestHistory:
    """Bounded, medians, totals."""

    def test_medians_shares_and_totals(self) -> None:
        clock = ManualClock()
        history = History(clock)
        for step in range(NUM_STEPS + 10):
            hiccup = 50.0 if step == 40 else 0.1
            history.add(report(step, 1, wait_seconds=hiccup))
        clock.advance(3.0)
        (found,) = history.state()["ranks"]
        assert found["step"] == NUM_STEPS + 9
        assert found["samples_per_second"] == pytest.approx(32 / 0.4)
        assert found["wait_fraction"] == pytest.approx(0.25)
        assert (found["bytes_sent"], found["silent_seconds"]) == (1000, 3.0)
        assert f'shade_gradient_samples_total{{rank="1"}} {32 * (NUM_STEPS + 10)}' in history.prometheus()

    def test_the_same_report_counts_once(self) -> None:
        history = History(ManualClock())
        assert history.add(report(1))
        assert not history.add(report(1))
        assert history.add(report(1, 1))
        assert 'samples_total{rank="0"} 32\n' in history.prometheus()

    def test_memory_is_bounded(self) -> None:
        history = History(ManualClock())
        for rank in range(MOST_RANKS + 10):
            history.add(report(1, rank))
        assert len(history.state()["ranks"]) == MOST_RANKS

    def test_the_page_is_what_prometheus_reads(self) -> None:
        history = History(ManualClock())
        for rank in range(3):
            history.add(report(1, rank))
        history.decided(DECISION)
        page = history.prometheus()
        names = re.findall(r"^# TYPE (\S+) (?:counter|gauge)$", page, re.MULTILINE)
        assert len(names) == len(set(names)) == len(COUNTERS) + 5
        for line in page.splitlines():
            assert line.startswith("# ") or re.fullmatch(r'[a-z_]+(\{rank="\d+"\})? [-0-9.e]+', line), line
        assert "shade_gradient_decisions_total 1\n" in page

    def test_nobody_has_told_anything(self) -> None:
        assert History(ManualClock()).state() == {"ranks": [], "decision": None, "num_decisions": 0}
        assert History(ManualClock()).prometheus().endswith("decisions_total 0\n")


class TestServer:
    """Over HTTP."""

    def test_reports_go_in_and_come_out(self, listening: TelemetryServer) -> None:
        body = b"".join(message.line(report(step, rank)) for step in range(5) for rank in range(2))
        assert ask(listening.url, "POST", "/reports", body) == (200, b'{"good": 10}')
        listening.hear(DECISION)
        state = json.loads(ask(listening.url, "GET", "/state")[1])
        assert state.keys() == fetch_state(listening.url).keys()
        assert [each["step"] for each in state["ranks"]] == [4, 4]
        assert state["decision"]["density"] == 0.02
        assert ask(listening.url, "GET", "/metrics")[1].startswith(b"# HELP shade_gradient_samples_total")
        assert listening.drain() == [report(step, rank) for step in range(5) for rank in range(2)]
        assert listening.drain() == []

    def test_lines_that_are_none_are_counted_and_the_rest_counts(
        self, listening: TelemetryServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "shade.control"):
            body = b"what\n" + message.line(report(1)) + b"{}\n" + message.line(report(2))
            assert ask(listening.url, "POST", "/reports", body) == (200, b'{"good": 2}')
        assert listening.state()["num_refused"] == 2
        assert len(caplog.records) == 1

    @pytest.mark.parametrize(
        ("method", "path", "headers", "status"),
        [("GET", "/", {}, 404), ("GET", "/etc/passwd", {}, 404), ("POST", "/state", {}, 404), ("PUT", "/", {}, 501),
         ("POST", "/reports", {"Content-Length": str(MOST_BODY_BYTES + 1)}, 413),
         ("POST", "/reports", {"Content-Length": "-1"}, 413), ("POST", "/reports", {"Content-Length": "9" * 99}, 413),
         ("POST", "/reports", {"Content-Length": "²"}, 413)],
    )  # fmt: skip
    def test_what_is_not_offered(
        self, method: str, path: str, headers: dict[str, str], status: int, listening: TelemetryServer
    ) -> None:
        assert ask(listening.url, method, path, None, headers)[0] == status
        assert ask(listening.url, "GET", "/state")[0] == 200

    def test_noise_and_silence_do_no_harm(self, listening: TelemetryServer) -> None:
        host, port = listening.url.removeprefix("http://").split(":")
        with (
            socket.create_connection((host, int(port))) as silent,
            socket.create_connection((host, int(port))) as noisy,
        ):
            noisy.sendall(b"\x00\xff" * 1000 + b"\r\n\r\n")
            assert ask(listening.url, "GET", "/state")[0] == 200
            silent.sendall(b"POST /reports HTTP/1.0\r\nContent-Length: 500\r\n\r\n" + message.line(report(1)))
            silent.shutdown(socket.SHUT_WR)
            assert silent.recv(100) == b""
        assert listening.drain() == []

    def test_more_callers_than_it_serves_are_hung_up_on(
        self, listening: TelemetryServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server, "_MOST_CONNECTIONS", 2)
        host, port = listening.url.removeprefix("http://").split(":")
        waiting = [socket.create_connection((host, int(port))) for _ in range(3)]
        try:
            assert waiting[2].recv(1) == b""
        finally:
            for each in waiting:
                each.close()
        wait_for(lambda: not listening._http._connected)
        assert ask(listening.url, "GET", "/state")[0] == 200

    def test_closing_waits_for_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server._Handler, "timeout", 600)
        made = TelemetryServer()
        host, port = made.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))):
            wait_for(lambda: bool(made._http._connected))
            closing = threading.Thread(target=made.close)
            closing.start()
            closing.join(20)
            was_closed = not closing.is_alive()
        closing.join()
        made.close()
        assert was_closed
        assert not [thread for thread in threading.enumerate() if "telemetry" in thread.name]

    def test_a_port_that_is_taken(self, listening: TelemetryServer) -> None:
        port = int(listening.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match="address to listen at"):
            TelemetryServer(port=port)
        with pytest.raises(ConfigError, match="address to listen at"):
            TelemetryServer(port=70_000)


class TestToken:
    """Beyond this machine only with one."""

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "some.host"])
    def test_beyond_this_machine_it_listens_only_with_a_token(self, host: str) -> None:
        with pytest.raises(ConfigError, match=TOKEN_VARIABLE):
            TelemetryServer(host)

    def test_whoever_has_it_is_served_and_nobody_else(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(TOKEN_VARIABLE, "open sesame")
        with TelemetryServer("0.0.0.0") as made:
            url = made.url.replace("0.0.0.0", "127.0.0.1")
            for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer open sesame2"}):
                assert ask(url, "GET", "/state", None, given)[0] == 401
                assert ask(url, "GET", "/metrics", None, given)[0] == 401
                assert ask(url, "POST", "/reports", message.line(report(1)), given)[0] == 401
            assert made.drain() == []
            assert fetch_state(url)["ranks"] == []
            # The log names this page.
            assert fetch_state(f"{url}/metrics")["ranks"] == []
            with TelemetryClient(url) as client:
                client.report(report(1))
            assert client.num_sent == 1
            with pytest.raises(ConfigError, match="401"):
                fetch_state(url, token="wrong")

    @pytest.mark.parametrize("token", ["löchrig", "two\nlines", " led"])
    def test_one_that_no_header_carries_is_refused_and_not_shown(self, token: str) -> None:
        for make in (lambda: TelemetryServer(token=token), lambda: TelemetryClient("http://h:1", token=token)):
            with pytest.raises(ConfigError, match="printable") as refused:
                make()
            assert token not in str(refused.value)


class TestClient:
    """It never stands in the way."""

    def test_what_it_is_given_arrives_in_order(self, listening: TelemetryServer) -> None:
        with TelemetryClient(listening.url) as client:
            for step in range(600):
                client.report(report(step))
        assert listening.drain() == [report(step) for step in range(600)]
        assert (client.num_sent, client.num_dropped) == (600, 0)

    def test_without_a_server_training_goes_on_and_it_is_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            client = TelemetryClient(f"http://127.0.0.1:{unused.getsockname()[1]}")
            with caplog.at_level(logging.WARNING, "shade.control"):
                for step in range(QUEUE_LENGTH + 500):
                    client.report(report(step))
                assert client.num_dropped >= 500 - 256
                client.close(10.0)
        assert client.num_dropped == QUEUE_LENGTH + 500
        assert [each.getMessage().split(" (")[0] for each in caplog.records] == [
            f"telemetry cannot be sent to http://127.0.0.1:{client._port}"
        ]

    def test_what_could_not_be_sent_is_sent_when_the_server_is_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shade.control.client._INTERVAL_SECONDS", 0.01)
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
        client = TelemetryClient(f"http://127.0.0.1:{port}")
        for step in range(20):
            client.report(report(step))
        wait_for(lambda: client._is_lost)
        with TelemetryServer(port=port) as late:
            wait_for(lambda: client.num_sent == 20)
            assert late.drain() == [report(step) for step in range(20)]
            client.close()
        assert client.num_dropped == 0

    def test_a_server_that_never_answers_holds_nobody_up(self) -> None:
        with socket.socket() as mute:
            mute.bind(("127.0.0.1", 0))
            mute.listen()
            client = TelemetryClient(f"http://127.0.0.1:{mute.getsockname()[1]}")
            for step in range(10 * QUEUE_LENGTH):
                client.report(report(step))
            assert len(client._queue) <= QUEUE_LENGTH
            client.close(0.01)
            mute.accept()[0].close()
            client.close(10.0)
        assert client.num_dropped == 10 * QUEUE_LENGTH

    @pytest.mark.parametrize(
        "url", ["", "127.0.0.1:80", "http://host", "https://h:1", "http://h:99999", "http://h:1/x"]
    )
    def test_a_url_that_is_none(self, url: str) -> None:
        with pytest.raises(ConfigError, match="telemetry server"):
            TelemetryClient(url)
        with pytest.raises(ConfigError, match="telemetry server"):
            fetch_state(url)
