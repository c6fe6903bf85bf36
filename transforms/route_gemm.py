"""A linear projection is computed by the library or kernel that is fastest for its size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import libcst as cst

from rewrite.analysis.blocks.terms import LINEAR
from rewrite.analysis.effects import effects_of
from rewrite.analysis.patterns.as_written import why_replaced
from rewrite.analysis.projections.linear_calls import only_argument
from rewrite.analysis.tree.module import ClassInfo, Module, self_assignments, self_attribute, without_runtime
from rewrite.analysis.tree.nodes import called_attribute, calls_in
from rewrite.analysis.tree.replacement import name_is_free, with_call
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Transform

OPERATOR = "routed_linear"
PACKED, ROUTED_PACKED = "packed_linear", "routed_packed_linear"


class RouteGemm(Transform):
    """Choose who computes a linear projection by the size of the product. Runs on request only.

    What it does:
        `self.o_proj(x)` becomes `routed_linear(x, self.o_proj)` in `forward`, for every attribute that `__init__`
        makes a plain `nn.Linear`; so does `linear(x, self.lm_head)` that decode_head wrote. A `packed_linear` that
        fuse_qkv or fuse_gate_up wrote becomes `routed_packed_linear`. The operators of decode_layers are told which of
        them computes their products: `linear(…, multiply=routed_linear)`.

    Why:
        No library is the fastest for all sizes. On AMD cards aiter, hipBLASLt and rocBLAS differ by shape, and for few
        rows a kernel that splits the columns beats a general product; `rewrite tune` measures which one to take.

    What it needs:
        The projection is called with one argument.

    Numerics:
        Reordered: the same sums, which each library takes in an order of its own. A path that takes no bias adds it
        after a rounding of its own.

    Known limits:
        Gradients, autocast, hooks, adapters and quantised layers take the original call, at run time and with the
        reason counted. Calls outside of `forward` stay. A call under torch.compile is opaque to the compiler, which
        then fuses nothing into the product.
    """

    name: ClassVar[str] = "route_gemm"
    summary: ClassVar[str] = "A linear projection is computed by the library or kernel that is fastest for its size."
    numerics: ClassVar[Numerics] = Numerics.REORDERED
    on_request: ClassVar[bool] = True
    after: ClassVar[tuple[str, ...]] = ("decode_head", "decode_layers", "fuse_gate_up", "fuse_qkv", "native_gqa")
    reasons: ClassVar[Mapping[str, str]] = {
        "not_linear": "the layer is not built as a plain nn.Linear",
        "other_call": "the projection is called with other arguments",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every call in a `forward` of something whose class is called linear, and every packed product."""
        for owner, name, method in module.methods():
            for call in calls_in(method.body):
                if without_runtime(module.qualified(call.func)) == PACKED and name_is_free(PACKED, module, method):
                    yield Candidate(call, f"{owner.name}.{name}", PACKED)
                elif name == "forward" and (operator := _told(call, module, method)):
                    yield Candidate(call, f"{owner.name}.{name}", operator)
            if name == "forward":
                for call, attribute in _projections(method):
                    if _may_be_linear(owner, attribute, module):
                        yield Candidate(call, f"{owner.name}.forward", attribute)

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Replace the call."""
        owner = module.classes[candidate.where.split(".")[0]]
        call = candidate.node
        assert isinstance(call, cst.Call)
        if candidate.label == PACKED:
            return _routed(call, module)
        if candidate.label in _MULTIPLY and isinstance(call.func, cst.Name):
            multiply = _MULTIPLY[candidate.label]
            keyword = cst.Arg(cst.Name(multiply), cst.Name("multiply"), equal=_EQUAL)
            args = [
                *call.args[:-1],
                call.args[-1].with_changes(comma=_comma(call)),
                keyword.with_changes(comma=call.args[-1].comma),
            ]
            return Found((Edit(call, (call.with_changes(args=args),)),), (multiply,))
        if candidate.label in effects_of(module).names.tampered or not _is_linear(owner, candidate.label, module):
            return Skip("not_linear", candidate.label)
        argument = only_argument(call) if called_attribute(call) else call.args[0].value
        if argument is None or isinstance(argument, cst.GeneratorExp):
            return Skip("other_call", candidate.label)
        scope = effects_of(module, plain_containers=True).scope(owner.methods["forward"], owner)
        if why := why_replaced(candidate.label, [argument], owner, scope):
            return Skip("not_linear", why)
        arguments = [module.code(argument), f"self.{candidate.label}"]
        old, new = with_call(call, OPERATOR, arguments, module)
        return Found((Edit(old, (new,)),), (OPERATOR,))


_MULTIPLY = {"linear": OPERATOR, "gated_linear": ROUTED_PACKED, "qkv_rope_cache": ROUTED_PACKED}
"""Operators that are told what computes their products."""
_EQUAL = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))


def _told(call: cst.Call, module: Module, method: cst.FunctionDef) -> str:
    """Return the name of an operator of several products, or of one with a norm or a residual; empty for others."""
    name = without_runtime(module.qualified(call.func))
    if name not in _MULTIPLY or not isinstance(call.func, cst.Name) or not name_is_free(name, module, method):
        return ""
    if any(arg.keyword is not None and arg.keyword.value == "multiply" for arg in call.args):
        return ""
    if name == "linear":
        return name if len(call.args) > 2 else ""
    return name if isinstance(call.args[1].value, cst.Tuple) and len(call.args[1].value.elements) > 1 else ""


def _comma(call: cst.Call) -> cst.Comma:
    """Return what stands between two arguments of a call."""
    comma = call.args[0].comma
    return comma if isinstance(comma, cst.Comma) else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


def _routed(call: cst.Call, module: Module) -> Found:
    arguments = [module.code(argument.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for argument in call.args]
    old, new = with_call(call, ROUTED_PACKED, arguments, module)
    return Found((Edit(old, (new,)),), (ROUTED_PACKED,))


def _projections(method: cst.FunctionDef) -> Iterator[tuple[cst.Call, str]]:
    """Yield the calls `self.x(...)` and `linear(..., self.x)` of a method, and x."""
    for call in calls_in(method.body):
        attribute = called_attribute(call)
        if attribute is None and _is_operator(call):
            attribute = self_attribute(call.args[1].value)
        if attribute is not None:
            yield call, attribute


def _is_operator(call: cst.Call) -> bool:
    """Whether this is `linear(x, y)`, the runtime's operator without a norm or a residual."""
    named = isinstance(call.func, cst.Name) and call.func.value == "linear"
    return named and len(call.args) == 2 and all(a.keyword is None and not a.star for a in call.args)


def _may_be_linear(owner: ClassInfo, attribute: str, module: Module) -> bool:
    built = (call for value in module.assignments(owner, attribute) for call in calls_in(value))
    return any(module.qualified(call.func).rsplit(".", 1)[-1].lower().endswith("linear") for call in built)


def _is_linear(owner: ClassInfo, attribute: str, module: Module) -> bool:
    """Whether `__init__`, of the class or else of its bases in this file, makes the attribute a plain one.

    Other methods may put in another of its kind (`set_output_embeddings`), which the operator looks at when it runs.
    """
    init = owner.methods.get("__init__")
    made = [value for name, value in (self_assignments(init) if init else ()) if name == attribute]
    if made:
        names = effects_of(module).names
        return all(isinstance(v, cst.Call) and names.resolved(v.func) in LINEAR for v in made)
    bases = (module.classes[base] for base in owner.bases if base in module.classes)
    return any(_is_linear(base, attribute, module) for base in bases)
