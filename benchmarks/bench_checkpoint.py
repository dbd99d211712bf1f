"""What a checkpoint costs a training run, and how soon it is safe: ours against everything else that is in use.

Question
    How long does a save stop the training? What does it add to the run's wall time? When is it durable? How long until
    a restarted process has its state again? How much memory does it take?

Method
    GPT-2 (124 M parameters, random weights) with Adam: 1.49 GB of state, trained on random tokens, 1 × 64 a step, on
    all cores. A run is a process of its own: warm-up steps with two unmeasured saves (first use makes buffers, starts
    processes), then 20 steps with a save at 4 of them, then whatever it takes until the last is on the disk. Every
    round runs all methods and the same steps without any save, in a new random order, so that what else the machine
    does hits all alike. The folder is emptied after each.

    blocked     what one save adds to the thread that trains: the call, and what is waited for before the optimizer's
                step.
    wall        the whole run from the first step to the last save's durability, over that of the run without saves.
    durable     from the call to fsync, while the training uses all cores. What a library leaves in the page cache is
                synced for it.
    at rest     the same of three more saves with the training standing still, so that a save has disk and cores to
                itself, over the floor `disk` measured just before each.
    written     bytes written for one save, over the state's size, the saves at rest left out: counted by the kernel for
                this process, on slow storage by the mount for all.
    memory      peak resident memory above that of the run without saves, over the state's size.
    memcpy      the floor of `blocked` for a stop-and-copy: the C library's memcpy of the same bytes, one thread, warm
                pages.
    disk        the floor of `durable`: the same bytes written from one warm buffer, with O_DIRECT or without, and
                fsync, the faster of the two, nothing else running.

    Slow storage: 100 MB/s behind a slowfs mount, where a save takes longer than twenty steps. A run has one unmeasured
    save and two that are measured. `shade, asymmetric` is there twice: as it is, and with AsymCheck's selective
    compression (codec zstd, a chunk is compressed only where that shortens the save).

Rule for compression on slow storage, written before its results
    It pays if `written` is below 1.00 and the median time until a save is durable is shorter with it than without it in
    every round. Its price is `wall` and `blocked`, which stand in the same row.

Command
    python benchmarks/bench_checkpoint.py --out benchmarks/results          (half an hour; --rounds 1 for a look)
    python benchmarks/bench_checkpoint.py --slow --out benchmarks/results   (half an hour, eleven minutes a round; root)
    python benchmarks/bench_checkpoint.py --slow --methods "shade, asymmetric" "shade, asymmetric, compressed"
        compression alone (twelve minutes)
    python benchmarks/bench_checkpoint.py --quick                           (a tiny model: does it work?)
        Runs are kept in OUT/checkpoint.jsonl or OUT/checkpoint-slow.jsonl until the table is written; the same command
        continues where it was interrupted.

Reading
    A method that copies in the background shows small `blocked` and pays in `wall`, because the copy takes a core and
    bandwidth from the training. Figures: benchmarks/results/checkpoint.md.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measures import Kept, forget, machine, percentile, written_bytes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).resolve().parent))
WARM_UP, STEPS, SAVES_AT_REST, TOKENS = 4, 20, 3, 64
SAVES, SLOW_SAVES = ((1, 3), (3, 8, 13, 18)), ((3,), (3, 13))
"""Steps behind which a save comes, of those for warming up and of those measured."""
SLOW_METHODS = (
    "DCP async_save, stager reused", "DCP async_save, overlapped", "torchsnapshot async_take", "shade, overlap",
    "shade, overlap, memory", "shade, asymmetric", "shade, asymmetric, compressed",
)  # fmt: skip
TINY = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 512}


# ── one run, in a process of its own ────────────────────────────────────────────────────────────────────────────────


def build() -> tuple[Any, Any, Any]:
    """The model, its optimizer, and a batch."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    size = TINY if "BENCH_QUICK" in os.environ else {}
    config = transformers.GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **size)
    model = transformers.GPT2LMHeadModel(config)
    return model, torch.optim.Adam(model.parameters(), lr=1e-4), torch.randint(0, config.vocab_size, (1, TOKENS))


def state_bytes_of(optimizer: Any) -> int:
    """Bytes of all parameters and of what Adam keeps of each."""
    held = [param for group in optimizer.param_groups for param in group["params"]]
    held += [value for entry in optimizer.state.values() for value in entry.values()]
    return sum(tensor.nbytes for tensor in held)


