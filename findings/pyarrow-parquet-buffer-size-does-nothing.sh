#!/bin/sh
# pyarrow 26.0.1: `ParquetFile(source, buffer_size=65536)` reads two column chunks of 4 MB in one request of 8 MB.
#
# Guess: `buffer_size` bounds what a read asks the source for, as its description says.
# Seen: the default `pre_buffer=True` asks for all wanted column chunks at once, joined where they are neighbours, and
# `buffer_size` has no effect, without an error. With `pre_buffer=False` no read is above 66 KB. A source that serves
# only parts of a column chunk is asked for all of it by the default.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q pyarrow==26.0.1 2>/dev/null
"$folder/venv/bin/python" - <<'PY'
import io
import random

import pyarrow as pa
import pyarrow.parquet as pq


class Noted(io.BytesIO):
    def read(self, size=-1):
        sizes.append(size)
        return super().read(size)


draw = random.Random(0)
table = pa.table({name: pa.array(draw.randbytes(1_000_000), pa.int32()) for name in "abcd"})
written = io.BytesIO()
pq.write_table(table, written, compression="none", use_dictionary=False, data_page_size=16384)
seen = {}
for pre_buffer in (True, False):
    sizes = []
    file = pq.ParquetFile(Noted(written.getvalue()), buffer_size=65536, pre_buffer=pre_buffer)
    sizes.clear()
    file.read_row_group(0, columns=["a", "b"], use_threads=False)
    seen[pre_buffer] = sizes
    print(f"pre_buffer={pre_buffer}: {len(sizes)} reads, the largest of {max(sizes):,} bytes")
assert len(seen[True]) == 1 and seen[True][0] > 8_000_000, "it has changed"
assert max(seen[False]) < 70_000, "it has changed"
PY
