"""Nothing is copied: no six lines of code in a row stand here and in the installed transformers or Liger as well.

A rule is shown on code that we wrote to show it; `CONTRIBUTING.md` asks for that. Comments, imports and lines of a few
characters, which every file has, do not count.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("bench", "docs", "fixtures", "rewrite", "runtime", "tests", "transforms")
TEXTS = ("*.py", "*.md", "*.patch", "*.diff", "*.txt")
LIBRARIES = ("transformers", "liger_kernel")
RUN = 6
SHORT = 11
"""Characters; `return x` and `**kwargs,` are nobody's own."""


def runs(path: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield every `RUN` lines of code that follow each other, with the number of the first."""
    text = path.read_text(encoding="utf-8", errors="replace")
    stripped = enumerate(map(str.strip, text.splitlines()), 1)
    code = [(n, s) for n, s in stripped if len(s) > SHORT and not s.startswith(("#", "import ", "from "))]
    lines = [line for _, line in code]
    for start in range(len(code) - RUN + 1):
        yield code[start][0], tuple(lines[start : start + RUN])


def shared(ours: list[Path], theirs: list[Path]) -> list[str]:
    """Return `file:line` of each of our runs that stands in one of their files."""
    places: dict[tuple[str, ...], list[str]] = {}
    for path in ours:
        for number, run in runs(path):
            places.setdefault(run, []).append(f"{path}:{number}")
    found: list[str] = []
    for path in theirs:
        for _, run in runs(path):
            found += places.pop(run, [])
    return sorted(found)


def repository() -> list[Path]:
    nested = (path for folder in FOLDERS for pattern in TEXTS for path in (ROOT / folder).rglob(pattern))
    return sorted({path.resolve() for path in (*nested, *ROOT.glob("*.md"))})


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_run_of_lines_stands_in(library: str) -> None:
    spec = importlib.util.find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{library} is not installed")
    theirs = sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))
    assert len(theirs) > 10
    assert shared(repository(), theirs) == []


def test_a_copied_run_is_found(tmp_path: Path) -> None:
    lines = [f"value_{number} = compute(value_{number})" for number in range(20)]
    theirs, copied, fewer = (tmp_path / name for name in ("theirs.py", "copied.py", "fewer.py"))
    theirs.write_text("\n".join(lines))
    copied.write_text("\n".join(["own = 1", "    # a remark", *("    " + line + "\n" for line in lines[3 : 3 + RUN])]))
    fewer.write_text("\n".join([*lines[3 : 2 + RUN], "something_else = 0", *lines[:2]]))
    assert shared([copied], [theirs]) == [f"{copied}:3"]
    assert shared([fewer], [theirs]) == []
