"""Which way to checkpoint costs a training least? Every strategy and what else is in use, on six models.

Question
    What does a snapshot cost the training with each strategy: how long does it stop, how much slower does it become?
    How soon is the snapshot safe, how many bytes are written, how long until a new process has the state again, and is
    it the same state, bit for bit?

Method
    A process trains one model, and all methods take turns in it, in a new random order each round: K steps behind a
    save and K steps without one in turn, after a save for warming up. One turn saves nothing: what its pairs differ
    by is what the machine does. In the first round another process restores what was saved last, from a cold disk, and
    compares it with a reference that was kept in memory. What the training frees stays with its process, or
    else page faults are most of a step's noise (`measures`).

    stall       what one snapshot makes the training thread wait: in the call, and before the optimizer's next step.
    slow-down   K steps behind a save, and until it is durable if it is not yet, over K steps without: the median of
                the seven turns around. (The next save would have to wait for as long.)
    cost        the same in seconds a snapshot: stalls, and what steps take longer because somebody copies beside them.
                ± is the standard error of the median over all rounds.
    memory      from the call until shared memory holds the snapshot (with --store: the server's), committed.
    durable     from the call until it is on the disk, synced. What a library leaves in the page cache is synced for it.
    written     what the kernel counts as written to storage, over the state's size; without a server's flusher.
    recovery    in a new process, until the state is loaded; once a model. Its free memory has been touched: what a
                method left of its own pages would decide else (`measures.touch_free_memory`).
    read        what that reads, over the state's size, as the kernel counts it: the page cache's part included, and
                what ranks exchange.
    equal       "bit", where all digests are those of the reference, or the largest difference as a part of its
                tensor's largest number.

    With --ranks the model is sharded by FSDP2 over so many processes of this machine, which share its cores and
    exchange over gloo. `fsdp2` saves through `Checkpointer`, others through `dcp.async_save`: `fsdp2-writer` by way of
    our writer and `fsdp2-dcp-overlapped` by DCP's own, both with a stager that copies in a thread, `fsdp2-dcp` with one
    that keeps its buffers; `fsdp2-torch-checkpointing` through that package's manager.
    A figure is the longest of all ranks', bytes are their sum, and as many new processes restore at once.

    Rule for the ranks, written before their results: ours is ahead at a number of ranks if its cost is lower than both
    others' by more than twice the difference's standard error, its stall and its recovery are no longer, and it
    restores bit for bit. What does not hold is said beside the table.

Command
    python benchmarks/bench_strategies.py --method asymmetric --model gpt2 --size base --every 5
        one run, one row
    python benchmarks/bench_strategies.py --size base --rounds 5 --out benchmarks/results
        the table: all methods, all models, two hours or three. Rows are added to OUT/strategies.jsonl as they come; the
        same command goes on where it was interrupted, and draws the table from what is there. --size tiny for a look.
    python benchmarks/bench_strategies.py --candidates --rounds 4 --out benchmarks/results
        the default strategy: what may be it, no restores; five minutes a round on two idle cores, and it says what is
        left. Rows are kept in OUT/strategies-default.jsonl, the table in .md. The rule is decision 0048.
    python benchmarks/bench_strategies.py --ranks 2 4 --model gpt2 --rounds 3 --out benchmarks/results
        a sharded model; half an hour. Rows are kept in OUT/strategies-ranks.jsonl, the table in .md.
    python benchmarks/bench_strategies.py --model gpt2 --data /data/wikitext-2-raw --size base
        on real text (WikiText for gpt2, bloom, roberta; SQuAD v1.1 for bert; an ImageFolder for vit and resnet)

Reading
    `cost` is what counts: a method that copies behind the training's back shows no stall and pays in slow-down. The
    smallest cost among those that restore bit for bit is marked. Figures: benchmarks/results/strategies.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import strategy_models
import strategy_report
import strategy_run
from measures import Log, commit, forget, processors
from strategy_methods import CANDIDATES, METHODS, NAMES, SHARDED, SPARE, process_of

from shade.errors import UnknownNameError

ROWS = "strategies.jsonl"
DEFAULT = "strategies-default"
"""Name of the files that say which strategy is the default."""
SEVERAL = "strategies-ranks"
"""Name of the files with several ranks."""
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where references are: on the disk they would hold up what is written and read there."""


