"""Who may import what (docs/architecture.md): the order of the rooms, and what each may use from outside.

It is why the command starts at once, works without torch, and why a room can be found and changed alone.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from rewrite.offers import DISTRIBUTION

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "transformers", "triton", "numpy", "hf_rewrite_runtime"}
WITH_TORCH = {
    "verify",
    "benchmark",
    "measure",
    "profile",
    "redundant",
    "tuning",
    "kernels",
    "exact",
    "finite",
    "runtime",
    "sweep/loaded",
}
"""Rooms of the tool that may import torch; the others work where it is not installed."""
FLOORS = re.compile(r"```rooms\n(.*?)```", re.DOTALL)


def modules() -> dict[str, Path]:
    """Return every module of the project by its path, `rewrite/codemod/build`; links are not followed."""
    found = [p for top in ("rewrite", "runtime", "transforms") for p in (ROOT / top).rglob("*.py")]
    paths = [p.relative_to(ROOT) for p in found if not any(above.is_symlink() for above in p.parents)]
    return {re.sub(r"/__init__$", "", p.with_suffix("").as_posix()): ROOT / p for p in paths}


def declared() -> dict[str, int]:
    """Return the floor of every room, as docs/architecture.md draws the house: a room imports from below."""
    drawing = FLOORS.search((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert drawing is not None
    floors = [line.split("#")[0].split() for line in drawing[1].strip().splitlines()]
    return {room: len(floors) - number for number, floor in enumerate(floors) for room in floor}


MODULES = modules()
ROOMS = declared()


def room_of(module: str) -> str:
    """Return the innermost declared room that holds a module."""
    parts = module.split("/")
    inside = ["/".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in inside if name in ROOMS), f"no room for {module}")


def imported(path: Path, for_types: bool = True) -> Iterator[str]:
    """Yield the full dotted name of everything that a file imports, inside functions and for types too."""
    relative = path.relative_to(ROOT)
    package = list(relative.parent.parts)
    package = package if package[0] == "rewrite" else ["rewrite", *package]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tests = (node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    types = {inner for node in tests for statement in node.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if node in types and not for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def module_of(name: str) -> str | None:
    """Return the module of the project that an imported name stands in."""
    parts = name.replace(DISTRIBUTION, "rewrite.runtime").split(".")
    if parts[0] != "rewrite":
        return None
    parts = parts[1:] if parts[1:2] in (["runtime"], ["transforms"]) else parts
    inside = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((module for module in inside if module in MODULES), None)


def arrows(files: Mapping[str, Path], for_types: bool = True) -> dict[str, set[str]]:
    """Return which modules each module imports; what the runtime offers by name is imported when it is asked for."""
    found = {
        name: {module_of(target) for target in imported(path, for_types and name != "runtime")}
        for name, path in files.items()
    }
    return {name: {target for target in targets if target is not None} - {name} for name, targets in found.items()}


ARROWS = arrows(MODULES)


def against(order: Mapping[str, int], given: Mapping[str, set[str]]) -> list[str]:
    """Return every import that goes up, or sideways into another room."""
    return [
        f"{name} imports {target}"
        for name, targets in given.items()
        for target in sorted(targets)
        if room_of(name) != room_of(target) and order[room_of(name)] <= order[room_of(target)]
    ]


def test_every_module_has_a_room() -> None:
    assert [name for name in MODULES if room_of(name) not in ROOMS] == []


def test_every_room_is_there() -> None:
    folders = {parent.as_posix() for name in MODULES for parent in Path(name).parents} | set(MODULES)
    assert sorted(set(ROOMS) - folders) == []


def test_a_room_has_at_most_twenty_modules() -> None:
    """`__init__` and `__main__` are Python's."""
    files = [path for path in MODULES.values() if not path.name.startswith("__")]
    assert {room: n for room, n in Counter(path.parent for path in files).items() if n > 20} == {}


def test_a_file_name_occurs_once() -> None:
    """`__init__` and `__main__` are Python's."""
    names = Counter(path.name for path in MODULES.values() if not path.name.startswith("__"))
    assert [name for name, n in names.items() if n > 1] == []


def test_no_import_goes_up() -> None:
    assert against(ROOMS, ARROWS) == []


def test_no_circle_inside_a_room() -> None:
    """Two files of a room that call each other may name each other's types; one of them gets the other as a value."""
    running = arrows(MODULES, for_types=False)

    def inner(name: str) -> set[str]:
        """A package's `__init__` re-exports what is below it; whoever imports the package's files does not need it."""
        return {t for t in running[name] if room_of(t) == room_of(name) and MODULES[t].name != "__init__.py"}

    try:
        list(TopologicalSorter({name: inner(name) for name in MODULES}).static_order())
    except CycleError as error:
        pytest.fail(f"a circle: {' → '.join(error.args[1])}")


def test_an_import_against_the_order_is_seen() -> None:
    planted = {**ARROWS, "rewrite/analysis/terms/computation": {"rewrite/codemod/build"}}
    assert against(ROOMS, planted) == ["rewrite/analysis/terms/computation imports rewrite/codemod/build"]


def outside(name: str) -> set[str]:
    return {target.split(".")[0] for target in imported(MODULES[name])}


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name.split("/")[0] == "runtime"))
def test_runtime_never_imports_the_tool(name: str) -> None:
    assert not {"libcst", "click", "rich"} & outside(name)
    assert all(target.startswith("runtime") for target in ARROWS[name])
    absolute = (node for node in ast.walk(ast.parse(MODULES[name].read_text())) if isinstance(node, ast.ImportFrom))
    assert not [node.module for node in absolute if node.level == 0 and (node.module or "").startswith("rewrite")]


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name.split("/")[0] == "transforms"))
def test_transforms_never_import_torch(name: str) -> None:
    assert not {*HEAVY, "click", "rich"} & outside(name)


TOOL = sorted(
    name
    for name in MODULES
    if name.startswith("rewrite") and not any(name.startswith(f"rewrite/{room}") for room in WITH_TORCH)
)


@pytest.mark.parametrize("name", TOOL)
def test_the_tool_never_imports_torch_outside_the_verifier(name: str) -> None:
    assert not HEAVY & outside(name)


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
