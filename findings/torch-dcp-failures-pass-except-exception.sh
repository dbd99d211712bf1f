#!/bin/sh
# torch 2.14.1: an error of torch.distributed.checkpoint's save or load is no Exception.
#
# Guess: a training that wraps its saves in `try … except Exception`, so that a full disk costs a checkpoint and not the
# run, catches what save() raises; so does a loop that tries an older checkpoint when load() fails.
# Seen: whatever a planner, a writer or a reader raises (here: a ValueError of a size that does not fit, a missing key, a
# PermissionError of the writer) arrives as CheckpointException, which derives from BaseException, as KeyboardInterrupt
# does. `except Exception` does not see it: the run ends. The cause is in `failures`, by rank, with its stack.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.14.1 2>/dev/null
"$folder/venv/bin/python" -W ignore - "$folder/saved" <<'PY'
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

folder = sys.argv[1]


class Full(FileSystemWriter):
    def write_data(self, plan, planner):
        raise PermissionError("no space for you")


def outcome(call):
    try:
        call()
    except Exception as error:
        return f"an Exception: {type(error).__name__}"
    except BaseException as error:
        (failure, _), = error.failures.values()
        return f"no Exception: {type(error).__name__} of {type(failure).__name__}"
    return "no error"


dcp.save({"a": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
seen = {
    "a size that does not fit": outcome(lambda: dcp.load({"a": torch.ones(3)}, checkpoint_id=folder, no_dist=True)),
    "a missing key": outcome(lambda: dcp.load({"b": 1}, checkpoint_id=folder, no_dist=True)),
    "a writer's error": outcome(lambda: dcp.save({"a": torch.ones(2)}, storage_writer=Full(folder), no_dist=True)),
}
for name, what in seen.items():
    print(f"{name}: {what}")
assert all(what.startswith("no Exception: CheckpointException of") for what in seen.values()), seen
PY