def measure(
    each: dict[str, Any], given: argparse.Namespace, place: Path, training: strategy_run.Ranks
) -> dict[str, Any]:
    """A method's turn, and in the first round a restore of what it has saved; what went wrong is a figure, too."""
    name, number = each["method"], each["round"]
    with (
        tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryDirectory(dir=MEMORY) as memory,
    ):
        is_restored = (number == 0 or given.several) and name != "none" and not given.candidates
        reference = Path(memory) / "reference.pt" if is_restored else None
        try:
            figures = training.take(name, Path(folder), reference, number)
            if reference is not None:
                forget(Path(folder))
                figures |= strategy_run.restore_on_ranks(name, given, Path(folder), reference)
        except RuntimeError as error:
            figures = {"failed": str(error)}
    return figures


class Runs(Log):
    """Rows by round, model and method; one is a method's turn."""

    def has(self, key: dict[str, Any]) -> bool:
        """Whether there is such a row, and it did not fail."""
        return any("failed" not in row and all(row.get(name) == key[name] for name in key) for row in self.rows)

    def of(self, key: dict[str, Any]) -> list[dict[str, Any]]:
        """The rows of a key: the last of each round, model and method."""
        found = {
            (row["round"], row["model"], row["method"]): row
            for row in self.rows
            if all(row.get(name) == key[name] for name in key)
        }
        return list(found.values())


