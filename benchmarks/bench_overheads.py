"""What the data plane itself costs: a cached batch, the start of an epoch, one line of feedback.

Question
    Does the machinery around the bytes (checksums, ledger, breaker, plan, sampling, score merging) cost more than a
    training loop would notice?

Method
    hit      A batch of 64 samples of 100 KB that the cache holds, over a unix socket: `SampleCache.fetch_many` (keys,
             one round to the server, checksum of every byte, counts) against the same 64 GETs through redis-py with
             hiredis in one pipeline, and against MGET. Every round times all of them, in a new random order; the
             figure is the median of the rounds' ratios, so what the machine does besides hits all alike.
    epoch    1,281,167 samples of ImageNet-like sizes, keep 0.7, capacity a fifth, all scores known: the first batch of
             an epoch includes drawing the next one and planning the cache for both. In a fresh process each: once for
             time and resident memory, once under tracemalloc for the peak of what is allocated (which counts the tables
             that stay, too). Memory is above that of the data set and its cache, before a sampler exists.
    report   `sampler.report(indices, losses)` once after each step of about 5 ms of matrix products, so that the caches
             are as cold as in training: 6 epochs of 50,000 samples in batches of 256. An epoch's figure is its median
             call, and a call's share of bringing the table up to date at the epoch's end, over its median step; medians
             because a process that the system takes off the CPU in between is no cost of ours. Median of the epochs.

Command
    python benchmarks/bench_overheads.py                (half a minute)

Reading
    `hit` below 1 means that our reading of the socket saves more than the checksum costs. `epoch` is paid once an
    epoch, on the training process, before its first batch. `report` is mostly waiting for cold memory: beside other
    programs on the same two cores runs gave 0.7 to 1.3 %; the published one had the machine nearly to itself.
    Figures: benchmarks/results/overheads.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hiredis
import numpy as np
import redis
import torch
from measures import commit

from shade import SampleCache, ShadeSampler, open_store
from shade.cache.entry import FORMAT_ENCODED

ROOT = Path(__file__).resolve().parent.parent
HIT_BATCH, HIT_BYTES, HIT_ROUNDS = 64, 100_000, 120
NUM_SAMPLES = 1_281_167
STEP_SECONDS, REPORT_BATCH, REPORT_SAMPLES, REPORT_EPOCHS = 0.005, 256, 50_000, 6
BARS = {"hit": 1.3, "epoch_seconds": 3.0, "epoch_megabytes": 100.0, "report": 0.01}


def seconds_of(action: Callable[[], Any]) -> float:
    """One run's time."""
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "quartile_1": low, "quartile_3": high}


def measure_hit() -> dict[str, Any]:
    """A fully cached batch against bare redis-py."""
    indices = list(range(HIT_BATCH))
    data = [random.randbytes(HIT_BYTES) for _ in indices]
    with open_store("local://") as store:
        cache = SampleCache(store, "bench", np.full(HIT_BATCH, HIT_BYTES), 2**30, FORMAT_ENCODED)
        cache.fetch_many(indices, lambda absent: [data[index] for index in absent])
        everything = np.ones(HIT_BATCH, dtype=bool)
        cache.residency.post(np.arange(HIT_BATCH), everything, everything, ending=False)
        client = redis.Redis(unix_socket_path=store.server.socket_path)
        keys = cache.keys.many(indices)

        def pipeline() -> list[bytes]:
            batch = client.pipeline(transaction=False)
            for key in keys:
                batch.get(key)
            return batch.execute()

        actions: dict[str, Callable[[], Any]] = {
            "redis-py pipeline": pipeline,
            "redis-py mget": lambda: client.mget(keys),
            "fetch_many": lambda: cache.fetch_many(indices, lambda absent: 1 / 0),
        }
        payloads, hits = cache.fetch_many(indices, lambda absent: 1 / 0)
        assert all(hits)
        assert [bytes(payload) for payload in payloads] == data
        times: dict[str, list[float]] = {name: [] for name in actions}
        for _ in range(HIT_ROUNDS):
            for name in random.sample(sorted(actions), len(actions)):
                times[name].append(seconds_of(actions[name]))
        client.close()
    ours = times["fetch_many"]
    ratios = {
        name: spread([mine / bare for mine, bare in zip(ours, times[name], strict=True)])
        for name in actions
        if name != "fetch_many"
    }
    return {
        "milliseconds": {name: spread([1e3 * t for t in values]) for name, values in times.items()},
        "ratio": ratios,
    }


class Planned:
    """Stands for a data set: what the sampler asks of one."""

    policy = None

    def __init__(self, cache: SampleCache, payload_bytes_N: np.ndarray) -> None:
        self.cache, self.source = cache, SimpleNamespace(payload_bytes_N=payload_bytes_N)

    def __len__(self) -> int:
        return NUM_SAMPLES


