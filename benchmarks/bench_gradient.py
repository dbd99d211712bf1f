"""What a slow link costs a training step, and how soon the training is done: ours against what else is in use.

Question
    Two hosts, 100 or 500 Mbit/s between them. How long is a step with plain DDP, with its bf16 hook, with PowerSGD,
    with DiLoCo, and with `GradientEngine`? When is the held-out loss where DDP's ends, and is the accuracy the same?

Method
    `scripts/testbed` makes two hosts (network namespaces) with a token bucket on either end of each cable; a rank runs
    on each, with one thread, and the allocator's settings that the launcher gives to ranks. `train_gradient` trains
    ResNet-18, a small GPT and a ViT (11 M parameters each) on data that they learn, with the same samples, optimizer
    and schedule for every method (`gradient_methods`, `gradient_tasks`).

    step        Interleaved: every round runs all methods at each rate, in a new random order, so that what else the
                machine does hits all alike. A run's figure is the mean of all steps but the first four, DiLoCo's over
                a whole cycle; the table has the median of the rounds. `none` is the floor: the same step without any
                exchange.
    beside      The same, the model computing beside the processor, as on an accelerator: forward and backward are
                played, in the same time for all methods (`gradient_played`). With one core a rank that must do both,
                whatever a method computes is time lost; this shows what it hides where the model needs no core.
    bytes       What rank 0's virtual cable has counted, sent and received, per step; not what a method believes.
    loss        The course of the held-out loss is measured once per method over the whole schedule, with no limit on
                the link: the methods do not look at the clock, so a link changes when a step ends and not what it
                computes. That is checked: the losses of the slow runs' steps must be those of the first steps of the
                long run, and the largest difference is printed (up to the long run's first look: a look brings home
                what is still under way). Loss against wall time is this course at the measured step times.
    to loss     Seconds until the held-out loss is, for good, below where DDP stood after half of its steps (½), and
                after three quarters (¾), where the schedule's last descent begins; nothing: it never is. The last look
                does not count: it is at more samples.
    accuracy    After the whole schedule, in points above DDP's, on 4,096 samples that nobody trains on. One course is
                one draw: two seeds of one method differ by as much as two methods. So DDP and the engine train with
                further seeds (initial weights and samples), and the engine's row has the mean difference to DDP with
                the same seed, and each of them. The other rows have that of the one course.

Bars
    A step at least 20 times shorter than DDP's at 100 Mbit/s and 8 times at 500, or within 10 % of the floor; accuracy
    not more than 0.5 points below DDP's at equal steps.

--varying
    The link follows a trace. One run for each density of a grid, and one whose density the controller sets,
    interleaved, the trace beginning with the training. Figure: seconds until DDP's loss after three quarters of its
    steps, as above. Bar: within 10 % of the best density, chosen in hindsight, and ahead of every other.

Command
    python benchmarks/bench_gradient.py --out benchmarks/results                  (three hours; needs root)
    python benchmarks/bench_gradient.py --varying --out benchmarks/results       (an hour)
    python benchmarks/bench_gradient.py --quick                                  (a minute: does it all work?)

    Every run is a line in OUT/gradient.jsonl until the last is done: the same command goes on where it was stopped.

Figures: benchmarks/results/gradient.md and gradient.png, gradient_varying.md and gradient_varying.png.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from measures import Kept, machine

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gradient_report import METHODS, TARGETS, Rows, plot, plot_varying, table, table_varying, target_of

from shade.launch.run import ALLOCATOR

ROOT = Path(__file__).resolve().parent.parent
TESTBED, PROGRAM = ROOT / "scripts" / "testbed", ROOT / "benchmarks" / "train_gradient.py"
TASKS = ("resnet18", "gpt", "vit")
DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1)
TRACE = "20 300mbit\n20 40mbit\n20 100mbit\n20 15mbit\n"
PATIENCE_SECONDS = 3600
SETTLING_STEPS, INNER_STEPS = 4, 20
COMPUTE = ("here", "beside")
"""Where the model computes."""


# ── one run on the testbed ──────────────────────────────────────────────────────────────────────────────────────────


class Testbed:
    """Two hosts of their own name."""

    def __init__(self) -> None:
        self.name = f"bench{os.getpid()}"

    def __call__(self, verb: str, *words: str) -> None:
        """A verb of scripts/testbed; its complaint ends this program."""
        command = [sys.executable, str(TESTBED), verb, "--name", self.name, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"bench_gradient: {done.stderr.strip()}")

    def run(self, *flags: str, trace: Path | None = None) -> Rows:
        """What rank 0 of one training printed; a trace begins when the training is about to."""
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500",
            "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **ALLOCATOR,
        }  # fmt: skip
        with contextlib.ExitStack() as stack:
            complaints = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
            ranks: list[subprocess.Popen[str]] = []
            for host, complaint in enumerate(complaints):
                command = [sys.executable, str(TESTBED), "exec", "--name", self.name, str(host), "--"]
                rank = subprocess.Popen(
                    [*command, sys.executable, str(PROGRAM), *flags],
                    env=environment | {"RANK": str(host)}, stdout=subprocess.PIPE, stderr=complaint, text=True,
                )  # fmt: skip
                ranks.append(rank)
                stack.callback(rank.communicate)
                stack.callback(rank.kill)
            guard = threading.Timer(PATIENCE_SECONDS, ranks[0].kill)
            guard.start()
            stack.callback(guard.cancel)
            rows: Rows = []
            assert ranks[0].stdout is not None
            for line in ranks[0].stdout:
                rows.append(json.loads(line))
                if rows[-1]["kind"] == "setup" and trace is not None:
                    self("rate", "--trace", str(trace))
            if any(rank.wait() for rank in ranks) or rows[-1]["kind"] != "end":
                told = [complaint.seek(0) or complaint.read()[-1500:] for complaint in complaints]
                raise RuntimeError(f"{' '.join(flags)}: " + "\n".join(told))
        return rows


@contextlib.contextmanager
def testbed() -> Iterator[Testbed]:
    """Two hosts that go away."""
    bed = Testbed()
    bed("up", "--hosts", "2", "--rate", "unlimited")
    try:
        yield bed
    finally:
        bed("down")


def pick(rows: Rows, kind: str) -> Rows:
    """The rows of one kind."""
    return [row for row in rows if row["kind"] == kind]


# ── fixed links ─────────────────────────────────────────────────────────────────────────────────────────────────────


def course(bed: Testbed, given: argparse.Namespace, task: str, *flags: str) -> dict[str, Any]:
    """The whole schedule, with no limit on the link; of its steps those before the first look."""
    look = ["--eval-every", str(max(4, given.steps // 20)), "--eval-samples", str(given.eval_samples)]
    last = ["--final-samples", str(given.final_samples)]
    bed("rate", "unlimited")
    rows = bed.run("--task", task, "--steps", str(given.steps), *look, *last, *flags)
    evals = [{name: row[name] for name in ("step", "loss", "accuracy")} for row in pick(rows, "eval")]
    steps = [row["loss"] for row in pick(rows, "step")][: evals[0]["step"]]
    return {"setup": rows[0], "steps": steps, "evals": evals}


def looks_of(given: argparse.Namespace) -> str:
    """What of the flags makes one course another."""
    return f"{given.steps} steps, {given.eval_samples} and {given.final_samples} samples"


def paces_of(bed: Testbed, given: argparse.Namespace, kept: Kept) -> dict[str, float]:
    """Task → seconds that its forward and backward take here."""

    def pace(task: str) -> dict[str, float]:
        flags = ["--task", task, "--method", "none", "--steps", "1", "--eval-samples", "0", "--played"]
        (row,) = pick(bed.run(*flags), "played")
        return {"seconds": row["seconds"]}

    return {task: kept(f"pace: {task}", partial(pace, task))["seconds"] for task in given.tasks}


def timed(
    bed: Testbed, given: argparse.Namespace, pace: float, task: str, compute: str, rate: str, method: str
) -> dict[str, Any]:
    """The first steps of a schedule, at a rate."""
    bed("rate", rate)
    played = ["--played", f"{pace:.4f}"] if compute == "beside" else []
    count = SETTLING_STEPS + INNER_STEPS if method == "diloco" else given.time_steps
    length = ["--steps", str(given.steps), "--stop-after", str(count), "--eval-samples", "0"]
    rows = bed.run("--task", task, "--method", method, *length, *played, *given.flags)
    losses = [row["loss"] for row in pick(rows, "step")]
    return {"task": task, "compute": compute, "rate": rate, "method": method, "losses": losses} | rows[-1]


def rounds_of(bed: Testbed, given: argparse.Namespace, kept: Kept) -> list[dict[str, Any]]:
    """All methods at all rates, round by round, each time in another order."""
    found = []
    paces = paces_of(bed, given, kept)
    places = list(itertools.product(given.tasks, COMPUTE, given.rates, given.methods))
    for number in range(given.rounds):
        for place in random.Random(number).sample(places, len(places)):
            key = f"round {number}: {', '.join(place)}, {given.time_steps} of {given.steps}, {given.flags}"
            found.append(kept(key, partial(timed, bed, given, paces[place[0]], *place)))
            tell(f"round {number}: {', '.join(place)}: {found[-1]['step_seconds']:.3f} s a step")
    return found


def finals_of(bed: Testbed, given: argparse.Namespace, kept: Kept) -> list[dict[str, Any]]:
    """What DDP and the engine have learned in the end, with each seed but the courses'."""
    found = []
    length = ["--steps", str(given.steps), "--eval-samples", str(given.final_samples)]
    for task, seed, method in itertools.product(given.tasks, range(1, given.seeds), ("ddp", "engine")):
        key = f"seed {seed}: {task}, {method}, {given.steps} steps, {given.final_samples} samples, {given.flags}"
        flags = ["--task", task, "--method", method, "--seed", str(seed), *length, *given.flags]
        found.append({"task": task, "method": method, "seed": seed} | kept(key, partial(final, bed, flags)))
        tell(f"seed {seed}: {task}, {method}: {100 * found[-1]['accuracy']:.2f} %")
    return found


