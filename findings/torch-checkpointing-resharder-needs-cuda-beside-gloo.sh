#!/bin/sh
# torch_checkpointing 0.1.1 (torch 2.14.1): with a resharder, a save over gloo needs a GPU, though it takes tensors of the
# CPU and stages them on the host.
#
# Guess: what ranks tell each other goes through their process group, so ranks that train on CPUs over gloo save as
# others do; the troubleshooting page names the settings of staging that such users need.
# Seen: without a resharder two gloo ranks save and load. With `ItemSpec(resharder=DefaultResharder())`, which a
# checkpoint needs from its first save on to be loaded on other ranks, `save` raises before it writes: the sizes of the
# metadata are gathered in tensors made with device="cuda", whatever the group is.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.14.1 torch_checkpointing==0.1.1 numpy 2>/dev/null
cat >"$folder/ranks.py" <<'PY'
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.config import AsyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

warnings.simplefilter("ignore")


def train(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    for name, spec in (("plain", ItemSpec()), ("resharded", ItemSpec(resharder=DefaultResharder()))):
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        config = CheckpointManager.Config(
            items={"model": spec},
            save=AsyncCheckpointSaverConfig(staging_config=staging),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
        manager = CheckpointManager(config)
        try:
            manager.save(f"{folder}/{name}", {"model": model.state_dict()}).result()
            said = "saved"
        except Exception as error:
            said = "NVIDIA" if "NVIDIA" in str(error) or "CUDA" in str(error) else repr(error)
        print(f"rank {rank}, {name}: {said}", flush=True)
        open(f"{folder}/{name}-{rank}", "w").write(said)
    import os
    os._exit(0)


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, (sys.argv[1],), 2)
    for rank in (0, 1):
        assert open(f"{sys.argv[1]}/plain-{rank}").read() == "saved"
        assert open(f"{sys.argv[1]}/resharded-{rank}").read() == "NVIDIA"
    print("as described: a resharder needs CUDA beside gloo")
PY
mkdir "$folder/run"
CUDA_VISIBLE_DEVICES='' "$folder/venv/bin/python" -W ignore "$folder/ranks.py" "$folder/run"
