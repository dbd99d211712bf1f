"""``shade tune``: finds out which global batch and density a training does well with, once, before it is run for long.

Each evaluation is a short run of the user's own command. What comes of it is a profile, which the controller reads.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shade.errors import ConfigError

if TYPE_CHECKING:
    from shade.control.study import Evaluation, Study

JOURNAL, PROFILE, PLOT = "evaluations.jsonl", "profile.json", "profile.png"
_EXAMPLES: Final = """\
examples:
  shade tune --command "python train.py --batch-size {batch} --density {density} --epochs 2" --metric accuracy
  shade tune --command "python train.py -b {batch} -d {density}" --metric-regex "val loss ([0-9.]+)" --loss
  shade tune --command "sh train.sh {batch} {density}" --metric accuracy --batch 64:1024 --density 0.001:0.1 --out tune

The command trains for a fraction of the whole (a tenth is plenty) and tells how well that went:
  --metric NAME       a line of JSON on its output, as {"accuracy": 0.71}; the last one counts
  --metric-regex RE   or the one group of a regular expression; the last match counts

Killed, it goes on where it was when the same command is typed again. In the folder --out:
  evaluations.jsonl   a line each, written when it ends
  batch-…-….log       its output
  profile.json        for the controller: quality over batch and density
  profile.png         the same for people

exit code: 0; 1 when not one evaluation succeeded; 2 when what was asked cannot be done
"""


def add(verbs: Any) -> None:
    """Adds ``tune`` to the command."""
    parser = verbs.add_parser(
        "tune",
        help="find the batch and density that train best",
        description="Tries global batches and densities on short runs (Bayesian optimisation) and writes a profile.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--command", required=True, metavar="WORDS", help="with {batch} and {density}; no shell")
    parser.add_argument("--metric", metavar="NAME", help="of a number in a line of JSON")
    parser.add_argument("--metric-regex", metavar="RE", help="with one group, instead")
    parser.add_argument("--loss", action="store_true", help="less is better")
    parser.add_argument("--batch", default="32:1024", metavar="LOW:HIGH", help="global, in samples (32:1024)")
    parser.add_argument("--batch-multiple", type=int, default=8, metavar="N", help="only multiples of it (8)")
    parser.add_argument("--density", default="0.0005:0.1", metavar="LOW:HIGH", help="kept fraction (0.0005:0.1)")
    parser.add_argument("--evaluations", type=int, default=31, metavar="N", help="in all (31)")
    parser.add_argument("--initial", type=int, default=10, metavar="N", help="of those, to look around (10)")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="of one evaluation (none)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the search (0)")
    parser.add_argument("--out", type=Path, default=Path("tune"), metavar="DIR", help="(tune)")
    parser.set_defaults(answer=_answer)


def _answer(given: argparse.Namespace) -> int:
    from shade.control.space import Space
    from shade.control.study import Study, run
    from shade.control.trial import CommandObjective
    from shade.terminal import progress_bar

    objective = CommandObjective(
        given.command, given.out, metric=given.metric, pattern=given.metric_regex, timeout_seconds=given.timeout
    )
    low, high = _range("--batch", given.batch)
    space = Space((round(low), round(high)), _range("--density", given.density), given.batch_multiple)
    about = {"command": given.command, "metric": given.metric, "pattern": given.metric_regex, "timeout": given.timeout}
    study = Study(space, given.loss, given.seed, given.evaluations, given.initial, about)
    done: list[Evaluation] = []
    with progress_bar(given.evaluations, unit="run") as bar:
        for evaluation in run(study, objective, given.out / JOURNAL):
            done.append(evaluation)
            best = study.best(done)
            if best is not None:
                bar.set_postfix_str(f"best {best.quality:.5g} at {best.batch}, {best.density:g}", refresh=False)
            bar.update()
    return _tell(study, done, given.out)


def _tell(study: Study, done: list[Evaluation], folder: Path) -> int:
    from shade.cli.tables import table
    from shade.control.drawing import best_batch, draw

    rows = [("number", "batch", "density", "quality", "seconds", "")]
    for each in done:
        quality = "failed" if each.quality is None else f"{each.quality:.6g}"
        told = " ".join((each.failure or "").split())[:80]
        rows.append((f"{each.number}", f"{each.batch}", f"{each.density:g}", quality, f"{each.seconds:.1f}", told))
    sys.stdout.write(table(rows, ">>>>><"))
    best = study.best(done)
    if best is None:
        sys.stderr.write(f"shade tune: not one evaluation succeeded; look into {folder}\n")
        return 1
    profile = study.profile(done)
    profile.save(folder / PROFILE)
    note = f"profile: {folder / PROFILE}"
    try:
        draw(profile, folder / PLOT)
        note += f", {folder / PLOT}"
    except ConfigError as error:
        note += f" (no picture: {error})"
    batch = best_batch(profile)
    sys.stdout.write(
        f"\nbest measured: {best.quality:.6g} at batch {best.batch}, density {best.density:g}\n"
        f"at batch {batch}, below density {profile.floor(batch):g} the quality falls by more than 2 %\n{note}\n"
    )
    return 0


def _range(flag: str, text: str) -> tuple[float, float]:
    low, colon, high = text.partition(":")
    try:
        return float(low), float(high if colon else low)
    except ValueError:
        raise ConfigError.of(f"{flag} as LOW:HIGH", text, "write two numbers, as 0.001:0.1") from None
