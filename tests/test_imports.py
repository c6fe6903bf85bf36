"""Who may import what (docs/architecture.md); it is why the command starts at once and works without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "transformers", "triton", "numpy"}


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).glob("*.py"))


TOOL = [
    path for folder in ("rewrite", "rewrite/commands", "rewrite/analysis", "rewrite/analysis/effects", "rewrite/sweep") for path in files(folder)
]


def imported(path: Path) -> Iterator[str]:
    """Yield the top-level name of every absolute import, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("path", files("runtime"), ids=lambda path: path.stem)
def test_runtime_never_imports_the_tool(path: Path) -> None:
    assert not {"libcst", "click", "rich", "rewrite", "runtime"} & set(imported(path))


@pytest.mark.parametrize("path", files("transforms"), ids=lambda path: path.stem)
def test_transforms_never_import_torch(path: Path) -> None:
    assert not {*HEAVY, "click", "rich"} & set(imported(path))


@pytest.mark.parametrize("path", TOOL, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_tool_never_imports_torch_outside_the_verifier(path: Path) -> None:
    assert not HEAVY & set(imported(path))


def loaded_by(code: str, folder: Path) -> set[str]:
    """Return the top-level modules that a new process has after `code`."""
    code += "\nimport sys; print('LOADED', *{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return set(done.stdout.rsplit("LOADED", 1)[1].split())


def test_help_loads_neither_torch_nor_libcst_nor_rich(tmp_path: Path) -> None:
    loaded = loaded_by("from rewrite.cli import run; run(['--help'])", tmp_path)
    assert not {*HEAVY, "libcst", "rich"} & loaded


def test_verify_package_loads_no_torch(tmp_path: Path) -> None:
    assert not HEAVY & loaded_by("import rewrite.verify", tmp_path)


def test_a_whole_run_without_verification_loads_no_torch(tmp_path: Path) -> None:
    run = "from rewrite.cli import run; assert run(['llama', '--out', 'out', '--no-verify']) == 0"
    assert not HEAVY & loaded_by(run, tmp_path)
