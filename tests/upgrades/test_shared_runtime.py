"""Packages that share one runtime: made, upgraded, edited, moved and left, alone and together."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import CommandLine
from rewrite.package.features import ON_REQUEST

from rewrite.deliver import acceptance
from rewrite.errors import OutputNotWritable
from rewrite.package import output, shared
from rewrite.package.lock import read_lock
from rewrite.sync import rebuild
from rewrite.verify.models import sides
from rewrite.verify.reach import Reach

from .conftest import Releases, edit
from .test_releases import DROPOUT

RUNTIME = "rewrite_runtime"
NAMES = ("out", "second")


@pytest.fixture(scope="module")
def pair(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two packages of one model that share a runtime."""
    from rewrite.cli import run

    place = tmp_path_factory.mktemp("pair")
    tree = Releases(place / "releases")("6.0.0")
    for name in NAMES:
        shutil.copytree(made, place / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert run(["sync", *NAMES, "--runtime", RUNTIME, "--transformers", str(tree), "--quiet"]) == 0
    return place


@pytest.fixture
def both(pair: Path, here: Path) -> Path:
    """A copy of that folder, the working folder."""
    for name in (*NAMES, RUNTIME):
        shutil.copytree(pair / name, name)
    return here


@pytest.fixture
def old(releases: Releases) -> tuple[str, Path]:
    return "--transformers", releases("6.0.0")


def contents(folder: Path) -> dict[str, bytes]:
    """The files of the packages and of their runtime."""
    found = (path for name in (*NAMES, RUNTIME) for path in (folder / name).rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() for p in found if p.is_file() and "__pycache__" not in p.parts}


OTHER = "f" * 64
"""The digest of another version; one character of it would be that of one version in sixteen."""


def moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this be another version of the tool."""
    for module in ("package.shared", "package.assemble", "sync.rebuild", "sync.partners"):
        monkeypatch.setattr(f"rewrite.{module}.engine_digest", lambda: OTHER)


def engines(folder: Path) -> list[str]:
    return [read_lock(folder / name).engine for name in NAMES] + [shared.read(folder / RUNTIME).engine]


def test_the_rooms_lie_in_the_shared_folder_alone(both: Path, rewrite: CommandLine, old: tuple[str, Path]) -> None:
    assert sorted(path.name for path in (both / "out" / "runtime").iterdir()) == ["__init__.py", "upstream.py"]
    assert {"__init__.py", "core.py", "products.py", "runtime.lock"} < {p.name for p in (both / RUNTIME).iterdir()}
    assert set(shared.read(both / RUNTIME).users) == {"../out", "../second"}
    assert read_lock(both / "out").options.runtime == f"../{RUNTIME}"
    assert rewrite("check", *NAMES, *old).code == 0
    done = rewrite("sync", *NAMES, *old)
    assert (done.code, done.out.count("nothing: the package is up to date")) == (0, 2)


IN_ONE_PROCESS = """
import importlib
names = ("out", "third")
first, second = (importlib.import_module(f"{name}.runtime.norms") for name in names)
assert first is not second and first.__file__ == second.__file__
keys = [{n: v.cache_key for n, v in vars(m).items() if type(v).__name__ == "JITFunction"} for m in (first, second)]
assert keys[0] == keys[1] and keys[0], keys
core = [importlib.import_module(f"{name}.runtime.core") for name in names]
assert [module.NAMESPACE for module in core] == [*names]
assert [module.PLACE_FOLDER.name for module in core] == [*names]
"""
"""Each package has modules, operators and tables of its own; a kernel that one compiled the other finds on disk."""


def in_one_process(folder: Path) -> None:
    pytest.importorskip("triton")
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", IN_ONE_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=compiled)
    assert done.returncode == 0, done.stderr


def test_another_model_adds_what_it_needs_and_changes_nothing_for_the_first(
    both: Path, rewrite: CommandLine, old: tuple[str, Path]
) -> None:
    before = contents(both)
    state = shared.state(both / "out", read_lock(both / "out"))
    done = rewrite("tiny", "--out", "third", "--no-verify", *old, "--runtime", RUNTIME, "--only", "fuse_rms_norm")
    assert done.code == 0, done.err
    assert "shared with out, second" in done.out
    assert (both / RUNTIME / "norms.py").is_file()
    after = contents(both)
    assert {n: d for n, d in after.items() if n.startswith(NAMES)} == {
        n: d for n, d in before.items() if n.startswith(NAMES)
    }
    assert shared.state(both / "out", read_lock(both / "out")) == state
    assert rewrite("check", "out", "second", "third", *old).code == 0
    in_one_process(both)
    assert contents(both) == after
    shutil.rmtree(both / "third")
    checked = rewrite("check", "out", *old)
    assert (checked.code, "lists third, which no longer share it" in checked.out) == (1, True)
    assert rewrite("sync", "out", *old).code == 0
    assert contents(both) == before


def test_a_shared_runtime_leaves_out_what_all_its_packages_do(
    here: Path, rewrite: CommandLine, old: tuple[str, Path]
) -> None:
    given = ("--no-verify", *old, "--runtime", RUNTIME, "--only", "static_cache")
    assert rewrite("tiny", "--out", "first", *given).code == 0
    small = {path.name for path in (here / RUNTIME).iterdir()}
    assert "parallel.py" not in small
    assert shared.read(here / RUNTIME).users["../first"].without == ON_REQUEST
    assert rewrite("tiny", "--out", "second", *given, "--with", "ranks").code == 0
    assert {path.name for path in (here / RUNTIME).iterdir()} == small | {"parallel.py"}
    assert rewrite("check", "first", "second", *old).code == 0
    shutil.rmtree(here / "second")
    assert rewrite("sync", "first", *old).code == 0
    assert {path.name for path in (here / RUNTIME).iterdir()} == small


def test_packages_of_one_runtime_move_to_another_version_together(
    both: Path, rewrite: CommandLine, old: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = both / RUNTIME / "runtime.lock"
    path.write_text(
        path.read_text().replace('["products', '["norms.gone", "products')
    )  # this version has it no longer
    moved(monkeypatch)
    refused = rewrite("tiny", "--out", "third", "--no-verify", *old, "--runtime", RUNTIME)
    assert (refused.code, "rewrite sync out second, which makes" in refused.err) == (2, True)
    done = rewrite("sync", "out", *old)
    assert done.code == 0, done.err
    assert "second (2 of 2), which shares its runtime with them" in done.out
    assert engines(both) == [OTHER, OTHER, OTHER]


def test_one_that_cannot_move_holds_the_other_back(
    both: Path, rewrite: CommandLine, releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(both / "second" / "modeling_tiny.py", "attention_dropout = 0.0", "attention_dropout = 0.5")
    moved(monkeypatch)
    before = contents(both)
    new = ("--transformers", releases("6.1.0", DROPOUT))
    done = rewrite("sync", "out", *new)
    assert (done.code, "nothing: second, which shares its runtime, cannot be made anew yet" in done.out) == (1, True)
    copy = both / "second" / "modeling_tiny.py.conflict"
    assert {name: data for name, data in contents(both).items() if not name.endswith(".conflict")} == before
    text = copy.read_text()
    copy.write_text(text[: text.index("<<<<<<<")] + text[text.index(">>>>>>>") :].partition("\n")[2])
    done = rewrite("sync", "second", *new, "--resolved", copy)
    assert done.code == 0, done.err + done.out
    assert engines(both) == [OTHER, OTHER, OTHER]


def test_an_edited_room_is_found_refused_and_put_back(both: Path, rewrite: CommandLine, old: tuple[str, Path]) -> None:
    before = contents(both)
    lock = read_lock(both / "out")
    state = shared.state(both / "out", lock)
    mine = edit(both / RUNTIME / "core.py", "import re\n", "import re\nMINE = 1\n")
    assert shared.state(both / "out", lock) != state
    for name in NAMES:
        assert "core.py was edited" in rewrite("check", name, *old).out
    refused = rewrite("sync", "out", *old)
    assert (refused.code, "--replace runtime/core.py" in refused.err) == (1, True)
    assert rewrite("undo", "second").code == 0
    undone = both / RUNTIME / "core.py.undone"
    assert undone.read_text() == mine
    undone.unlink()
    assert contents(both) == before
    (both / RUNTIME / "core.py").write_text(mine)
    assert rewrite("sync", "out", *old, "--replace", "runtime/core.py").code == 0
    (both / RUNTIME / "core.py.edited").unlink()
    assert contents(both) == before


def test_the_layout_of_a_room_is_no_edit_and_stays(both: Path, rewrite: CommandLine, old: tuple[str, Path]) -> None:
    path = both / RUNTIME / "core.py"
    mine = edit(path, '"""', "'''")
    assert rewrite("check", *NAMES, *old).code == 0
    assert rewrite("tiny", "--out", "third", "--no-verify", *old, "--runtime", RUNTIME, "--only", "fuse_qkv").code == 0
    assert path.read_text() == mine


def test_who_leaves_takes_the_runtime_along(both: Path, rewrite: CommandLine, old: tuple[str, Path]) -> None:
    assert rewrite("eject", "out").code == 0
    assert (both / "out" / "runtime" / "products.py").is_file()
    assert "SHARED" not in (both / "out" / "runtime" / "__init__.py").read_text()
    assert list(shared.read(both / RUNTIME).users) == ["../second"]
    assert rewrite("check", "second", *old).code == 0
    assert rewrite("sync", "second", "--runtime", "second/runtime", *old).code == 0
    assert (both / "second" / "runtime" / "core.py").is_file()
    assert not (both / RUNTIME).exists()
    assert rewrite("check", "second", *old).code == 0


def test_what_lies_beside_the_rooms_stays(both: Path, rewrite: CommandLine, old: tuple[str, Path]) -> None:
    (both / RUNTIME / "NOTES.md").write_text("mine")
    mine = edit(both / RUNTIME / "core.py", "import re\n", "import re\nMINE = 1\n")
    for name in NAMES:
        assert rewrite("eject", name).code == 0
    assert sorted(path.name for path in (both / RUNTIME).glob("[!.]*")) == ["NOTES.md", "core.py"]
    assert (both / RUNTIME / "core.py").read_text() == (both / "out" / "runtime" / "core.py").read_text() == mine


def test_a_runtime_that_was_moved_is_missed_and_found(both: Path, rewrite: CommandLine, old: tuple[str, Path]) -> None:
    (both / "lib").mkdir()
    (both / RUNTIME).rename(both / "lib" / "shared")
    done = subprocess.run([sys.executable, "-c", "import out"], capture_output=True, text=True, cwd=both)
    assert "rewrite sync PACKAGE --runtime DIR" in done.stderr.splitlines()[-1]
    checked = rewrite("check", "out", *old)
    assert (checked.code, f"cannot share the runtime {RUNTIME}" in checked.out) == (1, True)
    refused = rewrite("sync", "out", *old)
    assert (refused.code, "it has no runtime.lock" in refused.err) == (2, True)
    assert rewrite("sync", *NAMES, *old, "--runtime", "lib/shared").code == 0
    assert read_lock(both / "out").options.runtime == "../lib/shared"
    assert rewrite("check", *NAMES, *old).code == 0


def test_a_copy_that_is_compared_has_the_rooms(both: Path) -> None:
    lock = read_lock(both / "out")
    with acceptance.generated(both / "out", lock) as copy:
        assert (copy / "runtime" / "core.py").is_file()
        assert shared.state(copy, lock) == lock.engine
    assert not (both / "out" / "runtime" / "core.py").exists()


def test_a_verdict_holds_until_somebody_edits_the_runtime(both: Path) -> None:
    lock = read_lock(both / "out")
    files = {name: digest for name, digest in lock.files.items() if not name.startswith(".")}
    verdict = {"passed": True, "rewritten": {"files": files, "runtime": shared.state(both / "out", lock)}}
    (both / "out" / "verify.json").write_text(json.dumps(verdict))
    assert rebuild.stale_verdict(both / "out", lock) is None
    edit(both / RUNTIME / "core.py", "import re\n", "import re\nMINE = 1\n")
    assert "the runtime that it shares has changed" in str(rebuild.stale_verdict(both / "out", lock))


def test_an_export_has_all_of_it(both: Path, rewrite: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewrite.package.hub._auto_map", lambda *_: {})
    done = rewrite("export", "out", "--hub", "hub")
    assert done.code == 0, done.err
    assert {"modeling_tiny.py", "rewrite_runtime_core.py", "rewrite_runtime_products.py"} <= {
        path.name for path in (both / "hub").iterdir()
    }


def test_a_full_disk_leaves_package_and_runtime_as_they_were(
    both: Path, rewrite: CommandLine, releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(both)

    def full(*_: object) -> None:
        raise OutputNotWritable(RUNTIME, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(output, "put_shared", full)
        assert rewrite("sync", "out", "--transformers", releases("6.1.0", DROPOUT)).code == 1
    assert contents(both) == before
    assert not list(both.glob(".*"))


def test_a_kill_between_runtime_and_package_is_seen_and_mended(
    both: Path, rewrite: CommandLine, old: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved(monkeypatch)
    exchange = output._exchange

    def killed(staged: Path, target: Path) -> None:
        if target.name == "out":
            raise KeyboardInterrupt
        exchange(staged, target)

    with monkeypatch.context() as patch:
        patch.setattr(output, "_exchange", killed)
        assert rewrite("sync", "out", *old).code != 0
    assert engines(both)[0] != OTHER
    assert engines(both)[2] == OTHER
    assert "of another version than out" in rewrite("check", "out", *old).out
    assert rewrite("sync", *NAMES, *old).code == 0
    assert engines(both) == [OTHER, OTHER, OTHER]


def test_a_second_package_is_told_of_one_runtime(
    package: Path, here: Path, rewrite: CommandLine, old: tuple[str, Path]
) -> None:
    done = rewrite("tiny", "--out", "second", "--no-verify", *old, "--only", "fuse_qkv")
    assert f"rewrite sync out second --runtime {RUNTIME}" in done.out
    (here / "pyproject.toml").write_text(f'[tool.rewrite]\nruntime = "{RUNTIME}"\n')
    assert rewrite("sync", *old).code == 0
    assert set(shared.read(here / RUNTIME).users) == {"../out", "../second"}


@pytest.mark.parametrize("place", ["out", "out/inner", "out/modeling_tiny.py", "full", "."])
def test_a_place_that_can_be_no_runtime(
    package: Path, here: Path, rewrite: CommandLine, old: tuple[str, Path], place: str
) -> None:
    (here / "full").mkdir()
    (here / "full" / "mine.txt").write_text("mine")
    before = sorted(here.rglob("*"))
    done = rewrite("sync", "out", *old, "--runtime", place)
    assert (done.code, "cannot share the runtime" in done.err) == (2, True)
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("way", ["/etc", "..\\x", "a/../../x", "./x", 'x"y', 3])
def test_a_way_that_a_lock_cannot_have(both: Path, rewrite: CommandLine, way: object) -> None:
    path = both / "out" / "rewrite.lock"
    data = json.loads(path.read_text())
    data["options"]["runtime"] = way
    path.write_text(json.dumps(data))
    done = rewrite("check", "out")
    assert (done.code, "its rewrite.lock" in done.out) == (1, True)


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: data["files"].update({"../../victim.py": "0"}),
        lambda data: data["users"].update({"/etc": {"uses": [], "target": "cuda"}}),
        lambda data: data.update(schema=9),
        lambda data: data.pop("users"),
    ],
)
def test_a_lock_of_a_runtime_that_is_not_ours(both: Path, rewrite: CommandLine, old: tuple[str, Path], harm) -> None:
    path = both / RUNTIME / "runtime.lock"
    data = json.loads(path.read_text())
    harm(data)
    path.write_text(json.dumps(data))
    assert "its runtime.lock" in rewrite("check", "out", *old).out
    done = rewrite("sync", "out", *old)
    assert (done.code, "its runtime.lock" in done.err) == (2, True)


def test_a_verification_counts_the_rooms_outside_the_package(both: Path) -> None:
    source = sides.locate(both / "out")
    names = {path.name for path in sides.shared_rooms(source)}
    assert names == set(shared.read(both / RUNTIME).files)
    assert names < {path.name for path in Reach.of(source, True).files}
    with acceptance.generated(both / "out", read_lock(both / "out")) as copy:
        assert sides.shared_rooms(sides.locate(copy)) == []
