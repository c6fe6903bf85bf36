"""Locks that were edited by hand or made to harm, links, names with spaces: a clear error, nothing written outside."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome, rewrite

from rewrite.package import lock_text
from rewrite.package.lock import read_lock

from .conftest import Releases, edit
from .test_releases import DROPOUT

Harm = Callable[[dict[str, Any]], Any]


def commands(package: Path, tree: Path) -> list[Outcome]:
    return [
        rewrite("sync", package, "--transformers", tree),
        rewrite("check", package, "--transformers", tree),
        rewrite("diff", package),
        rewrite("undo", package),
        rewrite("eject", package),
    ]


def outside(package: Path) -> dict[str, bytes]:
    """Everything around the package."""
    top = package.resolve().parents[1]
    found = (path for path in top.rglob("*") if path.is_file() and not path.is_relative_to(package.resolve()))
    return {str(path): path.read_bytes() for path in found}


def file(name: str) -> Harm:
    return lambda data: data["files"].update({name: "0" * 64})


HARMS: dict[str, Harm] = {
    "up and out": file("../../victim.py"),
    "absolute": file("/tmp/victim.py"),
    "with a backslash": file("..\\victim.py"),
    "through a folder": file("_runtime/../../victim.py"),
    "a null": file("_runtime/\0.py"),
    "the folder itself": file("."),
    "another modeling file": lambda data: data.update(modeling="modeling_other.py"),
    "no modeling file's name": lambda data: data.update(modeling="_runtime/core.py"),
    "two modeling files, of an older version": lambda data: [
        data["files"].update({"modeling_other.py": "0"}),
        data.pop("modeling"),
    ],
    "a modeling file elsewhere": lambda data: data.update(files={"modeling_/../../victim.py": "0"}),
    "no modeling file": lambda data: data["files"].pop("modeling_tiny.py"),
    "an original outside transformers": lambda data: data["source"].update(path="../../../../etc/passwd"),
    "an absolute original": lambda data: data["source"].update(path="/etc/passwd"),
    "another module": lambda data: data["source"].update(module="os.path"),
    "a module that is no path": lambda data: data["source"].update(module="transformers.models.llama.modeling_llama"),
    "an absolute target": lambda data: data["source"].update(module=None, target="/etc/passwd"),
    "no Python": lambda data: data["source"].update(module=None, target="../secret", path="secret"),
    "numbers for text": lambda data: data["source"].update(target=7),
    "a list for an object": lambda data: data.update(files=[]),
    "text for a list": lambda data: data["options"].update(only="fuse_qkv"),
    "nothing": lambda data: data.clear(),
    "a later schema": lambda data: data.update(schema=99),
    "a schema that is true": lambda data: data.update(schema=True),
    "an object for a digest": lambda data: data["files"].update({"modeling_tiny.py": {}}),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_lock_that_says_what_no_lock_says(package: Path, releases: Releases, harm: str) -> None:
    tree, path = releases("6.1.0", DROPOUT), package / "rewrite.lock"
    data = json.loads(path.read_text())
    HARMS[harm](data)
    path.write_text(json.dumps(data))
    before, inside = outside(package), {p: p.read_bytes() for p in package.rglob("*") if p.is_file()}
    for done in commands(package, tree):
        assert done.code in (1, 2), done
        assert "rewrite.lock" in done.err + done.out
        assert "bug of ours" not in done.err
    assert outside(package) == before
    assert {p: p.read_bytes() for p in package.rglob("*") if p.is_file()} == inside


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 200_000, "nested without end"),
        ('{"schema": 2, "a": ' + "[" * 200_000, "nested without end"),
        ("{" + " " * lock_text.MOST_BYTES, "larger than"),
        ("<<<<<<< ours\n{}\n=======\n{}\n>>>>>>> theirs\n", "has conflict markers"),
        ("null", "should be an object"),
        ('{"schema": 1, "schema": 3}', "is missing"),
    ],
    ids=["deep", "deeper", "huge", "conflict", "null", "twice"],
)
def test_a_lock_that_is_no_object(package: Path, releases: Releases, text: str, said: str) -> None:
    (package / "rewrite.lock").write_text(text)
    for done in commands(package, releases("6.1.0")):
        assert (done.code in (1, 2), said in done.err + done.out) == (True, True), done


def test_a_lock_that_is_a_link_to_itself(package: Path, releases: Releases) -> None:
    path = package / "rewrite.lock"
    path.unlink()
    path.symlink_to(path.name)
    for done in commands(package, releases("6.1.0")):
        assert (done.code, "rewrite.lock" in done.err + done.out) == (2, True)


def test_an_edit_by_hand_is_noticed_and_a_sync_makes_the_lock_anew(package: Path, releases: Releases) -> None:
    tree, path = releases("6.0.0"), package / "rewrite.lock"
    good = path.read_text()
    path.write_text(
        good.replace('"q_proj, k_proj', '"x_proj, k_proj').replace('"version": "0.2.0"', '"version": "0.0.9"')
    )
    assert not read_lock(package).intact
    checked = rewrite("check", package, "--transformers", tree)
    assert (checked.code, "rewrite.lock was edited by hand" in checked.out) == (1, True)
    assert rewrite("sync", package, "--transformers", tree).code == 0
    assert path.read_text() == good


def test_options_that_name_a_rule_that_is_gone(package: Path, releases: Releases) -> None:
    path = package / "rewrite.lock"
    path.write_text(path.read_text().replace('"fuse_gate_up",\n      "fuse_qkv"', '"fuse_gone",\n      "fuse_qkv"'))
    data = json.loads(path.read_text())
    data["options"]["only"] = ["fuse_gone"]
    path.write_text(json.dumps(data))
    done = rewrite("sync", package, "--transformers", releases("6.1.0", DROPOUT))
    assert (done.code, "no transform 'fuse_gone'" in done.err) == (2, True)
    assert "no transform 'fuse_gone'" in rewrite("check", package, "--transformers", releases("6.1.0", DROPOUT)).out


@pytest.mark.parametrize("name", ["modeling_tiny.py", "__init__.py", ".rewrite", "rewrite.lock"])
def test_a_link_inside_is_refused_and_its_target_stays(
    package: Path, releases: Releases, name: str, tmp_path: Path
) -> None:
    place, target = package / name, tmp_path / "elsewhere"
    place.rename(target)
    place.symlink_to(target)
    before = outside(package)
    tree = releases("6.1.0", DROPOUT)
    before |= {str(path): path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    done = rewrite("sync", package, "--transformers", tree)
    assert (done.code, "is a link" in done.err) == (2, True)
    assert outside(package) == before


def test_a_conflict_is_not_written_through_a_link(package: Path, releases: Releases, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("safe")
    (package / "modeling_tiny.py.conflict").symlink_to(victim)
    edit(package / "modeling_tiny.py", "attention_dropout = 0.0", "attention_dropout = 0.5")
    assert rewrite("sync", package, "--transformers", releases("6.1.0", DROPOUT)).code == 1
    assert victim.read_text() == "safe"
    assert "<<<<<<< yours" in (package / "modeling_tiny.py.conflict").read_text()


def test_a_linked_package_stays_a_link(package: Path, releases: Releases) -> None:
    package.rename("real")
    Path("link").symlink_to("real")
    tree = releases("6.1.0", DROPOUT)
    assert rewrite("sync", "link", "--transformers", tree).code == 0
    assert Path("link").is_symlink()
    assert "attention_dropout = 0.1" in Path("real/modeling_tiny.py").read_text()
    listed = rewrite("check", "--transformers", tree).out
    assert listed == "unverified  real: never verified (rewrite verify real)\n"


@pytest.mark.parametrize("name", ["with space", "ünï-código", "[brackets]", "a'quote", "-dash"])
def test_names_that_need_care(here: Path, releases: Releases, name: str) -> None:
    original = releases("6.0.0") / "transformers" / "models" / "tiny" / "modeling_tiny.py"
    out = f"./{name}"
    assert rewrite(original, "--out", out, "--no-verify", "--diff", "none", "--only", "fuse_qkv").code == 0
    (here / f".{name}.rewrite-new-x").mkdir()
    (here / f".{name[0]}.rewrite-new-x").mkdir()  # of another folder, whatever the pattern
    tree = releases("6.1.0", DROPOUT)
    edit(here / name / "modeling_tiny.py", "class TinyLlamaMLP", "# mine\nclass TinyLlamaMLP")
    assert rewrite("sync", out, "--transformers", tree).code == 0
    assert rewrite("check", out, "--transformers", tree, "--format", "sarif").code == 0
    assert rewrite("undo", out).code == 0
    assert sorted(os.listdir(here)) == sorted([name, f".{name[0]}.rewrite-new-x"])


def test_an_original_that_is_the_package_itself(here: Path, releases: Releases) -> None:
    original = releases("6.0.0") / "transformers" / "models" / "tiny" / "modeling_tiny.py"
    (here / "modeling_tiny.py").write_bytes(original.read_bytes())
    assert rewrite("modeling_tiny.py", "--out", "out", "--no-verify", "--diff", "none", "--only", "fuse_qkv").code == 0
    path = here / "out" / "rewrite.lock"
    path.write_text(path.read_text().replace('"target": "../modeling_tiny.py"', '"target": "modeling_tiny.py"'))
    done = rewrite("sync", "out")
    assert (done.code, "already rewritten" in done.err) == (2, True)
    assert rewrite("check", "out").code == 1
