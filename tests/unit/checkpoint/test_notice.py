"""Notices are heard from each kind of source, once, and from nothing that is none."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shade.checkpoint._preemption.notice import (
    FileNotice,
    HttpNotice,
    NoticeSource,
    PreemptionNotice,
    SignalNotice,
    seconds_in,
    source_of,
)
from shade.errors import ConfigError

GRACE = 77.0


def left(notice: PreemptionNotice | None) -> float:
    assert notice is not None
    return notice.seconds_left


def heard(source: NoticeSource) -> PreemptionNotice:
    deadline = time.monotonic() + 30
    while (notice := source.look()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return notice


@pytest.mark.parametrize("text", ["", " \n", "TRUE", "True", "{}", '{"action": "terminate"}'])
def test_an_announcement_without_a_time_leaves_the_grace(text: str) -> None:
    assert seconds_in(text, GRACE) == GRACE


@pytest.mark.parametrize(("text", "seconds"), [("30", 30), ("1.5\n", 1.5), ('{"seconds": 12}', 12), ("-5", 0)])
def test_seconds_are_taken_as_they_are(text: str, seconds: float) -> None:
    assert seconds_in(text, GRACE) == seconds


@pytest.mark.parametrize("form", ["%Y-%m-%dT%H:%M:%SZ", '{{"action": "stop", "time": "{}"}}', "%Y-%m-%dT%H:%M:%S"])
def test_a_moment_is_counted_from_now(form: str) -> None:
    moment = (datetime.now(timezone.utc) + timedelta(seconds=120)).strftime("%Y-%m-%dT%H:%M:%SZ")
    text = form.format(moment) if "{" in form else moment.removesuffix("" if form.endswith("Z") else "Z")
    found = seconds_in(text, GRACE)
    assert found is not None
    assert 60 < found <= 120


@pytest.mark.parametrize("text", ["FALSE", "false\n", "NONE"])
def test_nothing_announced_is_no_notice(text: str) -> None:
    assert seconds_in(text, GRACE) is None


@pytest.mark.parametrize("text", ["<html>", "soon", "{", "nan", "inf", '{"time": "late"}'])
def test_what_is_no_announcement_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        seconds_in(text, GRACE)


def test_a_file_is_a_notice_once_it_is_there(tmp_path: Path) -> None:
    source = FileNotice(tmp_path / "notice", GRACE)
    assert source.look() is None
    (tmp_path / "notice").write_text("40")
    assert 30 < left(source.look()) <= 40
    (tmp_path / "notice").write_text("the machine is going down")
    assert 67 < left(source.look()) <= GRACE
    (tmp_path / "notice").write_text("FALSE")
    assert source.look() is None


@pytest.mark.parametrize(("text", "age_seconds"), [("", 100), ("40", 60), ("2001-09-09T01:46:40Z", 1)])
def test_a_notice_of_yesterday_is_refused(text: str, age_seconds: float, tmp_path: Path) -> None:
    path = tmp_path / "notice"
    path.write_text(text)
    os.utime(path, (time.time() - age_seconds,) * 2)
    with pytest.raises(ConfigError, match="remove it: its time is over"):
        FileNotice(path, GRACE)
    path.write_text("FALSE")
    FileNotice(path, GRACE)
    path.write_text("600")  # the machine was told just now
    assert FileNotice(path, GRACE).look() is not None


@pytest.fixture
def sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is before
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_signal_is_a_notice_and_a_second_one_changes_nothing(sigterm: None) -> None:
    source = SignalNotice(GRACE)
    assert source.look() is None
    os.kill(os.getpid(), signal.SIGTERM)
    first = source.look()
    os.kill(os.getpid(), signal.SIGTERM)
    assert source.look() is first
    assert 67 < left(first) <= GRACE
    source.close()
    source.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12, where there are threads
def test_a_signal_after_the_deadline_ends_the_process() -> None:
    child = os.fork()
    if child == 0:
        source = SignalNotice(0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        while left(source.look()) >= 0:
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12, where there are threads
def test_a_forked_child_ends_by_a_signal_as_ever(sigterm: None) -> None:
    source = SignalNotice(GRACE)
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    assert source.look() is None
    source.close()


def test_signals_are_watched_from_the_main_thread_only() -> None:
    errors: list[Exception] = []

    def watch() -> None:
        try:
            SignalNotice()
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert "from the main thread" in str(errors[0])


class Metadata(ThreadingHTTPServer):
    """A cloud's metadata server, as far as notices go."""

    daemon_threads = True
    answer: tuple[int, str] = (404, "")
    wants_token = False
    num_asked = 0


