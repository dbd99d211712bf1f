#!/bin/sh
# The ACUTE example on one machine: a memory node, its flusher, trainers; a trainer killed on the way if asked for.
#
#   benchmarks/execute_example.sh [--ranks N] [--epochs N] [--name NAME] [--out DIR] [--kill-after EPOCH] [flags …]
#
# The flags are those of training_example.py.
# Starts a Redis server, `shade checkpoint flush` and torchrun; with --kill-after, kills one trainer with SIGKILL once that
# epoch is done, and starts the training again with --snapshot_path latest. Ends when all that was saved is durable, with
# everything that it started. DIR (acute_example) gets train.log, flush.log and checkpoints/.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
ranks=2 epochs=4 name=user_model out=acute_example kill_after=
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) sed -n '2,/^set -eu/{/^set/d;s/^# \{0,1\}//;p;}' "$0"; exit 0 ;;
        --ranks) ranks=$2; shift 2 ;;
        --epochs) epochs=$2; shift 2 ;;
        --name) name=$2; shift 2 ;;
        --out) out=$2; shift 2 ;;
        --kill-after) kill_after=$2; shift 2 ;;
        *) break ;;
    esac
done

python=${SHADE_VENV:-$root/.venv}/bin/python
[ -x "$python" ] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
main='import sys; from shade.cli import main; sys.exit(main())'
shade() { "$python" -c "$main" "$@"; }

mkdir -p "$out"
out=$(cd "$out" && pwd)
: >"$out/train.log"
flusher= trainers= follower=
finish() {
    for process in $follower $trainers $flusher; do kill "$process" 2>/dev/null || true; done
    shade cache down --dir "$out/memory_node" >/dev/null 2>&1 || true
}
trap finish EXIT
trap 'exit 130' INT TERM

store=$(shade cache up --dir "$out/memory_node" 2>/dev/null)
echo "execute_example: memory node at $store"
case " $* " in # the model's name is the run's, unless the date is added: then the flusher serves what it finds
    *" --file_name_include_datetime"* | *" --file_date"*) set -- --model_name "$name" "$@"; which= ;;
    *) set -- --model_name "$name" "$@"; which="--run=$name" ;;
esac
case " $* " in # … in a folder of the model's name, where that is asked for
    *" --file_save_in_dictionary"* | *" --file_dictionary"*) persist=$out/checkpoints/$name ;;
    *) persist=$out/checkpoints ;;
esac
"$python" -c "$main" checkpoint flush "$store" --persist-to "$persist" $which 2>"$out/flush.log" &
flusher=$!

train() { # the flags of training_example.py
    port=$("$python" -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m torch.distributed.run --nproc-per-node "$ranks" \
        --master-addr 127.0.0.1 --master-port "$port" "$root/benchmarks/training_example.py" \
        "$epochs" 1 127.0.0.1 "$port" --store "$store" --persist-to "$out/checkpoints" "$@" >>"$out/train.log" 2>&1 &
    trainers=$!
}

tail -n +1 -f "$out/train.log" &
follower=$!
train "$@"
if [ -n "$kill_after" ]; then
    while kill -0 "$trainers" 2>/dev/null && ! grep -q "^epoch $kill_after:" "$out/train.log"; do sleep 0.1; done
    victim=$(cut -d ' ' -f 1 "/proc/$trainers/task/$trainers/children")
    echo "execute_example: killing trainer $victim after epoch $kill_after"
    kill -KILL "$victim"
    wait "$trainers" && { echo "execute_example: the trainers did not notice" >&2; exit 1; }
    echo "execute_example: going on from the latest snapshot"
    train "$@" --snapshot_path latest
fi
status=0
wait "$trainers" || status=$?
trainers=
kill "$flusher"
wait "$flusher" || true # 1 where something is not durable yet
flusher=
shade checkpoint flush "$store" --persist-to "$persist" --once 2>>"$out/flush.log" || status=$?
[ "$status" -ne 0 ] || shade checkpoint list --persist-to "$persist" || status=$?
exit "$status"
