#!/bin/sh
# torch 2.14.1: torch.distributed.checkpoint.load into the state of an optimizer that has not stepped loads no moments,
# and says nothing.
#
# Guess: what is in the checkpoint and not in the given state is loaded, as Optimizer.load_state_dict does, or refused,
# as Module.load_state_dict(strict=True) does; a key that the checkpoint lacks is refused, after all.
# Seen: `load` fills what the given dict names. The state of a new Adam is an empty dict, so nothing of it is named:
# `load` returns without an error or a warning, the learning rate is the saved one, and step counts and moments are
# missing. With a key more than the checkpoint has it raises CheckpointException. So a resumed run has the weights and
# none of the moments, unless the optimizer's state is made first (a step, or get_optimizer_state_dict).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.14.1 2>/dev/null
"$folder/venv/bin/python" -W ignore - "$folder/saved" <<'PY'
import sys

import torch
import torch.distributed.checkpoint as dcp

model = torch.nn.Linear(2, 1)


def adam(rate):
    return torch.optim.Adam(model.parameters(), lr=rate)


saved = adam(0.5)
model(torch.ones(2)).sum().backward()
saved.step()
dcp.save({"optimizer": saved.state_dict()}, checkpoint_id=sys.argv[1], no_dist=True)

new = adam(0.1)
state = {"optimizer": new.state_dict()}
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
new.load_state_dict(state["optimizer"])
rate, moments = new.param_groups[0]["lr"], len(new.state)
print("learning rate:", rate, "parameters with moments:", moments, "of", len(saved.state))
try:
    dcp.load({"optimizer": {"more": 0}}, checkpoint_id=sys.argv[1], no_dist=True)
except dcp.CheckpointException:
    print("a key more: CheckpointException")
else:
    sys.exit("a key more: loaded")
assert (rate, moments) == (0.5, 0), (rate, moments)
PY
