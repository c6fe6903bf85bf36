"""A residual add and the norm that reads the sum become one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

import libcst as cst

from rewrite.analysis.effects import Scope, before, effects_of, union, why_not_move
from rewrite.analysis.patterns.as_written import is_set_once
from rewrite.analysis.patterns.pairing import fused
from rewrite.analysis.patterns.residual import Pair, is_fused, norm_classes, pairs
from rewrite.analysis.tree.module import ClassInfo, Module, walk
from rewrite.transform import Candidate, Found, Numerics, Skip, Transform


class FuseAddNorm(Transform):
    """Add the residual and normalise the sum in one kernel.

    What it does:
        Turns `hidden_states = residual + hidden_states`, `residual = hidden_states` and
        `hidden_states = self.norm(hidden_states)` into one statement that calls `add_norm`, and
        `self.norm(hidden_states + residual)` into `add_norm(…)[0]`.

    Why:
        The norm reads the sum that the add has just written; one kernel keeps it in registers.

    What it needs:
        A sum of two tensors and, in the same block with nothing but copies of the name in between, the call of a norm
        that is `nn.LayerNorm`, `nn.RMSNorm` or a class of the file that `fuse_rms_norm` has rewritten, or one of these
        as a local or a table of the file has it for each configuration.

    Numerics:
        The sum is rounded as the add rounds it, before the norm reads it.

    Known limits:
        An add whose sum another module normalises (the last one of a decoder layer) stays: hooks and recorded hidden
        states see it. In-place adds stay, because other names of the tensor would see the sum. Norms and sums that
        decode_layers hands on to the blocks of a layer are left to those.
    """

    name = "fuse_add_norm"
    summary = "A residual add and the norm that follows it become one kernel."
    numerics = Numerics.REORDERED
    after = ("decode_layers", "fuse_layer_norm", "fuse_rms_norm")
    reasons: ClassVar[Mapping[str, str]] = {
        "norm_not_fused": "the norm is a class whose computation the runtime does not offer together with an add",
        "unknown_norm": "what is called may be something else than one norm of the sum",
        "conditional": "the norm is computed under a condition or more than once, the sum is not",
        "order": "it is not proven that the norm may be computed right after the sum, in the order of the new call",
        "in_place": "the add writes into a tensor that other names may share",
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
        if pair.reason == "unknown_norm":
            return Skip(pair.reason, pair.detail)
        if not classes or any(name is None for name in classes):
            return Skip("unknown_norm", f"self.{pair.norm} may hold something that is no norm known here")
        norms = sorted({name for name in classes if name is not None})
        if not all(is_fused(name, module) for name in norms):
            return Skip("norm_not_fused", ", ".join(name for name in norms if not is_fused(name, module)))
        if (refused := _refusal(pair, info, module)) is not None:
            return refused
        return Found(tuple(fused(pair, module)), ("add_norm",))


def _refusal(pair: Pair, info: ClassInfo, module: Module) -> Skip | None:
    if pair.reason:
        return Skip(pair.reason, pair.detail)
    scope = effects_of(module).scope(pair.function, info)
    if scope.unknown:
        return Skip("order", scope.unknown)
    sides = scope.of(pair.add.left) | scope.of(pair.add.right)
    if not pair.total:
        if (sides.anything or sides.stores) and not is_set_once(pair.norm, info, module):
            return Skip("order", f"self.{pair.norm} may change while the sum is evaluated")
        return None
    if not isinstance(pair.line, cst.SimpleStatementLine) or _is_conditional(pair, module):
        return Skip("conditional", "the call of the norm may not be evaluated, or several times")
    if (around := _may_catch(pair, module)) is not None:
        return Skip("order", f"`{around}` around it would see other locals where the norm fails")
    why = _why_not_before(pair, scope)
    return Skip("order", why) if why is not None else None


def _why_not_before(pair: Pair, scope: Scope) -> str | None:
    """Return why the norm may not be computed right after the add, None if it may.

    Copies of the sum, and names and attributes that the norm's statement reads first, change nothing.
    """
    earlier = list(before(scope, pair.call, pair.line))
    if pair.only_copied and all(isinstance(n, _READS) for part in earlier for n in walk(part)):
        return None
    past = union(scope.of(part) for part in (*pair.between, *earlier))
    names = {pair.total, *pair.others, *pair.copies}
    return why_not_move(scope, scope.of(pair.call), replace(past, binds=past.binds - names))


_READS = (
    cst.Name, cst.Attribute, cst.Dot, cst.BaseNumber, cst.BaseString, cst.EmptyLine, cst.Newline, cst.Comment,
    cst.TrailingWhitespace, cst.BaseParenthesizableWhitespace,
)  # fmt: skip


def _may_catch(pair: Pair, module: Module) -> str | None:
    """Return the statement around the two that may go on after an exception, in words; None if there is none."""
    for above in module.ancestors(pair.line):
        if isinstance(above, (cst.Try, cst.TryStar)):
            return "try"
        if isinstance(above, cst.With):
            made = [item.item.func for item in above.items if isinstance(item.item, cst.Call)]
            names = [effects_of(module).names.resolved(function) for function in made]
            if len(made) < len(above.items) or not all(name.startswith("torch.") for name in names):
                return "with"
        if above is pair.function:
            return None
    return None


def _is_conditional(pair: Pair, module: Module) -> bool:
    """Whether the norm's call is part of an expression that may not be evaluated, or several times."""
    lazy = (cst.IfExp, cst.BooleanOperation, cst.Lambda, cst.BaseComp)
    for above in module.ancestors(pair.call):
        if above is pair.line:
            return False
        if isinstance(above, lazy):
            return True
    return False
