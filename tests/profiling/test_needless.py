"""Compute that need not happen is found where it was planted, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import planted_model
import pytest
import torch

from rewrite.redundant.finding import Finding
from rewrite.redundant.redundancy_search import called_often
from rewrite.redundant.redundant_ops import findings
from rewrite.redundant.repeated import repeated
from rewrite.redundant.watch import Watcher, _digest

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
        return findings(*called_often(watcher, model, [inputs(seed) for seed in range(3)]))


def inputs(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(64, (3, 8), generator=generator)
    return {"input_ids": ids, "image": torch.randn(9, 16, generator=generator)}


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
        assert ("same bits" if each.kind == "repeated" else "3 calls") in each.proof


def test_what_a_call_returns_or_keeps_is_read() -> None:
    class Keeps(planted_model.Unread):
        kept: torch.Tensor

    model = planted_model.Planted().eval()
    for name in ("unread",):
        assert name in {each.kind for each in found_in(model)}
    inner = model.parts[2]
    assert isinstance(inner, planted_model.Unread)
    inner.unused.register_forward_hook(lambda module, given, out: setattr(module, "last", out))
    assert "unread" not in {each.kind for each in found_in(model)}


def test_what_repeats_names_the_argument_that_has_to_stay(found: list[Finding]) -> None:
    (part,) = [each for each in found if each.kind == "repeated"]
    assert part.text.startswith(f"line {part.line}, forward: if image stays the same, 1 operator need not run again")
    assert part.operators == 1
    assert part.bytes == 4 * (9 * 16 + 16 * 64 + 64 + 9 * 64)
    assert "with other input_ids" in part.proof


class Stateful(planted_model.Repeated):
    """What nothing but the bits can tell: the model's own state decides on the result."""

    def forward(self, hidden: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden, image * self.turns)


def repeated_in(part: torch.nn.Module, **kept: torch.Tensor) -> list[Finding]:
    model = planted_model.Planted().eval()
    model.repeated = part
    watcher = Watcher(model, str(FILE))
    with torch.no_grad():
        calls, _ = called_often(watcher, model, [inputs(seed) | kept for seed in range(2)])
    return list(repeated(calls[0], calls[1:]))


def test_what_a_model_keeps_is_no_argument_that_stays() -> None:
    image = inputs(0)["image"]
    assert repeated_in(planted_model.Repeated(16), image=image)
    assert not repeated_in(Stateful(16), image=image)


def test_nothing_repeats_where_nothing_stays_or_nothing_changes() -> None:
    assert not repeated_in(planted_model.Repeated(16))
    assert not repeated_in(planted_model.Repeated(16), **inputs(0))


def test_equal_bits_in_any_layout_are_the_same() -> None:
    number = torch.ones(4)[::3][:1]
    assert number.stride() == (3,)
    digests = {_digest([each]) for each in (number, torch.ones(1), torch.ones(4, 1)[:1, 0])}
    assert len(digests) == 1
    assert _digest([-number]) not in digests
    assert _digest([torch.zeros(1)]) != _digest([-torch.zeros(1)])
    assert _digest([torch.empty(0)]) != _digest([torch.empty(0, 1)])
