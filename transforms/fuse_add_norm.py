"""A residual add and the norm that reads the sum become one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import libcst as cst

from rewrite.analysis.sites.norms import runtime_norm
from rewrite.analysis.sites.pairing import fused_statements
from rewrite.analysis.sites.residual import Pair, is_fused, norm_classes, pairs
from rewrite.analysis.syntax.module import ClassInfo, Module
from rewrite.analysis.syntax.nodes import expression
from rewrite.analysis.syntax.replacement import call_statement, name_is_free
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Transform

_KERNEL = "add_rms_norm"


class FuseAddNorm(Transform):
    """Add the residual and normalise the sum in one kernel.

    What it does:
        Turns `hidden_states = residual + hidden_states`, `residual = hidden_states` and
        `hidden_states = self.norm(hidden_states)` into one statement that calls `add_norm`, and
        `self.norm(hidden_states + residual)` into `add_norm(…)[0]`. Norm classes of the file get a
        method `add_forward`.

    Why:
        The norm reads the sum that the add has just written; one kernel keeps it in registers.

    What it needs:
        A sum of two tensors and, in the same block with nothing but copies of the name in between, the call of a norm
        that is `nn.LayerNorm` or a class of the file that `fuse_rms_norm` has rewritten.

    Numerics:
        The sum is rounded as the add rounds it, before the norm reads it.

    Known limits:
        An add whose sum another module normalises (the last one of a decoder layer) stays: hooks and recorded hidden
        states see it. In-place adds stay, because other names of the tensor would see the sum.
    """

    name = "fuse_add_norm"
    summary = "A residual add and the norm that follows it become one kernel."
    numerics = Numerics.REORDERED
    after = ("fuse_layer_norm", "fuse_rms_norm")
    reasons: ClassVar[Mapping[str, str]] = {
        "norm_not_fused": "the norm is a class whose computation the runtime does not offer together with an add",
        "unknown_norm": "the attribute may hold something that is no norm",
        "conditional": "the norm is computed under a condition or more than once, the sum is not",
        "statement_between": "a statement other than a copy of the sum stands between the two",
        "in_place": "the add writes into a tensor that other names may share",
        "name_taken": "the file has a name of its own that the new code would call",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every call of a norm that reads a sum of two tensors."""
        for info, name, function in module.methods():
            for pair in pairs(info, function, module):
                yield Candidate(pair.call, f"{info.name}.{name}", pair.norm)

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Check the norm and the statements between, then build the call."""
        owner, method = candidate.where.split(".")
        info = module.classes[owner]
        pair = next(p for p in pairs(info, info.methods[method], module) if p.call is candidate.node)
        classes = norm_classes(info, pair.norm, module)
        if any(name is None for name in classes):
            return Skip("unknown_norm")
        norms = sorted({name for name in classes if name is not None})
        if not all(is_fused(name, module) for name in norms):
            return Skip("norm_not_fused")
        if (reason := _refusal(pair, module)) is not None:
            return Skip(reason)
        edits, uses = _add_forward([module.classes[name] for name in norms if name in module.classes], module)
        if edits is None:
            return Skip("name_taken")
        return Found((*edits, *_edits(pair, module)), ("norms.add_norm", *uses))


def _refusal(pair: Pair, module: Module) -> str | None:
    if not name_is_free("add_norm", module, pair.function):
        return "name_taken"
    if not pair.total:
        return None
    if not pair.same_block or not isinstance(pair.line, cst.SimpleStatementLine) or _is_conditional(pair, module):
        return "conditional"
    if len(pair.copies) < len(pair.between) or len(pair.line.body) != 1:
        return "statement_between"
    return "in_place" if pair.in_place else None


def _is_conditional(pair: Pair, module: Module) -> bool:
    """Whether the norm's call is part of an expression that may not be evaluated, or several times."""
    lazy = (cst.IfExp, cst.BooleanOperation, cst.Lambda, cst.BaseComp)
    for above in module.ancestors(pair.call):
        if above is pair.line:
            return False
        if isinstance(above, lazy):
            return True
    return False


def _edits(pair: Pair, module: Module) -> list[Edit]:
    if pair.assignment is None:
        sides = [module.code(_bare(side)) for side in (pair.add.left, pair.add.right)]
        return [Edit(pair.call, (expression(f"add_norm({', '.join(sides)}, self.{pair.norm})[0]"),))]
    new = fused_statements(pair, module)
    return [Edit(pair.assignment, new), *(Edit(s, ()) for s in (*pair.between, pair.line))]


def _add_forward(classes: list[ClassInfo], module: Module) -> tuple[list[Edit] | None, list[str]]:
    """Return the edits that give norm classes a method `add_forward`, or None where a name is taken."""
    edits: list[Edit] = []
    uses: list[str] = []
    for info in classes:
        found = runtime_norm(info, module)
        if found is None:
            raise ValueError(f"{info.name} calls no runtime norm")
        forward, call = found
        existing = module.method(info, "add_forward")
        if existing is not None and _KERNEL in module.code(existing):
            continue
        if existing is not None or not name_is_free(_KERNEL, module):
            return None, []
        edits.append(Edit(forward, (forward, _method(call.arguments, module))))
        uses.append(f"norms.{_KERNEL}")
    return edits, uses


def _method(arguments: tuple[str, ...], module: Module) -> cst.FunctionDef:
    call = call_statement("return ", _KERNEL, ["hidden_states", "residual", *arguments], module)
    lines = cst.Module([call]).code.rstrip("\n").replace("\n", "\n    ")
    text = (
        "def add_forward(self, hidden_states, residual):\n"
        '    """Returns the norm of `residual + hidden_states` and that sum."""\n'
        f"    {lines}\n"
    )
    method = cst.parse_statement(text, config=module.tree.config_for_parsing)
    if not isinstance(method, cst.FunctionDef):
        raise TypeError("not a function")
    return method.with_changes(leading_lines=[cst.EmptyLine(indent=False)])


def _bare(node: cst.BaseExpression) -> cst.BaseExpression:
    return node.with_changes(lpar=[], rpar=[])
