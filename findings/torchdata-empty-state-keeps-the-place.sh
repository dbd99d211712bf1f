#!/bin/sh
# torchdata 0.11.0 with torch 2.14.1: StatefulDataLoader.load_state_dict({}) leaves the state that was loaded before.
#
# Guess: an empty state means "from the beginning", as it does for a loader that was just made; a training script that
# found no checkpoint passes {} to whatever loader it has.
# Seen: a loader that was given the state after one batch, and then {}, begins with the second batch. A new loader that
# is given {} begins with the first. There is no error in either case. So {} is no way to put a loader back: make another.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.14.1 torchdata==0.11.0 2>/dev/null
"$folder/venv/bin/python" -W ignore - <<'PY'
from torchdata.stateful_dataloader import StatefulDataLoader


def loader():
    return StatefulDataLoader([0, 1, 2, 3, 4, 5], batch_size=2)


def rest(of):
    return [batch.tolist() for batch in of]


first = loader()
next(iter(first))
state = first.state_dict()
used, new = loader(), loader()
used.load_state_dict(state)
used.load_state_dict({})
new.load_state_dict({})
seen = rest(used), rest(new)
print("after a state and {}:", seen[0])
print("after {} alone:      ", seen[1])
assert seen == ([[2, 3], [4, 5]], [[0, 1], [2, 3], [4, 5]]), seen
PY
