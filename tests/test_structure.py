"""Guards the structure of the package: what import-linter and ruff cannot see, and that they see what they should.

Each guard is a function from a package folder to complaints. It runs on the package, where it must find nothing, and on
a small package with one planted fault, where it must find exactly that: a guard that cannot fail guards nothing.
"""

from __future__ import annotations

import ast
import graphlib
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.dead_names import OTHERS, dead_names, missing_names
from tests.support.structure import class_sizes, modules, nodes, private_doors, unit_tests_of_nothing

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "shade"
LEAST_DOCSTRING = 30
MOST_CLASS_LINES = 350
MOST_ATTRIBUTES = 20
MOST_MODULES = 12
REGISTRIES = ("policy", "_strategies", "_codecs")
LARGE_CLASSES = {
    "shade.cache.sharing.Sharing": "one lock: what its thread learns of other jobs, and what training decides by it",
    "shade.checkpoint._session.checkpointer.Checkpointer": "the face of snapshots: one method a promise of the docs",
    "shade.config.RunConfig": "one field for each flag of the launcher",
    "shade.gradient._comm.step.GradientStep": "what each stage of the pipeline leaves for the next, field by field",
    "shade.gradient._engine.engine.GradientEngine": "the face of the exchange: one method a promise of the docs",
    "shade.train.record.RunRecord": "the files that a run writes, and what it measured since the last row",
}
"""Classes that may be larger than others, and why."""
STARTERS = {
    *("Thread", "Timer", "Process", "Pool", "Popen", "ThreadPoolExecutor", "ProcessPoolExecutor", "fork", "spawn"),
    *("start_processes", "start_detached", "start_new_thread", "keep_fsspec_from_forks"),
}
"""Calls that start a thread or a process, of ours or of fsspec."""
OPEN_DOORS: set[tuple[str, str]] = set()
"""Uses of private attributes that are still there."""
TESTS_OF_NO_MODULE = {
    "test_figures.py": "the figures of README and docs",
}
"""Unit tests that bear no module's name, and what they are about."""