def child(name: str, folder: Path) -> dict[str, Any]:
    """Trains and saves; the figures."""
    from checkpoint_methods import METHODS

    model, optimizer, tokens = build()
    first_saves, saves = SLOW_SAVES if "BENCH_SLOW" in os.environ else SAVES
    blocked: list[float] = []

    def step(number: int, save: bool) -> None:
        nonlocal method
        model(tokens, labels=tokens).loss.backward()
        begun = time.perf_counter()
        method.may_change()
        if blocked and waiting:
            blocked[-1] += time.perf_counter() - begun
            waiting.clear()
        optimizer.step()
        optimizer.zero_grad()
        if save:
            begun = time.perf_counter()
            method.begin(number)
            blocked.append(time.perf_counter() - begun)
            waiting.append(True)

    waiting: list[bool] = []
    method: Any = METHODS["none"](model, optimizer, folder)
    step(0, False)
    method = METHODS[name](model, optimizer, folder)
    for number in range(1, WARM_UP + 1):
        step(number, save=number in first_saves)
    method.finish()
    blocked.clear()
    waiting.clear()
    method.durable_seconds.clear()
    getattr(method, "committed_seconds", []).clear()
    written, begun = written_bytes(folder), time.perf_counter()
    for number in range(STEPS):
        step(WARM_UP + 1 + number, save=number in saves)
    method.finish()
    figures = {
        "wall": time.perf_counter() - begun,
        "state_bytes": state_bytes_of(optimizer),
        "written": (written_bytes(folder) - written) / len(saves),
        "blocked": blocked if name != "none" else [],
        "durable": list(method.durable_seconds),
        "committed": list(getattr(method, "committed_seconds", [])),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "at_rest": at_rest(method, folder) if name != "none" and "BENCH_SLOW" not in os.environ else [],
    }
    if hasattr(method, "checkpointer"):
        method.checkpointer.close()
    return figures


def at_rest(method: Any, folder: Path) -> list[float]:
    """Seconds until a save is durable with nothing else going on, over the disk's own."""
    ratios = []
    for number in range(SAVES_AT_REST):
        floor = disk_seconds(folder, state_bytes_of(method.optimizer))
        begun = time.perf_counter()
        method.begin(WARM_UP + STEPS + 1 + number)
        method.may_change()
        method.finish()
        ratios.append((time.perf_counter() - begun) / floor)
    return ratios


def prepare_restore(folder: Path) -> dict[str, Any]:
    """Leaves the same state in shared memory, in the server's, in storage and in a file of torch.save, and dies."""
    import torch

    from shade import Checkpointer

    model, optimizer, tokens = build()
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")
    checkpointer = Checkpointer(os.environ["BENCH_STORE"], persist_to=str(folder), run="restore", every="never")
    checkpointer.attach(model=model, optimizer=optimizer)
    checkpointer.save()
    checkpointer.wait_durable()
    return {}


def child_restore(way: str, folder: Path) -> dict[str, Any]:
    """Loads what `prepare_restore` left, into a model and an optimizer without a state."""
    import torch

    from shade import Checkpointer

    model, optimizer, _ = build()
    if way == "torch.load":
        begun = time.perf_counter()
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return {"seconds": time.perf_counter() - begun, "tier": "storage"}
    store = os.environ["BENCH_STORE"] if way == "cluster memory" else None
    persist = str(folder) if way == "storage" else None
    checkpointer = Checkpointer(store, persist_to=persist, run="restore", every="never")
    checkpointer.attach(model=model, optimizer=optimizer)
    begun = time.perf_counter()
    tiers = checkpointer.restore_latest().tiers
    return {"seconds": time.perf_counter() - begun, "tier": ", ".join(tiers)}


# ── floors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def memcpy_seconds(num_bytes: int) -> float:
    """The C library, warm pages, one thread; the best of five."""
    source, target = mmap.mmap(-1, num_bytes), mmap.mmap(-1, num_bytes)
    views = [(ctypes.c_char * num_bytes).from_buffer(each) for each in (source, target)]
    ctypes.memset(views[0], 1, num_bytes)  # a page that was never written to is read from the cache
    taken = []
    for _ in range(6):
        begun = time.perf_counter()
        ctypes.memmove(views[1], views[0], num_bytes)
        taken.append(time.perf_counter() - begun)
    return min(taken[1:])


