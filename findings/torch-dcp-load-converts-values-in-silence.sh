#!/bin/sh
# torch 2.14.1: torch.distributed.checkpoint.load converts a tensor to the type of the one it fills, whatever is lost.
#
# Guess: as a tensor of another size is refused, so is one of another type; or a type that holds fewer values is.
# Seen: the saved values are copied into the given tensor as `copy_` does, without an error: float32 into bfloat16 loses
# bits, 300.7 into uint8 becomes 44, floats into int64 lose their fraction, imaginary parts go. So a model that was built
# in another precision than the checkpoint, or an index that was once a float, loads "well".
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.14.1 2>/dev/null
"$folder/venv/bin/python" -W ignore - "$folder" <<'PY'
import sys

import torch
import torch.distributed.checkpoint as dcp


def loaded(saved, into):
    folder = f"{sys.argv[1]}/{saved.dtype}-{into.dtype}"
    dcp.save({"a": saved}, checkpoint_id=folder, no_dist=True)
    dcp.load({"a": into}, checkpoint_id=folder, no_dist=True)
    return into.tolist()


seen = {
    "float32 into bfloat16": loaded(torch.tensor([1.001]), torch.zeros(1, dtype=torch.bfloat16)),
    "float32 into uint8": loaded(torch.tensor([300.7]), torch.zeros(1, dtype=torch.uint8)),
    "float32 into int64": loaded(torch.tensor([1.7, 2.9]), torch.zeros(2, dtype=torch.int64)),
    "complex64 into float32": loaded(torch.tensor([1 + 2j]), torch.zeros(1)),
}
for name, values in seen.items():
    print(f"{name}: {values}")
assert list(seen.values()) == [[1.0], [44], [1, 2], [1.0]], seen
PY
