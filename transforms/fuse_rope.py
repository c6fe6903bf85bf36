"""Functions that apply a rotary embedding call one kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import libcst as cst

from rewrite.analysis.sites.rope import Rotation, rotations, same_rotation
from rewrite.analysis.syntax.module import Module, walk
from rewrite.analysis.syntax.nodes import calls_in, parameters
from rewrite.analysis.syntax.replacement import call_statement, name_is_free, returning
from rewrite.analysis.terms.computation import NotComputable, body
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Transform


class FuseRope(Transform):
    """Rotate queries and keys in one kernel.

    What it does:
        Replaces the body of a function that applies a rotary embedding by one call of `rotary`, or of `rotary_single`
        where it takes one tensor. Name, signature, decorators and docstring stay, and so does every call of it.

    Why:
        PyTorch runs the two rotations as ten kernels that read and write queries and keys several times.

    What it needs:
        A module-level function that returns `x * cos + rotate(x) * sin` for one or two tensors, with the tables
        unsqueezed at one dimension. Both functions of the pair are compared by what they compute: halves (Llama),
        neighbours (Cohere, GLM, GPT-J), neighbours written apart (DeepSeek-V3), tables of one column a pair (gpt-oss),
        a rotated first part (GPT-NeoX), in the tensors' dtype, in fp32, or rounded back to it.

    Numerics:
        Products and sum are rounded where the original rounds them; in fp32 a product and the sum may be one
        operation.

    Known limits:
        Tables that are broadcast without an unsqueeze, complex tables, rotations with the opposite sign and rotated
        last parts stay. Where both results are rounded to the dtype of the queries, keys keep their own.
    """

    name = "fuse_rope"
    summary = "Rotary embeddings turn queries and keys in one kernel."
    numerics = Numerics.REORDERED
    reasons: ClassVar[Mapping[str, str]] = {
        "control_flow": "the body has a statement that the fused rotation has no place for",
        "other_computation": "the body is none of the rotations that `rotary` offers",
        "two_ways": "queries and keys are turned in two ways",
        "name_taken": "the file has a name `rotary` of its own",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every function that something calls and that takes tables of cosines and sines besides a tensor."""
        for name, function in module.functions.items():
            names = parameters(function)
            tables = [part for part in ("cos", "sin") if any(part in parameter for parameter in names)]
            if len(tables) < 2 or len(names) < 3 or not _multiplies(function, module):
                continue
            if module.references.get(name, 0) > 0:
                yield Candidate(function, name)

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Compare what the function returns with the operator's forms."""
        function = module.functions[candidate.where]
        try:
            found = rotations(body(function, module))
        except NotComputable as error:
            return Skip("control_flow", error.what)
        if found is None:
            return Skip("other_computation")
        if len(found) == 2 and not same_rotation(*found):
            return Skip("two_ways")
        if len(found) == 1 and found[0].other:
            return Skip("other_computation")
        name = "rotary" if len(found) == 2 else "rotary_single"
        if not name_is_free(name, module, function):
            return Skip("name_taken")
        call = call_statement("return ", name, _arguments(found), module, indent=4)
        return Found((Edit(function, (returning(function, call),)),), (f"attention.{name}",))


def _multiplies(function: cst.FunctionDef, module: Module) -> bool:
    """Whether the function has a product, or calls a function of the file, which may have it."""
    if any(isinstance(node, cst.Multiply) for node in walk(function.body)):
        return True
    return any(isinstance(call.func, cst.Name) and call.func.value in module.functions for call in calls_in(function))


def _arguments(found: list[Rotation]) -> list[str]:
    return [*(rotation.tensor for rotation in found), *found[0].tables, *found[0].options]
