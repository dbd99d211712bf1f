"""Starts the ranks of one machine through torch.distributed.run, shows their progress, and ends them with the launcher.

A signal to the launcher becomes an exception, which unwinds through `Ranks.stop`. If the launcher, or
torch.distributed.run, is killed outright, the kernel sends their children a SIGTERM. Workers of the DataLoader end by
themselves, within five seconds of their rank. `watch` shows a bar on a terminal, by a small file with rank 0's present
step; a pipe or a file gets only the report and the errors.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from tqdm import tqdm

from shade.config import RunConfig
from shade.errors import ConfigError
from shade.process import die_with_parent
from shade.store._servers.cluster_bootstrap import own_address
from shade.store.url import format_address
from shade.terminal import progress_bar

GRACE_SECONDS = 40.0
"""torch.distributed.run itself waits 30 s for its ranks before it kills them."""
MEETING_SECONDS = 600
"""How long machines wait for each other until there are enough."""
LAST_CALL_SECONDS = 10
NAME_SECONDS = 60
"""How long the name of machine 0 may be unknown: Kubernetes publishes a pod's name when the pod exists."""
SILENCE_SECONDS = 3.0
"""Time after which a wait says what it waits for."""
_CONNECT_SECONDS = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TAIL_BYTES = 200_000
_POLL_SECONDS = 0.2
LINE_SECONDS = 4.0
"""Interval between lines about a run whose progress is not shown on a terminal."""


class Ended(BaseException):
    """A signal asked the launcher to end."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[Callable[[], None]]:
    """Raises `Ended` at the first SIGINT, SIGTERM or SIGHUP; later ones are ignored until cleanup is over. Where SIGHUP
    is ignored, as under ``nohup``, it stays so.

    Yields:
        A function to call now and then: it raises `Ended` again if the exception was lost, because the signal came
        in the middle of something that ignores exceptions, such as a `__del__` or Python's work at a fork.
    """
    asked: list[int] = []

    def remind() -> None:
        if asked:
            raise Ended(asked[0])

    if threading.current_thread() is not threading.main_thread():
        yield remind
        return

    signals = _SIGNALS if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else _SIGNALS[:-1]

    def unwind(number: int, frame: FrameType | None) -> None:
        del frame
        for each in signals:
            # A second Ctrl-C must not interrupt the cleanup of the first.
            signal.signal(each, signal.SIG_IGN)
        asked.append(number)
        raise Ended(number)

    print_ignored = sys.unraisablehook

    def print_unless_ended(ignored: sys.UnraisableHookArgs) -> None:
        if not isinstance(ignored.exc_value, Ended):
            print_ignored(ignored)

    before = {number: signal.signal(number, unwind) for number in signals}
    # `remind` raises a lost `Ended` again, so its traceback would be noise.
    sys.unraisablehook = print_unless_ended
    try:
        yield remind
    finally:
        sys.unraisablehook = print_ignored
        for number, handler in before.items():
            signal.signal(number, handler)


def command(config: RunConfig) -> list[str]:
    """Returns the command that starts the ranks of this machine."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(_fixed(config) if config.min_nodes is None else _elastic(config)),
        *("--nproc_per_node", str(config.processes)),
        config.script,
    ]


def _fixed(config: RunConfig) -> list[str]:
    """Returns the arguments for a fixed set of machines, each with its number."""
    here = ["--nnodes", str(config.nodes), "--node_rank", str(config.node_rank)]
    return [*here, "--master_addr", config.master_address, "--master_port", str(config.master_port)]


def _elastic(config: RunConfig) -> list[str]:
    """Returns the arguments for as many machines as there are. They meet on machine 0, which has the lowest address and
    so rank 0, and meet again when one is lost: those that come within `LAST_CALL_SECONDS` of there being enough
    continue."""
    is_host = int(config.node_rank == 0)
    settings = f"is_host={is_host},join_timeout={MEETING_SECONDS},last_call_timeout={LAST_CALL_SECONDS}"
    return [
        *("--nnodes", f"{config.min_nodes}:{config.nodes}", "--max_restarts", str(config.restarts)),
        *("--rdzv_backend", "c10d", "--rdzv_endpoint", f"{config.master_address}:{config.master_port}"),
        *("--rdzv_id", "shade", "--rdzv_conf", settings, "--local_addr", own_address(config.master_address)),
    ]


def await_machine_0(config: RunConfig, remind: Callable[[], None]) -> None:
    """Returns when machine 0 listens where all machines meet, and says what is waited for if that takes seconds.

    Args:
        config: The resolved run of another machine.
        remind: Called now and then; may raise.

    Raises:
        ConfigError: Machine 0 did not answer in `MEETING_SECONDS`, or its name stayed unknown for `NAME_SECONDS`.
    """
    machine_0 = format_address(config.master_address, config.master_port)
    cure = "start it there with -nr 0, or correct -master_address and --master_port"
    begun, silent = time.monotonic(), True
    while True:
        try:
            socket.create_connection((config.master_address, config.master_port), _CONNECT_SECONDS).close()
            return
        except OSError as error:
            waited = time.monotonic() - begun
            limit, reason = NAME_SECONDS if isinstance(error, socket.gaierror) else MEETING_SECONDS, str(error)
        if waited > limit:
            raise ConfigError.of(f"machine 0 at {machine_0}", f"{reason} for {limit} s", cure)
        if waited > SILENCE_SECONDS and silent:
            sys.stderr.write(f"waiting up to {limit} s for machine 0 at {machine_0} ({reason}); {cure}\n")
            silent = False
        remind()
        time.sleep(_POLL_SECONDS)


