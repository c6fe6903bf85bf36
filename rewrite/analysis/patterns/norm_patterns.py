"""The normalisations that the runtime computes, recognised by what a class's `forward` returns."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.effects import effects_of
from rewrite.analysis.patterns.as_written import is_runtime_name, why_no_parameter, why_not_as_written
from rewrite.analysis.terms.computation import Bindings, NotComputable, Pattern, body, subterms
from rewrite.analysis.terms.spelling import Term, constant, make
from rewrite.analysis.tree.module import ClassInfo, Module, without_runtime

_RMS = """
class Norm:
    def norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.EPS)

    def wide(self, x):
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.EPS)

    def forward(self, x):
        return {}
"""
_LAYER = """
class Norm:
    def norm(self, x):
        centered = x - x.mean(-1, keepdim=True)
        return centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + self.EPS)

    def forward(self, x):
        return {}
"""
_FP32 = {"weight_in_fp32": "True"}

RMS_NORMS = tuple(
    Pattern(_RMS.format(returned), keywords)
    for returned, keywords in (
        ("self.WEIGHT * self.norm(x.float()).to(x.dtype)", {}),
        ("(self.WEIGHT * self.norm(x.float())).to(x.dtype)", _FP32),
        ("(self.WEIGHT.float() * self.norm(x.float())).to(x.dtype)", {"CAST": ".float()", **_FP32}),
        ("((1 + self.WEIGHT.float()) * self.norm(x.float())).to(x.dtype)", {"offset": "1.0", **_FP32}),
        ("self.norm(x.float()).to(x.dtype)", {}),
        ("self.WEIGHT * self.wide(x).to(x.dtype)", {}),
        ("(self.WEIGHT * self.wide(x)).to(x.dtype)", _FP32),
        ("(self.WEIGHT.float() * self.wide(x)).to(x.dtype)", {"CAST": ".float()", **_FP32}),
        ("self.wide(x).to(x.dtype)", {}),
        (
            "(self.norm(x.float()) * self.WEIGHT.float() if self.WITH else self.norm(x.float())).to(x.dtype)",
            {"CAST": ".float()", **_FP32},
        ),
        (
            "(self.norm(x.float()) * self.WEIGHT.float()).to(x.dtype)"
            " if self.WITH else self.norm(x.float()).to(x.dtype)",
            {"CAST": ".float()", **_FP32},
        ),
        (
            "self.WEIGHT * (self.wide(x).to(self.WEIGHT.dtype)"
            " if self.WEIGHT.dtype in [torch.float16, torch.bfloat16] else self.wide(x))",
            {"rounds_as_weight": "True"},
        ),
    )
)
"""RMSNorm; the marks are the keywords of `rms_norm`, and what is appended to its weight (`CAST`).

In `wide` the product with the root, which is fp32, brings the input to fp32: the same numbers but for inputs of fp64.
A weight that the file casts is cast in the call: without an offset `rms_norm` multiplies as torch promotes, so fp64
weights would not be rounded.
"""

LAYER_NORMS = tuple(
    Pattern(_LAYER.format(returned))
    for returned in (
        "(self.WEIGHT.float() * self.norm(x.float())).to(x.dtype)",
        "(self.WEIGHT.float() * self.norm(x.float()) + self.BIAS.float()).to(x.dtype)",
    )
)
"""LayerNorm written out in fp32, the weight applied before the rounding."""

_OF_TORCH = """
class Norm:
    def forward(self, x):
        return {}.to(x.dtype)
"""
LAYER_NORMS_OF_TORCH = tuple(
    Pattern(_OF_TORCH.format(normed))
    for normed in (
        "super().forward(x.float())",
        "torch.nn.functional.layer_norm(x.float(), self.SHAPE, self.WEIGHT, self.BIAS, self.EPS)",
        "torch.nn.functional.layer_norm(x.float(), self.SHAPE, None if self.WEIGHT is None else self.WEIGHT.float(),"
        " None if self.BIAS is None else self.BIAS.float(), self.EPS)",
    )
)
"""What a class made from `nn.LayerNorm` computes in fp32, whatever dtype it is given."""


@dataclass(frozen=True)
class NotProven:
    """The computation is the operator's as far as it is written down; `what` else it may be."""

    what: str


@dataclass(frozen=True)
class NormCall:
    """The runtime call that computes what a norm class's `forward` computes."""

    function: str
    tensor: str
    """The parameter of `forward` that is normalised."""
    arguments: tuple[str, ...]
    """The source of the arguments after the tensor."""

    @property
    def given(self) -> list[str]:
        """The source of all arguments."""
        return [self.tensor, *self.arguments]


def computed(info: ClassInfo, module: Module) -> Term | NotComputable:
    """Return what the class's own `forward` computes, or what keeps it from having a canonical form."""
    try:
        return body(info.methods["forward"], module, info)
    except NotComputable as error:
        return error


def rms_norm_call(term: Term, info: ClassInfo, module: Module) -> NormCall | NotProven | None:
    """Return the `rms_norm` call that computes `term`, None if it is another computation."""
    kept = _kept(term)
    for pattern in RMS_NORMS:
        if (bound := pattern.match(kept)) is not None:
            if kept != term and bound["EPS"].op == "attribute":
                if not why_no_parameter(bound["EPS"].value, info, module):
                    return NotProven("eps is a tensor, which is added before the dimension is put back")
            keywords = [f"{key}={value}" for key, value in pattern.marks.items() if key != "CAST"]
            weight = _weight(bound, str(pattern.marks.get("CAST", "")))
            call = NormCall("rms_norm", bound["x"].value, (weight, _eps(bound), *keywords))
            return _proven(call, bound, info, module)
    return None


