#!/bin/sh
# pyarrow 26.0.1: of a Parquet file without Arrow's own schema in it, as other writers leave it,
# `ParquetFile.schema.to_arrow_schema()` and `ParquetFile.schema_arrow` give different types to a UUID column.
#
# Guess: both describe the columns as `read()` returns them.
# Seen: `schema_arrow` and `read()` have extension<arrow.uuid>, whose values are `uuid.UUID`; `to_arrow_schema()` has
# fixed_size_binary[16], whose values are bytes. A reader that plans by the one and reads by the other hands out other
# values.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q pyarrow==26.0.1 2>/dev/null
"$folder/venv/bin/python" - "$folder/uuids.parquet" <<'PY'
import sys
import uuid

import pyarrow as pa
import pyarrow.parquet as pq

values = pa.array([uuid.UUID(int=number).bytes for number in range(3)], pa.binary(16))
pq.write_table(pa.table({"id": pa.ExtensionArray.from_storage(pa.uuid(), values)}), sys.argv[1], store_schema=False)
file = pq.ParquetFile(sys.argv[1])
seen = {
    "schema.to_arrow_schema()": file.schema.to_arrow_schema().field("id").type,
    "schema_arrow": file.schema_arrow.field("id").type,
    "read()": file.read().schema.field("id").type,
}
for name, kind in seen.items():
    print(f"{name}: {kind}")
assert seen["schema_arrow"] == seen["read()"] == pa.uuid(), "it has changed"
assert seen["schema.to_arrow_schema()"] == pa.binary(16), "it has changed"
PY
