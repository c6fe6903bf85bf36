"""What experts do between their two products, and how their weights lie: the runtime's `ExpertsForm`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import libcst as cst

from rewrite.analysis.blocks.term_source import source
from rewrite.analysis.blocks.terms import why_not_read
from rewrite.analysis.terms.computation import NotComputable, body
from rewrite.analysis.terms.spelling import FLOAT32, NONE, Term, constant, make
from rewrite.analysis.tree.module import ClassInfo, Module, without_runtime
from rewrite.analysis.tree.nodes import parameters

GATE = "_apply_gate"
"""What `use_experts_implementation` calls between the products."""
_FLAGS = {"is_transposed": "transposed", "has_bias": "biased"}
"""Arguments of the decorator, and the fields that they are."""
_IGNORED = ("is_concatenated",)
"""An argument that nothing reads: the gate says whether gates and ups alternate."""
_BOUNDS = ("input", "min", "max")
_LAST = constant(-1)


class OtherForm(NotComputable):
    """The experts do something that `ExpertsForm` has no words for."""


def layout(experts: ClassInfo, decorator: cst.BaseExpression, module: Module) -> list[str]:
    """Return what the decorator of a class says that is unusual, as fields of `ExpertsForm`.

    Raises:
        NotComputable: if it says what none of them means.
    """
    found = []
    for argument in decorator.args if isinstance(decorator, cst.Call) else ():
        name = "" if argument.keyword is None else argument.keyword.value
        value = module.code(argument.value)
        if name in _IGNORED or (name in _FLAGS and value == "False"):
            continue
        if name not in _FLAGS or value != "True":
            raise OtherForm(module.code(argument.with_changes(comma=cst.MaybeSentinel.DEFAULT)))
        found.append(_FLAGS[name])
    parts = ["gate_up_proj", "down_proj"]
    parts += [f"{part}_bias" for part in parts] if "biased" in found else []
    if missing := [part for part in parts if part not in experts.assigned]:
        raise OtherForm(f"{experts.name} has no {missing[0]}")
    return found


def experts_form(experts: ClassInfo, decorator: cst.BaseExpression, module: Module) -> tuple[str, ...]:
    """Return the arguments of the `ExpertsForm` of a class of experts; none for gates above ups and `act_fn`.

    Raises:
        NotComputable: if it computes something that `ExpertsForm` does not describe.
    """
    flags = [f"{name}=True" for name in layout(experts, decorator, module)]
    function = module.method(experts, GATE)
    if function is None:
        if "act_fn" not in experts.assigned:
            raise OtherForm(f"{experts.name} has no act_fn")
        return ("self.act_fn", *flags) if flags else ()
    if (why := why_not_read(experts, function, module)) or len(parameters(function)) != 2:
        raise OtherForm(why or f"{GATE} takes more than gates and ups")
    reader = Reader(Term("parameter", (), parameters(function)[1]))
    reader.read(body(function, module, experts))
    return (*reader.arguments(module), *flags)


@dataclass
class Reader:
    """Reads `activation(gate) * up`, with what is done to either before."""

    packed: Term
    activation: Term | None = None
    found: dict[str, Term] = field(default_factory=dict)
    interleaved: set[bool] = field(default_factory=set)
    limits: set[Term | None] = field(default_factory=set)

    def arguments(self, module: Module) -> list[str]:
        """Return the arguments that were read."""
        found = [] if self.activation is None else [source(self.activation, module)]
        found += ["alpha=1.0"] if self.activation is None and "alpha" not in self.found else []
        found += [f"{name}={source(term, module)}" for name, term in self.found.items()]
        return found + (["interleaved=True"] if self.interleaved == {True} else [])

    def read(self, term: Term) -> None:
        """Read what the gate returns; casts to fp32 and back are what the kernels do anyway."""
        term = _uncast(term)
        if without_runtime(term.op) == "gated_activation" and len(term.args) == 3:
            gate, up, activation = term.args
            term = make("mul", Term("call", (activation, gate)), up)
        if term.op != "mul" or len(term.args) != 2:
            raise OtherForm("what the second product reads is no activated gate times up")
        for gate, up in (term.args, term.args[::-1]):
            if self._takes_up(_uncast(up)):
                self._take_gate(_uncast(gate))
                break
        else:
            raise OtherForm("what the second product reads is no activated gate times up")
        if len(self.interleaved) != 1 or len(self.limits) != 1:
            raise OtherForm("gate and up are not taken or limited alike")
        if (limit := self.limits.pop()) is not None:
            self.found["limit"] = limit

    def _takes_up(self, term: Term) -> bool:
        shift = None
        if term.op == "add" and len(term.args) == 2:
            numbers = [side for side in term.args if side.op == "constant"]
            others = [side for side in term.args if side not in numbers]
            if len(numbers) != 1 or len(others) != 1:
                return False
            shift, term = numbers[0], _uncast(others[0])
        term, limit = self._bounded(term, both=True)
        if not self._is_half(term, 1):
            return False
        self.limits.add(limit)
        if shift is not None:
            self.found["shift"] = shift
        return True

    def _take_gate(self, term: Term) -> None:
        if term.op == "mul" and len(term.args) == 2:
            sigmoid = next((side for side in term.args if _uncast(side).op == "sigmoid"), None)
            if sigmoid is None:
                raise OtherForm("the gate is activated in another way")
            gate = _uncast(next(side for side in term.args if side is not sigmoid))
            inner = _uncast(_uncast(sigmoid).args[0])
            if inner != gate:
                self.found["alpha"] = _factor(inner, gate)
        elif term.op == "call" and len(term.args) == 2 and term.args[0].op == "attribute":
            self.activation, gate = term.args[0], _uncast(term.args[1])
        elif term.op == "nn.functional.silu" and len(term.args) == 1:
            gate = _uncast(term.args[0])
        else:
            raise OtherForm("the gate is activated in another way")
        gate, limit = self._bounded(gate, both=False)
        if not self._is_half(gate, 0):
            raise OtherForm("what is activated is no half of the first product")
        self.limits.add(limit)

    def _bounded(self, term: Term, both: bool) -> tuple[Term, Term | None]:
        """Return a term without its limits, and the one from above; `both` wants the same one from below."""
        if term.op not in ("clamp", "clip"):
            return term, None
        given = dict(zip(_BOUNDS, (a for a in term.args if a.op != "keyword"), strict=False))
        given |= {a.value: a.args[0] for a in term.args if a.op == "keyword"}
        largest, smallest = given.get("max", NONE), given.get("min", NONE)
        if not set(given) <= set(_BOUNDS) or largest.op not in ("attribute", "constant"):
            raise OtherForm(f"limits of another kind: {term}")
        if smallest != (make("neg", largest) if both else NONE):
            raise OtherForm(f"limits of another kind: {term}")
        return _uncast(given["input"]), largest

    def _is_half(self, term: Term, which: int) -> bool:
        """Whether a term is the gates (0) or ups (1) of the first product."""
        if term.op != "index":
            return False
        halves = Term("chunk", (self.packed, constant(2), _LAST))
        if term == Term("index", (halves, constant(which))):
            self.interleaved.add(False)
            return True
        every_second = make("slice", constant(which), NONE, constant(2))
        if term.args[0] == self.packed and term.args[-1] == every_second and _is_last(term.args[1:]):
            self.interleaved.add(True)
            return True
        return False


def _is_last(items: Sequence[Term]) -> bool:
    """Whether an index of several items chooses along the last dimension, whatever their number."""
    return len(items) == 2 and items[0].value == "..."


def _factor(term: Term, of: Term) -> Term:
    sides = term.args if term.op == "mul" and len(term.args) == 2 else ()
    others = [side for side in sides if _uncast(side) != of]
    if len(others) != 1 or len(sides) != 2 or others[0].op not in ("attribute", "constant"):
        raise OtherForm("a sigmoid of something else than the gate")
    return others[0]


def _uncast(term: Term) -> Term:
    """Return `term` without casts to fp32, and to the dtype of a tensor, which is that of the weights."""
    while term.op == "cast" and (term.args[1] == FLOAT32 or term.args[1].op == "dtype"):
        term = term.args[0]
    return term
