"""The generated documentation is up to date, and what it says about commands is true."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_rewrite_runtime.rocm import settings as rocm
from rewrite import docs
from rewrite.cli import COMMANDS
from rewrite.transforms import all_transforms

ROOT = Path(__file__).parents[1]


def test_generated_documentation_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    stale = [str(path) for path, text in docs.generated().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, f"run `python -m rewrite.docs`: {stale}"


@pytest.mark.parametrize(
    "command", ["bench/decode.py render", "bench/families.py render", "bench/gemm_table.py", "bench/mutant_page.py"]
)
def test_figures_in_the_documentation_are_those_recorded(command: str) -> None:
    done = subprocess.run([sys.executable, *command.split(), "--check"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, f"run `python {command}`"


@pytest.mark.parametrize("transform", all_transforms(), ids=lambda transform: transform.name)
def test_every_transform_has_the_fixed_headings(transform: object) -> None:
    text = type(transform).__doc__ or ""
    assert [heading for heading in docs.HEADINGS if f"{heading}:" not in text] == []


def test_the_page_of_the_command_line_names_every_command() -> None:
    named = set(re.findall(r"`rewrite ([a-z]+)", (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")))
    assert set(COMMANDS) - {"apply"} <= named


def own_words_of_readme() -> str:
    """README without what is generated from measurements."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"<!-- (\w+): generated -->.*?<!-- \1: end -->", "", text, flags=re.S)


def test_readme_is_short() -> None:
    assert len(own_words_of_readme().split()) <= 600
    assert len(list((ROOT / "docs").glob("*.md"))) <= 25


def test_figures_of_readme_stand_on_a_page() -> None:
    pages = " ".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    measured = {float(number) for number in re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", pages)}
    said = re.findall(r"(?<![\w.])\d+\.\d+(?![\w.]|\.\d)", re.sub(r"`[^`]*`", "", own_words_of_readme()))
    places = {number: len(number.partition(".")[2]) for number in said}
    rounded = {number: {f"{one:.{digits}f}" for one in measured} for number, digits in places.items()}
    assert [number for number in said if number not in rounded[number]] == []
    assert len(said) >= 6


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def test_calls_for_amd_exist() -> None:
    """The page's Python parses, and what it calls of `rocm` takes these keywords."""
    calls = 0
    for block in blocks("amd.md", "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("rocm."):
                calls += 1
                function = getattr(rocm, ast.unparse(node.func).removeprefix("rocm."))
                inspect.signature(function).bind(*node.args, **{word.arg: word.value for word in node.keywords})
    assert calls > 3


def test_ci_runs_the_test_command_of_readme() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line.startswith("python3 -m venv") and "pytest" in line]
    assert len(commands) == 1
    assert commands[0].rsplit(" && ", 1)[1].startswith(".venv/bin/pytest")


def test_every_page_is_one_step_from_readme_and_on_the_site() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Where to read on")[2].partition("\n## ")[0]
    linked = list(dict.fromkeys(re.findall(r"\(docs/([\w.-]+\.md)", readme)))
    assert sorted(linked) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    site = re.findall(r" ([\w.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.M)
    assert sorted({*linked, "index.md", "contributing.md", "changelog.md"}) == sorted(site)
