"""The distribution: every package is listed, the links are there, the wheel holds every module."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from rewrite.errors import EXTRAS

ROOT = Path(__file__).parents[1]
MAPPED = {"transforms": "rewrite/transforms", "runtime": "rewrite/runtime"}


def modules() -> set[str]:
    """Return the path in the wheel of every module in the source folders."""
    own = {path for path in (ROOT / "rewrite").rglob("*.py") if not _below_link(path)}
    found = {path.relative_to(ROOT).as_posix() for path in own}
    for folder, place in MAPPED.items():
        found |= {f"{place}/{path.relative_to(ROOT / folder).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
    return found


def _below_link(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents)


def test_every_package_is_listed() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^packages = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    names = set(re.findall(r'"([^"]+)"', listed.group(1)))
    assert names == {str(Path(module).parent).replace("/", ".") for module in modules()}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=~;\[ ]", requirement)[0] for requirement in requirements}


def test_both_distributions_have_one_version() -> None:
    found = {
        re.search(r'^(?:__version__|version) = "([^"]+)"', (ROOT / path).read_text(encoding="utf-8"), re.M)[1]  # type: ignore[index]
        for path in ("pyproject.toml", "runtime/pyproject.toml", "rewrite/__init__.py", "runtime/__init__.py")
    }
    assert len(found) == 1
    (version,) = found
    assert f'"hf-rewrite-runtime~={version}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"\n## {version}, " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"rev: v{version}\n" in (ROOT / "docs" / "upgrades.md").read_text(encoding="utf-8")


def test_what_runs_models_is_not_installed_with_the_tool() -> None:
    """The pre-commit hook installs the dependencies alone: under a minute, under 300 MB."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert names(project["dependencies"]) == {"click", "libcst", "rich", "ruff", "tomli"}
    assert names(extras["verify"]) == {"coverage", "hf-rewrite-runtime"}
    assert "hf-rewrite[verify]" in extras["bench"]
    assert "hf-rewrite[verify,report]" in extras["dev"]
    brought = {library: extra for extra in ("verify", "hub", "report") for library in names(extras[extra])}
    runtime = tomllib.loads((ROOT / "runtime" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    brought |= dict.fromkeys(names(runtime["dependencies"]), brought["hf-rewrite-runtime"])
    imported = {library.replace("-", "_"): f"'hf-rewrite[{extra}]'" for library, extra in brought.items()}
    assert imported == EXTRAS
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python3 -m venv .*?pip install -e \./runtime -e ('.*?')", readme, re.MULTILINE)
    assert commands[:2] == ["'.[verify]'", "'.[dev]'"]


WITHOUT_THE_EXTRAS = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from rewrite.cli import run
for line in {lines!r}:
    code = run(line.split())
    print(f"{{line}}: {{code}}", file=sys.stderr)
"""
LEAN = (
    "modeling_tiny_llama.py --out out --no-verify --diff none", "check out", "sync out", "diff out --diff stat",
    "diff out --edits", "diff out --format markdown", "explain fuse_qkv", "explain", "models llama",
    "export out --hub hub", "undo out", "eject out",
)  # fmt: skip


def test_what_runs_no_model_runs_without_the_extras(tmp_path: Path) -> None:
    (tmp_path / "modeling_tiny_llama.py").write_bytes(
        (ROOT / "fixtures" / "models" / "modeling_tiny_llama.py").read_bytes()
    )
    lean = WITHOUT_THE_EXTRAS.format(missing={*EXTRAS, "tokenizers", "numpy"} - {"transformers"}, lines=LEAN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", lean]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    codes = [line for line in done.stderr.splitlines() if not line.startswith("rewriting")]
    assert codes == [f"{line}: 0" for line in LEAN], done.stderr


@pytest.mark.parametrize("folder", MAPPED)
def test_the_links_for_editors_are_relative(folder: str) -> None:
    link = ROOT / "rewrite" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder


@pytest.mark.slow
def test_the_wheel_holds_every_module(tmp_path: Path) -> None:
    source = tmp_path / "source"
    archive = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True)
    for name in archive.stdout.decode().split("\0"):
        if name and not (ROOT / name).is_symlink() and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert modules() <= names
    assert "rewrite/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
