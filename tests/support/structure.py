"""Reads how the package and its unit tests are arranged: classes, private attributes, names of tests.

The guards of `tests/test_structure.py` and the figures of `scripts/measure_structure` count with the same functions.
Nothing of the package is imported, so that another clone can be read too.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

parsed = functools.cache(ast.parse)
"""The syntax tree of a text; every guard reads the whole package."""


@functools.cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Every node of a module, as `ast.walk` yields them."""
    return tuple(ast.walk(tree))


DOORS_OF_OTHERS = {
    "tensor._version": "torch.Tensor",
    "part._buffers": "torch.nn.Module",
    "self._optimizer._opt_called": "torch.optim.Optimizer",
    **dict.fromkeys(
        ("own._metadata", "made._metadata", "state._metadata", "saved._metadata", "fits._metadata", "part._metadata"),
        "the dict that torch.nn.Module.state_dict returns",
    ),
    **dict.fromkeys(("dataset._fingerprint", "value._fingerprint", "found._fingerprint"), "datasets.Dataset"),
    "file_system._url": "fsspec",
    "os._exit": "Python",
    "_ZipMember._make": "a named tuple",
}
"""Uses of a private attribute of another library whose name a class of ours has too."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules(package: Path) -> Iterator[tuple[str, Path, ast.Module]]:
    """Yields dotted name, path and syntax tree of every module."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield name, path, parsed(path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class ClassSize:
    """How much of a class a reader has to hold in mind."""

    name: str
    """Dotted, with the module."""
    num_lines: int
    """From `class` to the end, with its docstring, without decorators."""
    num_attributes: int
    """What `attributes` finds."""


@functools.cache
def class_sizes(package: Path) -> list[ClassSize]:
    """Returns the size of every class, nested ones too."""
    return [
        ClassSize(f"{name}.{node.name}", (node.end_lineno or 0) - node.lineno + 1, len(attributes(node)))
        for name, _, tree in modules(package)
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef)
    ]


@functools.cache
def attributes(node: ast.ClassDef) -> frozenset[str]:
    """Returns what an object of a class keeps, as far as the class itself says.

    These are the names that a method assigns on its first argument, whatever the statement, and the fields that the
    body annotates, as a dataclass has them. Inherited ones, methods, properties, constants of the class and `ClassVar`
    do not count, and a class within counts for itself.
    """
    found = set()
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if "ClassVar" not in ast.unparse(statement.annotation):
                found.add(statement.target.id)
        elif isinstance(statement, Function) and statement.args.args:
            found |= _assigned_on(statement.args.args[0].arg, statement)
    return frozenset(found)


def _assigned_on(owner: str, node: ast.AST) -> set[str]:
    """Returns the attributes of a name that are assigned below a node, classes within left out."""
    found = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            continue
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store) and _is_name(child.value, owner):
            found.add(child.attr)
        elif isinstance(child, ast.Call) and len(child.args) == 3 and ast.unparse(child.func).endswith("__setattr__"):
            target, name, _ = child.args
            if _is_name(target, owner) and isinstance(name, ast.Constant):
                found.add(str(name.value))
        found |= _assigned_on(owner, child)
    return found


def _is_name(node: ast.AST, *names: str) -> bool:
    """Whether a node is one of some names."""
    return isinstance(node, ast.Name) and node.id in names


def private_doors(package: Path) -> list[tuple[str, str]]:
    """Returns each use of a private attribute of another module's class: its place, and `x._name` as it is written.

    Taken are `x._name` and `getattr(x, "_name")` if a class of the package has a `_name`, x is neither `self` nor `cls`
    nor `super()`, and x is likely of another module: no class of this module has a `_name`, or x is an argument whose
    annotation names no class of this module. A protocol, which only describes another's class, does not count as a
    class of its module. `DOORS_OF_OTHERS` lists what belongs to another library.
    """
    everywhere = set().union(*(_private_names(tree, protocols=True) for _, _, tree in modules(package)))
    found = []
    for name, _, tree in modules(package):
        own = _private_names(tree, protocols=False)
        foreign = _foreign_arguments(tree)
        for node in nodes(tree):
            if door := _door(node):
                owner, attribute = door
                used = f"{ast.unparse(owner)}.{attribute}"
                is_own = _is_name(owner, "self", "cls") or ast.unparse(owner).startswith("super(")
                may_be_own = attribute in own and (getattr(owner, "id", ""), id(node)) not in foreign
                if attribute in everywhere and not (is_own or may_be_own) and used not in DOORS_OF_OTHERS:
                    found.append((f"{name}:{node.lineno}", used))
    return found


