#!/bin/sh
# torch 2.14.1: torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, called before an optimizer's first step,
# changes the training that follows.
#
# Guess: it reads a state, as Optimizer.state_dict() does, and leaves the optimizer as it was.
# Seen: it steps an optimizer that has no state once, with zero gradients and learning rate 0, so that there is a state
# to name. Weights stay, the state does not: Adam, AdamW, NAdam, RAdam, Adamax and Adafactor count that step, so that
# their bias correction begins at 2 (Adam's first real step is 0.74 of what it is without); SGD with dampening has a
# buffer, so that its first real step is dampened; Rprop and ASGD keep step sizes that come from the rate 0. After three
# steps the weights differ for 8 of the 12 optimizers below. SGD, RMSprop, Adagrad and Adadelta train on unchanged.
# get_state_dict does the same. A script that builds its state to look whether there is something to load, and finds
# nothing, trains otherwise than one that does not look.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.14.1 2>/dev/null
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from torch import optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def trained(kind, is_read, **options):
    torch.manual_seed(0)
    model, inputs = torch.nn.Linear(4, 3), torch.randn(8, 4)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    if is_read:
        get_optimizer_state_dict(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return model.weight.detach()


changed, unchanged = [], []
kinds = (optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adafactor, optim.Rprop, optim.ASGD)
kinds += (optim.SGD, optim.RMSprop, optim.Adagrad, optim.Adadelta)
for kind in kinds:
    same = torch.equal(trained(kind, False), trained(kind, True))
    (unchanged if same else changed).append(kind.__name__)
dampened = {"momentum": 0.9, "dampening": 0.1}
print("changed:", *changed)
print("unchanged:", *unchanged)
assert len(changed) == 8 and unchanged == ["SGD", "RMSprop", "Adagrad", "Adadelta"], (changed, unchanged)
assert not torch.equal(trained(optim.SGD, False, **dampened), trained(optim.SGD, True, **dampened))
first = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
adam, read = (optim.Adam([each], lr=0.1) for each in first)
holder = torch.nn.Module()
holder.weight = first[1]
get_optimizer_state_dict(holder, read)
for each, optimizer in zip(first, (adam, read)):
    each.grad = torch.ones(1)
    optimizer.step()
ratio = float((1 - first[1]) / (1 - first[0]))
print(f"Adam's first step: {ratio:.2f} of what it is without")
assert abs(ratio - 0.74) < 0.01, ratio
PY
