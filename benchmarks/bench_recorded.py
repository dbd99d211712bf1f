"""What does it cost to record a stream in the first epoch, what is gained in the later ones, and how long is a resume?

Question: of three streams, how many samples/s come (a) plainly, through a DataLoader, with the best number of workers,
(b) in the first epoch, while they are recorded, (c) in a later, shuffled epoch? How long after a stop in the first
epoch is the first batch there, at several depths, beside Hugging Face's own ways, and what do these lose and double?

Method: *text*: streaming Parquet of Hugging Face, 2 KB of text a row; *line*: 64 items in 20 ms, as from a bucket;
*tokens*: tensors of 512 tokens out of memory, the fastest that a stream can be. Batches of 64, no training, so that all
that recording costs shows. All ways take turns in each round, with 0, 1 and 2 workers; for each the best number of
workers by its median. A resume begins with the objects and ends with the first batch.

    python benchmarks/bench_recorded.py --folder /nvme/bench --rounds 3 --out recorded.jsonl   # continues if stopped
    python benchmarks/bench_recorded.py --report recorded.jsonl

Decision 0059 has the result and what follows from it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from shade import Recorded, RecordedSampler, ShadeDataset, ShadeLoader

BATCH = 64
NUM_ITEMS = {"text": 40_000, "line": 16_000, "tokens": 60_000}
WORKERS = (0, 1, 2)
DEPTHS = (0.1, 0.5, 0.9)
SHUFFLE_BUFFER = 1_000


def make_text(folder: Path) -> list[str]:
    """Returns the Parquet files, which are written once."""
    files = [folder / f"text-{number}.parquet" for number in range(4)]
    if not files[-1].exists():
        random, words = np.random.default_rng(0), [f"w{number:04d}" for number in range(2_000)]
        each = NUM_ITEMS["text"] // len(files)
        for number, file in enumerate(files):
            texts = [" ".join(random.choice(words, 350)) for _ in range(each)]
            ids = list(range(number * each, number * each + each))
            datasets.Dataset.from_dict({"text": texts, "id": ids}).to_parquet(str(file))
    return [str(file) for file in files]


def text(folder: Path) -> Any:
    """Returns Hugging Face's stream."""
    return datasets.load_dataset("parquet", data_files=make_text(folder), split="train", streaming=True)


class Generated(IterableDataset[Any]):
    """Tensors of 512 tokens and a number; after each batch a wait, if the line has a latency."""

    def __init__(self, num_items: int, seconds: float) -> None:
        self._num_items, self._seconds = num_items, seconds

    def __iter__(self) -> Iterator[Any]:
        tokens = torch.arange(self._num_items + 512, dtype=torch.int32)
        for number in range(self._num_items):
            if number % BATCH == 0 and self._seconds:
                time.sleep(self._seconds)
            yield tokens[number : number + 512].clone(), number


STREAMS: dict[str, Callable[[Path], Any]] = {
    "text": text,
    "line": lambda _: Generated(NUM_ITEMS["line"], 0.020),
    "tokens": lambda _: Generated(NUM_ITEMS["tokens"], 0.0),
}


def rate(loader: Any, name: str) -> tuple[float, float]:
    """Returns the samples a second of an epoch, and the processor seconds that it took."""
    begun, cpu = time.perf_counter(), sum(os.times()[:4])
    count = sum(len(batch["id"]) if isinstance(batch, dict) else len(batch[-1]) for batch in loader)
    assert count == NUM_ITEMS[name], count
    return count / (time.perf_counter() - begun), sum(os.times()[:4]) - cpu


def epochs(folder: Path, name: str, num_workers: int) -> Iterator[dict[str, Any]]:
    """Yields the rates of one stream: plain, while it is recorded, and later."""
    if name == "text" or num_workers < 2:  # a generator in two workers comes twice
        plain = DataLoader(STREAMS[name](folder), batch_size=BATCH, num_workers=num_workers)
        yield dict(zip(("rate", "cpu"), rate(plain, name), strict=True), way="plain")
    place = folder / "recording"
    shutil.rmtree(place, ignore_errors=True)
    data = Recorded(partial(STREAMS[name], folder), place)
    dataset = ShadeDataset(data, cache=None)
    sampler = RecordedSampler(dataset, batch_size=BATCH, mode="uniform")
    loader = ShadeLoader(dataset, batch_size=BATCH, sampler=sampler, num_workers=num_workers)
    for epoch, way in ((0, "first"), (1, "later")):
        sampler.set_epoch(epoch)
        yield dict(zip(("rate", "cpu"), rate(loader, name), strict=True), way=way)
    sampler.close()
    data.close()