def _foreign_arguments(tree: ast.Module) -> set[tuple[str, int]]:
    """Returns the arguments whose annotation names no class of the module, with each node of their function."""
    classes = {node.name for node in nodes(tree) if isinstance(node, ast.ClassDef)}
    found = set()
    for function in nodes(tree):
        if isinstance(function, Function):
            names = []
            for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
                words = set(re.findall(r"\w+", ast.unparse(argument.annotation) if argument.annotation else "Any"))
                if not classes & words and words.isdisjoint({"Any", "Self"}):
                    names.append(argument.arg)
            if names:
                found |= {(name, id(node)) for node in ast.walk(function) for name in names}
    return found


def _door(node: ast.AST) -> tuple[ast.expr, str] | None:
    """Returns object and name of a use of an attribute, if it is private."""
    door = None
    if isinstance(node, ast.Attribute):
        door = node.value, node.attr
    elif isinstance(node, ast.Call) and _is_name(node.func, "getattr", "setattr", "hasattr") and len(node.args) > 1:
        door = node.args[0], str(getattr(node.args[1], "value", ""))
    return door if door and _is_private(door[1]) else None


def _is_private(name: str) -> bool:
    """Whether a name has one underscore in front."""
    return name.startswith("_") and not name.startswith("__")


def _private_names(tree: ast.Module, *, protocols: bool) -> set[str]:
    """Returns the private methods and attributes of a module's classes, of its protocols too if wanted."""
    found: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.ClassDef) and (protocols or "Protocol" not in map(ast.unparse, node.bases)):
            found |= attributes(node)
            found |= {part.name for part in node.body if isinstance(part, Function)}
            targets = (target for part in node.body if isinstance(part, ast.Assign) for target in part.targets)
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return set(filter(_is_private, found))


def docstrings(package: Path) -> Iterator[tuple[str, int, int]]:
    """Yields place, lines in the file and lines of text of every docstring, those of attributes included."""
    for name, _, tree in modules(package):
        for node in nodes(tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                num_text_lines = len(inspect.cleandoc(node.value.value).splitlines())
                yield f"{name}:{node.lineno}", (node.end_lineno or 0) - node.lineno + 1, num_text_lines


def makers_of_groups(package: Path) -> list[str]:
    """Returns the modules that call `new_group` of torch.distributed."""
    return [
        name
        for name, _, tree in modules(package)
        if any(isinstance(node, ast.Attribute) and node.attr == "new_group" for node in nodes(tree))
    ]


def unit_tests_of_nothing(root: Path) -> list[str]:
    """Returns the unit tests that bear no module's name, as paths below `tests/unit`.

    `tests/unit/<package>/test_x.py` bears the name of a module or a folder of `shade/<package>` if x is that name,
    underscores in front left out, or begins with it and a `_`. In `tests/unit` itself any module of the package will
    do, and a script or a module of `tests/support` that the test is about.
    """
    unit = root / "tests" / "unit"
    found = []
    for path in sorted(unit.rglob("test_*.py")):
        folder = path.relative_to(unit).parts[0]
        names = _names_below(root / "shade" / folder if path.parent != unit else root / "shade")
        if path.parent == unit:
            names |= {other.stem for place in ("scripts", "tests/support") for other in (root / place).glob("*")}
        stem = path.stem.removeprefix("test_")
        if not any(stem == name or stem.startswith(f"{name}_") for name in names):
            found.append(str(path.relative_to(unit)))
    return found


@functools.cache
def _names_below(folder: Path) -> frozenset[str]:
    """Returns the names of a package, of the folders in it and of their modules."""
    files = [path.stem for path in folder.rglob("*.py") if path.stem != "__init__"]
    folders = [folder.name, *(path.name for path in folder.rglob("*") if path.is_dir())]
    return frozenset(name.strip("_") for name in files + folders) - {"pycache"}
