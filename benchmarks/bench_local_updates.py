#!/usr/bin/env python3
"""How long does a step take behind a slow line, with local updates and with other ways to exchange?

Question
    Four ranks train a ResNet-18 of 11 M parameters, each behind a line of its own (`scripts/testbed`: 20 or 100 Mbit/s,
    no delay). Forward and backward are played (`gradient_played`): 0.1 s that use no processor, as an accelerator
    would. What does a step take, and what does each rank send?

Rows
    Without exchange; DDP; PowerSGD, rank 4; DiLoCo as torchft has it, without its fragments: the distance all-reduced
    in bf16 every 30 steps, while nothing trains; `GradientEngine` with 1 %; `LocalUpdates` every 30 steps, whole and
    waited for; and the same in four fragments, each beside seven inner steps.

Measured
    Means over 60 steps after four that warm up, which is two exchanges of what exchanges every 30 steps. Rows that
    send every step take 12; DDP 4, and none at 20 Mbit/s, where a step of it takes half a minute. Rounds, each in a new
    order. Bytes are those of rank 0's network interface, sent or received, whichever is more.

The rule, written before the first result
    `LocalUpdates` in fragments takes at most 1.05 of the time without exchange at 20 Mbit/s, and at most half of the
    time of the best other row at 100 Mbit/s; each round's ratio by itself, their median judged. Quality is not measured
    here: a step of another row may be worth more or less.

Command
    python benchmarks/bench_local_updates.py              about 12 minutes; needs root and a quiet machine
    python benchmarks/bench_local_updates.py --quick      one round of two rows: a test of this program
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from gradient_testbed import Testbed, prepare, testbed
from measures import Log, commit, machine

RESULTS = Path(__file__).parent / "results"
RANKS, WARM_UP = 4, 4
RATES = {"20mbit": "20 Mbit/s", "100mbit": "100 Mbit/s"}
H = ["--inner-steps", "30"]
LOCAL = ["--method", "local-updates", *H, "--density", str(1 / 64)]
ROWS: dict[str, tuple[str, int, list[str]]] = {
    "none": ("no exchange", 60, ["--method", "none"]),
    "ddp": ("DDP", 4, ["--method", "ddp"]),
    "powersgd": ("PowerSGD, rank 4", 12, ["--method", "powersgd4"]),
    "diloco": ("DiLoCo in bf16, H = 30", 60, ["--method", "diloco-bf16", *H]),
    "engine": ("`GradientEngine`, 1 %", 12, ["--method", "engine", "--density", "0.01", "--staleness", "0"]),
    "whole": ("`LocalUpdates`, H = 30", 60, LOCAL),
    "fragments": ("the same, 4 fragments, delay 7", 60, [*LOCAL, "--fragments", "4", "--delay", "7"]),
}
LEFT_OUT = {("20mbit", "ddp")}


def measure(bed: Testbed, rate: str, row: str, *, task: str) -> dict[str, Any]:
    """Trains once; returns seconds and bytes of a step."""
    _, steps, flags = ROWS[row]
    bed("rate", rate)
    flags = [*flags, "--task", task, "--played", "0.1", "--eval-samples", "0", "--steps", "400"]
    end = bed.run(RANKS, *flags, "--stop-after", str(WARM_UP + steps))[-1]
    return {name: value for name, value in end.items() if name.startswith("step")}


def table(lines: list[dict[str, Any]]) -> str:
    """Returns seconds a step, the ratio to no exchange, and bytes, as medians over the rounds."""
    text = ["| line | exchange | s a step | of no exchange | KB a step |", "|---|---|---|---|---|"]
    for rate, shown in RATES.items():
        plain = {line["round"]: line["step_seconds"] for line in lines if (line["rate"], line["row"]) == (rate, "none")}
        for row, (name, *_) in ROWS.items():
            found = [line for line in lines if (line["rate"], line["row"]) == (rate, row) and line["round"] in plain]
            if found:
                seconds = statistics.median(line["step_seconds"] for line in found)
                ratio = statistics.median(line["step_seconds"] / plain[line["round"]] for line in found)
                sent = statistics.median(max(line["step_bytes_sent"], line["step_bytes_received"]) for line in found)
                text.append(f"| {shown} | {name} | {seconds:.3f} | {ratio:.2f} | {sent / 1e3:,.0f} |")
    return "\n".join(text)


def main(argv: list[str]) -> int:
    """Measures, prints, writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of two rows, of a small network")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    prepare()
    log = Log(options.out / "local-updates.jsonl")
    rates, rows = (["100mbit"], ["none", "fragments"]) if options.quick else (list(RATES), list(ROWS))
    done = {(line["round"], line["rate"], line["row"]) for line in log.rows}
    version = commit()
    with testbed(RANKS) as bed:
        for row in ("engine", "fragments"):  # not counted: kernels are compiled, and kept on the disk
            measure(bed, rates[-1], row, task="gpt" if options.quick else "resnet18")
        for number in range(1 if options.quick else options.rounds):
            runs = [(rate, row) for rate in rates for row in rows if (rate, row) not in LEFT_OUT]
            random.Random(number).shuffle(runs)
            for rate, row in runs:
                if (number, rate, row) in done:
                    continue
                found = measure(bed, rate, row, task="gpt" if options.quick else "resnet18")
                log.add({"round": number, "rate": rate, "row": row} | found | {"commit": version})
                print(f"round {number}, {rate}, {row}: {found['step_seconds']:.3f} s a step", flush=True)
    commits = ", ".join(dict.fromkeys(line["commit"] for line in log.rows))
    head = ["# A step of four ranks behind slow lines", "", f"commit {commits}, torch {torch.__version__}, {machine()}"]
    text = "\n".join([*head, "", table(log.rows)])
    print(text)
    (options.out / "local-updates.md").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
