#!/bin/sh
# torch_checkpointing 0.1.1 (torch 2.14.1): with its default storage no checkpoint is written to a file system that takes
# O_DIRECT only for whole blocks, as ext4 and XFS do.
#
# Guess: the default writes anywhere; the class of the stream says that it tries O_DIRECT and falls back to usual files.
# Seen: it falls back if `open` refuses. ext4 accepts the open and refuses the first write whose length or memory is not
# a multiple of the block, with EINVAL. `save` returns; the future that it returned raises; the folder holds no
# checkpoint. With `LocalFileSystemStorageConfig(use_direct_io=False)` the same state is saved and loaded.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.14.1 torch_checkpointing==0.1.1 numpy 2>/dev/null
cat >"$folder/save.py" <<'PY'
import os
import sys

import torch
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


def is_for_whole_blocks(folder):
    try:
        descriptor = os.open(f"{folder}/probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        return False
    try:
        os.write(descriptor, b"seven..")
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def save(folder, **storage):
    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    config = CheckpointManager.Config(save=AsyncCheckpointSaverConfig(staging_config=staging))
    if storage:
        config.storage_config = LocalFileSystemStorageConfig(**storage)
    try:
        CheckpointManager(config).save(folder, {"model": torch.nn.Linear(7, 3).state_dict()}).result()
        return "saved"
    except Exception as error:
        return "Invalid argument" if "Invalid argument" in str(error) else repr(error)


if __name__ == "__main__":
    if not is_for_whole_blocks(sys.argv[1]):
        print("this file system takes any write with O_DIRECT, or none: run it on ext4 or XFS (TMPDIR=...)")
        os._exit(0)
    default, usual = save(f"{sys.argv[1]}/default"), save(f"{sys.argv[1]}/usual", use_direct_io=False)
    print("default storage:", default)
    print("use_direct_io=False:", usual)
    os._exit(0 if (default, usual) == ("Invalid argument", "saved") else 1)
PY
mkdir "$folder/saved"
"$folder/venv/bin/python" -W ignore "$folder/save.py" "$folder/saved"
