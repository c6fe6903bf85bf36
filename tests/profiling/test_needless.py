"""Compute that need not happen is found where it was planted, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import planted_model
import pytest
import torch

from rewrite.profile.looking import called
from rewrite.profile.needless import Finding, findings
from rewrite.profile.watch import Watcher

FILE = Path(planted_model.__file__)
PLANTED = {
    (number, kind)
    for number, line in enumerate(FILE.read_text(encoding="utf-8").splitlines(), 1)
    if "# planted: " in line
    for kind in line.split("# planted: ")[1].strip().split(", ")
}


def found_in(model: torch.nn.Module) -> list[Finding]:
    watcher = Watcher(model, str(FILE))
    with torch.no_grad():
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            called(watcher, model, {"input_ids": torch.randint(64, (3, 8), generator=generator)})
    return findings(watcher.calls)


@pytest.fixture(scope="module")
def found() -> list[Finding]:
    torch.manual_seed(0)
    return found_in(planted_model.Planted().eval())


def test_everything_planted_is_found_and_nothing_else(found: list[Finding]) -> None:
    assert {(each.line, each.kind) for each in found} == PLANTED


def test_a_finding_says_where_how_much_and_why(found: list[Finding]) -> None:
    for each in found:
        assert f"line {each.line}" in each.text
        assert each.bytes > 0
        assert each.operators > 0
        assert "3 calls" in each.proof


def test_the_loop_counts_its_turns(found: list[Finding]) -> None:
    (loop,) = [each for each in found if each.kind == "loop"]
    assert "3 turns" in loop.text
    assert loop.module == "parts.*"


def test_what_a_call_returns_or_keeps_is_read() -> None:
    class Keeps(planted_model.Unread):
        kept: torch.Tensor

    model = planted_model.Planted().eval()
    for name in ("unread",):
        assert name in {each.kind for each in found_in(model)}
    inner = model.parts[4]
    assert isinstance(inner, planted_model.Unread)
    inner.unused.register_forward_hook(lambda module, given, out: setattr(module, "last", out))
    assert "unread" not in {each.kind for each in found_in(model)}