def final(bed: Testbed, flags: list[str]) -> dict[str, float]:
    """The last look of a training, with no limit on the link."""
    bed("rate", "unlimited")
    (row,) = pick(bed.run(*flags), "eval")
    return {name: row[name] for name in ("loss", "accuracy")}


def measure(given: argparse.Namespace, kept: Kept) -> dict[str, Any]:
    """Courses, seeds and rounds."""
    courses: dict[str, dict[str, Any]] = {}
    with testbed() as bed:
        for task in given.tasks:
            for method in given.methods:
                key = f"course: {task}, {method}, {looks_of(given)}, {given.flags}"
                found = kept(key, partial(course, bed, given, task, "--method", method, *given.flags))
                courses.setdefault(task, {})[method] = found
                tell(f"course: {task}, {method}: {found['evals'][-1]}")
        runs = rounds_of(bed, given, kept)
        finals = finals_of(bed, given, kept)
    return {"about": about(given, kept), "courses": courses, "runs": runs, "finals": finals}


# ── a varying link ──────────────────────────────────────────────────────────────────────────────────────────────────


def steered(bed: Testbed, given: argparse.Namespace, trace: Path, task: str, *flags: str) -> dict[str, Any]:
    """The whole schedule, while the link follows the trace."""
    look = ["--eval-every", str(max(1, given.steps // 40)), "--eval-samples", str(min(512, given.eval_samples))]
    plain = ["--task", task, "--method", "engine", "--steps", str(given.steps), *look, *given.flags]
    rows = bed.run(*plain, *flags, trace=trace)
    return {
        "evals": [{name: row[name] for name in ("step", "loss", "seconds")} for row in pick(rows, "eval")],
        "steps": [{name: row[name] for name in ("seconds", "density")} for row in pick(rows, "step")],
    }


def measure_varying(given: argparse.Namespace, kept: Kept) -> dict[str, Any]:
    """The controller and each fixed density, round by round, over the same trace; DDP's course gives the target."""
    runs = []
    with testbed() as bed, tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        trace.write_text(given.trace.read_text() if given.trace else TRACE)
        targets = {}
        for task in given.tasks:
            key = f"target: {task}, {looks_of(given)}"
            evals = kept(key, partial(course, bed, given, task, "--method", "ddp"))["evals"]
            targets[task] = {share: target_of(evals, share) for share in TARGETS}
            tell(f"targets: {task}: {', '.join(f'{loss:.4f}' for loss in targets[task].values())}")
        compiling = argparse.Namespace(**vars(given) | {"steps": 4})  # which the first run of all would pay for
        steered(bed, compiling, trace, given.tasks[0], "--controller")
        ways = {f"density {density:g}": ["--density", f"{density:g}"] for density in given.densities}
        ways["controller"] = ["--controller"]
        places = [(task, way) for task in given.tasks for way in ways]
        for number in range(given.rounds):
            for task, way in random.Random(number).sample(places, len(places)):
                key = f"round {number}: {task}, {way}, {given.steps}, {trace.read_text()!r}, {given.flags}"
                found = kept(key, partial(steered, bed, given, trace, task, *ways[way]))
                runs.append({"task": task, "way": way} | found)
                tell(f"round {number}: {task}, {way}: {found['steps'][-1]['seconds']:.1f} s")
        return {"about": about(given, kept), "trace": trace.read_text(), "targets": targets, "runs": runs}


# ── the report ──────────────────────────────────────────────────────────────────────────────────────────────────────


def tell(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def about(given: argparse.Namespace, kept: Kept) -> str:
    """Commits, machine and versions."""
    import torch

    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return (
        f"commit {kept.commits}, {given.rounds} rounds, schedules of {given.steps} steps, torch {torch.__version__}, "
        f"{machine()}, TCP with {control}, ours with {' '.join(given.flags)}"
    )


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="default: all")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "500mbit"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3, help="of the accuracy of DDP and the engine")
    parser.add_argument("--steps", type=int, default=400, help="of a whole schedule; 20 times DiLoCo's H, or more")
    parser.add_argument("--time-steps", type=int, default=16, help="of a run that is timed; DiLoCo's has 4 + H")
    parser.add_argument("--eval-samples", type=int, default=1024, help="held out, of each look")
    parser.add_argument("--final-samples", type=int, default=4096, help="of the last, which gives the accuracy")
    parser.add_argument("--density", type=float, default=0.03, help="of the hook and the engine")
    parser.add_argument("--compressor", default="threshold-v", help="of the hook and the engine")
    parser.add_argument("--quick", action="store_true", help="one network, few steps: shows that it works, no figures")
    parser.add_argument("--varying", action="store_true", help="the controller against fixed densities, on a trace")
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES, help="the grid of --varying")
    parser.add_argument("--trace", type=Path, help="of --varying: lines `seconds rate`; default: one of four rates")
    parser.add_argument("--out", type=Path, help="folder for the .json, .md and .png")
    return parser


def main() -> None:
    """Measures, prints, writes."""
    given = build_parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the hosts go away then, too
    others = given.methods or (["engine"] if given.quick else METHODS)
    given.methods = list(dict.fromkeys(["none", "ddp", *others]))
    given.flags = ["--compressor", given.compressor, "--density", f"{given.density:g}", "--correction"]
    if given.quick:
        given.tasks, given.rates, given.rounds, given.densities = ["resnet18"], ["100mbit"], 1, [0.01]
        given.steps, given.time_steps, given.eval_samples, given.final_samples = 8, 6, 128, 128
        given.seeds = 2
    name = "gradient_varying" if given.varying else "gradient"
    kept = Kept(given.out / f"{name}.jsonl" if given.out else None)
    result = (measure_varying if given.varying else measure)(given, kept)
    text = f"# {'A varying link' if given.varying else 'A slow link'}\n\n{result['about']}\n"
    text += (table_varying(result) if given.varying else table(result)) + "\n"
    print(text)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / f"{name}.json").write_text(json.dumps(result) + "\n")
        (given.out / f"{name}.md").write_text(text)
        (plot_varying if given.varying else plot)(result, given.out / f"{name}.png")
        kept.done()


if __name__ == "__main__":
    main()