def resident_megabytes() -> float:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def epoch_child(traced: bool) -> dict[str, float]:
    """Starts four epochs; the dearest counts."""
    generator = np.random.default_rng(0)
    sizes = generator.lognormal(11.6, 0.45, NUM_SAMPLES).astype(np.int64)
    losses = generator.gamma(1.0, 1.0, NUM_SAMPLES).astype(np.float32)
    seconds, megabytes = [], []
    with open_store("memory://") as store:
        cache = SampleCache(store, "bench", sizes, 0, FORMAT_ENCODED)
        cache.capacity_bytes = int(0.2 * cache.size_bytes_N.sum())
        before = resident_megabytes()
        if traced:
            tracemalloc.start()
        sampler = ShadeSampler(Planned(cache, sizes), batch_size=256, keep=0.7)
        for epoch in range(4):
            sampler.set_epoch(epoch)
            stream = iter(sampler)
            seconds.append(seconds_of(lambda stream=stream: next(stream)))
            megabytes.append(tracemalloc.get_traced_memory()[1] / 2**20 if traced else resident_megabytes() - before)
            sampler._draws.table.update(np.arange(NUM_SAMPLES), losses)
            sampler.report(torch.zeros(0, dtype=torch.int64), torch.zeros(0))
            sampler.weights(torch.zeros(0, dtype=torch.int64))
            del stream
        sampler.close()
    return {"seconds": max(seconds), "megabytes": max(megabytes)}


def measure_epoch() -> dict[str, Any]:
    """The start of an epoch of ImageNet, in processes of its own."""
    found = {}
    for name, flag in (("resident", "--epoch-child"), ("traced", "--epoch-child-traced")):
        done = subprocess.run([sys.executable, __file__, flag], stdout=subprocess.PIPE, check=True)
        found[name] = json.loads(done.stdout)
    return found


def measure_report() -> dict[str, Any]:
    """`report` after steps of about five milliseconds."""
    torch.set_num_threads(1)
    side = 256
    left, right = torch.randn(side, side), torch.randn(side, side)

    def step() -> None:
        for _ in range(products):
            left @ right

    products = 1
    while statistics.median(seconds_of(step) for _ in range(20)) < STEP_SECONDS:
        products += 1
    sampler = ShadeSampler(range(REPORT_SAMPLES), batch_size=REPORT_BATCH)
    calls, ratios = [], []
    for _ in range(REPORT_EPOCHS):
        steps, reports = [], []
        for indices in torch.randperm(REPORT_SAMPLES).split(REPORT_BATCH):
            losses = torch.rand(len(indices))
            steps.append(seconds_of(step))
            begun = time.perf_counter()
            sampler.report(indices, losses)
            reports.append(time.perf_counter() - begun)
        share_of_flush = seconds_of(sampler._merger.flush) / len(steps)
        calls.append(1e6 * (statistics.median(reports) + share_of_flush))
        ratios.append(calls[-1] / (1e6 * statistics.median(steps)))
    sampler.close()
    return {
        "microseconds": spread(calls),
        "step_milliseconds": 1e3 * statistics.median(steps),
        "ratio": spread(ratios),
    }


def render(result: dict[str, Any]) -> str:
    """The table for people."""
    hit, epoch, report = result["hit"], result["epoch"], result["report"]
    ratio, mget = hit["ratio"]["redis-py pipeline"], hit["ratio"]["redis-py mget"]
    took = hit["milliseconds"]
    rows = [
        (
            f"cached batch of {HIT_BATCH} × 100 KB over redis-py + hiredis, pipelined",
            f"{ratio['median']:.2f} ({ratio['quartile_1']:.2f}–{ratio['quartile_3']:.2f}) ×",
            f"≤ {BARS['hit']} ×",
        ),
        ("the same over MGET", f"{mget['median']:.2f} ({mget['quartile_1']:.2f}–{mget['quartile_3']:.2f}) ×", "–"),
        (
            f"start of an epoch, N = {NUM_SAMPLES:,}: time",
            f"{epoch['resident']['seconds']:.2f} s",
            f"< {BARS['epoch_seconds']:.0f} s",
        ),
        (
            "the same: peak allocated (resident)",
            f"{epoch['traced']['megabytes']:.0f} MB ({epoch['resident']['megabytes']:.0f} MB)",
            f"< {BARS['epoch_megabytes']:.0f} MB",
        ),
        (
            f"`report` over a step of {report['step_milliseconds']:.1f} ms",
            f"{100 * report['ratio']['median']:.2f} % ({report['microseconds']['median']:.0f} µs)",
            f"< {100 * BARS['report']:.0f} %",
        ),
    ]
    lines = ["# Overheads of the data plane", "", "| what | measured | bar |", "|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    medians = ", ".join(f"{name} {values['median']:.1f} ms" for name, values in took.items())
    lines += ["", f"Medians of {HIT_ROUNDS} interleaved rounds: {medians}; in brackets the quartiles of the ratio."]
    lines += ["", f"`python benchmarks/bench_overheads.py`, {result['about']}. Method: the docstring of that file.", ""]
    return "\n".join(lines)


def main() -> None:
    """Measures, and writes overheads.json and overheads.md."""
    parser = argparse.ArgumentParser(description="What the data plane itself costs.")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="where the results go")
    parser.add_argument("--epoch-child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--epoch-child-traced", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.epoch_child or args.epoch_child_traced:
        print(json.dumps(epoch_child(args.epoch_child_traced)))
        return
    about = (
        f"commit {commit()}, {platform.machine()} with {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}, "
        f"redis-py {redis.__version__}, hiredis {hiredis.__version__}"
    )
    result = {"about": about, "report": measure_report(), "hit": measure_hit(), "epoch": measure_epoch()}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "overheads.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "overheads.md").write_text(render(result))
    print(render(result))


if __name__ == "__main__":
    main()
