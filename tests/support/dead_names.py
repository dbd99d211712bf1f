"""Finds names and paths that the documentation sets in backticks and that exist nowhere.

Read are the pages below `docs/`, README, ARCHITECTURE and CONTRIBUTING without their blocks of code, and the
docstrings of `shade/`. What stands in backticks is looked up by its form; other forms are left alone:

a path           begins with a folder of the clone, of `shade/` or of `tests/`, or with a private folder of a plane, as
                 ARCHITECTURE writes them: `tests/support/pages.py`, `policy/plan`, `_comm/message`. `.py` may be left
                 out, `<x>` stands for anything, `file::name` also wants the name in the file.
`pages.py`       a file of this name is somewhere in the clone, or in a block of code of a page.
`shade.a.b`      a module, then a name that the module defines, imports or lists, then a member of that class.
`Class.member`   a class of `shade/`: it, or a base, has the member. A base of another library may have any.
`module.name`    the first part is a module or a folder of `shade/`: the others are names as below.
a name           of CamelCase, of two words or more in snake_case or CAPITALS: an identifier or a word of a string in
                 the code of the clone or in a block of code of a page, or a built-in, or a file. Comments and
                 docstrings do not count. A counter `shade_x_total` is x.

A name of another library, or one that a page makes up, is listed in `OTHERS`. Nothing is imported, so that another
clone can be read too.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.structure import nodes, parsed

PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/**/*.md")
CODE = ("shade", "tests", "benchmarks", "examples", "docs", "scripts")
LISTS = ("dead_names.py", "test_structure.py", "test_measure_structure.py")
FENCED = re.compile(r"^( *)(```|~~~).*?^\1\2", re.DOTALL | re.MULTILINE)
TICKED = re.compile(r"(?<!`)(`{1,2})([^`\n]+)\1(?!`)")
PATH = re.compile(r"(?:[\w.<>*-]+/)+[\w.<>*-]*(?:::\w+)?")
FILE = re.compile(r"[\w-]+\.py")
DOTTED = re.compile(r"(\w+(?:\.\w+)+)(?:\(.*\))?")
NAME = re.compile(r"(_?[A-Z]\w*[a-z]\w*[A-Z]\w*|_?[a-z][a-z0-9]*(?:_[a-z0-9]+)+|_?[A-Z]+(?:_[A-Z0-9]+)+)(?:\(.*\))?")
COUNTER = re.compile(r"shade_(\w+?)(?:_total)?")
OTHERS: dict[str, str] = {
    "shade/policy/random.py": "the example of CONTRIBUTING",
    "tests/unit/policy/test_random.py": "the example of CONTRIBUTING",
    "utils.py": "the file that must not be",
    "PR_SET_PDEATHSIG": "Linux",
    "FOPEN_DIRECT_IO": "Linux",
    "FUSE_DIRECT_IO_ALLOW_MMAP": "Linux",
    "LD_PRELOAD": "Linux",
    "MADV_COLLAPSE": "Linux",
    "MADV_POPULATE_WRITE": "Linux",
    "SCHED_IDLE": "Linux",
    "sync_file_range": "Linux",
    "io_uring": "Linux",
    "process_vm_readv": "Linux",
    "passthrough_ll": "libfuse",
    "AWS_PROFILE": "AWS",
    "snapshot_every_n_steps": "torchdata",
    "CheckpointIO": "Lightning",
    "load_from_checkpoint": "Lightning",
    "register_save_state_pre_hook": "Accelerate",
    "CheckpointConfig": "Ray Train",
    "FSSPEC_S3_ENDPOINT_URL": "fsspec",
    "used_memory_dataset": "Redis",
    "ExperimentalWarning": "optuna",
    "JournalStorage": "optuna",
    "JSONDecodeError": "Python",
    "inspect.getsource": "Python",
    "zero_to_fp32.py": "DeepSpeed",
    "is_decoupled": "DeepSpeed",
    "start_http_server": "prometheus_client",
    "build_py": "setuptools",
    "PersistentDataset": "MONAI",
    "BaseNode": "torchdata",
    "set_transform": "datasets",
    "TrainJob": "Kubeflow",
    "TrainingRuntime": "Kubeflow",
    "Snapshot.async_take(path, app_state)": "torchsnapshot",
    "global_step120": "an example of DeepSpeed's tags",
    "score_00000": "an array of a trace",
    "shade/shards": "a folder of the user's cache",
    "stall_cache_seconds": "made of a cause's name",
    "stall_decode_seconds": "made of a cause's name",
    "stall_transform_seconds": "made of a cause's name",
}
"""Whose a name is that stands nowhere in the code of the clone."""


def documented(root: Path) -> Iterator[tuple[str, int, str]]:
    """Yields file, line and text of every page without its blocks of code, and of every docstring of the package."""
    for path in pages(root):
        prose = FENCED.sub(lambda block: "\n" * block[0].count("\n"), path.read_text(encoding="utf-8"))
        yield str(path.relative_to(root)), 1, prose
    for path in sorted((root / "shade").rglob("*.py")):
        for node in nodes(parsed(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield str(path.relative_to(root)), node.lineno, node.value.value


def pages(root: Path) -> list[Path]:
    """Returns the pages of a clone."""
    return sorted({path for pattern in PAGES for path in root.glob(pattern)})


def ticked(root: Path) -> Iterator[tuple[str, str]]:
    """Yields `file:line` and what stands in backticks."""
    for file, line, text in documented(root):
        for found in TICKED.finditer(text):
            yield f"{file}:{line + text.count(chr(10), 0, found.start())}", found[2]


class Clone:
    """What a clone has names for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folders = {name for name in (*CODE, "deploy") if (root / name).is_dir()}
        """Those that a path may begin with."""
        self.files = {path.name for name in self.folders for path in (root / name).rglob("*.py")}
        self.files |= {path.name for path in root.glob("*.py")}
        """Names of the Python files."""
        self.modules: dict[str, ast.Module] = {}
        """Syntax trees of the package by dotted name."""
        self.classes: dict[str, ast.ClassDef] = {}
        """Classes of the package by name."""
        self.words = set(dir(builtins))
        """Identifiers of the package and words of its strings."""
        for path in sorted((root / "shade").rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            tree = parsed(path.read_text(encoding="utf-8"))
            self.modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = tree
            self.classes |= {node.name: node for node in nodes(tree) if isinstance(node, ast.ClassDef)}
            self.words |= _words(tree)
        self.parts = {part for module in self.modules for part in module.split(".")} - {"shade"}
        """Names of modules and folders of the package."""
        texts = [path.read_text(encoding="utf-8") for path in pages(root)]
        self.examples = "\n".join(found[0] for text in texts for found in FENCED.finditer(text))
        """The blocks of code of all pages."""
        self.example_words = set(re.findall(r"\w+", self.examples))

    def lacks(self, name: str) -> str:
        """Returns why the name in backticks is dead, or nothing if it lives or has a form that is left alone."""
        if PATH.fullmatch(name):
            return self._lacks_path(name)
        if FILE.fullmatch(name):
            return "" if name in self.files or name in self.examples else "no such file"
        if found := DOTTED.fullmatch(name):
            return self._lacks_dotted(found[1].split("."))
        if (found := NAME.fullmatch(name)) and not self._knows(found[1]):
            return "no such name"
        return ""

    def _lacks_path(self, name: str) -> str:
        """Returns why a path is dead."""
        path, _, inside = name.partition("::")
        first = path.split("/")[0]
        if first in self.folders:
            places = [self.root]
        else:
            places = [place for place in (self.root / "shade", self.root / "tests") if (place / first).is_dir()]
            if first.startswith("_"):
                places += [found.parent for found in (self.root / "shade").rglob(first) if found.is_dir()]
        pattern = re.sub(r"<\w+>", "*", path.rstrip("/"))
        matches = [found for place in places for end in ("", ".py") for found in place.glob(pattern + end)]
        if places and not matches:
            return "no such path"
        if inside and matches and inside not in matches[0].read_text(encoding="utf-8"):
            return f"{path} has no {inside}"
        return ""

    def _lacks_dotted(self, parts: list[str]) -> str:
        """Returns why a dotted name is dead."""
        first, second = parts[:2]
        if first == "shade":
            return "" if self._resolves(parts) else "no such name in the package"
        if first in self.classes:
            return "" if self._has(first, second) else f"{first} has no {second}"
        if first in self.parts or first.startswith("_"):
            dead = [part for part in parts if part not in self.parts and not self._knows(part)]
            return f"no such name: {dead[0]}" if dead else ""
        if NAME.fullmatch(first) and not self._knows(first):
            return f"no such class: {first}"
        return ""

    def _resolves(self, parts: list[str]) -> bool:
        """Whether a dotted name is a module, a name of one, or a member of such a class."""
        for end in range(len(parts), 0, -1):
            module, rest = ".".join(parts[:end]), parts[end:]
            if module in self.modules:
                if not rest:
                    return True
                if rest[0] not in _names(self.modules[module]):
                    return False
                return len(rest) == 1 or rest[0] not in self.classes or self._has(rest[0], rest[1])
        return False

    def _has(self, name: str, member: str) -> bool:
        """Whether a class of the package, or a base, has a member; a base of another library may have any."""
        node = self.classes[name]
        if member in _names(node):
            return True
        bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
        return any(
            self._has(base, member) if base in self.classes else base not in ("Protocol", "ABC", "Generic", "object")
            for base in bases
            if base != name
        )

    def _knows(self, name: str) -> bool:
        """Whether a name stands in the code of the clone or in a block of code of a page."""
        name = found[1] if (found := COUNTER.fullmatch(name)) else name
        if name in self.words or name in self.example_words or f"{name}.py" in self.files:
            return True
        # Most names are of the package; of the other files only those that have the name are parsed.
        return any(name in text and name in _words(parsed(text)) for text in self._other_programs)

    @functools.cached_property
    def _other_programs(self) -> list[str]:
        """The Python files outside the package, as text, without those that list dead names."""
        folders = [self.root / name for name in CODE if name != "shade"]
        paths = [path for folder in folders for path in sorted(folder.rglob("*.py")) if path.name not in LISTS]
        texts = [path.read_text(encoding="utf-8") for path in paths]
        scripts = [path for path in sorted((self.root / "scripts").glob("*")) if path.is_file()]
        return texts + [text for path in scripts if "python" in (text := path.read_text(encoding="utf-8"))[:40]]


@functools.cache
def _words(tree: ast.Module) -> set[str]:
    """Returns the identifiers of a module and the words of its strings, without its docstrings."""
    found: set[str] = set()
    documentation: set[int] = set()
    for node in nodes(tree):  # a statement comes before the string in it
        if isinstance(node, ast.Expr):
            documentation.add(id(node.value))
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and id(node) not in documentation:
                found.update(re.findall(r"\w+", node.value))
        elif isinstance(node, ast.ImportFrom):
            found.update((node.module or "").split("."))
        elif isinstance(node, ast.alias):
            found.update(node.name.split("."))
        else:
            found.update(
                name for key in ("id", "attr", "name", "arg") if isinstance(name := getattr(node, key, 0), str)
            )
    return found


def _names(tree: ast.Module | ast.ClassDef) -> set[str]:
    """Returns what a module or a class binds at any depth, and its strings: a package lists what it loads late."""
    found = set()
    for node in nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
    return found


def missing_names(root: Path) -> list[tuple[str, str, str]]:
    """Returns place, name and reason of what stands in backticks and not in this clone, names of others included."""
    clone = Clone(root)
    return [(place, name, why) for place, name in ticked(root) if (why := clone.lacks(name))]


def dead_names(root: Path) -> list[str]:
    """Returns what stands in backticks and exists nowhere, with its place."""
    missing = ((place, name, why) for place, name, why in missing_names(root) if name not in OTHERS)
    return [f"{place} `{name}`: {why}" for place, name, why in missing]
