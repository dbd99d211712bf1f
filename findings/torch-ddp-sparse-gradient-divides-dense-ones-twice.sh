#!/bin/sh
# torch 2.14.1, DistributedDataParallel over gloo: with an Embedding(sparse=True) whose gradient is ready first, all other
# gradients are divided by the number of ranks twice.
#
# Guess: gradients are the mean over the ranks, sparse or not; a mixture that is not supported is refused.
# Seen: on 2 ranks, linear(x) + embedding(i) has half of the right gradient in the linear layer, without an error or a
# warning; embedding(i) + linear(x), where the linear layer's gradient is ready first, has the right one, and so has
# sparse=False. With static_graph=True the first step is right and those that follow are not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.14.1 2>/dev/null
cat >"$folder/ranks.py" <<'PY'
import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Sum(torch.nn.Module):
    def __init__(self, is_sparse, linear_first):
        super().__init__()
        self.embedding = torch.nn.Embedding(4, 2, sparse=is_sparse)
        self.linear = torch.nn.Linear(2, 2)
        self.linear_first = linear_first

    def forward(self, i):
        x = i[:, None] * torch.ones(2)
        return self.linear(x) + self.embedding(i) if self.linear_first else self.embedding(i) + self.linear(x)


dist.init_process_group("gloo")
rank, seen = dist.get_rank(), {}
for is_sparse in (False, True):
    for linear_first in (False, True):
        torch.manual_seed(0)
        plain = Sum(is_sparse, linear_first)
        model = copy.deepcopy(plain)
        plain(torch.arange(4)).pow(2).mean().backward()
        parallel = DistributedDataParallel(model)
        parallel(torch.arange(4)[2 * rank : 2 * rank + 2]).pow(2).mean().backward()
        ratio = model.linear.weight.grad / plain.linear.weight.grad
        seen[is_sparse, linear_first] = round(ratio.mean().item(), 3)
if rank == 0:
    for (is_sparse, linear_first), ratio in seen.items():
        order = "linear + embedding" if linear_first else "embedding + linear"
        print(f"sparse={is_sparse}, {order}: {ratio} of the right gradient")
    right = {(False, False): 1.0, (False, True): 1.0, (True, False): 1.0}
    assert seen == {**right, (True, True): 0.5}, seen
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/ranks.py"