def imports(tree: ast.Module, known: set[str]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import; ``from a import b`` is ``a.b`` where that is a module, else ``a``."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base


def package_imports(package: Path) -> list[str]:
    """Imports from `shade` itself or from one's own package instead of a module, and relative imports."""
    known = {name for name, _, _ in modules(package)}
    complaints = []
    for name, path, tree in modules(package):
        doors = {package.name}
        if path.name != "__init__.py":
            doors.add(name.rpartition(".")[0])
        for node in nodes(tree):
            through: set[str] = set()
            if isinstance(node, ast.ImportFrom) and node.level:
                complaints.append(f"{name}:{node.lineno} imports relatively; write the full path")
            elif isinstance(node, ast.ImportFrom):
                if any(f"{node.module}.{alias.name}" not in known | {"shade.__version__"} for alias in node.names):
                    through = {node.module or ""}
            elif isinstance(node, ast.Import):
                through = {alias.name for alias in node.names}
            complaints += [
                f"{name}:{node.lineno} imports from the package {door}; import from the module that defines it"
                for door in sorted(through & doors)
            ]
    return complaints


def docstrings(package: Path) -> list[str]:
    """Modules that do not say what they are."""
    return [
        f"{name} has no docstring; say what it does, why this way, and the price"
        for name, _, tree in modules(package)
        if len(ast.get_docstring(tree) or "") < LEAST_DOCSTRING
    ]


def registries(package: Path) -> list[str]:
    """Files that register a class and that their folder's ``__init__`` does not import."""
    trees = {name: (path, tree) for name, path, tree in modules(package)}
    complaints = []
    for name, (path, tree) in trees.items():
        registering = any(
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "register"
            and isinstance(call.func.value, ast.Name)
            and call.func.value.id.isupper()  # a registry; not atexit
            for call in nodes(tree)
        )
        folder, _, file = name.rpartition(".")
        if registering and path.name != "__init__.py" and folder in trees:
            door = trees[folder][1]
            if name not in {imported for _, imported in imports(door, set(trees))}:
                complaints.append(f"add to {folder.replace('.', '/')}/__init__.py: from {folder} import {file}")
    return complaints


def large_classes(package: Path) -> list[str]:
    """Classes that are too large to hold in mind."""
    return [
        f"{size.name} has {size.num_lines} lines and {size.num_attributes} attributes, more than {MOST_CLASS_LINES} or "
        f"{MOST_ATTRIBUTES}; give a part of it a class with a name"
        for size in class_sizes(package)
        if size.num_lines > MOST_CLASS_LINES or size.num_attributes > MOST_ATTRIBUTES
        if size.name not in LARGE_CLASSES
    ]


def reached_through(package: Path) -> list[str]:
    """Uses of a private attribute of another module's class."""
    return [
        f"{place} uses {used}, which is private to another module; give that class a public method"
        for place, used in private_doors(package)
        if (place.partition(":")[0], used) not in OPEN_DOORS
    ]


def unnamed_unit_tests(package: Path) -> list[str]:
    """Unit tests that bear the name of no module and no folder of the package that they test."""
    return [
        f"tests/unit/{name} names no module and no folder of its package; rename it after what it tests"
        for name in unit_tests_of_nothing(package.parent)
        if name not in TESTS_OF_NO_MODULE
    ]


def named_and_gone(package: Path) -> list[str]:
    """Names and paths in backticks, in pages and docstrings, that exist nowhere."""
    return dead_names(package.parent)


def forbidden_words(package: Path) -> list[str]:
    """Printing, bare excepts and things left undone."""
    complaints = []
    for name, _, tree in modules(package):
        for node in nodes(tree):
            at = f"{name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Name) and node.id == "print" and name != f"{package.name}.cli":
                complaints.append(f"{at} prints; return the text, or log it")
            elif isinstance(node, ast.ExceptHandler) and node.type is None:
                complaints.append(f"{at} has a bare except; name what it expects")
            elif isinstance(node, ast.Name) and node.id.startswith("NotImplemented"):
                complaints.append(f"{at} has NotImplemented; write it, or use an abstract method")
    return complaints


def repeated_classes(package: Path) -> list[str]:
    """Class names that stand in two modules."""
    homes = defaultdict(list)
    for name, _, tree in modules(package):
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    return [f"class {name} stands in {' and '.join(found)}" for name, found in homes.items() if len(found) > 1]


def repeated_stems(package: Path) -> list[str]:
    """Files of one name within two levels: in a package, or in two sub-packages of one package.

    A public module that only re-exports the names of a private one may have its name.
    """
    homes = defaultdict(list)
    for name, path, tree in modules(package):
        parts = name.split(".")
        defines = any(isinstance(node, ast.ClassDef | ast.FunctionDef) for node in tree.body)
        if path.name not in ("__init__.py", "base.py") and len(parts) > 2 and defines:
            homes[parts[1], parts[-1]].append(name)
    return [f"{' and '.join(found)} have one name" for found in homes.values() if len(found) > 1]


def counted_folders(package: Path) -> list[str]:
    """Modules that count their parent folders, and so break when they move."""
    return [
        f"{name}:{node.lineno} counts its parent folders; use importlib.resources"
        for name, _, tree in modules(package)
        for node in nodes(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("parent", "parents") and "__file__" in ast.unparse(node)
    ]


def full_folders(package: Path) -> list[str]:
    """Folders of more modules than a reader takes in at a glance; a registry's folder has a file for each name.

    The doors ``__init__`` and ``__main__`` hold nothing to read.
    """
    counts = Counter(path.parent for _, path, _ in modules(package) if not path.name.startswith("__"))
    return [
        f"{folder.relative_to(package.parent)} holds {n} modules, more than {MOST_MODULES}; make packages of them"
        for folder, n in counts.items()
        if n > MOST_MODULES and folder.name not in REGISTRIES
    ]


def cycles(package: Path) -> list[str]:
    """Modules that import each other, at whatever level of indentation."""
    found = list(modules(package))
    known = {name for name, _, _ in found}
    graph = {name: {to for _, to in imports(tree, known) if to in known} - {name} for name, _, tree in found}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return ["cycle: " + " → ".join(error.args[1])]
    return []


def unlisted_threads(package: Path) -> list[str]:
    """Modules that start threads or processes and are not in the table of ARCHITECTURE.md, and the other way round."""
    plan = package.parent / "ARCHITECTURE.md"
    text = plan.read_text() if plan.exists() else ""
    table = text.partition("## Threads and processes\n")[2].partition("\n## ")[0]
    listed = {name for row in table.splitlines() if row[:1] == "|" for name in re.findall(r"`([\w/]+\.py)`", row)}
    starting = {
        path.relative_to(package).as_posix()
        for _, path, tree in modules(package)
        for node in nodes(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in STARTERS
    }
    return [
        *(f"{name} starts a thread or process: add it to ARCHITECTURE.md" for name in sorted(starting - listed)),
        *(f"{name} starts nothing: take it out of ARCHITECTURE.md" for name in sorted(listed - starting)),
    ]


GUARDS = [
    *(package_imports, docstrings, registries, full_folders, forbidden_words),
    *(cycles, repeated_classes, repeated_stems, counted_folders),
    *(large_classes, reached_through, unnamed_unit_tests, named_and_gone, unlisted_threads),
]
DOC = '"""A module that says at some length what it is."""\n'
SMALL_PACKAGE = {
    "shade/__init__.py": DOC,
    "shade/registry.py": DOC,
    "shade/store/__init__.py": DOC + "from shade.store import a\n",
    "shade/store/a.py": DOC + "from shade.store.b import B\n\n@R.register('a')\nclass A: ...\n",
    "shade/store/b.py": DOC
    + "class B:\n    def __init__(self): self._secret = 1\n    def same(self, b: B): return b._secret\n",
    "shade/cache.py": DOC + "from shade.store import A\nfrom shade import registry\n",
    "tests/unit/store/test_b.py": "",
    "tests/unit/store/test_store_limits.py": "",
    "tests/unit/test_registry.py": "def test_it(): ...",
    "docs/page.md": """`shade/store/b.py`, `store/b`, `test_registry.py`, `shade.store.b.B.same`, `B._secret`, `b.B`,
`is_told`, `NotOurs(…)` and ``tests/unit/test_registry.py::test_it`` exist; `isinstance`, `a word`, `lr=0.1` pass.

```python
class NotOurs: is_told = True
```
""",
}
LARGE = """
class C:
    a: int
    def __init__(self):
        self.b, (self.c, *self.d), self.e = 1, (2, 3), 4
        self.f = self.g = self.h = 1
        for self.i in (): self.j: int = 1
        with open("x") as self.k: self.l += 1
        class Within:
            def __init__(self): self.not_of_c = 1
        object.__setattr__(self, "m", 1)
    def set(me): me.n = me.o = me.p = me.q = me.r = me.s = me.t = me.u = 1
""".removeprefix("\n")
GONE = (
    "shade/store/gone.py",
    "tests/unit/test_gone.py",
    "store/gone",
    "tests/unit/test_registry.py::test_gone",
    "gone.py",
    "shade.store.gone",
    "shade.store.b.Gone",
    "shade.store.b.B.gone",
    "B.gone()",
    "store.gone_from_b",
    "GoneClass",
    "_GoneClass.member",
    "gone_from_b(1)",
    "GONE_LIMIT",
)
PLANTED: list[tuple[Callable[[Path], list[str]], str, str, str]] = [
    (package_imports, "shade/cache.py", DOC + "from shade import SampleCache\n", "the package shade"),
    (package_imports, "shade/cache.py", DOC + "import shade\n", "the package shade"),
    (package_imports, "shade/store/b.py", DOC + "from shade.store import A\n", "the package shade.store"),
    (package_imports, "shade/store/b.py", DOC + "from . import a\n", "relatively"),
    (docstrings, "shade/store/b.py", "class B: ...\n", "shade.store.b has no docstring"),
    (registries, "shade/store/__init__.py", DOC, "add to shade/store/__init__.py: from shade.store import a"),
    (
        registries,
        "shade/store/b.py",
        DOC + "class B: ...\n\nfor _name in ('b', 'c'):\n    STORES.register(_name)(B)\n",
        "add to shade/store/__init__.py: from shade.store import b",
    ),
    (
        large_classes,
        "shade/cache.py",
        DOC + "class C:\n" + "    x = 1\n" * MOST_CLASS_LINES,
        "shade.cache.C has 351 lines",
    ),
    (large_classes, "shade/cache.py", DOC + LARGE, "shade.cache.C has 11 lines and 21 attributes"),
    (reached_through, "shade/cache.py", DOC + "def f(b): return b._secret\n", "shade.cache:2 uses b._secret"),
    (reached_through, "shade/cache.py", DOC + "def f(x): return getattr(x.b, '_secret', 0)\n", "uses x.b._secret"),
    (
        reached_through,
        "shade/cache.py",
        DOC + "class Described(Protocol):\n    def _secret(self): ...\ndef f(): return made()._secret\n",
        "shade.cache:4 uses made()._secret",
    ),
    (
        reached_through,
        "shade/cache.py",
        DOC + "class C:\n    def __init__(self, b: B): self._secret = b._secret\n",
        "shade.cache:3 uses b._secret",
    ),
    (unnamed_unit_tests, "tests/unit/store/test_limits.py", "", "tests/unit/store/test_limits.py names no module"),
    (unnamed_unit_tests, "tests/unit/store/test_cache.py", "", "tests/unit/store/test_cache.py names no module"),
    *((named_and_gone, "docs/page.md", f"Words, and `{name}`.", f"docs/page.md:1 `{name}`") for name in GONE),
    (named_and_gone, "shade/cache.py", DOC + "def f():\n    'Calls `g_of_b`.'\n", "shade/cache.py:3 `g_of_b`"),
    (forbidden_words, "shade/store/b.py", DOC + "print('hello')\n", "prints"),
    (forbidden_words, "shade/store/b.py", DOC + "try:\n    x = 1\nexcept:\n    x = 2\n", "bare except"),
    (forbidden_words, "shade/store/b.py", DOC + "def f(): raise NotImplementedError\n", "NotImplemented"),
    (repeated_classes, "shade/cache.py", DOC + "class B: ...\n", "class B stands in shade.cache and shade.store.b"),
    (repeated_stems, "shade/store/_x/b.py", DOC + "def f(): ...\n", "shade.store._x.b and shade.store.b have one name"),
    (
        counted_folders,
        "shade/store/b.py",
        DOC + "x = Path(__file__).resolve().parents[2]\n",
        "counts its parent folders",
    ),
    (unlisted_threads, "shade/cache.py", DOC + "def f(): threading.Thread(target=f)\n", "cache.py starts a thread"),
    (unlisted_threads, "shade/store/b.py", DOC + "pool = ThreadPoolExecutor(2)\n", "store/b.py starts a thread"),
    (
        unlisted_threads,
        "ARCHITECTURE.md",
        "## Threads and processes\n\n| pool | `store/b.py` |\n\n## Next\n\n| `store/a.py` |\n",
        "store/b.py starts nothing",
    ),
    (cycles, "shade/store/b.py", DOC + "def f():\n    from shade.store import a\n", "shade.store.a"),
]


def build_package(folder: Path, **changed: str) -> Path:
    """Writes the small package, with some files changed."""
    for name, content in {**SMALL_PACKAGE, **changed}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder / "shade"


@pytest.mark.parametrize("guard", GUARDS)
def test_the_package_keeps_the_rules(guard: Callable[[Path], list[str]]) -> None:
    assert guard(PACKAGE) == []


def test_a_full_folder_is_found(tmp_path: Path) -> None:
    files = {f"shade/store/m{number}.py": DOC for number in range(MOST_MODULES - 1)}
    (complaint,) = full_folders(build_package(tmp_path, **files))
    assert complaint.startswith("shade/store holds 13 modules")


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_leaves_a_sound_package_alone(guard: Callable[[Path], list[str]], tmp_path: Path) -> None:
    assert guard(build_package(tmp_path)) == []


@pytest.mark.parametrize(("guard", "file", "content", "complaint"), PLANTED)
def test_a_guard_finds_what_is_planted(
    guard: Callable[[Path], list[str]], file: str, content: str, complaint: str, tmp_path: Path
) -> None:
    complaints = guard(build_package(tmp_path, **{file: content}))
    assert len(complaints) == 1
    assert complaint in complaints[0]


def test_every_exception_is_needed() -> None:
    sizes = class_sizes(PACKAGE)
    large = {size.name for size in sizes if size.num_lines > MOST_CLASS_LINES or size.num_attributes > MOST_ATTRIBUTES}
    assert set(LARGE_CLASSES) <= large, "small enough now: take it out of LARGE_CLASSES"
    doors = {(place.partition(":")[0], used) for place, used in private_doors(PACKAGE)}
    assert doors >= OPEN_DOORS, "closed now: take it out of OPEN_DOORS"
    missing = {name for _, name, _ in missing_names(ROOT)}
    assert set(OTHERS) <= missing, "in no page and no docstring, or in the code: take it out of OTHERS"
    assert set(TESTS_OF_NO_MODULE) <= set(unit_tests_of_nothing(ROOT)), "fits now: take it out of TESTS_OF_NO_MODULE"


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs import-linter in a folder that holds pyproject.toml and the package."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    return subprocess.run(
        [*command, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package and its contracts in a folder of their own."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(PACKAGE, tmp_path / "shade", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.multiprocess
def test_the_contracts_hold(copy: Path) -> None:
    result = lint_imports(copy)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.multiprocess
def test_the_contracts_catch_planted_violations(copy: Path) -> None:
    planted = {
        "shade/policy/base.py": "import torch",
        "shade/cache/residency_map.py": "import redis",
        "shade/store/base.py": "import shade.cache.residency_map",
    }
    for file, line in planted.items():
        with (copy / file).open("a") as end:
            end.write(f"\n{line}\n")
    result = lint_imports(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    assert re.search(r"Layers: imports go down only BROKEN", result.stdout)
    assert re.search(r"Decisions are arithmetic.* BROKEN", result.stdout)
    assert re.search(r"Only the store speaks Redis.* BROKEN", result.stdout)


@pytest.mark.multiprocess
def test_a_new_module_must_be_given_a_layer(copy: Path) -> None:
    (copy / "shade" / "attic.py").write_text(DOC)
    result = lint_imports(copy)
    assert result.returncode == 1
    assert "shade.attic" in result.stdout + result.stderr


@pytest.mark.multiprocess
def test_importing_shade_loads_neither_torch_nor_redis() -> None:
    program = "import sys, shade; print(sorted({'torch', 'redis', 'numpy'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"


def test_every_public_name_exists() -> None:
    import shade

    missing = [name for name in shade.__all__ if not hasattr(shade, name)]
    assert missing == []
    with pytest.raises(AttributeError, match="no attribute 'ShadeSamplr'"):
        _ = shade.ShadeSamplr


def tracked_files() -> list[Path]:
    """What git would publish, or skips where this is no clone."""
    result = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=60, check=False)
    if result.returncode:
        pytest.skip("not a git clone")
    return [ROOT / name for name in result.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.multiprocess
def test_no_tracked_file_names_a_path_of_one_machine() -> None:
    # Written in pieces, so that this file does not find itself.
    homes = "|".join(
        ["/" + "work/", "/" + "root/", "/" + r"home/(?!cc/|user/|you/)\w", "/" + "Users/", "/" + "tmp/venv"]
    )
    machine_path = re.compile(rf"(?<![\w.$}}~*-])(?:{homes})".encode())
    found = [str(path.relative_to(ROOT)) for path in tracked_files() if machine_path.search(path.read_bytes())]
    assert found == []


@pytest.mark.multiprocess
def test_scripts_are_executable_and_say_what_they_do() -> None:
    for script in sorted((ROOT / "scripts").iterdir()):
        assert script.stat().st_mode & 0o111, f"chmod +x {script.name}"
        source = script.read_text(encoding="utf-8")
        assert "|| true" not in source, f"{script.name} swallows a failure"
        if source.startswith("#!/bin/sh"):
            result = subprocess.run(
                [str(script), "--help"], capture_output=True, text=True, timeout=60, check=False, cwd="/"
            )
            assert result.returncode == 0, result.stderr
            assert script.name in result.stdout


@pytest.mark.multiprocess
def test_every_advice_to_install_an_extra_names_this_distribution_and_an_extra_of_it() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    extras = set(
        re.findall(r"^(\w+) = \[", project.partition("optional-dependencies]")[2].partition("\n\n")[0], re.MULTILINE)
    )
    wrong = []
    for path in tracked_files():
        if path.suffix in (".py", ".md", ".toml", ".yaml", "") and path.name not in ("CHANGELOG.md", "README.md"):
            text = path.read_text(encoding="utf-8", errors="ignore")
            wrong += [f"{path.name}: {found}" for found in re.findall(r"(?<![\w/-])shade\[[a-z].*", text)]
            named = re.findall(r"install_hint\([\"'](\w+)", text) + re.findall(r"torch-shade\[(\w+)\]'", text)
            wrong += [f"{path.name}: no extra {name}" for name in named if name not in extras]
    assert wrong == []
    assert {"report", "digits", "server", "all"} <= extras
