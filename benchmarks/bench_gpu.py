"""What a GPU user asks: how long a save stalls, what the loader adds to a step, what choosing from a gradient costs.

Question
    Does a save of GPT-2 and Adam cost no more than copying the same bytes, and, overlapped, a twentieth of PyTorch's
    own asynchronous save? Does a step with `ShadeLoader` take 1.02 of one whose batches lie on the device? Is a
    gradient chosen from in a fifth of `torch.topk`'s time? And does every path that needs a GPU work?

Method
    Figures: ours and its floor or rival in one run, in rounds of all ways in a new random order; the first round is
    dropped, the figure is the median, in brackets the range, and the ratio is the median of the rounds' ratios. What is
    timed, and what is not, stand in the docstrings of `benchmarks/gpu/stall.py`, `loading.py` and `choosing.py`.
    Paths: `benchmarks/gpu/paths.py`; each says what worked, or fails.

Command
    scripts/gpu_check                     all; on a GPU it writes benchmarks/results/gpu.md
    scripts/gpu_check --out FOLDER        into another folder
    scripts/gpu_check stall fsdp2         some parts, named by words of them; writes nothing without --out

    Needs no network, and makes its data. It ends within eight minutes: what takes longer is stopped, with its stack.
    The status is 1 if a path is wrong or a part failed; a target that is missed is said in the table, and is no
    failure. Without a GPU the same lines run on the processor with small sizes: a stand-in, which holds no figure of a
    GPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))  # a clone needs no installation

import torch  # noqa: E402 - once the clone is on the path
from gpu.choosing import choosing  # noqa: E402
from gpu.loading import loading  # noqa: E402
from gpu.machine import STAND_IN, Machine  # noqa: E402
from gpu.paths import PATHS  # noqa: E402
from gpu.stall import stall  # noqa: E402
from gpu.table import HEAD, Row  # noqa: E402

FIGURES: dict[str, Callable[[Machine], list[Row]]] = {"stall": stall, "loading": loading, "choosing": choosing}
LONGEST_SECONDS = 460.0


def chosen(words: list[str]) -> list[str]:
    """The parts of some names, or that have one of some words in their names; all without words."""
    names = [*FIGURES, *PATHS]
    return [name for name in names if not words or any(w == name or (w not in names and w in name) for w in words)]


def page(machine: Machine, rows: list[Row], paths: list[str], failed: list[str], seconds: float) -> str:
    """The table as it is so far."""
    lines = ["# On a GPU" if machine.is_gpu else f"# On a processor ({STAND_IN})", "", machine.about(), ""]
    lines += ["Median of the rounds, in brackets the range. A ratio below 1 says that ours is faster.", ""]
    lines += [*HEAD, *(each.markdown(is_gpu=machine.is_gpu) for each in rows), ""]
    lines += ["| path | | |", "|---|---|---|", *paths, ""]
    lines += [f"Failed: {', '.join(failed)}." if failed else "Nothing failed.", ""]
    lines += [f"`scripts/gpu_check`, {seconds:.0f} s. Method: the docstring of `benchmarks/bench_gpu.py`.", ""]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs the parts, and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="*", help=f"words of: {', '.join((*FIGURES, *PATHS))}; all without one")
    parser.add_argument(
        "--out", type=Path, help="folder for gpu.md; without it benchmarks/results, of a whole run on a GPU"
    )
    args = parser.parse_args(argv)
    names = chosen(args.part)
    if not names:
        parser.error(f"expected words of: {', '.join((*FIGURES, *PATHS))}; got {' '.join(args.part)}")
    machine, begun = Machine.here(), time.monotonic()
    out = args.out or (ROOT / "benchmarks" / "results" if machine.is_gpu and not args.part else None)
    print(f"gpu_check: {machine.about()}\n", flush=True)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)  # as asked for
    rows: list[Row] = []
    paths: list[str] = []
    failed: list[str] = []
    for name in names:
        machine.clear()
        started, verdict = time.monotonic(), "ok"
        try:
            if name in FIGURES:
                found = FIGURES[name](machine)
                rows += found
                told = "\n".join(f"    {each.markdown(is_gpu=machine.is_gpu)}" for each in found)
            else:
                told = PATHS[name](machine)
        except Exception as error:  # noqa: BLE001 - what fails is a row of the table
            verdict, told = "FAILED", " ".join(f"{type(error).__name__}: {error}".split())[-400:]
            failed.append(name)
        seconds = f"{time.monotonic() - started:.1f} s"
        if name in PATHS or verdict != "ok":
            paths.append(f"| {name} | {verdict} | {told.replace('|', '/')} ({seconds}) |")
        print(f"{name:<38}{verdict:<8}{seconds:>8}  {told if name in PATHS or verdict != 'ok' else ''}", flush=True)
        if name in FIGURES and verdict == "ok":
            print(told, flush=True)
        if out is not None:  # after each part: what comes next may not come back
            out.mkdir(parents=True, exist_ok=True)
            (out / "gpu.md").write_text(page(machine, rows, paths, failed, time.monotonic() - begun), encoding="utf-8")
    print(f"\ngpu_check: {', '.join(failed)} failed" if failed else "\ngpu_check: nothing failed", flush=True)
    if out is not None:
        print(f"gpu_check: written to {out / 'gpu.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    faulthandler.dump_traceback_later(LONGEST_SECONDS, exit=True)
    if not Machine.here().is_gpu:
        torch.set_num_threads(1)  # others' processes would hold up every operation of several
    sys.exit(main())
