"""The product with the vocabulary is one that knows about few rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import libcst as cst

from rewrite.analysis.step.terms import LINEAR
from rewrite.analysis.syntax.module import ClassInfo, Module, names_in, self_assignments
from rewrite.analysis.syntax.nodes import called_attribute, calls_in, expression, single_argument
from rewrite.analysis.syntax.replacement import name_is_free
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
        "other_call": "the head is called with other arguments",
        "name_taken": "the file has a name `linear` of its own",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every call of something made for the vocabulary, in the `forward` of a model that generates."""
        for info in module.classes.values():
            if not {"forward", "__init__"} <= {*info.methods} or not _generates(info):
                continue
            for call in calls_in(info.methods["forward"].body):
                attribute = called_attribute(call)
                if attribute is not None and _is_head(info, attribute, module):
                    yield Candidate(call, f"{info.name}.forward", attribute)

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Replace the call."""
        owner = module.classes[candidate.where.split(".")[0]]
        forward = owner.methods["forward"]
        call = next(call for call in calls_in(forward.body) if call is candidate.node)
        argument = single_argument(call)
        if argument is None:
            return Skip("other_call")
        if not _is_linear(owner, candidate.label, module):
            return Skip("not_linear")
        if not name_is_free("linear", module, forward):
            return Skip("name_taken")
        fused = expression(f"linear({module.code(argument)}, self.{candidate.label})")
        return Found((Edit(call, (fused,)),), ("products.linear",))


def _generates(info: ClassInfo) -> bool:
    return any(base.rsplit(".", 1)[-1] in ("GenerationMixin", "GraphGeneration") for base in info.bases)


def _is_head(info: ClassInfo, attribute: str, module: Module) -> bool:
    values = module.assignments(info, attribute)
    heads = [v for v in values if any(module.qualified(c.func).endswith("Linear") for c in calls_in(v))]
    return bool(heads) and any("vocab_size" in name for name in names_in(heads))


def _is_linear(info: ClassInfo, attribute: str, module: Module) -> bool:
    """Whether `__init__` makes the head a plain one; `set_output_embeddings` may put in another of its kind."""
    values = [value for name, value in self_assignments(info.methods["__init__"]) if name == attribute]
    return bool(values) and all(isinstance(v, cst.Call) and module.qualified(v.func) in LINEAR for v in values)
