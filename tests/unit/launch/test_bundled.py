"""The examples that the package brings: listed with what they show, written whole, and never over a file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from shade.cli import main
from shade.errors import ConfigError
from shade.launch.bundled import EXAMPLES, examples, write_example


def test_every_script_is_listed_with_a_line_and_helpers_are_not() -> None:
    known = examples()
    assert {"bench_cifar10", "lightning_trainer", "quickstart"} <= set(known)
    assert "networks" not in known


@pytest.mark.parametrize("name", sorted(examples()))
def test_an_example_comes_with_the_modules_that_it_imports(name: str, tmp_path: Path) -> None:
    written = {path.stem for path in write_example(name, tmp_path)}
    ours = {path.stem for path in EXAMPLES.glob("*.py")}
    for stem in written:
        tree = ast.parse((tmp_path / f"{stem}.py").read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert names & ours <= written
        assert (tmp_path / f"{stem}.py").read_bytes() == (EXAMPLES / f"{stem}.py").read_bytes()


def test_no_file_is_overwritten_and_a_second_call_says_why(tmp_path: Path) -> None:
    (tmp_path / "networks.py").write_text("mine")
    with pytest.raises(ConfigError, match="remove it, or go to another folder"):
        write_example("bench_cifar10", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["networks.py"]
    (tmp_path / "networks.py").unlink()
    assert len(write_example("bench_cifar10.py", tmp_path)) == 2


def test_the_command_lists_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["example"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith(sorted(examples())[0])
    assert main(["example", "bench_cifr10"]) == 2
    assert "expected an example among" in capsys.readouterr().err
    assert main(["example", "audio"]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'audio.py'}\n"
