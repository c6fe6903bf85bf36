"""A package's whole life on one page: edit, upgrade, conflict, resolve, accept, export, eject. bench/walk.py is the
same with real releases of transformers, in an environment of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

from command_line import rewrite

from .conftest import Releases, edit
from .test_accept import MINE, Judge, judge  # noqa: F401  # a fixture

ORIGINAL = "self.scaling = self.head_dim**-0.5"
THEIRS = (ORIGINAL, "self.scaling = config.head_dim**-0.5")


def test_edit_upgrade_conflict_resolve_accept_export_eject(
    package: Path,
    releases: Releases,
    judge: Judge,  # noqa: F811
) -> None:
    old, new = releases("6.0.0"), releases("6.1.0", THEIRS)
    model = package / "modeling_tiny.py"
    edit(model, ORIGINAL, MINE)
    assert "unverified" in rewrite("check", package, "--transformers", old).out

    edited = model.read_bytes()
    conflict = rewrite("sync", package, "--transformers", new, "--no-verify")
    copy = package / "modeling_tiny.py.conflict"
    assert conflict.code == 1
    assert model.read_bytes() == edited
    text, count = re.subn(r"<<<<<<<.*?>>>>>>>[^\n]*\n", f"        {MINE}\n", copy.read_text(), flags=re.S)
    assert count == 1
    copy.write_text(text)
    assert rewrite("sync", package, "--transformers", new, "--resolved", copy).code == 0
    assert MINE in model.read_text()
    assert not copy.exists()

    assert "unverified" in rewrite("check", package, "--transformers", new).out
    original = new / "transformers" / "models" / "tiny" / "modeling_tiny.py"
    assert rewrite("accept", package, "--reason", "sharper attention", "--original", original).code == 0
    assert "up to date" in rewrite("check", package, "--transformers", new).out
    assert json.loads((package / "accepted.json").read_text())["reason"] == "sharper attention"

    assert rewrite("export", package, "--hub", "hub").code == 0
    assert MINE in (Path("hub") / model.name).read_text()
    assert rewrite("eject", package).code == 0
    assert not (package / "rewrite.lock").exists()
    assert MINE in model.read_text()
