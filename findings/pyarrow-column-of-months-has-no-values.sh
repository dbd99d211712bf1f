#!/bin/sh
# pyarrow 26.0.1: a column of Arrow's interval type "year-month" is read, printed, sliced and taken, but has no value.
#
# Guess: a type that pyarrow cannot handle is refused when the file is read, by an ArrowNotImplementedError.
# Seen: nanoarrow 0.9.0 writes such a column; pyarrow reads the stream, names the type and prints "14M". Then
# to_pylist() and pyarrow.nulls() raise KeyError: 21, the number of the type, which names neither column nor cause and
# is no ArrowException. Who converts columns of files of others must expect it.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q pyarrow==26.0.1 nanoarrow==0.9.0 2>/dev/null
"$folder/venv/bin/python" - <<'PY'
import io

import nanoarrow as na
import pyarrow as pa
from nanoarrow.ipc import StreamWriter

values = na.c_buffer([1, 14], na.int32())
months = na.c_array_from_buffers(na.interval_months(), 2, [None, values])
rows = na.c_array_from_buffers(na.struct({"age": na.interval_months()}), 2, [None], children=[months])
sink = io.BytesIO()
with StreamWriter.from_writable(sink) as writer:
    writer.write_array(rows)

table = pa.ipc.open_stream(sink.getvalue()).read_all()
print(table.schema, "| rows:", table.num_rows, "| second:", table.slice(1).to_string(preview_cols=1).split()[-1])
assert str(table.schema.field("age").type) == "month_interval"
assert "14M" in str(table.take([1])["age"])
for name, convert in (("to_pylist", table.to_pylist), ("nulls", lambda: pa.nulls(1, table.schema.field("age").type))):
    try:
        convert()
    except KeyError as error:
        print(f"{name}: KeyError: {error}; an ArrowException: {isinstance(error, pa.ArrowException)}")
        assert error.args == (21,) and not isinstance(error, pa.ArrowException)
    else:
        raise SystemExit(f"{name} works: this has changed")
PY