def layer_norm_call(term: Term, info: ClassInfo, module: Module) -> NormCall | NotProven | None:
    """Return the `layer_norm` call that computes `term`, None if it is another computation."""
    for pattern in LAYER_NORMS_OF_TORCH if info.bases == ("torch.nn.LayerNorm",) else ():
        if (bound := pattern.match(term)) is not None:
            names = ("weight", "bias", "eps", "normalized_shape")
            held = tuple(bound[name].value for name in ("WEIGHT", "BIAS", "EPS", "SHAPE") if name in bound)
            why = why_not_as_written(info, info.methods["forward"], module)
            why = why or next((f"self.{name} is set in the file" for name in names if name in info.assigned), "")
            heirs = effects_of(module).names.heirs(info)
            why = why or next((f"{heir.name} is made from it" for heir in heirs if len(heir.bases) > 1), "")
            if held in ((), names):
                call = NormCall("layer_norm", bound["x"].value, tuple(f"self.{name}" for name in names))
                return NotProven(why) if why else call
    for pattern in LAYER_NORMS:
        if (bound := pattern.match(term)) is not None:
            bias = f"self.{bound['BIAS'].value}" if "BIAS" in bound else "None"
            call = NormCall("layer_norm", bound["x"].value, (_weight(bound), bias, _eps(bound)))
            return _proven(call, bound, info, module)
    return None


def runtime_norm(info: ClassInfo, module: Module) -> tuple[cst.FunctionDef, NormCall] | None:
    """Return the `forward` of a class that only calls a runtime norm, and that call."""
    function = module.method(info, "forward")
    last = function.body.body[-1] if function is not None and function.body.body else None
    if function is None or not isinstance(last, cst.SimpleStatementLine) or not _only_statement(function):
        return None
    value = last.body[-1].value if isinstance(last.body[-1], cst.Return) else None
    if not isinstance(value, cst.Call):
        return None
    short = without_runtime(module.qualified(value.func))
    if short not in ("rms_norm", "layer_norm") or not is_runtime_name(short, module):
        return None
    tensor, *rest = (module.code(argument).rstrip(", ") for argument in value.args)
    if any(argument.startswith("rounds_as_weight") for argument in rest):
        return None  # no other operator has this order of roundings
    return function, NormCall(short, tensor, tuple(rest))


def _only_statement(function: cst.FunctionDef) -> bool:
    """Whether nothing but a docstring stands before the last statement."""
    before = function.body.body[:-1]
    return len(before) <= 1 and all(
        isinstance(statement, cst.SimpleStatementLine)
        and isinstance(statement.body[0], cst.Expr)
        and isinstance(statement.body[0].value, (cst.SimpleString, cst.ConcatenatedString))
        for statement in before
    )


def said(term: Term) -> str:
    """Return what is computed instead, in words for a skip's detail."""
    text = str(term)
    return f"it computes {text if len(text) <= 120 else text[:119] + '…'}"


def rms_norm_obstacle(term: Term) -> str:
    """Name what tells `term` from the computations of `rms_norm`."""
    if len({t.value for t in subterms(term) if t.op == "parameter"}) > 1:
        return "second_tensor"
    scaled = (t.args for t in subterms(term) if t.op == "mul")
    if any(factor.op == "parameter" and any(_roots(other) for other in args) for args in scaled for factor in args):
        return "product_in_input_dtype"
    return "other_computation"


def _roots(term: Term) -> list[Term]:
    """Return what `term` takes the square root or its inverse of."""
    exponents = (constant(0.5), constant(-0.5))
    return [t.args[0] for t in subterms(term) if t.op == "pow" and t.args[1] in exponents]


def _kept(term: Term) -> Term:
    """Return a term whose means keep their dimension where it is put back behind the root."""
    root = term.args[0] if term.op == "unsqueeze" and term.args[1:] == (constant(-1),) else term
    if root is not term and root.op == "pow" and root.args[0].op == "add":
        sides = root.args[0].args
        means = [side for side in sides if side.op == "mean" and side.args[1:] == (constant(-1),)]
        if len(means) == 1 and {other.op for other in sides if other is not means[0]} <= {"constant", "attribute"}:
            eps = sides[0] if sides[1] is means[0] else sides[1]
            return make("pow", make("add", make("unsqueeze", means[0], constant(-1)), eps), root.args[1])
    inner = tuple(map(_kept, term.args))
    if inner == term.args:
        return term
    return Term(term.op, inner, term.value) if term.value else make(term.op, *inner)


def _weight(bound: Bindings, cast: str = "") -> str:
    if "WEIGHT" not in bound:
        return "None"
    weight = f"self.{bound['WEIGHT'].value}{cast}"
    return f"{weight} if self.{bound['WITH'].value} else None" if "WITH" in bound else weight


def _eps(bound: Bindings) -> str:
    number = bound["EPS"]
    return number.value if number.op == "constant" else f"self.{number.value}"


def _proven(call: NormCall, bound: Bindings, info: ClassInfo, module: Module) -> NormCall | NotProven:
    """Return the call if nothing but what is written in the file decides what `forward` computes."""
    why = why_not_as_written(info, info.methods["forward"], module)
    names = [bound[key].value for key in ("WEIGHT", "BIAS") if key in bound]
    why = why or next((why for name in names if (why := why_no_parameter(name, info, module))), "")
    return NotProven(why) if why else call
