"""Fuzzes readers guided by coverage: python -m tests.support.programs.fuzz_guided SECONDS FOLDER [NAME …]

Each gets so many seconds; what fails is written to the folder. It needs atheris, which is no dependency: ``pip install
atheris``. Half of the mutations are libFuzzer's, the others those of the blind fuzz; an input that comes to a new line
of ``shade`` is kept and mutated again. A reader has a process of its own, a fork: to instrument the package takes long.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import struct
import sys
import tempfile
from pathlib import Path

import atheris

# What numba compiles must stay as it is.
COMPILED = ["shade.gradient._kernels", "shade.data._transforms.kernels", "shade.checkpoint._buffer.stream_hash"]
with atheris.instrument_imports(include=["shade"], exclude=COMPILED):
    from tests.support.readers import READERS, Reader, missing, outcome


def fuzz(name: str, reader: Reader, seconds: str, folder: str) -> None:
    """Does not return: libFuzzer ends the process."""

    def one_input(data: bytes) -> None:
        outcome(reader.read, data)

    def mutate(data: bytes, most_bytes: int, seed: int) -> bytes:
        rng = random.Random(seed)
        with contextlib.suppress(struct.error, ValueError):
            if rng.randrange(2):
                return reader.mutate(data, rng)[:most_bytes]
        return bytes(atheris.Mutate(data, most_bytes))

    corpus = tempfile.mkdtemp(dir=folder)
    Path(corpus, "seed").write_bytes(reader.seed())
    one_input(reader.seed())
    place = f"-artifact_prefix={folder}/{name.replace(' ', '-').replace('/', '-')}-"
    limits = (f"-max_total_time={seconds}", "-timeout=60", "-rss_limit_mb=4096", "-verbosity=0", "-print_final_stats=1")
    atheris.Setup([sys.argv[0], *limits, place, corpus], one_input, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    logging.disable()
    failed = []
    for name in sys.argv[3:] or READERS:
        if package := missing(name):
            sys.stderr.write(f"{name}: {package} is not installed\n")
            continue
        sys.stderr.write(f"{name}: begins\n")
        child = os.fork()
        if not child:
            fuzz(name, READERS[name], *sys.argv[1:3])
        if os.waitpid(child, 0)[1]:
            failed.append(name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
