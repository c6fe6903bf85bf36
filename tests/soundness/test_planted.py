"""The harness sees a wrong rewriting: each of these transforms is wrong in one way, and found out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import libcst as cst
import pytest

from rewrite.analysis.tree.module import Module, walk
from rewrite.analysis.tree.nodes import expression
from rewrite.measure.runtime_part import runtime_part
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Transform
from soundness.case import cases, read_case
from soundness.compare import all_transforms, examine
from soundness.observe import PACKAGE, package


class Planted(Transform):
    """Replaces one piece of source by another that means something else."""

    summary = "Wrong on purpose."
    numerics = Numerics.EXACT
    reasons: ClassVar[dict[str, str]] = {}

    def __init__(self, old: str, new: str):
        self.name = f"plant_{new}"
        self.old, self.new = old, new

    def candidates(self, module: Module) -> Iterable[Candidate]:
        if self.new in module.tree.code:  # what was written may hold what is looked for
            return ()
        found = (node for node in walk(module.tree) if isinstance(node, cst.BaseExpression))
        return [Candidate(node, "Subject.forward") for node in found if module.code(node) == self.old]

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        return Found((Edit(candidate.node, (expression(self.new),)),))


BODY = """
q = self.q_proj(x)
y.mul_(2)
self.calls.append(1)
self.drop(y)
k = self.k_proj(x)
return q, k, y.add(1)

-- init
self.calls = []
self.drop = nn.Dropout(0.5)
"""
WRONG = {
    "swapped outputs": ("q, k, y.add(1)", "k, q, y.add(1)"),
    "a write left out": ("y.mul_(2)", "y.mul(2)"),
    "a write of an input": ("y.add(1)", "y.add_(1)"),
    "other strides": ("self.q_proj(x)", "self.q_proj(x).mT.contiguous().mT"),
    "a weight that changes": ("self.k_proj(x)", "self.k_proj.requires_grad_(False)(x)"),
    "a weight of another value": ("self.k_proj(x)", "(self.k_proj(x), self.k_proj.bias.data.add_(1))[0]"),
    "a call left out": ("self.calls.append(1)", "len(self.calls)"),
    "a detached result": ("self.q_proj(x)", "self.q_proj(x.detach())"),
    "another error": ("y.add(1)", "y.no_such_method(1)"),
    "another type of container": ("q, k, y.add(1)", "[q, k, y.add(1)]"),
    "a result that is the input": ("y.add(1)", "(y.add(1), y)[1]"),
    "random numbers drawn once more": ("y.add(1)", "y.add(1 + 0 * torch.rand(()))"),
    "another dtype": ("y.add(1)", "y.add(1).float()"),
    "a module registered": ("y.add(1)", "(y.add(1), self.add_module('extra', nn.Linear(2, 2)))[0]"),
    "only in training": ("y.add(1)", "y.add(2 if self.training else 1)"),
    "only for the odd batch": ("y.add(1)", "y.add(2 if len(y) == 3 else 1)"),
    "only in the second call": ("y.add(1)", "y.add(2 if len(self.calls) == 2 else 1)"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rewriting_is_seen(wrong: str) -> None:
    case = read_case("planted", "projections.body", f"layout: yes\n{BODY}")
    assert examine(case, [Planted(*WRONG[wrong])]).difference


def test_a_right_rewriting_is_none() -> None:
    case = read_case("planted", "projections.body", f"layout: yes\n{BODY}")
    verdict = examine(case, [Planted("y.add(1)", "1 + y")])
    assert verdict.sites
    assert not verdict.difference


UNGUARDED = {
    "carried/carried.in_a_dictionary": ("validator", "Validator", "_look_for_changes"),
    "carried/carried.in_an_object": ("validator", "Validator", "_look_for_changes"),
    "carried/carried.counts_its_calls": ("validator", "Validator", "_look_for_changes"),
    "carried/carried.written_by_the_model": ("validator", "Validator", "_look_for_changes"),
    "carried/carried.never_forgotten_in_a_dictionary": ("side_effects", "Before", "put_back"),
    "carried/carried.never_forgotten_in_place_of_a_buffer": ("side_effects", "Before", "put_back"),
    "carried/carried.read_of_the_prompt": ("side_effects", "Kept", "is_read"),
    "carried/carried.read_of_the_length_of_the_prompt": ("side_effects", "Kept", "is_read"),
    "carried/carried.harmless": ("recurrent_state", "CarriedStates", "advance"),
    "carried/handed.harmless": ("recurrent_state", "CarriedStates", "advance"),
    "carried/handed.by_the_class_in_another_form": ("eligibility", "", "are_handed_on"),
}
"""What stands between a text and a wrong answer, and is taken away here."""


@pytest.mark.parametrize("name", UNGUARDED)
def test_a_state_that_nobody_looks_after_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is told again without the model's Python (`told_again`): else it would do what it did."""
    package()
    file, owner, guard = UNGUARDED[name]
    decode = runtime_part(PACKAGE, f"decode/{file}")
    answers = {"is_read": False, "are_handed_on": True}
    monkeypatch.setattr(getattr(decode, owner) if owner else decode, guard, lambda *given: answers.get(guard))
    case = next(case for case in cases() if case.name == name)
    case = replace(case, run="talk(module, model, *inputs, rewritten, any_reason=True)")
    assert examine(case, all_transforms(case.transforms)).difference
