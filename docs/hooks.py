"""Shows the version, and lets pages link to files of the repository outside docs/, as they would on a code host.

``../../benchmarks/results/loaders.md`` in a page becomes ``../repository/benchmarks/results/loaders.md``; the file
is added to the site below ``repository/``. mkdocs then checks the link as any other, and the strict build fails if
the file does not exist.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = "repository/"
LINK = re.compile(r"(\]\(|src=\")([^)\s#\":]+)(?=[)#\"])")


def place(src_uri: str) -> str:
    """Returns where a page of the site lies in the repository."""
    return src_uri.removeprefix(OUTSIDE) if src_uri.startswith(OUTSIDE) else f"docs/{src_uri}"


def outside(text: str, src_uri: str) -> dict[str, str]:
    """Returns, by link, the path in the repository of each linked file that lies outside docs/."""
    found = {}
    for _, link in LINK.findall(text):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place(src_uri)), link))
        if not path.startswith(("docs/", "..")) and (ROOT / path).is_file():
            found[link] = path
    return found


def on_config(config: Any) -> Any:
    """Shows the version below each page."""
    match = re.search(
        r'^__version__ = "(.+)"$', (ROOT / "shade" / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    config.copyright = f"torch-shade {match[1] if match else ''}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the files that pages link to, and those that these link to."""
    waiting = [file for file in files if file.is_documentation_page()]
    while waiting:
        file = waiting.pop()
        if file.inclusion.is_excluded():
            continue
        for path in outside(Path(file.abs_src_path or "").read_text(encoding="utf-8"), file.src_uri).values():
            if files.get_file_from_path(OUTSIDE + path) is None:
                added = File.generated(
                    config, OUTSIDE + path, abs_src_path=str(ROOT / path), inclusion=InclusionLevel.NOT_IN_NAV
                )
                files.append(added)
                if added.is_documentation_page():
                    waiting.append(added)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns each link that leaves docs/ into one to the added file, and each back into docs/ into one to the page."""
    here = posixpath.dirname(page.file.src_uri)
    if page.file.src_uri.startswith(("decisions/", OUTSIDE)):
        page.meta.setdefault("search", {"boost": 0.3})  # a search finds how-to pages and the reference first
    targets = {link: OUTSIDE + path for link, path in outside(markdown, page.file.src_uri).items()}
    if page.file.src_uri.startswith(OUTSIDE):
        for _, link in LINK.findall(markdown):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(place(page.file.src_uri)), link))
            if path.startswith("docs/"):
                targets[link] = path.removeprefix("docs/")

    def replaced(match: re.Match[str]) -> str:
        target = targets.get(match[2])
        return match[1] + (posixpath.relpath(target, here or ".") if target else match[2])

    return LINK.sub(replaced, markdown)
