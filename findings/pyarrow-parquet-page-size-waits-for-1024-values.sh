#!/bin/sh
# pyarrow 26.0.1: data_page_size of Parquet's writer has no effect below 1,024 values.
#
# Guess: data_page_size=10_000 makes pages of about 10 kB, so that one row of 1 kB costs a page of about ten rows.
# Seen: the size of a page is looked at after each write_batch_size values, 1,024 by default. With values of 1 kB every
# page has 1 MB, and the files for 1 kB, 10 kB and 100 kB are the same, byte for byte. With write_batch_size=8 as well,
# the pages follow data_page_size. Who reads single rows of pictures through the page index needs both.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q pyarrow==26.0.1 2>/dev/null
"$folder/venv/bin/python" - "$folder/some.parquet" <<'PY'
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

made = random.Random(0)
rows = pa.table({"picture": [made.randbytes(1000) for _ in range(4096)]})


def written(size, **options):
    plain = {"use_dictionary": False, "compression": "none", "write_page_index": True, "write_statistics": False}
    pq.write_table(rows, sys.argv[1], data_page_size=size, **plain, **options)
    return Path(sys.argv[1]).read_bytes()


small, middle, large = written(1_000), written(10_000), written(100_000)
print("1 kB, 10 kB and 100 kB: the same file:", small == middle == large)
assert small == middle == large
# Each page has a header, and an entry of the page index: the files grow with the number of pages.
sizes = [len(written(size, write_batch_size=8)) for size in (10_000, 100_000, 1_000_000)]
print("with write_batch_size=8, bytes of the files:", *sizes)
assert sizes[0] > sizes[1] > sizes[2], sizes
PY
