"""``shade top`` shows a training live: what each rank does, the last decision, what the end of a process would cost.

On a terminal `rich` redraws the look on the alternate screen until ``q`` or Ctrl-C; a pipe or a file gets one look. The
command only reads: it changes nothing about the training, and may be started and ended at any time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shade.cli import top_view
from shade.cli.tables import printable
from shade.errors import ConfigError

if TYPE_CHECKING:
    from rich.text import Text

_EXAMPLES: Final = """\
examples:
  shade top http://127.0.0.1:9090                       a run's telemetry server; its log says where
  shade top http://127.0.0.1:9090 runs/20250101-120000  and its folder: reads, stalls, memory
  shade top runs/20250101-120000 --once | cat           one look

compute, exchange   medians of the last 64 steps; the exchange may be hidden behind the compute
time                of the present epoch: the step itself, and the stalls by what the loading was busy with
                    (origin, cache, decode, transform; wait: none of these)
cache node          what the cache's servers hold, asked of them
waits               share of the step that the training stood still for the exchange
silent              since the rank was last heard of

q or Ctrl-C ends it. Beyond this machine the server wants the token in SHADE_TELEMETRY_TOKEN.
"""


def add(verbs: Any) -> None:
    """Adds the verb ``top`` to the command's parser."""
    parser = verbs.add_parser(
        "top",
        help="a live look at a training",
        description="Shows what each rank does, the last decision, and what an end would cost.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("where", nargs="+", metavar="WHERE", help="a telemetry server's URL, a run directory, or both")
    parser.add_argument("--once", action="store_true", help="one look, then end")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between looks (1)")
    parser.set_defaults(answer=_answer)


def _answer(given: argparse.Namespace) -> int:
    if not 0.05 <= given.interval <= 3600:
        raise ConfigError.of("an --interval from 0.05 to 3600 seconds", given.interval, "leave it at 1")
    if given.once or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        sys.stdout.write("".join(f"{line}\n" for line in _look(given.where)))
        return 0
    from rich.console import Console
    from rich.live import Live

    with _single_keys(), contextlib.suppress(KeyboardInterrupt):
        console = Console(highlight=False)
        with Live(_screenful(given.where), console=console, screen=True, auto_refresh=False) as screen:
            while not _is_asked_to_end(given.interval):
                screen.update(_screenful(given.where), refresh=True)
    return 0


def _look(where: Sequence[str]) -> list[str]:
    """Returns one look at everything, as lines.

    Args:
        where: URLs and folders.

    Returns:
        Lines.

    Raises:
        ConfigError: A server does not answer, or there is no such folder.
    """
    from shade.control.client import fetch_state

    lines: list[str] = []
    for each in where:
        lines += ["", each] if lines else [each]
        if "://" in each:
            lines += top_view.of_server(fetch_state(each))
        elif Path(each).is_dir():
            lines += top_view.of_run(Path(each))
        else:
            raise ConfigError.of("a telemetry server's URL or a run directory", each, "as http://127.0.0.1:9090")
    return lines


def _screenful(where: Sequence[str]) -> Text:
    """Returns one look for a screen; what does not answer now may answer later, so the screen says so and stays."""
    from rich.text import Text

    lines = [f"shade top  {time.strftime('%H:%M:%S')}  q ends it", ""]
    for each in where:
        try:
            lines += [*_look([each]), ""]
        except ConfigError as error:
            lines += [each, printable(f"no answer: {error}"), ""]
    return Text.from_ansi("\n".join(lines))


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Lets the terminal pass on each key when it is typed; restores its settings at the end."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield
        return
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _is_asked_to_end(seconds: float) -> bool:
    """Waits, and returns whether ``q`` was typed meanwhile."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0]:
            typed = os.read(sys.stdin.fileno(), 64)
            if not typed or b"q" in typed:
                return True
    return False
