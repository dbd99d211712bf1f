#!/bin/sh
# torch 2.11.0: DefaultStager of torch.distributed.checkpoint takes one save; the second one with it raises KeyError.
#
# Guess: a stager is made once and passed to each async_save, as its reused memory (pinned, shared) is what it is for; it
# is closed by close().
# Seen: the first save with a stager works. The second raises KeyError: <class 'type'> out of a copier whose table is
# empty, because each save has closed what the stager is made of. So the memory that it pins is pinned for one save. Two
# saves with two stagers work. torch 2.14.1 serves any number of saves with one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.11.0 numpy==2.2.6 2>/dev/null
"$folder/venv/bin/python" -W ignore - "$folder" <<'PY'
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


def saved(name, stager):
    state, path = {"a": torch.ones(4)}, f"{sys.argv[1]}/{name}"
    try:
        response = dcp.async_save(state, checkpoint_id=path, async_stager=stager, no_dist=True)
        getattr(response, "upload_completion", response).result()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def stager():
    return DefaultStager(StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_non_blocking_copy=False))


one = stager()
seen = [saved("first", one), saved("second", one), saved("third", stager())]
print("first, second with the same stager, third with another:", seen)
assert seen == ["saved", "KeyError: <class 'type'>", "saved"], seen
PY
