"""Reads the fenced blocks of the documentation, and runs those of one page in order, in one folder.

A page may begin with ``<!-- page: slow needs=redis,images -->``: what its blocks need, by the names of `Needs`. It also
runs as a script of its own that closes nothing, and on two ranks, unless it says ``closes`` (a block opens again what
another one has closed) or ``alone`` (its numbers or its files are those of one rank). A block may follow a comment:

``<!-- test: ranks=2 -->``              a whole script, run by torchrun with that many ranks
``<!-- test: output -->``               what the block before it prints
``<!-- test: part-of=examples/x.py -->``    lines of that file, which another test runs; ``…`` stands for other lines
``<!-- test: skip reason=… -->``        needs what no test has; it is only compiled or parsed

A python block with ``title="train.py"`` becomes that file; any other runs at once, in the page's own name space. In a
console block, lines that begin with ``$`` are commands, and the lines below are their output. A sh block is a script.
Output is compared without its numbers; a line ``…`` stands for any lines, and ``…`` in a line for any text.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```([\w-]*)(?: +title=\"([^\"]+)\")?[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!-- test: ([^\n]*?) -->\n\Z")
PAGE = re.compile(r"<!-- page: ([^\n]*?) -->")
NUMBER = re.compile(r"[-+]?\d[\d,.:]*(e[-+]?\d+)?")
SECONDS = 300


@dataclass
class Block:
    """One fenced block."""

    language: str
    title: str
    text: str
    line: int
    """The first line of its text, counted from 1."""
    start: int
    stop: int
    """Where the text stands in the page."""
    options: dict[str, str] = field(default_factory=dict)

    @property
    def is_at_once(self) -> bool:
        """Whether it is Python that runs in the page's own name space."""
        return self.language == "python" and not self.title and not self.options

    @property
    def is_run(self) -> bool:
        """Whether it runs: at once, on ranks, as commands, or as a file that a command names."""
        return self.language in ("python", "console", "sh") and not {"skip", "part-of"} & set(self.options)

    @property
    def reason(self) -> str:
        """Why it is not run; empty if it is."""
        return self.options.get("reason", "") if "skip" in self.options else ""


def options_of(text: str) -> dict[str, str]:
    """Reads ``word name=value …``; a reason is the rest of the line."""
    head, found, reason = text.partition("reason=")
    options = {name: value for name, _, value in (word.partition("=") for word in head.split())}
    return options | ({"reason": reason} if found else {})


def blocks_of(page: str) -> list[Block]:
    """Returns all fenced blocks of a page."""
    found = []
    for match in FENCE.finditer(page):
        comment = COMMENT.search(page, 0, match.start())
        options = options_of(comment[1]) if comment else {}
        line = page.count("\n", 0, match.start(3)) + 1
        found.append(Block(match[1], match[2] or "", match[3], line, match.start(3), match.end(3), options))
    return found


def page_options(page: str) -> dict[str, str]:
    """Returns what the page says of itself."""
    match = PAGE.search(page)
    return options_of(match[1]) if match else {}


def commands_of(text: str) -> list[tuple[str, str]]:
    """Returns the commands of a console block, each with the output that is shown below it."""
    found: list[tuple[str, str]] = []
    continues = False
    for line in text.splitlines():
        if continues:
            found[-1] = (f"{found[-1][0]}\n{line}", "")
        elif line.startswith("$ "):
            found.append((line[2:], ""))
        else:
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
        continues = found[-1][0].endswith("\\") and not found[-1][1]
    return found


def is_like(shown: str, printed: str) -> bool:
    """Whether shown output agrees with what was printed, numbers and the width of gaps aside."""

    def plain(text: str) -> str:
        lines = (NUMBER.sub("0", line) for line in text.strip().splitlines())
        return "\n".join(re.sub(r"[ ─━|█▏▎▍▌▋▊▉╭╮╰╯│┃╸╺]+", " ", line).strip() for line in lines)

    pieces = [re.escape(each.strip()).replace("…", ".*?") for each in re.split(r"^\s*…\s*$", plain(shown), flags=re.M)]
    pattern = r"\s*" + r"(?s:.*?)".join(pieces) + r"\s*"
    return re.fullmatch(pattern, plain(printed)) is not None


