"""Writes the pages that follow from others or from the code: command line, metrics, llms.txt.

``scripts/docs refresh`` runs it. A test compares each page with what this module returns, so that none falls behind.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parent
NOTE = "<!-- Written by docs/generate.py; `scripts/docs refresh` writes it again. -->\n"
COLUMNS = "100"


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yields a parser and, depth first, those of its verbs."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from parsers(verb)


def command_line() -> str:
    """Returns the page of all commands: what ``--help`` prints."""
    from shade.cli.command import parser
    from shade.launch.resolve import parser as run_parser

    os.environ["COLUMNS"] = COLUMNS
    parts = ["# Command line\n", NOTE, "Each section is the output of the command with `--help`.\n"]
    whole = parser()
    verbs = [whole, run_parser("shade run"), *(each for each in parsers(whole) if each not in (whole,))]
    for each in verbs:
        if each.prog == "shade run" and not each.description:
            continue  # the place of the launcher's own parser
        title = "shade" if each is whole else each.prog.removeprefix("shade ")
        text = re.sub(r"[ \t]+$", "", each.format_help(), flags=re.MULTILINE)
        parts.append(f"## {title}\n\n```text\n{text}```\n")
    return "\n".join(parts)


def unit(name: str) -> str:
    """Returns the unit that a metric's name says."""
    if "seconds" in name and "per_second" not in name:
        return "seconds"
    if "bytes" in name:
        return "bytes"
    if name.endswith("per_second"):
        return "samples per second"
    if "ratio" in name or "accuracy" in name or "density" in name or "per_sample" in name:
        return "fraction"
    return "–" if "loss" in name or "rate" in name else "count"


def series(name: str) -> str:
    """Returns a metric's name for Prometheus, with its labels."""
    from shade.train.exposition import GAUGES

    end = "" if name in GAUGES else "_bucket" if name == "wait_seconds" else "_total"
    return f'shade_{name}{end}{{rank="0"{", le" if end == "_bucket" else ""}}}'


def table(meanings: dict[str, str], prometheus: Callable[[str], str] = series) -> str:
    """Returns a table of names, units, names for Prometheus and meanings."""
    rows = [f"| `{name}` | {unit(name)} | `{prometheus(name)}` | {meaning} |" for name, meaning in meanings.items()]
    return "\n".join(["| name | unit | Prometheus | meaning |", "|---|---|---|---|", *rows]) + "\n"


def page_of(link: str) -> tuple[str, str]:
    """Returns a page's title and its first sentence: its goal, or what follows the title."""
    text = re.sub(r"<!--.*?-->\s*", "", (DOCS / link).read_text(encoding="utf-8"), flags=re.DOTALL)
    title, _, body = text.partition("\n")
    first = next((part for part in body.strip().split("\n\n") if part[:1] not in "#|!`"), "")
    sentence = re.sub(r"\]\([^)]*\)|[\[\]*]", "", " ".join(first.split())).removeprefix("Goal: ")
    return title.removeprefix("# "), re.split(r"(?<=[.:!?])\s", sentence)[0].rstrip(":")


def llms() -> str:
    """Returns the map of the pages for language models, after llmstxt.org: the links of the first page, by section."""
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    parts = ["# shade\n", "> " + " ".join(index.split("\n\n")[1].partition(" The [README]")[0].split()) + "\n"]
    parts.append(
        "Install `torch-shade`, import `shade`. Each part works alone: `ShadeDataset` and `ShadeSampler` (or "
        "`ShadeLoader`) read slow storage less; `Checkpointer` saves while training continues; "
        "`GradientEngine` sends small gradients.\n"
    )
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        links = [link for link in re.findall(r"\]\(([\w./-]+\.md)\)", section) if not link.startswith("../")]
        if links:
            parts.append(f"## {section.splitlines()[0]}\n")
            described = ((link, *page_of(link)) for link in links)
            parts.append(
                "".join(
                    f"- [{title}]({link[:-3]}/){': ' + about if about else ''}\n" for link, title, about in described
                )
            )
    return "\n".join(parts)


def metrics() -> str:
    """Returns the page of all metrics."""
    from shade.cache.ledger import FIELDS
    from shade.checkpoint._preemption.recovery_estimate import MEANING as RECOVERY
    from shade.gradient._engine.meter import COUNTS
    from shade.train.exposition import MEANING

    cache = {name: meaning for name, meaning in FIELDS.items() if name in MEANING}
    run = {name: meaning for name, meaning in MEANING.items() if name not in {*cache, *COUNTS}}
    return "\n".join(
        [
            "# Metrics\n",
            NOTE,
            "A run of the launcher writes these numbers to `metrics.jsonl` (a row for each epoch and rank), to\n"
            "`rank0.prom` and, with `--metrics-port`, to a page for Prometheus. A Prometheus name begins with\n"
            "`shade_`; a counter ends in `_total`. [How to read them](../how-to/prometheus-and-tensorboard.md).\n",
            "## Where samples came from\n",
            "Counters. A *hit* is a sample whose bytes did not come from the origin.\n",
            table(cache),
            "## Time, epochs, snapshots\n",
            table(run),
            "## Gradient exchange\n",
            table(dict(COUNTS)),
            "## What a failure would cost now\n",
            'For each kind of failure (`end="process"`, `"machine"`, `"cluster"`), below `shade_checkpoint_`.\n',
            table(dict(RECOVERY), lambda name: f"shade_checkpoint_{name}{{end, tier}}"),
        ]
    )


PAGES: dict[str, Callable[[], str]] = {
    "reference/command-line.md": command_line,
    "reference/metrics.md": metrics,
    "llms.txt": llms,
}


def main() -> None:
    """Writes every page."""
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
