"""The processes of one run on this machine: a store if none was named, the ranks, a progress bar, the report.

Whatever ends the launcher ends them all: a signal is passed on and waited for, an error unwinds through the same
`with`, and a launcher that is killed outright takes its children with it (`shade.process`), the private server through
its own watchdog.

Exit codes: 0 done · 1 a rank failed (the log says where) · 2 bad input, one line said why · 128+n ended by signal n.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from tqdm import tqdm

from shade.config import CACHE_URL, RUN_FILE, RunConfig
from shade.data.dataset import ACCESS_LOG
from shade.errors import ShadeError
from shade.launch import flags, preflight
from shade.launch.resolve import resolve
from shade.process import die_with_parent
from shade.store import open_store

_GRACE_SECONDS = 20.0
_POLL_SECONDS = 0.2


class _Ended(BaseException):
    """A signal asked the launcher to end."""

    def __init__(self, number: int) -> None:
        self.number = number


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the launcher.

    Args:
        argv: Flags; the process's own when None.

    Returns:
        The exit code, see the top of the file.
    """
    args = flags.parser().parse_args(argv)
    dry_run = vars(args).pop("dry_run", False)
    try:
        config, cache_url = resolve(args, Path.cwd())
        preflight.check(config, cache_url)
        if dry_run:
            return 0
        return _launch(config, cache_url)
    except ShadeError:
        return 2
    except _Ended as ended:
        return 128 + ended.number


def describe(config: RunConfig) -> str:
    """The resolved plan, a line per setting, and the command that the ranks are started with."""
    plan = dataclasses.asdict(config)
    width = max(map(len, plan))
    lines = [
        f"{name:{width}}  {', '.join(value) if isinstance(value, tuple) else value}" for name, value in plan.items()
    ]
    return "\n".join([*lines, f"{'command':{width}}  {' '.join(_command(config))}"])


def _launch(config: RunConfig, cache_url: str) -> int:
    out = Path(config.out)
    fresh = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    for leftover in out.glob("failure-*.txt"):
        leftover.unlink()
    try:
        with _signals(), contextlib.ExitStack() as stack:
            if cache_url.startswith("local:"):
                cache_url = stack.enter_context(open_store(cache_url)).url
            config = dataclasses.replace(config, master_port=config.master_port or _free_port())
            code = _train(config, cache_url)
    except ShadeError:
        if fresh:
            shutil.rmtree(out)
        raise
    failures = sorted(out.glob("failure-*.txt"))
    if failures:
        if fresh and not (out / "metrics.jsonl").exists():
            shutil.rmtree(out)
        return 2
    if code != 0:
        return 1
    if config.node_rank == 0:
        pass
    return 0


def _train(config: RunConfig, cache_url: str) -> int:
    """Starts the ranks and waits for them."""
    out = Path(config.out)
    log = out / "train.log"
    environment = os.environ | {RUN_FILE: str(config.save()), CACHE_URL: cache_url, ACCESS_LOG: str(log)}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // config.processes)))
    if config.master_socket:
        environment |= {"GLOO_SOCKET_IFNAME": config.master_socket, "NCCL_SOCKET_IFNAME": config.master_socket}
    _link_log(log)
    launcher = os.getpid()
    with log.open("ab") as sink:
        ranks = subprocess.Popen(
            _command(config),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=lambda: die_with_parent(launcher),
            start_new_session=True,
        )
    try:
        return _watch(ranks, config)
    finally:
        _end(ranks)


def _command(config: RunConfig) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(config.nodes), "--node_rank", str(config.node_rank)),
        *("--nproc_per_node", str(config.processes)),
        *("--master_addr", config.master_address, "--master_port", str(config.master_port)),
        config.script,
    ]


def _watch(ranks: subprocess.Popen[bytes], config: RunConfig) -> int:
    """Turns the ranks' progress file into a bar until they are done."""
    file = Path(config.out) / "progress.json"
    file.unlink(missing_ok=True)
    form = {"bar_format": "{l_bar}{bar}| {postfix}", "mininterval": 0.2 if sys.stderr.isatty() else 10.0}
    with tqdm(total=config.epochs, unit="epoch", file=sys.stderr, **form) as bar:
        bar.set_postfix_str("starting the ranks")
        while ranks.poll() is None:
            time.sleep(_POLL_SECONDS)
            with contextlib.suppress(OSError, ValueError):
                now = json.loads(file.read_text())
                bar.set_postfix_str(
                    f"epoch {now['epoch'] + 1}/{config.epochs} step {now['step']}/{now['num_steps']} · "
                    f"{now['samples_per_second']:.0f} samples/s · hit ratio {now['hit_ratio']:.2f} · "
                    f"waiting {now['waiting_fraction']:.0%}",
                    refresh=False,
                )
                bar.update(now["epoch"] + now["step"] / max(1, now["num_steps"]) - bar.n)
        if ranks.returncode == 0:
            bar.set_postfix_str("done", refresh=False)
            bar.update(bar.total - bar.n)
    file.unlink(missing_ok=True)
    return ranks.returncode


def _end(ranks: subprocess.Popen[bytes]) -> None:
    if ranks.poll() is None:
        ranks.send_signal(signal.SIGTERM)
        try:
            ranks.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(ranks.pid, signal.SIGKILL)
            ranks.wait()


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """SIGINT and SIGTERM unwind the launcher instead of ending it on the spot."""

    def unwind(number: int, frame: FrameType | None) -> None:
        raise _Ended(number)

    before = {number: signal.signal(number, unwind) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _link_log(log: Path) -> None:
    """Links train.log into the working directory, unless a file of that name is somebody else's."""
    link = Path.cwd() / "train.log"
    if link.is_symlink():
        link.unlink()
    if not link.exists() and log != link:
        link.symlink_to(log)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last_error(log: Path) -> str:
    """The last line of the log that looks like an exception: where a reader would look first."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if "Error:" in line and "ChildFailedError" not in line]
    return errors[-1][-300:] if errors else "no error was logged"
