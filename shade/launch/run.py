"""Runs one training on this machine from its command line to its report.

Exit codes: 0 done · 1 a rank failed, one line says which and why · 2 bad input, one line says what was expected, and
nothing was written · 128+n ended by signal n.

Invariant: for a run on one machine, the ``hitting`` and ``miss`` lines of train.log are as many as the rows of
metrics.jsonl say together. A killed run has logged accesses that no row counts; when it is resumed they get a row of
their own, of the kind ``lost``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from shade.checkpoint._buffer.shared_memory_folder import remove_folder
from shade.config import ACCESS_LOG, CACHE_URL, CHECKPOINT_URL, HAS_SNAPSHOTS, RUN_FILE, SNAPSHOTS, RunConfig
from shade.errors import ConfigError, ShadeError, shown_place
from shade.launch import preflight
from shade.launch.bundled import DIGITS, EXAMPLES, prepare_digits
from shade.launch.preflight import has_snapshots, memory_folder
from shade.launch.ranks import Ended, Ranks, await_machine_0, command, free_port, signals_as_exceptions, watch
from shade.launch.resolve import StoreURLs, parse, resolve
from shade.report import write_comparison, write_report
from shade.store import open_store
from shade.store.url import format_address
from shade.telemetry import JsonlSink
from shade.terminal import status_line
from shade.trajectory import LOSSES

_OURS = (
    *("run.json", HAS_SNAPSHOTS, "train.log", "output.log"),
    *("metrics.jsonl", "trace.npz", "trail.jsonl", "progress.json"),
)


class Workspace:
    """Where a run writes.

    Args:
        config: The resolved run.
        directory: The user's working directory; gets the link ``train.log``.
        checkpoint_url: URL of the store for snapshots, with its password, or None.
        is_again: Whether it takes over the directory of an earlier attempt.

    Raises:
        ConfigError: The run directory cannot be made, or a run that began meanwhile has it.
    """

    def __init__(
        self, config: RunConfig, directory: Path, checkpoint_url: str | None = None, *, is_again: bool = False
    ) -> None:
        self._config, self._checkpoint_url = config, checkpoint_url
        self.out = Path(config.out)
        self.train_log = self.out / "train.log"
        """A line for each sample that was fetched and one for each epoch, for grep."""
        self.output_log = self.out / "output.log"
        """All output of the ranks."""
        self.metrics = self.out / "metrics.jsonl"
        self._link = directory / "train.log"
        self._linked_before: str | None = None
        self._made = [path for path in (self.out, *self.out.parents) if not path.exists()]
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            if not (config.resume or is_again):
                config.save(is_new=True)
            self.train_log.touch()
        except FileExistsError:
            cure = "choose another, or continue it with --resume"
            raise ConfigError.of("an --out without a run in it", str(self.out), cure) from None
        except OSError as error:
            cure = f"choose another --out ({error.strerror})"
            raise ConfigError.of("an --out that can be written", str(self.out), cure) from None
        for leftover in (*self.out.glob("failure-*.txt"), self.out / "progress.json"):
            leftover.unlink(missing_ok=True)
        if config.resume and config.nodes == 1 and config.has_cache:  # else no row counts the logged accesses
            self._account_for_lost()
        self._make_link()

    @property
    def failure(self) -> str | None:
        """Returns the line of the first rank that met bad input."""
        lines = [path.read_text().strip() for path in sorted(self.out.glob("failure-*.txt"))]
        return next(filter(None, lines), None)

    @property
    def has_results(self) -> bool:
        """Returns whether there is anything worth keeping: an epoch's metrics or a snapshot."""
        measured = self.metrics.exists() and self.metrics.stat().st_size > 0
        return measured or has_snapshots(self._config, self._checkpoint_url)

    def undo(self) -> None:
        """Removes what a run writes, unless there are results; the link points where it did before.

        Files of the user, and another machine's directory, may lie there too: they stay, and so do their folders.
        """
        if self.has_results:
            return
        # Before the storage goes, which has the name of that folder.
        if memory := memory_folder(self._config, self._checkpoint_url):
            remove_folder(memory)
        if self._link.is_symlink() and os.readlink(self._link) == str(self.train_log):
            self._link.unlink()
            if self._linked_before is not None:
                self._link.symlink_to(self._linked_before)
        for path in (self.out / name for name in _OURS):
            path.unlink(missing_ok=True)
        for path in (*self.out.glob("failure-*.txt"), *self.out.glob("rank*.prom")):
            path.unlink()
        for folder in ("tensorboard", LOSSES, SNAPSHOTS):
            shutil.rmtree(self.out / folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            # Deepest first; a folder with files of the user is not empty and stays.
            for path in self._made:
                path.rmdir()

    def _make_link(self) -> None:
        """Links train.log into the working directory, unless the user has a file of that name."""
        with contextlib.suppress(OSError):  # a working directory that is not ours to write only lacks a convenience
            if self._link.is_symlink():
                self._linked_before = os.readlink(self._link)
                self._link.unlink()
            if not self._link.exists():
                self._link.symlink_to(self.train_log)

    def _account_for_lost(self) -> None:
        logged = {"hits": 0, "misses": 0}
        with self.train_log.open("rb") as lines:
            for line in lines:
                logged["hits"] += line.startswith(b"hitting ")
                logged["misses"] += line.startswith(b"miss ")
        with contextlib.suppress(FileNotFoundError), self.metrics.open("rb") as rows:
            for row in rows:
                with contextlib.suppress(ValueError):
                    counts = json.loads(row)
                    for name in logged:
                        logged[name] -= int(counts.get(name) or 0)
        if any(count > 0 for count in logged.values()):
            sink = JsonlSink(self.metrics)
            sink.write({"kind": "lost", **{name: max(0, count) for name, count in logged.items()}})
            sink.close()


ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""glibc settings for ranks: what a step frees stays for the next one, up to 1 GiB. Else it goes to the kernel and comes
back page by page, thousands of faults a step (decision 0006). The user's own settings win."""


def main(argv: Sequence[str] | None = None, prog: str = "runshade.py") -> int:
    """Runs the launcher.

    Args:
        argv: Flags; the process's own if None.
        prog: What the user typed, for help and messages.

    Returns:
        The exit code, see the top of the file.
    """
    args = parse(sys.argv[1:] if argv is None else argv, prog)
    dry_run = vars(args).pop("dry_run", False)
    compares = not any(value not in (None, []) for name, value in vars(args).items() if name not in ("out", "track"))
    config: RunConfig | None = None
    made: RunConfig | None = None
    stores = StoreURLs("none")
    try:
        with signals_as_exceptions() as remind:
            with status_line(f"{prog}: reading the plan"):
                config, stores = resolve(args, Path.cwd())
            if compares:
                config = dataclasses.replace(config, script=str(EXAMPLES / "quickstart.py"))
            digits = (Path.cwd() / DIGITS).resolve()
            needs_digits = config.train_paths == (str(digits / "train"),)
            if needs_digits and not dry_run:
                if not digits.is_dir():
                    sys.stderr.write(f"writing the digits into {digits}\n")
                prepare_digits(digits)
            is_there = not needs_digits or digits.is_dir()
            with status_line(f"{prog}: checking data, cache and snapshots"):
                content = (
                    preflight.check(config, stores) if is_there else f"the digits, still to be written into {digits}"
                )
            if dry_run:
                sys.stdout.write(describe(config, content) + "\n")
                return 0
            if config.resume and config.node_rank == 0 and not preflight.has_snapshots(config, stores.checkpoint):
                sys.stderr.write(f"{prog}: run {config.run} has no snapshot yet; it starts from the beginning\n")
                config = _again(config, stores)
            elif config.nodes == 1 and not {"out", "resume"} & vars(args).keys():
                config = made = _in_new_directory(config)
            if compares:
                code, message = _compare(config, stores, remind)
            else:
                code, message = _launch(config, stores, remind, f"{prog}: {content}\n")
            again = config.restarts if config.min_nodes is None else 0  # else torch.distributed.run does it
            for left in range(again - 1, -1, -1):
                if code != 1:
                    break
                sys.stderr.write(f"{prog}: {message}; the ranks are restarted ({left} more times after that)\n")
                config = _again(config, stores)
                code, message = _launch(config, stores, remind)
    except ShadeError as error:
        code, message = 2, " ".join(str(error).split())
    except Ended as ended:
        code, message = 128 + ended.number, f"stopped by {ended}"
    if code == 2 and made is not None:
        # Nothing is in it, and perhaps nothing beside it.
        with contextlib.suppress(OSError):
            Path(made.out).rmdir()
            Path(made.out).parent.rmdir()
    if code and config is not None and code != 2 and preflight.has_snapshots(config, stores.checkpoint):
        message += f"; continue with --resume {config.out}"
    if message:
        sys.stderr.write(f"{prog}: {message}\n")
    return code


def _again(config: RunConfig, stores: StoreURLs) -> RunConfig:
    """Returns the plan of a restart after ranks were lost: from the newest snapshot, or from the start if there is none
    yet."""
    is_there = preflight.has_snapshots(config, stores.checkpoint)
    config = dataclasses.replace(config, resume=is_there)
    if not is_there:
        Workspace(config, Path.cwd(), stores.checkpoint, is_again=True).undo()
    return config


def _in_new_directory(config: RunConfig) -> RunConfig:
    """Makes the run directory, which bears the time; with a number if another run of that second has it."""
    out, number = Path(config.out), 1
    while True:
        try:
            out.mkdir(parents=True)
            return dataclasses.replace(config, out=str(out))
        except FileExistsError:
            number += 1
            out = Path(f"{config.out}-{number}")
        except OSError:
            # `Workspace` says what is wrong.
            return config


def describe(config: RunConfig, content: str) -> str:
    """Returns the resolved plan, a line per setting, and the command that starts the ranks; ``content`` says what the
    data set holds."""
    plan = {"data": content} | {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    plan["master_port"] = config.master_port or "any that is free"
    plan |= {name: shown_place(plan[name]) for name in ("persist_to", "notice") if name in plan}
    plan["cache"] = f"{config.cache}  ({config.working_set_fraction:.0%} of the data set)"
    width = max(map(len, plan))
    lines = [
        f"{name:{width}}  {', '.join(value) if isinstance(value, tuple) else value}" for name, value in plan.items()
    ]
    return "\n".join([*lines, f"{'command':{width}}  {' '.join(command(config))}"])


def _compare(config: RunConfig, stores: StoreURLs, remind: Callable[[], None]) -> tuple[int, str]:
    """Trains without a cache and without shade's loader, then with them, and compares; returns as `_launch` does."""
    plain = dataclasses.replace(config, out=str(Path(config.out) / "plain"), cache="none", run="", track=None)
    preflight.check_out(plain)
    first = "1/2: the digits from slow storage, with a plain DataLoader\n"
    code, message = _launch(plain, StoreURLs("none"), remind, first, compared=True)
    if code == 0:
        code, message = _launch(config, stores, remind, "2/2: the same through shade\n", compared=True)
    if code == 0:
        with status_line("writing the comparison"):
            comparison = write_comparison(plain.out, config.out)
        sys.stdout.write(comparison)
    return code, message


def _launch(
    config: RunConfig, stores: StoreURLs, remind: Callable[[], None], headline: str = "", *, compared: bool = False
) -> tuple[int, str]:
    """Trains and reports; returns the exit code and a message. The headline is shown when the run can be written. Of a
    comparison, only the run with a cache is shown."""

    def poll() -> int | None:
        remind()
        return ranks.poll()

    workspace = Workspace(config, Path.cwd(), stores.checkpoint)
    sys.stderr.write(headline)
    try:
        with contextlib.ExitStack() as stack:
            if stores.cache.startswith("local:"):
                stores = dataclasses.replace(stores, cache=stack.enter_context(open_store(stores.cache)).url)
            config = dataclasses.replace(config, master_port=config.master_port or free_port())
            if config.node_rank > 0:
                await_machine_0(config, remind)
            elif config.nodes > 1:
                where = format_address(config.master_address, config.master_port)
                line = f"{config.nodes} machines meet at {where}; the others need the same command with their own -nr"
                sys.stderr.write(f"{line}\n")
            environment = _environment(config, stores, workspace)
            ranks = stack.enter_context(Ranks(config, environment, workspace.output_log))
            code = watch(poll, config, in_lines=compared)
    except ShadeError:
        workspace.undo()
        raise
    # A rank that was killed makes the others complain about their input; that is no bad input. What one complained of
    # before the ranks were started again is over.
    if code != 0 and workspace.failure is not None and not ranks.was_killed:
        message = workspace.failure
        if workspace.has_results:  # training was under way: data that vanished, say
            return 1, message
        workspace.undo()
        return 2, message
    if code != 0:
        return 1, f"{ranks.why()}; all of it is in {workspace.output_log}"
    if config.node_rank > 0:
        return 0, f"done; the report is on machine 0, this machine's logs are in {config.out}"
    if not workspace.has_results:
        return 0, f"done; the script reported no epoch, so there is no report in {config.out}"
    with status_line("writing the report"):
        report = write_report(config.out)
    if not compared or config.cache != "none":
        sys.stdout.write(report)
        if sys.stdout.isatty():  # else they have scrolled away
            sys.stdout.write("\n" + report.split("\n\n")[1] + "\n")
    return 0, f"report, picture and logs are in {config.out}"


def _environment(config: RunConfig, stores: StoreURLs, workspace: Workspace) -> dict[str, str]:
    environment = os.environ | {
        RUN_FILE: str(config.save()),
        CACHE_URL: stores.cache,
        ACCESS_LOG: str(workspace.train_log),
    }
    if stores.checkpoint is not None:
        environment[CHECKPOINT_URL] = stores.checkpoint
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // config.processes)))
    environment.setdefault("PYTHONUNBUFFERED", "1")
    for name, value in ALLOCATOR.items():
        environment.setdefault(name, value)
    if config.min_nodes is not None:
        # With a store in common, later rounds of torch.distributed.run wait in vain for the address of rank 0.
        environment.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if config.master_socket:
        environment |= {"GLOO_SOCKET_IFNAME": config.master_socket, "NCCL_SOCKET_IFNAME": config.master_socket}
    return environment
