#!/bin/sh
# grain 0.2.18: a slice of a shuffled MapDataset is another set of elements in each epoch.
#
# Guess: shuffled[:8] and shuffled[8:] split ten elements into training and validation, and training.repeat(3) trains
# three times on the same eight.
# Seen: the slice takes places, not elements, and the shuffle has another order in each epoch of the repeat: the second
# epoch of the training part has both elements of the validation part, the third one of them. Each part by itself looks
# right, and so does the first epoch. Slicing first and shuffling each part keeps them apart.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q grain==0.2.18 2>/dev/null
"$folder/venv/bin/python" - 2>/dev/null <<'PY'
import grain

elements = grain.MapDataset.range(10)


def shared(training, validation):
    kept, repeated = {validation[i] for i in range(2)}, training.repeat(3)
    return [sorted(kept & {repeated[8 * epoch + i] for i in range(8)}) for epoch in range(3)]


shuffled = elements.shuffle(seed=0)
after = shared(shuffled[:8], shuffled[8:])
before = shared(elements[:8].shuffle(seed=0), elements[8:].shuffle(seed=0))
print("validation elements that each epoch trains on: shuffled, then sliced:", after, "sliced, then shuffled:", before)
assert [len(epoch) for epoch in after] == [0, 2, 1], after
assert before == [[], [], []], before
PY
