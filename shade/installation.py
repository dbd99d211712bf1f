"""Knows the distribution that installs this package, and finds another one that installs a package of the same name.

The distribution is ``torch-shade``, the package `shade`: on PyPI, ``shade`` is OpenStack's client library, and installs
a package `shade` too. In one environment each overwrites files of the other, and uninstalling either removes them.
Python imports what it finds. So every message that names an extra takes the name from here, and the first import and
``shade doctor`` say so if another distribution is there.
"""

from __future__ import annotations

import warnings
from importlib import metadata
from typing import Final

DISTRIBUTION: Final = "torch-shade"
"""Name under which pip installs the package."""


def install_hint(extra: str) -> str:
    """Returns the command that installs an extra, such as ``pip install 'torch-shade[jpeg]'``."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def name_clash() -> str | None:
    """Returns what is wrong and the cure if another distribution installs a package `shade` here, else None.

    Only an installed wheel lists such files. An editable install of a clone under the old name does not.
    """
    for other in metadata.distributions(name="shade"):
        if "\nshade/" in "\n" + (other.read_text("RECORD") or ""):
            return (
                f"expected {DISTRIBUTION} alone to install a package shade, got one of the distribution "
                f"shade {other.version} too ({other.metadata['Summary']}): each overwrites files of the other; "
                f"pip uninstall -y shade, then pip install --force-reinstall --no-deps {DISTRIBUTION}"
            )
    return None


def warn_of_name_clash() -> None:
    """Warns of a `name_clash`."""
    clash = name_clash()
    if clash is not None:
        warnings.warn(clash, stacklevel=3)