class Handler(BaseHTTPRequestHandler):
    server: Metadata

    def do_GET(self) -> None:
        self.server.num_asked += 1
        refused = self.server.wants_token and self.headers["X-aws-ec2-metadata-token"] != "secret"
        self._say(*((401, "") if refused else self.server.answer))

    def do_PUT(self) -> None:
        right = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._say(200 if right else 400, "secret")

    def _say(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    server = Metadata(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def watch(metadata: Metadata) -> Iterator[Callable[[], HttpNotice]]:
    made: list[HttpNotice] = []

    def make() -> HttpNotice:
        made.append(HttpNotice(f"http://127.0.0.1:{metadata.server_port}/spot/action", GRACE, poll_seconds=0.01))
        return made[-1]

    yield make
    for each in made:
        each.close()


def asked_again(metadata: Metadata) -> None:
    before, deadline = metadata.num_asked, time.monotonic() + 30
    while metadata.num_asked < before + 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("nothing", [(404, ""), (200, "FALSE"), (200, "<html>log in</html>"), (503, "")])
def test_an_address_is_a_notice_once_it_says_so(
    metadata: Metadata, watch: Callable[[], HttpNotice], nothing: tuple[int, str]
) -> None:
    metadata.answer = nothing
    source = watch()
    asked_again(metadata)
    assert source.look() is None
    metadata.answer = (200, '{"action": "terminate", "seconds": 50}')
    assert 40 < left(heard(source)) <= 50


def test_an_address_that_asks_for_a_token_gets_one(metadata: Metadata, watch: Callable[[], HttpNotice]) -> None:
    metadata.wants_token, metadata.answer = True, (200, "TRUE")
    assert 67 < left(heard(watch())) <= GRACE


def test_nobody_there_is_no_notice_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    source = HttpNotice("http://127.0.0.1:1/action", GRACE, poll_seconds=0.01)
    deadline = time.monotonic() + 30
    while not caplog.records:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(0.05)
    source.close()
    assert source.look() is None
    assert len(caplog.records) == 1


def test_sources_are_known_by_how_they_are_written(tmp_path: Path, sigterm: None) -> None:
    kinds = {"sigterm": SignalNotice, str(tmp_path): FileNotice, "http://127.0.0.1:1/x": HttpNotice}
    for text, kind in kinds.items():
        source = source_of(text, GRACE)
        assert isinstance(source, kind)
        source.close()


@pytest.mark.parametrize("text", ["SIGUSR1", "usr1", "SIGUSR1 "])
def test_another_signal_is_a_notice_for_all_who_watch_it(text: str) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    sources = [source_of(text, GRACE) for _ in range(2)]
    os.kill(os.getpid(), signal.SIGUSR1)
    assert [67 < left(source.look()) <= GRACE for source in sources] == [True, True]
    for source in reversed(sources):
        source.close()
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize("text", ["SIGTREM", "KILL", "sigchld"])
def test_a_signal_that_cannot_be_watched_is_not_taken_for_a_file(text: str) -> None:
    with pytest.raises(ConfigError, match="one of SIGTERM, SIGUSR1"):
        source_of(text, GRACE)
    source = source_of(f"./{text}", GRACE)
    assert isinstance(source, FileNotice)


@pytest.mark.parametrize("text", ["", "ftp://host/x", "http:///x"])
def test_what_cannot_be_watched_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write "):
        source_of(text, GRACE)