class PageRunner:
    """Runs the blocks of a page.

    Args:
        path: The page.
        folder: Where its files and commands live.
        addresses: What stands instead of the addresses that the page names.
        preamble: Python that runs first, for what the page says the reader has already.
        refresh: Write what was printed into the page, instead of comparing it.
        names: The name space of its blocks; by default one of its own.
    """

    def __init__(
        self,
        path: Path,
        folder: Path,
        addresses: dict[str, str],
        preamble: str = "",
        *,
        refresh: bool = False,
        names: dict[str, Any] | None = None,
    ) -> None:
        self._path, self._folder, self._addresses, self._refresh = path, folder, addresses, refresh
        self._preamble = preamble
        self._names = {"__name__": "__main__"} if names is None else names
        self._is_script, self._is_rank = False, False
        self._rewritten: Callable[[str], str] = str
        self._printed = ""
        self._edits: list[tuple[int, int, str]] = []

    def _install_command(self) -> None:
        """Makes ``shade`` the command of this clone."""
        command = self._folder / "bin" / "shade"
        command.parent.mkdir(exist_ok=True)
        call = "import sys; from shade.cli import main; sys.exit(main())"
        command.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c '{call}' \"$@\"\n")
        command.chmod(0o755)

    def run(self) -> None:
        """Runs all blocks; raises what the first failing one raises, or AssertionError if its output differs."""
        self._install_command()
        try:
            self._run()
        finally:
            for name in ("checkpointer", "sampler", "dataset"):
                if name in self._names:
                    self._names[name].close()

    def run_as_script(self, rewritten: Callable[[str], str], *, is_rank: bool = False) -> None:
        """Runs all blocks as a script of its own: nothing is closed for it, and outputs are not compared.

        Args:
            rewritten: Makes of each python block what runs in its place.
            is_rank: Run only what runs at once, on one of several ranks.
        """
        self._install_command()
        self._is_script, self._is_rank, self._rewritten = True, is_rank, rewritten
        self._run()

    def _run(self) -> None:
        text = self._path.read_text(encoding="utf-8")
        exec(compile(self._real(self._preamble), "<preamble>", "exec"), self._names)
        for block in blocks_of(text):
            if self._is_rank and not block.is_at_once:
                continue
            if "skip" in block.options:
                check_only(block)
            elif "part-of" in block.options:
                check_part(block)
            elif "output" in block.options:
                self._compare(block, block.text, self._printed, block.start, block.stop)
            elif block.language == "python" and block.title:
                (self._folder / block.title).write_text(self._code(block), encoding="utf-8")
            elif block.language == "python" and "ranks" in block.options:
                self._printed = self._ranks(block)
            elif block.language == "python":
                self._printed = self._python(block)
            elif block.language == "console":
                self._console(block)
            elif block.language == "sh":
                self._printed = self._shell(f"set -eu\n{block.text}", block)
            else:
                check_only(block)
        for start, stop, new in reversed(self._edits):
            text = text[:start] + new + text[stop:]
        if self._edits:
            self._path.write_text(text, encoding="utf-8")

    def _code(self, block: Block) -> str:
        return self._rewritten(self._real(block.text))

    def _real(self, text: str) -> str:
        for shown, real in self._addresses.items():
            text = text.replace(shown, real)
        return text

    def _shown(self, text: str) -> str:
        for shown, real in self._addresses.items():
            text = text.replace(real, shown)
        return text.replace(str(self._folder), "…")

    def _python(self, block: Block) -> str:
        code = compile("\n" * (block.line - 1) + self._code(block), str(self._path), "exec", dont_inherit=True)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, self._names)
        return out.getvalue()

    def _ranks(self, block: Block) -> str:
        script = self._folder / f"block-{block.line}.py"
        script.write_text(self._code(block), encoding="utf-8")
        launch = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node {block.options['ranks']}"
        return self._shell(f"{launch} {script.name}", block)

    def _console(self, block: Block) -> None:
        at = block.start
        for command, shown in commands_of(block.text):
            printed = self._shell(command, block)
            begin = at + len(f"$ {command}\n")
            at = begin + len(shown)
            if shown:
                self._compare(block, shown, printed, begin, at)
            self._printed = printed

    def _shell(self, command: str, block: Block) -> str:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "PATH": f"{self._folder}/bin{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "100",
        }
        done = subprocess.run(
            ["bash", "-c", self._real(command)], cwd=self._folder, env=environment, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False,
        )  # fmt: skip
        expected = int(block.options.get("exit", 0))
        where = f"{self._path.name}:{block.line}: {command}"
        assert done.returncode == expected, f"{where}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        return done.stdout + (done.stderr if expected or "stderr" in block.options else "")

    def _compare(self, block: Block, shown: str, printed: str, start: int, stop: int) -> None:
        printed = "".join(f"{line.rstrip()}\n" for line in self._shown(printed).strip("\n").splitlines())
        agrees = self._is_script or is_like(shown, printed)
        if agrees and (not self._refresh or "…" in shown):
            return
        assert self._refresh, f"{self._path.name}:{block.line} shows\n{shown}\nbut printed was\n{printed}"
        self._edits.append((start, stop, printed))


def check_part(block: Block) -> None:
    """Looks for a block's lines in the file that they are taken from, at one indentation or another."""
    file = (ROOT / block.options["part-of"]).read_text(encoding="utf-8")
    lines = [line.strip() for line in file.splitlines()]
    text = "\n".join(lines) + "\n"
    for part in re.split(r"^\s*\.\.\.\n", block.text, flags=re.MULTILINE):
        shown = "\n".join(line.strip() for line in part.strip().splitlines()) + "\n"
        assert shown in text, f"{block.options['part-of']} has no such lines:\n{part}"


def check_only(block: Block) -> None:
    """Parses a block that is not run."""
    if block.language == "python":
        ast.parse(block.text)
    elif block.language == "yaml":
        import yaml

        assert list(yaml.safe_load_all(block.text))
    elif block.language in ("sh", "console"):
        commands = [command for command, _ in commands_of(block.text)] if block.language == "console" else [block.text]
        for command in commands:
            subprocess.run(["bash", "-n", "-c", command], check=True, timeout=SECONDS)


def pages() -> Iterator[Path]:
    """Yields the README and every page of docs/."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))
