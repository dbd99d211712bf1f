#!/bin/sh
# tensordict 0.15.3 with torch 2.14.1: a TensorDict is a collections.abc.Mapping, but iterating over it gives rows, and its
# length is the number of rows; it has no truth value.
#
# Guess: of a Mapping, iteration gives the keys, len() their number, and bool() says whether there are any; code that
# takes apart nested dicts (collate functions, device movers, checkpoint writers) relies on it.
# Seen: isinstance(_, Mapping) is True; list(_) has a TensorDict per row; len(_) is the batch size; bool(_) raises
# RuntimeError; keys(), dict(_) and {**_} do have the keys. So ask for .keys(), and test for a TensorDict before a Mapping.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.14.1 tensordict==0.15.3 2>/dev/null
"$folder/venv/bin/python" -W ignore - <<'PY'
from collections.abc import Mapping

import torch
from tensordict import TensorDict

data = TensorDict({"x": torch.arange(3), "y": torch.ones(3, 2)}, batch_size=[3])
try:
    truth = str(bool(data))
except RuntimeError:
    truth = "RuntimeError"
seen = {
    "is a Mapping": isinstance(data, Mapping),
    "length": len(data),
    "iteration gives": {type(each).__name__ for each in data},
    "keys": sorted(data.keys()),
    "dict() has": sorted(dict(data)),
    "bool()": truth,
}
for name, value in seen.items():
    print(f"{name}: {value}")
assert list(seen.values()) == [True, 3, {"TensorDict"}, ["x", "y"], ["x", "y"], "RuntimeError"], seen
PY
