#!/bin/sh
# numpy 2.5.5: ndarray.resize to a smaller size takes new memory and copies; numpy 2.4.6 gives memory back in place.
#
# Guess: `array.resize(half, refcheck=False)` is the call that gives memory back without a copy, as realloc does: its
# documentation says that it changes the array in place.
# Seen: in 2.5.5 the peak while an array of 80 MB shrinks to 40 MB is 120 MB, the old and the new one together; in 2.4.6
# it is 80 MB. The result is the same. What was written to stay below a limit of memory goes over it, by the size of what
# is kept.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"   # numpy 2.5 needs Python 3.12
for version in 2.4.6 2.5.5; do
    "$folder/venv/bin/python" -m pip install -q "numpy==$version" 2>/dev/null
    "$folder/venv/bin/python" -W ignore - "$version" <<'PY'
import sys
import tracemalloc

import numpy as np

tracemalloc.start()
array = np.ones(10_000_000)
tracemalloc.reset_peak()
array.resize(5_000_000, refcheck=False)
peak = round(tracemalloc.get_traced_memory()[1] / 1e6)
print(np.__version__, "peak while 80 MB shrink to 40:", peak, "MB")
assert array.shape == (5_000_000,) and peak == {"2.4.6": 80, "2.5.5": 120}[sys.argv[1]], peak
PY
done
