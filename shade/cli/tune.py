"""``shade tune`` finds the global batch and the density that train best, before the long run.

Each evaluation is a short run of the user's own command. The result is a profile, which the controller reads, and a
picture of it: the expected quality, the points that were measured, and a cut at the best batch. Optuna's own plots
show neither the fit nor the density below which the quality falls (decision 0019).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shade.errors import ConfigError
from shade.installation import install_hint

if TYPE_CHECKING:
    from shade.control.profile import Profile
    from shade.control.study import Evaluation, Study

JOURNAL, PROFILE, PLOT = "evaluations.jsonl", "profile.json", "profile.png"
_HOPELESS: Final = 3
"""Failures without a success after which the search ends: the command is wrong, not the points."""
_INK: Final = "#22303c"
_EXAMPLES: Final = """\
examples:
  shade tune --command "python train.py --batch-size {batch} --density {density} --epochs 2" --metric accuracy
  shade tune --command "python train.py -b {batch} -d {density}" --metric-regex "val loss ([0-9.]+)" --loss
  shade tune --command "sh train.sh {batch} {density}" --metric accuracy --batch 64:1024 --density 0.001:0.1 --out tune

The command trains for a fraction of the whole run (a tenth is plenty) and prints how well that went:
  --metric NAME       a line of JSON on its output, as {"accuracy": 0.71}; the last one counts
  --metric-regex RE   or the one group of a regular expression; the last match counts

A search that was killed resumes when the same command is typed again. It ends early if the first three runs fail.
The folder --out holds:
  evaluations.jsonl   one line for each evaluation, written when it ends
  batch-…-….log       the output of one evaluation
  profile.json        quality over batch and density, for the controller
  profile.png         the same as a picture

exit code: 0; 1 when no evaluation succeeded; 2 when the arguments are wrong
"""


def add(verbs: Any) -> None:
    """Adds the verb ``tune`` to the command's parser."""
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
    from shade.control.study import CommandObjective, Space, Study, run
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
            if len(done) >= _HOPELESS and best is None:
                # A new start tries the mended command at these points again.
                (given.out / JOURNAL).unlink()
                break
    return _report(study, done, given.out)


def _report(study: Study, done: list[Evaluation], folder: Path) -> int:
    from shade.cli.tables import table

    rows = [("number", "batch", "density", "quality", "seconds", "")]
    for each in done:
        quality = "failed" if each.quality is None else f"{each.quality:.6g}"
        failure = " ".join((each.failure or "").split())[:80]
        rows.append((f"{each.number}", f"{each.batch}", f"{each.density:g}", quality, f"{each.seconds:.1f}", failure))
    sys.stdout.write(table(rows, ">>>>><"))
    best = study.best(done)
    if best is None:
        why = " ".join((done[-1].failure or "").split())
        cure = f"correct the command (or lower --batch) and start again; its output is in {folder}"
        sys.stderr.write(f"shade tune: none of {len(done)} evaluations succeeded: {why}; {cure}\n")
        return 1
    profile = study.profile(done)
    profile.save(folder / PROFILE)
    note = f"profile: {folder / PROFILE}"
    try:
        draw(profile, folder / PLOT)
        note += f", {folder / PLOT}"
    except ConfigError as error:
        note += f" (no picture: {error})"
    batch = profile.best_batch()
    sys.stdout.write(
        f"\nbest measured: {best.quality:.6g} at batch {best.batch}, density {best.density:g}\n"
        f"at batch {batch}, below density {profile.floor(batch):g} the quality falls by more than 2 %\n{note}\n"
    )
    return 0


def draw(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Writes a picture of a profile on a canvas without display; the suffix says the format.

    Raises `ConfigError` if matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"matplotlib is not installed; {install_hint('tune')} brings it") from None
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    both, cut = figure.subplots(1, 2)
    _draw_surface(figure, both, profile)
    _draw_cut(cut, profile)
    try:
        figure.savefig(path, dpi=110, metadata={"Software": None})
    except (OSError, ValueError) as error:
        raise ConfigError.of("a picture that can be written", f"{os.fspath(path)}: {error}", "name a .png") from None


def _draw_surface(figure: Any, axes: Any, profile: Profile) -> None:
    good = [each for each in profile.evaluations if each.get("quality") is not None]
    failed = [each for each in profile.evaluations if each.get("quality") is None]
    if len(profile.batches) > 1 and len(profile.densities) > 1:
        columns = list(zip(*profile.quality, strict=True))
        colours = "viridis_r" if profile.is_loss else "viridis"
        filled = axes.contourf(profile.batches, profile.densities, columns, levels=20, cmap=colours)
        figure.colorbar(filled, ax=axes, label="expected loss" if profile.is_loss else "expected quality")
    for those, marker, label in ((good, "o", "measured"), (failed, "x", "failed")):
        if those:
            x, y = [each["batch"] for each in those], [each["density"] for each in those]
            axes.scatter(x, y, marker=marker, s=22, color="white" if marker == "o" else "#c8553d",
                         edgecolors=_INK if marker == "o" else None, label=label)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="global batch", ylabel="density", title="Quality")
    if profile.evaluations:
        axes.legend(fontsize="small", loc="lower right")


def _draw_cut(axes: Any, profile: Profile) -> None:
    from shade.control.profile import ALLOWED_SHORTFALL_FRACTION

    batch = profile.best_batch()
    expected = [profile.expected(batch, density) for density in profile.densities]
    axes.plot(profile.densities, expected, color="#2f6fb0", label=f"expected at batch {batch}")
    floor = profile.floor(batch)
    axes.axvline(floor, color="#e08a2e", ls="--", label=f"{ALLOWED_SHORTFALL_FRACTION:.0%} worse below {floor:.3g}")
    axes.set(xscale="log", xlabel="density", title="What density costs")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _range(flag: str, text: str) -> tuple[float, float]:
    low, colon, high = text.partition(":")
    try:
        return float(low), float(high if colon else low)
    except ValueError:
        raise ConfigError.of(f"{flag} as LOW:HIGH", text, "write two numbers, as 0.001:0.1") from None
