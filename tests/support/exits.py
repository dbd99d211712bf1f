"""Runs a script until all of it has ended, and says how it ended and what it left; makes scripts that close nothing.

Each script has a machine of its own as far as it can leave something there: ``/dev/shm`` (a mount namespace), a
temporary folder, and an empty cache of numba's, so that all is compiled again. What it starts is known by the mount
namespace: servers write over their environment.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONGEST_SECONDS = 800.0
"""After this a script hangs."""
LEAVING_SECONDS = 20.0
"""For what a script has started to see that it is gone."""
OF_OTHERS = ("torchelastic_", "torchinductor_", "ray")
"""What torch and Ray leave in the temporary folder."""
PUBLIC = ("shade", "shade.checkpoint", "shade.checkpoint.dcp", "shade.data", "shade.gradient", "shade.store")
_OWN_MEMORY = """
mount -t tmpfs tmpfs /dev/shm || exit 111
"$@" >"$ENDING/said" 2>"$ENDING/errors" </dev/null
echo $? >"$ENDING/status.new"; mv "$ENDING/status.new" "$ENDING/status"
exec sleep 3600
"""


@functools.cache
def closed_by_with() -> frozenset[str]:
    """Names of our classes that a ``with`` closes."""
    found = set()
    for name in PUBLIC:
        module = importlib.import_module(name)
        exported = ((each, getattr(module, each)) for each in module.__all__)
        found |= {each for each, kind in exported if hasattr(kind, "__exit__") and hasattr(kind, "close")}
    return frozenset(found)


class _Unclosing(ast.NodeTransformer):
    def __init__(self) -> None:
        self.changes: list[str] = []

    def _note(self, node: ast.AST) -> None:
        self.changes.append(ast.unparse(node).partition("\n")[0])

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        ours = [item for item in node.items if _makes_ours(item.context_expr)]
        if not ours:
            return node
        self._note(node)
        made: list[ast.stmt] = []
        for item in ours:
            value, name = item.context_expr, item.optional_vars
            made.append(ast.Expr(value) if name is None else ast.Assign([name], value))
        node.items = [item for item in node.items if item not in ours]
        return [*made, *([node] if node.items else node.body)]

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        match node.value:
            case ast.Call(func=ast.Attribute(attr="close"), args=[], keywords=[]):
                self._note(node)
                return ast.Pass()
        return node


def _makes_ours(value: ast.expr) -> bool:
    match value:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in closed_by_with()
    return False


def without_closing(text: str) -> tuple[str, list[str]]:
    """Makes a script that closes nothing of one that does.

    ``with X(…) as x:`` becomes ``x = X(…)`` for each X of ours, and ``….close()`` goes.

    Returns:
        The script, and the lines that were changed; without any, it is the same.
    """
    unclosing = _Unclosing()
    tree = unclosing.visit(ast.parse(text))
    if not unclosing.changes:
        return text, []
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n", unclosing.changes


@dataclass(frozen=True)
class Ending:
    """How a script has ended."""

    status: int | None
    """None if it hung."""
    said: str
    errors: str
    left: list[str]
    """Processes, files in shared memory, and entries of the temporary folder."""

    def check(self) -> None:
        """Raises AssertionError if it did not end as a script should, or left something."""
        shown = f"{self.said[-2000:]}\n{self.errors[-6000:]}"
        assert self.status is not None, f"hung\n{shown}"
        assert self.status == 0, f"status {self.status}\n{shown}"
        assert not self.left, f"left {self.left}\n{shown}"


def ending_of(command: Sequence[str | Path], folder: Path, **environment: str) -> Ending:
    """Runs a command in a folder, and waits until what it has started is gone, or had long enough.

    Args:
        command: What is run.
        folder: Where it runs.
        **environment: Added to this process's environment.
    """
    namespace = own_namespace()
    with _temporary_folder() as place:
        (place / "tmp").mkdir()
        ours = {
            "ENDING": str(place),
            "TMPDIR": str(place / "tmp"),
            "NUMBA_CACHE_DIR": str(place / "numba"),
            "TORCH_EXTENSIONS_DIR": str(Path.home() / ".cache" / "torch_extensions"),  # DeepSpeed compiles for minutes
            "XDG_CACHE_HOME": str(place / "cache"),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}",
            "PYTHONFAULTHANDLER": "1",  # shows the stacks of a script that hangs
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        own = subprocess.Popen(
            [*namespace, "sh", "-c", _OWN_MEMORY, "sh", *map(str, command)],
            cwd=folder,
            env=os.environ | ours | environment,
            start_new_session=True,
        )
        status = place / "status"
        _wait_until(lambda: status.exists() or own.poll() is not None, LONGEST_SECONDS)
        hung = not status.exists()
        if hung:
            for process in _started(own.pid):
                _kill(process, signal.SIGABRT)
            _wait_until(status.exists, LEAVING_SECONDS)
        memory, temporary = Path(f"/proc/{own.pid}/root/dev/shm"), place / "tmp"
        _wait_until(lambda: not _left(own.pid, memory, temporary), LEAVING_SECONDS)
        left = _left(own.pid, memory, temporary)
        for process in [*_started(own.pid), own.pid]:
            _kill(process, signal.SIGKILL)
        own.wait()
        code = None if hung else int(status.read_text())
        said, errors = ((place / name).read_text(errors="replace") for name in ("said", "errors"))
        return Ending(code, said, errors, left)


@functools.cache
def own_namespace() -> tuple[str, ...]:
    """Returns the words that run a command with mounts of its own; skips the test where that is not permitted."""
    for words in (("unshare", "--mount"), ("unshare", "--map-root-user", "--mount")):
        with contextlib.suppress(FileNotFoundError):
            command = [*words, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return words
    pytest.skip("needs a mount namespace, which this machine does not permit")


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    # Not tmp_path: a server of ours goes to /tmp where the temporary folder's name is too long for a socket.
    place = Path(tempfile.mkdtemp(prefix="exit-"))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _wait_until(is_so: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)


def _kill(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _started(holder: int) -> dict[int, str]:
    """Returns the processes that a script has started and that still run: process id → command."""
    found = {}
    namespace = os.readlink(f"/proc/{holder}/ns/mnt")
    for path in Path("/proc").glob("[0-9]*/ns/mnt"):
        process = path.parent.parent
        with contextlib.suppress(OSError):
            if int(process.name) != holder and os.readlink(path) == namespace:
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")[:150]
    return found


def _left(holder: int, memory: Path, temporary: Path) -> list[str]:
    processes = [f"process {words}" for words in _started(holder).values()]
    # A folder that is empty costs nothing: /dev/shm/shade-<user> is one.
    files = [f"/dev/shm/{path.relative_to(memory)}" for path in memory.rglob("*") if not path.is_dir()]
    rest = [f"$TMPDIR/{path.name}" for path in temporary.iterdir() if not path.name.startswith(OF_OTHERS)]
    return processes + sorted(files) + sorted(rest)