def disk_seconds(folder: Path, num_bytes: int) -> float:
    """Write and fsync of the same bytes, from one warm buffer: the faster of O_DIRECT and the page cache."""
    piece = mmap.mmap(-1, 8 * 2**20)
    piece.write(random.randbytes(len(piece)))
    taken = []
    for flags in (os.O_DIRECT, 0):
        path = folder / "floor"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
        except OSError:
            continue
        begun = time.perf_counter()
        for _ in range(num_bytes // len(piece)):
            os.write(descriptor, piece)
        os.fsync(descriptor)
        taken.append(time.perf_counter() - begun)
        os.close(descriptor)
        path.unlink()
    return min(taken)


# ── rounds and the report ───────────────────────────────────────────────────────────────────────────────────────────


def run_child(kind: str, name: str, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """The figures of one process."""
    command = [sys.executable, __file__, kind, name, "--folder", str(folder)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed: {done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def rounds_of(
    names: list[str], kept: Kept, num_rounds: int, folder: Path, environment: dict[str, str]
) -> dict[str, Any]:
    """All methods, round by round, with the floors of each round beside them."""
    found: dict[str, Any] = {name: [] for name in names}
    floors: list[dict[str, float]] = []

    def run(name: str) -> dict[str, Any]:
        place = Path(tempfile.mkdtemp(dir=folder))
        try:
            return run_child("--child", name, place, environment)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def floors_of(num_bytes: int) -> dict[str, Any]:
        return {"memcpy": memcpy_seconds(num_bytes), "disk": disk_seconds(folder, num_bytes)}

    for number in range(num_rounds):
        for name in random.Random(number).sample(names, len(names)):
            found[name].append(kept(f"{number} {name}", lambda name=name: run(name)))  # type: ignore[misc]
            print(f"round {number}: {name}: {found[name][-1]['wall']:.1f} s", file=sys.stderr, flush=True)
        num_bytes = found["none"][-1]["state_bytes"]
        floors.append(kept(f"{number} floors", lambda num_bytes=num_bytes: floors_of(num_bytes)))  # type: ignore[misc]
    return {"methods": found, "floors": floors}


def table(result: dict[str, Any]) -> str:
    """Markdown: one row a method."""
    floors = {name: statistics.median(each[name] for each in result["floors"]) for name in ("memcpy", "disk")}
    lines = [
        f"memcpy of the state: {floors['memcpy']:.3f} s; write and fsync: {floors['disk']:.2f} s.",
        "",
        "| method | blocked | p99 | / memcpy | wall / no saves | committed | durable | / disk | at rest | written "
        "| memory |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    quiet = result["methods"]["none"]
    state_bytes = quiet[0]["state_bytes"]
    for name, runs in result["methods"].items():
        wall = statistics.median(run["wall"] / base["wall"] for run, base in zip(runs, quiet, strict=True))
        peak = statistics.median(run["peak_bytes"] - base["peak_bytes"] for run, base in zip(runs, quiet, strict=True))
        blocked = [each for run in runs for each in run["blocked"]]
        if not blocked:
            continue
        durable = [each for run in runs for each in run["durable"]]
        committed = [each for run in runs for each in run["committed"]]
        median = statistics.median(blocked)
        ratios = [each for run in runs for each in run["at_rest"]]
        rest = f"{statistics.median(ratios):.2f}" if ratios else ""
        soon = f"{statistics.median(committed):.2f} s" if committed else ""
        written = statistics.median(run["written"] for run in runs) / state_bytes
        late = statistics.median(durable)
        lines.append(
            f"| {name} | {median:.3f} s | {percentile(blocked, 0.99):.3f} s | {median / floors['memcpy']:.2f} | "
            f"{wall:.3f} | {soon} | {late:.2f} s | {late / floors['disk']:.2f} | {rest} | {written:.2f} × | "
            f"{peak / state_bytes:.2f} |"
        )
    return "\n".join(lines)


def compression(result: dict[str, Any]) -> str:
    """A sentence on what compression gains, round by round; nothing where it was not measured."""
    plain, packed = (result["methods"].get(f"shade, asymmetric{end}", ()) for end in ("", ", compressed"))
    pairs = [[statistics.median(run["durable"]) for run in both] for both in zip(plain, packed, strict=False)]
    ratios = ", ".join(f"{after / before:.2f}" for before, after in pairs)
    return f"\nTime until durable with compression over that without, by round: {ratios}.\n" if ratios else ""


def restores(folder: Path, environment: dict[str, str], num_rounds: int) -> dict[str, list[float]]:
    """Seconds until a new process has the state again, by where it was; the disk is cold."""
    from shade.checkpoint._buffer.shared_memory_folder import own_folder

    run_child("--prepare", "restore", folder, environment)
    found: dict[str, list[float]] = {}
    for ways in (("torch.load", "shared memory"), ("cluster memory", "storage")):
        for _ in range(num_rounds):
            for way in ways:
                forget(folder)
                figures = run_child("--restore", way, folder, environment)
                if way != "torch.load" and figures["tier"] != way:
                    raise RuntimeError(f"expected to restore from {way}, got {figures['tier']}")
                found.setdefault(way, []).append(figures["seconds"])
        if "shared memory" in ways:
            shutil.rmtree(own_folder("restore"))
    return found


def restore_table(found: dict[str, list[float]]) -> str:
    """Markdown: one row a place."""
    base = statistics.median(found["torch.load"])
    lines = ["| restored from | median | torch.load from a cold disk takes |", "|---|---|---|"]
    for way, seconds in found.items():
        median = statistics.median(seconds)
        lines.append(f"| {way} | {median:.2f} s | {base / median:.1f} × as long |")
    return "\n".join(lines)


def measure(given: argparse.Namespace) -> None:
    """All rounds, and the report."""
    from checkpoint_methods import USUAL

    from shade.store._servers.server import LocalServer

    names = given.methods or (SLOW_METHODS if given.slow else USUAL)
    names = ["none", *(name for name in names if name != "none")]
    title = "checkpoint-slow" if given.slow else "checkpoint"
    kept = Kept(given.out / f"{title}.jsonl" if given.out else None)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given.folder)))
        if given.slow:
            folder = stack.enter_context(slow_storage(folder))
        server = LocalServer()
        server.start()
        stack.callback(server.stop)
        environment = {"BENCH_STORE": server.url.reveal()}
        environment |= {"BENCH_SLOW": "yes"} if given.slow else {}
        environment |= {"BENCH_QUICK": "yes"} if given.quick else {}
        result = rounds_of(names, kept, given.rounds, folder, environment)
        if not given.slow:
            num_restores = 1 if given.quick else max(3, given.rounds)
            result["restore"] = kept("restore", lambda: restores(folder, environment, num_restores))
    result["about"] = about(kept.commits, given.rounds)
    text = f"{result['about']}\n\n{table(result)}\n{compression(result)}"
    if "restore" in result:
        text += f"\n{restore_table(result['restore'])}\n"
    print(text)
    if given.out:
        (given.out / f"{title}.json").write_text(json.dumps(result, indent=1) + "\n")
        (given.out / f"{title}.md").write_text(text)
    kept.done()


def about(commits: str, num_rounds: int) -> str:
    """Commits, machine and versions."""
    import torch

    return f"commit {commits}, {num_rounds} rounds, torch {torch.__version__}, {machine()}"


@contextlib.contextmanager
def slow_storage(folder: Path) -> Iterator[Path]:
    """A folder on storage of 100 MB/s."""
    source, mount = folder / "source", folder / "mount"
    source.mkdir()
    mount.mkdir()
    command = [str(ROOT / "scripts" / "slowfs"), str(source), str(mount), "--writable", "--bandwidth", "100MB/s"]
    with subprocess.Popen([*command, "--open-latency", "2ms"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "slowfs:" not in (line := process.stdout.readline()):
            if not line:
                raise RuntimeError("slowfs did not start")
        try:
            yield mount
        finally:
            process.terminate()
            process.stdout.read()  # it says goodbye


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="What a checkpoint costs; see the top of the file.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", nargs="*", help="default: all")
    parser.add_argument("--slow", action="store_true", help="storage of 100 MB/s, behind slowfs (needs root)")
    parser.add_argument("--quick", action="store_true", help="a tiny model: does it work?")
    parser.add_argument("--out", type=Path, help="folder for checkpoint.json and checkpoint.md")
    parser.add_argument("--folder", type=Path, help="where to save; default: a temporary folder")
    for kind in ("--child", "--restore", "--prepare"):
        parser.add_argument(kind, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(given.child, given.folder)))
    elif given.restore or given.prepare:
        way = child_restore(given.restore, given.folder) if given.restore else prepare_restore(given.folder)
        print(json.dumps(way), flush=True)
        os._exit(0)  # as a crash would: a clean end gives shared memory back
    else:
        measure(given)


if __name__ == "__main__":
    main()