def resumes(folder: Path, depth: float) -> Iterator[dict[str, Any]]:
    """Yields the seconds to the first batch of each way to resume a shuffled stream, with what is lost and doubled."""
    num_batches = int(NUM_ITEMS["text"] * depth) // BATCH
    whole = [row["id"] for row in _shuffled(folder)]
    # Hugging Face: by its state, and by skip.
    stream = _shuffled(folder)
    rows = iter(stream)
    taken = [next(rows)["id"] for _ in range(num_batches * BATCH)]
    state = stream.state_dict()
    for way, begin in (("state_dict", _by_state(state)), ("skip", lambda each: each.skip(len(taken)))):
        begun = time.perf_counter()
        rest = iter(begin(_shuffled(folder)))
        first = [next(rest)["id"] for _ in range(BATCH)]
        seconds = time.perf_counter() - begun
        got = taken + first + [row["id"] for row in rest]
        lost, doubled = len(set(whole) - set(got)), len(got) - len(set(got))
        yield {"way": way, "seconds": seconds, "lost": lost, "doubled": doubled, "same": got == whole}
    place = folder / "resumed"
    shutil.rmtree(place, ignore_errors=True)

    def opened(state: Any = None) -> tuple[Recorded, RecordedSampler, Any]:
        data = Recorded(partial(_shuffled, folder), place)
        dataset = ShadeDataset(data, cache=None)
        sampler = RecordedSampler(dataset, batch_size=BATCH, mode="uniform")
        if state is not None:
            sampler.load_state_dict(state)
        return data, sampler, iter(ShadeLoader(dataset, batch_size=BATCH, sampler=sampler, num_workers=0))

    data, sampler, batches = opened()
    got = [number for _ in range(num_batches) for number in next(batches)[0]["id"].tolist()]
    state = sampler.state_dict()
    data.close()
    ahead = data.num_readable - num_batches * BATCH
    begun = time.perf_counter()
    data, sampler, batches = opened(state)
    got += next(batches)[0]["id"].tolist()
    seconds = time.perf_counter() - begun
    got += [number for rows, _ in batches for number in rows["id"].tolist()]
    lost, doubled = len(set(whole) - set(got)), len(got) - len(set(got))
    row = {"way": "Recorded", "seconds": seconds, "lost": lost, "doubled": doubled, "same": got == whole}
    yield row | {"ahead": ahead}
    data.close()


def _shuffled(folder: Path) -> Any:
    return text(folder).shuffle(seed=1, buffer_size=SHUFFLE_BUFFER)


def _by_state(state: Any) -> Callable[[Any], Any]:
    def begin(stream: Any) -> Any:
        stream.load_state_dict(state)
        return stream

    return begin


def report(rows: list[dict[str, Any]]) -> None:
    """Prints the tables."""
    found: dict[tuple[str, str], dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["kind"] == "rate":
            found[row["stream"], row["way"]][row["workers"]].append((row["rate"], row["cpu"]))
    print("| stream | plain, samples/s | first epoch / plain | later / plain |\n|---|---|---|---|")
    for name in STREAMS:
        best = {}
        for way in ("plain", "first", "later"):
            by_workers = found[name, way]
            workers = max(by_workers, key=lambda each: median(rate for rate, _ in by_workers[each]), default=0)
            rates = sorted(rate for rate, _ in by_workers[workers]) or [float("nan")]
            best[way] = rates, workers
        plain = median(best["plain"][0])
        cells = [f"{plain:,.0f} (w={best['plain'][1]})"]
        for way in ("first", "later"):
            rates, workers = best[way]
            cells.append(
                f"{median(rates) / plain:.2f} ({rates[0] / plain:.2f} to {rates[-1] / plain:.2f}, w={workers})"
            )
        print(f"| {name} | {' | '.join(cells)} |")
    print("\n| depth | way | first batch after, s | lost | doubled | same order |\n|---|---|---|---|---|---|")
    for depth in DEPTHS:
        for way in ("state_dict", "skip", "Recorded"):
            mine = [row for row in rows if row["kind"] == "resume" and (row["depth"], row["way"]) == (depth, way)]
            if mine:
                seconds = median(row["seconds"] for row in mine)
                last = mine[-1]
                print(f"| {depth} | {way} | {seconds:.2f} | {last['lost']} | {last['doubled']} | {last['same']} |")


def main() -> None:
    """Runs what is missing in the file of results, or reports it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("recorded-bench"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("recorded.jsonl"))
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    out = arguments.report or arguments.out
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    if arguments.report:
        return report(rows)
    warnings.simplefilter("ignore")
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    done = {(row["kind"], row["round"], row.get("stream", row.get("depth")), row.get("workers")) for row in rows}
    for number in range(arguments.rounds):
        jobs: list[tuple[Any, ...]] = [("rate", number, name, workers) for name in STREAMS for workers in WORKERS]
        jobs += [("resume", number, depth, None) for depth in DEPTHS]
        for kind, _, name, workers in (job for job in jobs if job not in done):
            made = epochs(arguments.folder, name, workers) if kind == "rate" else resumes(arguments.folder, name)
            said = {"stream": name, "workers": workers} if kind == "rate" else {"depth": name}
            new = [{"kind": kind, "round": number} | said | each for each in made]
            with out.open("a") as file:
                file.writelines(json.dumps(each) + "\n" for each in new)
            print(*new, sep="\n", flush=True)
            rows += new
    report(rows)


if __name__ == "__main__":
    main()
