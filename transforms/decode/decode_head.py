"""The product with the vocabulary is one that knows about few rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import libcst as cst

from rewrite.analysis.blocks.terms import LINEAR
from rewrite.analysis.effects import effects_of
from rewrite.analysis.tree.module import ClassInfo, Module, names_in, self_assignments, self_attribute, walk
from rewrite.analysis.tree.nodes import called_attribute, calls_in, expression
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Stage, Transform


class DecodeHead(Transform):
    """Compute the logits of few rows at the speed of memory.

    What it does:
        `self.lm_head(hidden_states)` becomes `linear(hidden_states, self.lm_head)` in models that generate.

    Why:
        The head is the largest weight of a small model, and a general product reads it too slowly for one row.

    What it needs:
        The head is a plain `nn.Linear` built with the config's vocabulary, called with one argument.

    Numerics:
        Reordered: the same sums for one to a few rows, which another kernel may take in another order.

    Known limits:
        Heads of several layers stay.
    """

    name = "decode_head"
    summary = "The product with the vocabulary reads its weight at the speed of memory for few rows."
    numerics = Numerics.REORDERED
    stage = Stage.STEP
    reasons: ClassVar[Mapping[str, str]] = {
        "not_linear": "the head is not built as a plain nn.Linear",
        "other_call": "the head is called with other arguments, or its weight is multiplied without it",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every use of something made for the vocabulary, in the `forward` of a model that generates."""
        for info in module.classes.values():
            if not {"forward", "__init__"} <= {*info.methods} or not _generates(info, module):
                continue
            for call in calls_in(info.methods["forward"].body):
                attribute = called_attribute(call)
                if attribute is not None and _is_head(info, attribute, module):
                    yield Candidate(call, f"{info.name}.forward", attribute)
                elif (read := _weight_read(call)) is not None and _is_head(info, read, module):
                    yield Candidate(call, f"{info.name}.forward", f"{read}.weight")

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Replace the call."""
        owner = module.classes[candidate.where.split(".")[0]]
        forward = owner.methods["forward"]
        call = next(call for call in calls_in(forward.body) if call is candidate.node)
        argument = _input(call) if called_attribute(call) is not None else None
        if argument is None:
            return Skip("other_call", module.code(call)[:80])
        if not _is_linear(owner, candidate.label, module):
            return Skip("not_linear", candidate.label)
        fused = expression(f"linear({module.code(argument)}, self.{candidate.label})")
        return Found((Edit(call, (fused,)),), ("linear",))


def _generates(info: ClassInfo, module: Module) -> bool:
    bases = {base.rsplit(".", 1)[-1] for owner in effects_of(module).names.owners(info) for base in owner.bases}
    return any(base == "GraphGeneration" or base.endswith("GenerationMixin") for base in bases)


def _is_head(info: ClassInfo, attribute: str, module: Module) -> bool:
    """Whether an attribute is made for the vocabulary, and is no table of embeddings."""
    calls = [call for value in module.assignments(info, attribute) for call in calls_in(value)]
    made = [call for call in calls if not module.qualified(call.func).endswith("Embedding")]
    return any("vocab" in name for name in names_in(argument for call in made for argument in call.args))


def _input(call: cst.Call) -> cst.BaseExpression | None:
    """Return the one argument of a call of `nn.Linear`, by position or by name."""
    if len(call.args) != 1 or call.args[0].star:
        return None
    word = call.args[0].keyword
    return call.args[0].value if word is None or word.value == "input" else None


_ASKED = {"dtype", "device", "shape", "ndim", "requires_grad"}


def _weight_read(call: cst.Call) -> str | None:
    """Return `x` of a call that is given `self.x.weight`, or what is made of it; its dtype has none of its numbers."""
    for argument in call.args:
        asked = [n.value for n in walk(argument.value) if isinstance(n, cst.Attribute) and n.attr.value in _ASKED]
        for node in walk(argument.value):
            if isinstance(node, cst.Attribute) and node.attr.value == "weight" and not any(node is a for a in asked):
                if (attribute := self_attribute(node.value)) is not None:
                    return attribute
    return None


def _is_linear(info: ClassInfo, attribute: str, module: Module) -> bool:
    """Whether `__init__` makes the head a plain one; `set_output_embeddings` may put in another of its kind."""
    names = effects_of(module).names
    if not names.means(info.name) or names.why_strange(info):
        return False
    values = [value for name, value in self_assignments(info.methods["__init__"]) if name == attribute]
    return bool(values) and all(isinstance(v, cst.Call) and names.resolved(v.func) in LINEAR for v in values)
