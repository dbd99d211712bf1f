"""Shows a default's value in the reference where the code names a constant: ``working_set_fraction: float = 0.2``."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class Defaults(griffe.Extension):
    """Replaces each parameter's default that names a constant by the constant's value."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Visits every function of a package, once all of it is loaded."""
        waiting: list[Any] = [pkg]
        while waiting:
            each = waiting.pop()
            waiting += [member for member in each.members.values() if not member.is_alias]
            if each.is_function:
                for parameter in each.parameters:
                    if isinstance(parameter.default, griffe.ExprName):
                        parameter.default = constant(pkg, parameter.default) or parameter.default


def constant(package: griffe.Module, name: griffe.ExprName) -> str | None:
    """Returns the text of a constant's value; None if it is no number or text."""
    try:
        value = str(package[name.canonical_path.removeprefix(f"{package.path}.")].value)
        ast.literal_eval(value)
    except (KeyError, AttributeError, ValueError, SyntaxError, griffe.GriffeError):
        return None
    return value
