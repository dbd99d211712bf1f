"""Makes the long description: README.md with absolute links. All else is said in pyproject.toml.

A link of README.md leads to a file beside it, so that it holds in every clone, fork and version. The package index has
no such files: there it leads to the file of this version in the repository that ``[project.urls]`` names.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")


def found(pattern: str, file: str) -> str:
    """Returns what a pattern finds in a file of the repository."""
    match = re.search(pattern, (HERE / file).read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise ValueError(f"expected {pattern} in {file}, got none")
    return match[1]


def long_description() -> str:
    """Returns README.md with links to the files of this version: of pictures to their bytes, of others to a page."""
    repository = found(r'^Repository = "(.+)"$', "pyproject.toml")
    version = found(r'^__version__ = "(.+)"$', "shade/__init__.py")

    def absolute(match: re.Match[str]) -> str:
        kind = "raw" if match[1].endswith((".svg", ".png")) else "blob"
        return f"]({repository}/{kind}/v{version}/{match[1]})"

    return LINK.sub(absolute, (HERE / "README.md").read_text(encoding="utf-8"))


setup(long_description=long_description(), long_description_content_type="text/markdown")
