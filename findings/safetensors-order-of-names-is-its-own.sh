#!/bin/sh
# safetensors 0.8.0: a file does not keep the order of the dict that was saved.
#
# Guess: load_file(save_file(tensors)) is the dict as it was, the order of its names too, as with torch.save, pickle, npz
# and JSON; a format with a header of names in an order has that order.
# Seen: tensors are written by the size of their type, widest first, and by name within a type, and load_file yields them
# in this order; safe_open().keys() sorts by name alone. So the n-th tensor of what is loaded is another than the n-th
# that was saved: what belongs together by position (parameters of an optimizer, lists of layers "10" before "9") has to
# be matched by name.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q safetensors==0.8.0 numpy==2.2.6 2>/dev/null
"$folder/venv/bin/python" - "$folder/some.safetensors" <<'PY'
import sys

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

tensors = {
    "layer.9": np.zeros(1, np.float32),
    "layer.10": np.zeros(1, np.float32),
    "mask": np.zeros(1, np.int8),
    "scale": np.zeros(1, np.float64),
}
save_file(tensors, sys.argv[1])
loaded = list(load_file(sys.argv[1]))
with safe_open(sys.argv[1], "np") as file:
    keys = list(file.keys())
print("saved: ", *tensors)
print("loaded:", *loaded)
print("keys(): ", *keys)
assert loaded == ["scale", "layer.10", "layer.9", "mask"], loaded
assert keys == ["layer.10", "layer.9", "mask", "scale"], keys
PY
