"""No edit is ever lost: random edits over changes like those of real releases; bench/upgrades.py takes real ones."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import pytest
from command_line import rewrite

from rewrite.codemod.build import build
from rewrite.package.snapshots import archive
from rewrite.source.resolve import resolve
from rewrite.sync import merge
from rewrite.sync.merge import Merged
from rewrite.transforms import select

from . import random_edits
from .conftest import FIXTURE, Releases, edit
from .random_edits import EDITS, outcome

UPSTREAM = (
    ("attention_dropout = 0.0", "attention_dropout = 0.1"),
    ("hidden_states", "states"),
    ("def repeat_kv(", "def slice_logits(x):\n    return x\n\n\ndef repeat_kv("),
    ("self.is_causal = True", "self.is_causal = getattr(config, 'is_causal', True)"),
)
"""What releases do: a constant, a renamed argument everywhere, a new function, a line that becomes another."""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The generated text of the fixture, and of the fixture after each of the changes."""
    folder, found = tmp_path_factory.mktemp("texts"), []
    for change in (None, *UPSTREAM):
        text = FIXTURE.read_text()
        if change is not None:
            assert change[0] in text
            text = text.replace(*change)
        (folder / "modeling_tiny.py").write_text(text)
        found.append(build(resolve(str(folder / "modeling_tiny.py")), select(only=("fuse_qkv",))).rewritten.text)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_no_edit_is_lost(texts: list[str], seed: int) -> None:
    choose = random.Random(seed)
    new = choose.choice(texts[1:])
    kinds = choose.sample(sorted(EDITS), choose.choice((1, 1, 2, 3)))
    assert outcome(texts[0], new, kinds, choose) in ("merged", "conflict", "refused")


def test_the_sample_has_merges_and_conflicts(texts: list[str]) -> None:
    found = {outcome(texts[0], texts[2], [kind], random.Random(7)) for kind in sorted(EDITS)}
    assert {"merged", "conflict"} <= found


@pytest.mark.parametrize("side", ["new", "yours", "half"])
def test_a_merge_that_drops_a_side_is_noticed(texts: list[str], monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    def broken(base: str, yours: str, new: str) -> Merged:
        if side == "half":
            whole = merge.three_way(base, yours, new)
            return Merged(whole.text.replace("    # mine", "", 1) if not whole.conflicts else new)
        return Merged(new if side == "new" else yours)

    monkeypatch.setattr(random_edits, "three_way", broken)
    found = [outcome(texts[0], texts[2], ["comment"], random.Random(seed)) for seed in range(6)]
    if side == "yours":
        found = [outcome(texts[0], texts[1], ["comment"], random.Random(seed)) for seed in range(6)]
        assert not any(result.startswith("conflict") for result in found)
    else:
        assert all("drops" in result for result in found), found


def test_the_working_file_stays_in_a_conflict_and_the_resolution_is_taken(package: Path, releases: Releases) -> None:
    path = package / "modeling_tiny.py"
    mine = edit(path, "attention_dropout = 0.0", "attention_dropout = 0.5")
    init = edit(package / "__init__.py", "rewritten from transformers 6.0.0", "mine")
    before = {file: file.read_bytes() for file in package.rglob("*") if file.is_file()}
    tree = releases("6.1.0", UPSTREAM[0])
    conflict = rewrite("sync", package, "--transformers", tree)
    assert conflict.code == 1
    copies = [package / f"{name}.conflict" for name in ("modeling_tiny.py", "__init__.py")]
    for copy in copies:
        assert f"--resolved {copy}" in conflict.out
    assert {file: file.read_bytes() for file in before} == before
    assert (path.read_text(), (package / "__init__.py").read_text()) == (mine, init)
    checked = rewrite("check", package, "--transformers", tree, "--format", "json")
    assert '"kind": "conflict"' in checked.out
    assert rewrite("sync", package, "--transformers", tree, "--resolved", copies[0]).code == 2  # markers
    copies[0].write_text(mine.replace("= 0.5", "= 0.6"))
    copies[1].write_text(init)
    resolved = [part for copy in copies for part in ("--resolved", copy)]
    assert rewrite("sync", package, "--transformers", tree, *resolved).code == 0
    assert "attention_dropout = 0.6" in path.read_text()
    assert not any(copy.exists() for copy in copies)
    assert rewrite("check", package, "--transformers", tree).code == 0


def test_markers_in_the_working_file_stop_a_sync(package: Path, releases: Releases) -> None:
    path = package / "modeling_tiny.py"
    edit(path, "class TinyLlamaMLP", "<<<<<<< mine\n=======\n>>>>>>> theirs\nclass TinyLlamaMLP")
    done = rewrite("sync", package, "--transformers", releases("6.1.0", UPSTREAM[0]))
    assert (done.code, "still has conflict markers" in done.err) == (2, True)
    checked = rewrite("check", package, "--transformers", releases("6.0.0"), "--format", "github")
    line = path.read_text().split("\n").index("<<<<<<< mine") + 1
    assert f"line={line}," in checked.out


def test_a_syntax_error_of_the_user_stops_a_sync(package: Path, releases: Releases) -> None:
    edit(package / "modeling_tiny.py", "class TinyLlamaMLP(nn.Module):", "class TinyLlamaMLP(nn.Module:")
    done = rewrite("sync", package, "--transformers", releases("6.1.0", UPSTREAM[0]))
    assert (done.code, "does not parse as Python" in done.err) == (2, True)


@pytest.mark.parametrize("damage", ["edited", "missing", "swapped"])
def test_a_merge_never_starts_from_a_text_that_was_not_generated(
    package: Path, releases: Releases, damage: str
) -> None:
    path, kept = package / "modeling_tiny.py", package / ".rewrite" / "texts.zip"
    texts = {name: zipfile.ZipFile(kept).read(name) for name in zipfile.ZipFile(kept).namelist()}
    mine = edit(path, "class TinyLlamaMLP", "# mine\nclass TinyLlamaMLP")
    if damage == "swapped":
        kept.write_bytes(archive({**texts, path.name: mine.encode()}))  # the edit would look like ours, and be dropped
    elif damage == "edited":
        changed = texts[path.name].replace(b"attention_dropout", b"dropout")
        kept.write_bytes(archive({**texts, path.name: changed}))
    else:
        kept.unlink()
    done = rewrite("sync", package, "--transformers", releases("6.1.0", UPSTREAM[0]))
    assert (done.code, "cannot be told from the generated text" in done.err) == (2, True)
    assert path.read_text() == mine
    assert rewrite("sync", package, "--transformers", releases("6.0.0")).code == 0  # the same text can be made anew
    assert path.read_text() == mine
    assert zipfile.ZipFile(kept).read(path.name) == texts[path.name]