class Ranks:
    """The running ranks; a context manager that leaves none behind.

    Args:
        config: The resolved run.
        environment: Environment of the ranks.
        log: File for all their output.
    """

    def __init__(self, config: RunConfig, environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        launcher = os.getpid()
        with log.open("ab") as sink:
            self._log_start = sink.tell()
            self._process = subprocess.Popen(
                command(config),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
                # A killed launcher cannot unwind: the kernel ends its child.
                preexec_fn=lambda: die_with_parent(launcher),
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Returns the exit status, or None while they run."""
        return self._process.poll()

    def stop(self) -> None:
        """Ends them and waits until they are gone. Safe to call twice."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def was_killed(self) -> bool:
        """Returns whether a signal ended the rank that failed first: then the others' complaints are no bad input."""
        return self._cause(self._written())[1] < 0

    def why(self) -> str:
        """Says in one sentence why they failed, as read from their output."""
        text = self._written()
        who, status = self._cause(text)
        if status < 0:
            guess = " (out of memory?)" if -status == signal.SIGKILL else ""
            return f"{who} was killed by {signal.Signals(-status).name}{guess}"
        error = r"^(?:\[(rank\d+)\]:)?\s*((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$"
        errors = [each for each in re.findall(error, text, re.MULTILINE) if "ChildFailedError" not in each[1]]
        # A lost worker ends its rank, and the other ranks then complain about the connection, perhaps as the first.
        workers = [each for each in errors if "DataLoader worker" in each[1]]
        rank, line = (workers[:1] or [e for e in errors if e[0] == who.replace(" ", "")] or errors or [("", "")])[-1]
        if workers and rank:
            who = rank.replace("rank", "rank ")
        return f"{who} failed: {line.strip()[:300]}" if line else f"{who} failed with exit status {status}"

    def _written(self) -> str:
        """Returns the end of what the ranks wrote."""
        with self._log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - _TAIL_BYTES))
            return file.read().decode(errors="replace")

    @staticmethod
    def _cause(text: str) -> tuple[str, int]:
        """Returns which rank failed first, and its exit status, negative for a signal."""
        cause = re.search(r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", text, re.DOTALL)
        return (f"rank {cause[1]}", int(cause[2])) if cause else ("a rank", 1)


def watch(poll: Callable[[], int | None], config: RunConfig, *, in_lines: bool = False) -> int:
    """Shows a bar on standard error until ``poll`` returns the ranks' exit status, and returns that.

    Without a terminal it shows nothing or, if asked to, a line now and then.
    """
    file = Path(config.out) / "progress.json"
    form = "{percentage:3.0f}% |{bar:6}| {desc}"
    width = shutil.get_terminal_size().columns - 15 if sys.stderr.isatty() else None
    starting = f"starting {config.processes} rank{'s' * (config.processes > 1)} (importing PyTorch)"
    began = time.monotonic()
    next_line = LINE_SECONDS if in_lines and not sys.stderr.isatty() else float("inf")
    first: tuple[float, float] | None = None
    with progress_bar(config.epochs, bar_format=form) as bar:
        bar.set_description_str(starting)
        while (status := poll()) is None:
            time.sleep(_POLL_SECONDS)
            now: dict[str, Any] = {}
            with contextlib.suppress(OSError, ValueError):
                now = json.loads(file.read_text())
            seconds = time.monotonic() - began
            if seconds >= next_line:
                next_line = seconds + LINE_SECONDS
                sys.stderr.write(f"  {bar.desc}\n")
            if "step" in now:
                done = now["epoch"] + now["step"] / max(1, now["num_steps"])
                first = first or (seconds, done)
                pace = (seconds - first[0]) / (done - first[1]) if done > first[1] else None
                left = pace and pace * (config.epochs - done)
                bar.set_description_str(_progress(now, config.epochs, left, width), False)
                bar.update(done - bar.n)
            elif first is None:
                bar.set_description_str(f"{now.get('note', starting)} · {seconds:.0f} s")
        bar.n = config.epochs if status == 0 else bar.n
        bar.set_description_str("done" if status == 0 else "stopped")
    file.unlink(missing_ok=True)
    return status


def _progress(now: dict[str, Any], epochs: int, seconds_left: float | None, width: int | None) -> str:
    """Returns the text beside the bar: as many parts as fit, the most important first; a terminal of 80 columns has
    room for 65 characters."""
    parts = [f"epoch {now['epoch'] + 1}/{epochs}"]
    if now.get("loss") is not None:
        parts.append(f"loss {now['loss']:.3f}")
    if seconds_left is not None:
        parts.append(f"{tqdm.format_interval(seconds_left)} left")
    parts += [f"hits {now['hit_ratio']:.0%}", f"storage {_rate(now.get('origin_bytes_per_second', 0.0))}"]
    parts += [f"{now['samples_per_second']:,.0f} samples/s", f"waiting {now['waiting_fraction']:.0%}"]
    while len(parts) > 1 and width is not None and len(" · ".join(parts)) > width:
        parts.pop()
    return " · ".join(parts)


def _rate(bytes_per_second: float) -> str:
    """Returns what storage gives, in MB/s; a small rate has more digits."""
    rate = bytes_per_second / 1e6
    return f"{rate:.1f} MB/s" if rate >= 0.95 or not rate else f"{rate:.2f} MB/s"


def free_port() -> int:
    """Returns a port of this machine that is free now; another process may take it a moment later."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
