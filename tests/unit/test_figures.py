"""Every figure in README and docs stands in the results that its section links; every file of results is listed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*/*.md"))]
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)#]*)[^)]*\)")
NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?")


def numbers(text: str) -> list[str]:
    """The numbers of a text as they are written, without commas. Code, comments and addresses are left out."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "", LINK.sub(r"\1", text))
    return [found.rstrip(",").replace(",", "") for found in NUMBER.findall(text)]


def listed() -> dict[str, str]:
    """The files of results and the programs that made them, by the list."""
    text = (RESULTS / "README.md").read_text()
    return dict(re.findall(r"^\| \[[\w-]+\]\(([\w.-]+)\) \| `(\w+\.py)", text, re.MULTILINE))


def sources(page: Path, section: str) -> list[str]:
    """The linked results and the programs that made them; for the README the page of all figures."""
    texts = []
    for _, address in LINK.findall(section):
        path = (page.parent / address).resolve()
        if path.parent == RESULTS and path.name in listed():
            texts += [path.read_text(), (ROOT / "benchmarks" / listed()[path.name]).read_text()]
        elif path.name == "costs.md" and page.name == "README.md":
            texts.append(path.read_text())
    return texts


def is_rounded(figure: str, exact: str) -> bool:
    """Whether a figure is an exact number rounded to the figure's own digits."""
    digits = len(figure.partition(".")[2])
    return abs(float(figure) - float(exact)) <= 0.5 * 10.0**-digits + 1e-12


def sections() -> dict[str, tuple[str, list[str]]]:
    """The sections that link results, by page and heading, with what they are compared with."""
    found = {}
    for page in PAGES:
        for section in re.split(r"^(?=## )", page.read_text(), flags=re.MULTILINE):
            if page.parent.name != "decisions" and (texts := sources(page, section)):
                found[f"{page.relative_to(ROOT)}: {section.splitlines()[0].strip('# ')}"] = section, texts
    return found


@pytest.mark.parametrize(("section", "texts"), list(sections().values()), ids=list(sections()))
def test_figures_are_those_of_the_results(section: str, texts: list[str]) -> None:
    exact = {number for text in texts for number in numbers(text.replace("`", " "))}
    absent = [figure for figure in numbers(section) if not any(is_rounded(figure, each) for each in exact)]
    assert not absent, f"expected figures of a linked file of results, got {absent}; measure again, or mend the text"


def test_sections_with_figures_are_found() -> None:
    costs = {f"docs/explanation/costs.md: {each}" for each in ("Slow storage", "Checkpoints", "Gradients", "Policies")}
    assert {"README.md: Figures", "docs/how-to/sampling-mode.md: What was measured", *costs} <= set(sections())


@pytest.mark.parametrize(
    ("figure", "exact", "same"), [("2.8", "2.82", True), ("2.8", "2.86", False), ("3", "2.7", True)]
)
def test_a_figure_is_rounded_to_its_own_digits(figure: str, exact: str, same: bool) -> None:
    assert is_rounded(figure, exact) is same


def test_every_file_of_results_is_listed_with_a_program_that_exists() -> None:
    assert [program for program in listed().values() if not (ROOT / "benchmarks" / program).is_file()] == []
    assert {Path(name).stem for name in listed()} == {path.stem for path in RESULTS.iterdir() if path.stem != "README"}
