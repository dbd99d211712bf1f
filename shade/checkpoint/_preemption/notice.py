"""Watches for preemption notices: a signal, a file that appears, an address that answers.

A source gives at most one notice, with its deadline. A failing source gives none, and does not stop a training.

====================  ================================================================================================
a signal's name       grace seconds from the signal on. Most schedulers give 30 after ``SIGTERM``; Slurm sends
                      ``SIGUSR1`` 60 seconds before the end if ``--signal=USR1@60`` asks for it
a path                appears: its content is a number of seconds, a time (ISO 8601), JSON with either; else the grace
``http://…``          200 with the same, ``TRUE`` or ``FALSE``; 404: nothing yet. Knows the token that AWS asks for
====================  ================================================================================================

docs/how-to/spot-notices.md has the addresses of AWS and Google.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any, Final
from urllib.parse import urlsplit

from torch.utils.data._utils import signal_handling
from typing_extensions import override

from shade.errors import ConfigError, shown_url

GRACE_SECONDS: Final = 30.0
"""Time between SIGTERM and SIGKILL in torchrun, Kubernetes and most schedulers; the shortest that clouds give."""
HTTP_POLL_SECONDS: Final = 1.0
_HTTP_TIMEOUT_SECONDS: Final = 2.0
_SAME_SIGNAL_SECONDS: Final = 1.0
"""Time within which one sender's signals reach a process and its workers, in any order."""
_SPARED, _OVER = 1, 2
_SIGNALS: Final = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP", "SIGXCPU")
"""Signals that schedulers and users end a process with, or announce that they will."""
_MOST_BYTES: Final = 4096
_HEADERS: Final = {"Metadata-Flavor": "Google"}
"""Header without which Google's server does not answer; other servers ignore it."""

_signals: Any = signal_handling

logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class PreemptionNotice:
    """A notice that this process will be ended."""

    source: str
    """Name of the source, for the log."""
    deadline: float
    """When the process will be ended, in monotonic seconds of this machine."""

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; negative afterwards."""
        return self.deadline - time.monotonic()


class NoticeSource(ABC):
    """A source of notices."""

    @abstractmethod
    def look(self) -> PreemptionNotice | None:
        """Returns the notice, if there is one by now. Called a few times a second; must not block."""

    def close(self) -> None:  # noqa: B027 - a file needs nothing
        """Ends the watching. Safe to call twice."""


def seconds_in(text: str, grace_seconds: float) -> float | None:
    """Returns the seconds from now, ≥ 0, in the text of a notice, or None if it says that there is none. The text is a
    number of seconds, a time in ISO 8601, JSON with one of these under ``seconds`` or ``time``, ``TRUE``, ``FALSE``,
    ``NONE``, or nothing; else `ValueError` is raised. Where it names no time, ``grace_seconds`` are left."""
    text = text.strip()
    if text.upper() in ("FALSE", "NONE"):
        return None
    if text.upper() in ("", "TRUE"):
        return grace_seconds
    if text.startswith("{"):
        try:
            fields: dict[str, Any] = json.loads(text)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        found = fields.get("seconds", fields.get("time"))
        return grace_seconds if found is None else seconds_in(str(found), grace_seconds)
    try:
        seconds = float(text)
    except ValueError:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=timezone.utc)
        seconds = moment.timestamp() - time.time()
    if not seconds < float("inf"):
        raise ValueError(f"{text} is no time")
    return max(0.0, seconds)


class SignalNotice(NoticeSource):
    """A signal as a notice. It may come twice, from a scheduler and from a launcher: the second changes nothing.

    Made in the main thread, as Python requires. Forked children still end by the signal, and after the deadline so does
    this process. Most senders signal the whole process group; workers that a DataLoader forks from now on survive it
    while this process has a notice, since the step under way needs them. Where older workers die of it, DataLoader's
    alarm, which would raise at any line of the training, is silent.

    Args:
        grace_seconds: Time from the signal until the sender kills this process.
        number: The signal.

    Raises:
        ConfigError: Not in the main thread.
    """

    def __init__(self, grace_seconds: float = GRACE_SECONDS, number: signal.Signals = signal.SIGTERM) -> None:
        self._grace_seconds, self._number = grace_seconds, number
        self._notice: PreemptionNotice | None = None
        self._process_id = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            name, cure = threading.current_thread().name, "call it there, or watch a file or an http:// address"
            raise ConfigError.of(f"{number.name} to be watched from the main thread", name, cure)
        self._spares_workers = mmap.mmap(-1, 1)  # shared with forked processes
        self._set_up_worker, self._raise_if_worker_died = (
            _signals._set_worker_signal_handlers,
            _signals._error_if_any_worker_fails,
        )
        _signals._set_worker_signal_handlers = self._in_new_worker
        _signals._error_if_any_worker_fails = self._when_child_died
        self._before: Any = signal.signal(number, self._received)

    def _received(self, number: int, frame: FrameType | None) -> None:
        late = self._notice is not None and self._notice.seconds_left < 0
        if late or os.getpid() != self._process_id:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self._notice is None:
            self._spares_workers[0] = _SPARED
            self._notice = PreemptionNotice(self._number.name, time.monotonic() + self._grace_seconds)
            # Another Checkpointer of this process may watch it too.
            if isinstance(getattr(self._before, "__self__", None), SignalNotice):
                self._before(number, frame)

    def _in_new_worker(self) -> None:
        self._set_up_worker()
        signal.signal(self._number, self._received_by_worker)

    def _received_by_worker(self, number: int, frame: FrameType | None) -> None:
        until = time.monotonic() + _SAME_SIGNAL_SECONDS
        while not self._spares_workers[0] and time.monotonic() < until:
            time.sleep(_SAME_SIGNAL_SECONDS / 50)
        if self._spares_workers[0] != _SPARED:
            os._exit(0)  # as a worker does that its DataLoader ends

    def _when_child_died(self) -> None:
        try:
            self._raise_if_worker_died()
        except RuntimeError:
            until = time.monotonic() + _SAME_SIGNAL_SECONDS
            while self._notice is None and time.monotonic() < until:
                time.sleep(_SAME_SIGNAL_SECONDS / 50)
            if self._notice is None:
                raise

    @override
    def look(self) -> PreemptionNotice | None:
        return self._notice

    def close(self) -> None:
        """Restores the earlier signal handler."""
        before, self._before = self._before, None
        self._spares_workers[0] = _OVER
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(self._number, before)
            if _signals._set_worker_signal_handlers == self._in_new_worker:
                _signals._set_worker_signal_handlers = self._set_up_worker
                _signals._error_if_any_worker_fails = self._raise_if_worker_died


class FileNotice(NoticeSource):
    """A file whose appearance is a notice.

    Args:
        path: Path of the file.
        grace_seconds: Time left if the file names no time.

    Raises:
        ConfigError: The file has been there for longer than the time that it gives: an earlier notice.
    """

    def __init__(self, path: str | os.PathLike[str], grace_seconds: float = GRACE_SECONDS) -> None:
        self._path, self._grace_seconds = Path(path), grace_seconds
        found = self.look()
        with contextlib.suppress(OSError):
            age_seconds = time.time() - self._path.stat().st_mtime
            if found is not None and age_seconds > max(0.0, found.seconds_left):
                got = f"{path}, {age_seconds:.0f} s old"
                raise ConfigError.of(
                    "the path of a file that appears with a notice", got, "remove it: its time is over"
                )

    @override
    def look(self) -> PreemptionNotice | None:
        try:
            text = self._path.read_bytes()[:_MOST_BYTES].decode(errors="replace")
        except OSError:
            return None
        seconds: float | None = self._grace_seconds
        with contextlib.suppress(ValueError):
            seconds = seconds_in(text, self._grace_seconds)
        return None if seconds is None else PreemptionNotice(str(self._path), time.monotonic() + seconds)


class HttpNotice(NoticeSource):
    """An address that answers once there is a notice; asked in a thread of its own, without a proxy.

    Args:
        url: URL to ask.
        grace_seconds: Time left if the answer names no time.
        poll_seconds: Time between two requests.

    Raises:
        ConfigError: It is not an HTTP URL.
    """

    def __init__(self, url: str, grace_seconds: float = GRACE_SECONDS, poll_seconds: float = HTTP_POLL_SECONDS) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError.of("the address of a notice", shown_url(url), "write http://host/path")
        self._url, self._grace_seconds, self._poll_seconds = url, grace_seconds, poll_seconds
        self._shown = f"{parts.scheme}://{parts.hostname}{parts.path}"
        self._token_url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/latest/api/token"
        self._token: str | None = None
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._notice: PreemptionNotice | None = None
        self._closed, self._warned = threading.Event(), False
        self._thread = threading.Thread(target=self._serve, name="shade-notice-http", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while self._notice is None:
            try:
                self._notice = self._ask()
            except (OSError, ValueError) as error:  # URLError is an OSError
                if not self._warned:
                    logger.warning("no notices from %s: %s; asking on", self._shown, error)
                self._warned = True
            if self._closed.wait(self._poll_seconds):
                return

    def _ask(self) -> PreemptionNotice | None:
        try:
            text = self._get(self._url, {"X-aws-ec2-metadata-token": self._token} if self._token else {})
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 401:
                asked = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
                self._token = self._get(self._token_url, asked, method="PUT")
            elif error.code != 404:
                raise
            return None
        seconds = seconds_in(text, self._grace_seconds)
        return None if seconds is None else PreemptionNotice(self._shown, time.monotonic() + seconds)

    def _get(self, url: str, headers: dict[str, str], method: str = "GET") -> str:
        request = urllib.request.Request(url, headers={**_HEADERS, **headers}, method=method)
        with self._opener.open(request, timeout=_HTTP_TIMEOUT_SECONDS) as answer:
            content: bytes = answer.read(_MOST_BYTES)
            return content.decode(errors="replace")

    @override
    def look(self) -> PreemptionNotice | None:
        return self._notice

    def close(self) -> None:
        """Ends the thread, after the current request."""
        self._closed.set()
        self._thread.join()


def source_of(text: str, grace_seconds: float = GRACE_SECONDS) -> NoticeSource:
    """Makes a source from its text: a signal's name, ``http://…``, or else a path. It watches already."""
    if not text:
        raise ConfigError.of("what to watch", text, "write SIGTERM, SIGUSR1, http://host/path or the path of a file")
    word = text.strip().upper()
    name = word if word.startswith("SIG") else f"SIG{word}"
    if name in _SIGNALS:
        return SignalNotice(grace_seconds, signal.Signals[name])
    if "/" not in text and (word.startswith("SIG") or name in signal.Signals.__members__):
        raise ConfigError.of(f"one of {', '.join(_SIGNALS)}", text, "a file of that name is ./" + text)
    return HttpNotice(text, grace_seconds) if "://" in text else FileNotice(text, grace_seconds)
