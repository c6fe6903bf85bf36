"""The down projection of a gated MLP keeps no activation for its gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import libcst as cst

from rewrite.analysis.blocks.terms import LINEAR
from rewrite.analysis.effects import effects_of
from rewrite.analysis.patterns.as_written import is_runtime_name, why_replaced
from rewrite.analysis.projections.linear_calls import only_argument
from rewrite.analysis.tree.module import Module
from rewrite.analysis.tree.nodes import called_attribute, calls_in
from rewrite.analysis.tree.replacement import with_call
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Transform

GATED, PRODUCT = "gated_activation", "gated_product"


class SpareActivation(Transform):
    """Compute `act(gate) * up` again in the backward, and do not keep it. Runs on request only.

    What it does:
        `self.down_proj(gated_activation(gate, up, self.act_fn))`, which fuse_gated_activation wrote, becomes
        `gated_product(gate, up, self.act_fn, self.down_proj)`.

    Why:
        A training step keeps the product beside gate and up, from which one pass over memory makes it. It is a quarter
        of what a layer keeps: 2 GiB for 8,192 tokens of a model of 1 G.

    What it needs:
        The projection is built as a plain `nn.Linear` and is called with the product alone.

    Numerics:
        Exact: the same product, rounded in the same way, twice.

    Known limits:
        Takes effect where gradients are made by kernels, on a GPU and not compiled; an adapter, a hook or a sharded
        weight takes the two calls.
    """

    name: ClassVar[str] = "spare_activation"
    summary: ClassVar[str] = "The down projection of a gated MLP keeps no activation for its gradients."
    numerics: ClassVar[Numerics] = Numerics.EXACT
    # route_gemm and fp8, where they are asked for, come before it by their names: what they rewrite, it leaves alone
    on_request: ClassVar[bool] = True
    after: ClassVar[tuple[str, ...]] = ("decode_layers", "fuse_gated_activation", "static_cache")
    reasons: ClassVar[Mapping[str, str]] = {
        "not_linear": "the projection is not built as a plain nn.Linear",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every call of an attribute with nothing but a gated activation."""
        for owner, name, method in module.methods():
            for call in calls_in(method.body):
                attribute = called_attribute(call)
                argument = only_argument(call) if attribute is not None else None
                if attribute is not None and isinstance(argument, cst.Call) and _is_gated(argument, module):
                    yield Candidate(call, f"{owner.name}.{name}", attribute)

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Check the projection, and join the calls."""
        owner, name = candidate.where.split(".")
        call = candidate.node
        assert isinstance(call, cst.Call)
        inner = only_argument(call)
        assert isinstance(inner, cst.Call)
        values = module.assignments(module.classes[owner], candidate.label)
        names = effects_of(module).names
        plain = all(isinstance(v, cst.Call) and names.resolved(v.func) in LINEAR for v in values)
        if not values or not plain or candidate.label in names.tampered:
            return Skip("not_linear", candidate.label)
        info, method = module.classes[owner], module.classes[owner].methods[name]
        factors = [argument.value for argument in inner.args]
        if why := why_replaced(candidate.label, factors, info, effects_of(module).scope(method, info)):
            return Skip("not_linear", why)
        given = [module.code(a.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for a in inner.args]
        old, new = with_call(call, PRODUCT, [*given, f"self.{candidate.label}"], module)
        return Found((Edit(old, (new,)),), (PRODUCT,))


def _is_gated(call: cst.Call, module: Module) -> bool:
    """Whether this is `gated_activation(x, y, z)`, the runtime's."""
    named = isinstance(call.func, cst.Name) and call.func.value == GATED and is_runtime_name(GATED, module)
    return named and len(call.args) == 3 and all(a.keyword is None and not a.star for a in call.args)