def work(given: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    """Every (round, model, method), in random order within a round and model; what shards the model comes last."""
    found = []
    for number in range(given.rounds):
        for model in given.models:
            order = random.Random(f"{number} {model}").sample(names, len(names))
            turns = [{"round": number, "model": model, "method": name} for name in order]
            found += sorted(turns, key=process_of)
    return found


def run_all(given: argparse.Namespace, names: list[str], log: Runs, place: Path) -> None:
    """Runs what the log has not got: a process a round and model, and one for each method that shards the model."""
    common = setting(given)
    left = [each for each in work(given, names) if not log.has(each | common)]
    begun, number = time.monotonic(), 0
    for (_, model, sharded), group in itertools.groupby(left, process_of):
        one = argparse.Namespace(**vars(given), model=model)
        with (
            spare_buffers(),
            contextlib.closing(strategy_run.Ranks(one, METHODS[sharded or "none"])) as training,
        ):
            for each in group:
                number += 1
                figures = measure(each, one, place, training)
                made = {"commit": commit(), "processors": processors(), "at": time.time()}
                log.add(each | common | made | figures)
                left_seconds = (time.monotonic() - begun) / number * (len(left) - number)
                told = f"[{number}/{len(left)}] {described(each, figures)}; {duration(left_seconds)} left"
                print(told, file=sys.stderr, flush=True)


@contextlib.contextmanager
def spare_buffers() -> Iterator[None]:
    """A place where buffers wait from one method's turn to the next; they go with it."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        os.environ[SPARE] = folder
        try:
            yield
        finally:
            del os.environ[SPARE]


def setting(given: argparse.Namespace) -> dict[str, Any]:
    """What two rows must have in common to stand in one table."""
    found = {name: getattr(given, name) for name in ("size", "every", "store")}
    found["data"] = str(given.data) if given.data else None
    return found | {"ranks": given.ranks if given.several else None}


def described(each: dict[str, Any], figures: dict[str, Any]) -> str:
    """A line on a run."""
    name = f"round {each['round']} {each['model']} {each['method']}"
    if "failed" in figures:
        return f"{name}: failed: {figures['failed'].splitlines()[-1]}"
    cost = statistics.median(behind - without for behind, without in figures["pairs"])
    if not figures["stalls"]:
        return f"{name}: {cost:+.3f} s"
    told = f"{name}: cost {cost:.3f} s, stall {statistics.median(figures['stalls']):.3f} s"
    if "equal" not in figures:
        return told
    return f"{told}, equal {strategy_report.sameness(figures['equal'], figures.get('error', 0.0))}"


def duration(seconds: float) -> str:
    """A duration for people."""
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Which way to checkpoint costs least; see the top of the file.")
    parser.add_argument("--method", help="one run of this method alone")
    parser.add_argument("--methods", nargs="*", help="of the table (all)")
    parser.add_argument("--candidates", action="store_true", help="which strategy is the default; nothing is restored")
    parser.add_argument("--model", action="append", dest="models", help="may be repeated (all six)")
    parser.add_argument("--size", default="base", help="tiny, base or large (base)")
    parser.add_argument("--every", type=int, default=2, metavar="K", help="steps behind a save, and without one (2)")
    parser.add_argument("--saves", type=int, default=3, metavar="NUM", help="measured in each turn, at most (3)")
    parser.add_argument("--rounds", type=int, default=5, metavar="NUM", help="of the table (5)")
    parser.add_argument("--data", type=Path, help="real text or images; made up otherwise")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="NUM", help="shard the model over 2 or more processes")
    parser.add_argument("--store", action="store_true", help="ours through a Redis server's memory")
    parser.add_argument("--out", type=Path, help="folder for strategies.jsonl, .md, .json and .png")
    parser.add_argument("--folder", type=Path, help="where to save; default: a temporary folder")
    return parser.parse_args()


def chosen(given: argparse.Namespace) -> list[str]:
    """Returns the methods to measure; the one that saves nothing is the first, where the model is whole.

    Raises:
        UnknownNameError: There is no such method, or none that several ranks can be measured with.
    """
    usual = SHARDED if given.ranks else CANDIDATES if given.candidates else NAMES
    names = [given.method] if given.method else given.methods or usual
    known = SHARDED if given.ranks else list(METHODS)
    for name in names:
        if name not in known:
            noun = "method that shards the model" if given.ranks else "method"
            raise UnknownNameError(f"no {noun} named {name!r}; known: {', '.join(known)}")
    return list(names) if given.ranks else ["none", *(name for name in names if name != "none")]


def report_of(given: argparse.Namespace, names: list[str], log: Runs) -> strategy_report.Report:
    """Returns the report of what the log has for a setting."""
    rows = [row for row in log.of(setting(given)) if row["model"] in given.models and row["method"] in names]
    return strategy_report.Report(rows, setting(given))


def write(given: argparse.Namespace, reports: list[strategy_report.Report]) -> None:
    """Prints the reports, and writes their files."""
    if given.several:
        name = SEVERAL
        text = "# A model sharded over several ranks\n\n" + "\n\n".join(report.of_ranks() for report in reports) + "\n"
    elif given.candidates:
        name = DEFAULT
        text = f"# The default strategy\n\n{reports[0].about()}\n\n{reports[0].ranking()}\n"
    else:
        name, text = "", reports[0].text()
    print(text)
    if given.out is not None and name:
        (given.out / f"{name}.md").write_text(text)
    elif given.out is not None and not given.method:
        reports[0].write(given.out)


def main() -> None:
    """Command line."""
    given = parse()
    given.models = given.models or list(strategy_models.MODELS)
    try:
        for model in given.models:
            strategy_models.build(model, given.size, on_meta=True)  # imports what it needs, for all runs at once
        names = chosen(given)
    except UnknownNameError as error:
        sys.exit(f"bench_strategies: {error}")
    if given.method:
        given.rounds = 1
    given.several, numbers_of_ranks = bool(given.ranks), given.ranks or [1]
    rows = f"{SEVERAL}.jsonl" if given.several else f"{DEFAULT}.jsonl" if given.candidates else ROWS
    log = Runs(None if given.out is None else given.out / rows)
    reports = []
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given.folder)))
        if given.store:
            from shade.store._servers.server import LocalServer

            server = LocalServer()
            server.start()
            stack.callback(server.stop)
            os.environ["BENCH_STORE"] = server.url.reveal()
        for num_ranks in numbers_of_ranks:
            given.ranks = num_ranks
            run_all(given, names, log, place)
            reports.append(report_of(given, names, log))
    write(given, reports)
    sys.exit(1 if any(report.has_failed for report in reports) else 0)


if __name__ == "__main__":
    main()
