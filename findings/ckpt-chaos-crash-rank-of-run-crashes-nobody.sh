#!/bin/sh
# ckpt-chaos 0.1.8: `run --ranks 2 --crash-rank 1` crashes nobody, and reports that all crash points passed.
#
# Guess: the rank that --crash-rank names is crashed at each point, as rank 0 is by default; where no process was
# crashed, a crash test has shown nothing and does not pass.
# Seen: `run` arms the named rank only, but the armed process asks CKPT_CHAOS_CRASH_RANK whether it is the one, which
# `run` never sets and which is 0 by default. Each point is marked as one that did not crash; the verdict is PASS and
# the exit code 0. With CKPT_CHAOS_CRASH_RANK=1 set by hand, rank 1 is crashed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q ckpt-chaos==0.1.8 2>/dev/null
cat >"$folder/job.py" <<'PY'
import os
import sys

os.makedirs(sys.argv[1], exist_ok=True)
with open(f"{sys.argv[1]}/rank-{os.environ['RANK']}", "w") as file:
    file.write("x")
PY
chaos() {
    "$folder/venv/bin/python" -m ckpt_chaos run --ranks 2 --crash-rank 1 --modes before --max-points 4 --work "$folder/$1" \
        -- "$folder/venv/bin/python" "$folder/job.py" '{out}'
}
cd "$folder"
chaos unset >unset.txt
CKPT_CHAOS_CRASH_RANK=1 chaos set >set.txt || true
grep -E 'PASS|DID NOT CRASH' unset.txt | head -5
echo "without the variable: $(grep -c 'DID NOT CRASH' unset.txt) points crashed nobody; with it: $(grep -c 'DID NOT CRASH' set.txt || true)"
grep -q 'DID NOT CRASH' unset.txt
grep -q 'PASS: ' unset.txt
test "$(grep -c 'DID NOT CRASH' set.txt || true)" -lt "$(grep -c 'DID NOT CRASH' unset.txt)"
