"""One loader, some epochs, in a process of its own; a JSON line an epoch. Started by `bench_loaders`.

    python benchmarks/loader_epochs.py convert METHOD IMAGES OUT
    python benchmarks/loader_epochs.py run METHOD '{"root": …, "scratch": …, "side": 224, …}' EPOCHS

CPU seconds are those of this process and all it has started, workers and a private Redis server included; opens and
bytes are those the mount or the object server counted meanwhile. The first line is the set-up: making data set, server
and loader.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import torch
from loader_methods import METHODS, Setting, is_object
from measures import SLOW_STATS

NOT_INSTALLED = 3


def cpu_seconds() -> float:
    """Of this process and its descendants, those that have ended and were waited for included."""
    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


class Meter:
    """What happens from one reading to the next."""

    def __init__(self, root: str) -> None:
        server = os.environ.get("AWS_ENDPOINT_URL", "")
        self._stats = f"{server}/.stats" if is_object(root) else (Path(root) / SLOW_STATS).as_uri()
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        with urllib.request.urlopen(self._stats) as answer:
            counts = json.load(answer)
        return {
            "seconds": time.perf_counter(),
            "cpu_seconds": cpu_seconds(),
            "opens": counts["num_opens"],
            "reads": counts["num_reads"],
            "bytes": counts["read_bytes"],
        }

    def tell(self, **words: Any) -> None:
        """Prints a line, and begins anew."""
        now = self._now()
        words |= {name: round(now[name] - self._before[name], 6) for name in now}
        print(json.dumps(words), flush=True)
        self._before = self._now()


def run(name: str, setting: Setting, epochs: int) -> None:
    """Loads the epochs and tells of each."""
    torch.set_num_threads(1)
    meter = Meter(setting.root)
    method = METHODS[name][1](setting)
    meter.tell(epoch=-1, samples=0)
    for number in range(epochs):
        num_samples = method.epoch(number)
        meter.tell(epoch=number, samples=num_samples)
    method.close()


def main(words: list[str]) -> None:
    """Converts, or runs; ends with `NOT_INSTALLED` where the package is missing."""
    verb, name, *rest = words
    try:
        if verb == "convert":
            convert = METHODS[name][1].convert
            assert convert is not None, f"{name} reads the images as they are"
            convert(Path(rest[0]), Path(rest[1]))
        else:
            options = json.loads(rest[0])
            run(name, Setting(**options | {"scratch": Path(options["scratch"])}), int(rest[1]))
    except ImportError as error:
        print(json.dumps({"missing": str(error).splitlines()[0]}), flush=True)
        sys.exit(NOT_INSTALLED)


if __name__ == "__main__":
    main(sys.argv[1:])
