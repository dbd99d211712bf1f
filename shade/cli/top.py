"""``shade top``: a live look at a training: what each rank does, the last decision, what an end would cost.

On a terminal it is drawn again and again until ``q`` or Ctrl-C, on a screen of its own that leaves no trace; into a
pipe or a file goes one look. It only asks: nothing about the training changes, and it may be started and left any time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from shade.cli import top_view
from shade.errors import ConfigError

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
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _REST = "\x1b[H", "\x1b[K", "\x1b[J"


def add(verbs: Any) -> None:
    """Adds ``top`` to the command."""
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
    if given.once or not sys.stdout.isatty():
        sys.stdout.write("".join(f"{line}\n" for line in _look(given.where)))
        return 0
    with _screen(), contextlib.suppress(KeyboardInterrupt):
        while True:
            _draw(_look_or_why_not(given.where))
            if _is_asked_to_end(given.interval):
                break
    return 0


def _look(where: Sequence[str]) -> list[str]:
    """One look at everything.

    Args:
        where: URLs and folders.

    Returns:
        Lines.

    Raises:
        ConfigError: Something is not there.
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


def _look_or_why_not(where: Sequence[str]) -> list[str]:
    """For a screen: what is away may come back."""
    lines = [f"shade top  {time.strftime('%H:%M:%S')}  q ends it", ""]
    for each in where:
        try:
            lines += [*_look([each]), ""]
        except ConfigError as error:
            lines += [each, top_view.printable(f"no answer: {error}"), ""]
    return lines


def _draw(lines: Sequence[str]) -> None:
    width, height = shutil.get_terminal_size()
    shown = [f"{line[:width]}{_END_OF_LINE}" for line in lines[:height]]
    sys.stdout.write(_HOME + "\n".join(shown) + _REST)
    sys.stdout.flush()


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """The terminal's other screen, keys as they are typed; all is put back, however this ends."""
    import termios
    import tty

    keys = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = termios.tcgetattr(keys) if keys is not None else None
    sys.stdout.write(_ENTER)
    try:
        if keys is not None:
            tty.setcbreak(keys)
        yield
    finally:
        if keys is not None and before is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, before)
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


def _is_asked_to_end(seconds: float) -> bool:
    """Waits so long, or until ``q`` is typed."""
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
