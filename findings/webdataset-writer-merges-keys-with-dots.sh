#!/bin/sh
# webdataset 1.0.2: TarWriter takes keys with a dot, and the reader makes one sample of those that are equal before it.
#
# Guess: samples that are written under different keys are read as different samples; or a key that cannot come back is
# refused.
# Seen: a name ends at the first dot of its last part. `frame.0`, `frame.1`, `frame.2` come back as one sample `frame`
# with the fields `0.cls`, `1.cls`, `2.cls`; no error, no warning, two of three samples gone. A dot in a folder
# (`v1.5/0`) does no harm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q webdataset==1.0.2 2>/dev/null
"$folder/venv/bin/python" -W ignore - "$folder" <<'PY'
import sys

import webdataset as wds


def read(*keys):
    path = f"{sys.argv[1]}/some.tar"
    with wds.TarWriter(path) as writer:
        for number, key in enumerate(keys):
            writer.write({"__key__": key, "cls": number})
    samples = list(wds.WebDataset(path, shardshuffle=False))
    return [(sample["__key__"], [name for name in sample if not name.startswith("__")]) for sample in samples]


merged, folders = read("frame.0", "frame.1", "frame.2"), read("v1.5/0", "v1.5/1")
print("frame.0, frame.1, frame.2:", merged)
print("v1.5/0, v1.5/1:", folders)
assert merged == [("frame", ["0.cls", "1.cls", "2.cls"])], merged
assert folders == [("v1.5/0", ["cls"]), ("v1.5/1", ["cls"])], folders
PY
