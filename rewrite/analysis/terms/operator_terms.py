"""What an operator of the runtime computes, by the function that its file declares (`rewrite/operators.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import libcst as cst
import libcst.matchers as m

from rewrite import operators
from rewrite.analysis.terms.computation import MAX_DEPTH, Bindings, NotComputable, Run
from rewrite.analysis.terms.spelling import Term
from rewrite.analysis.tree.module import Module

_TUPLE = m.Call(func=m.Name("tuple"), args=[m.Arg(value=m.GeneratorExp())])


def as_declared(call: Term) -> Term:
    """Return what a call of an operator computes where its file says so, else the call.

    Raises:
        NotComputable: if the call has other arguments than the operator.
    """
    if call.op not in operators.computations():
        return call
    module = _module(call.op)
    function = module.functions[call.op]
    return _Declared(module, None, MAX_DEPTH).function(function, _bound(function, call))


@cache
def _module(name: str) -> Module:
    return Module(cst.parse_module(operators.computations()[name]))


def _bound(function: cst.FunctionDef, call: Term) -> Bindings:
    """Return the arguments of a call by the operator's parameters; a starred one has a tuple."""
    plain = [argument for argument in call.args if argument.op != "keyword"]
    bound: Bindings = {argument.value: argument.args[0] for argument in call.args if argument.op == "keyword"}
    names = [param.name.value for param in function.params.params]
    bound |= dict(zip(names, plain, strict=False))
    more = function.params.star_arg
    if isinstance(more, cst.Param):
        bound[more.name.value] = Term("tuple", tuple(plain[len(names) :]))
    elif len(plain) > len(names):
        raise NotComputable(f"a call of {call.op} with {len(plain)} arguments")
    for param in (*function.params.params, *function.params.kwonly_params):
        if param.name.value not in bound and param.default is None:
            raise NotComputable(f"a call of {call.op} without {param.name.value}")
    return _with_defaults(function, bound)


def _with_defaults(function: cst.FunctionDef, bound: Mapping[str, Term]) -> Bindings:
    given = {
        param.name.value: Run(_EMPTY, None, MAX_DEPTH).expression(param.default, {})
        for param in (*function.params.params, *function.params.kwonly_params)
        if param.default is not None
    }
    return {**given, **bound}


_EMPTY = Module(cst.parse_module(""))


@dataclass
class _Declared(Run):
    """One symbolic execution of a declaration, which may say `tuple(f(x) for x in xs)` of what it is called with."""

    def call(self, node: cst.Call, environment: Bindings) -> Term:
        """Return the term of a call; of `tuple`, the tuple of what its generator yields."""
        if not m.matches(node, _TUPLE):
            return super().call(node, environment)
        generator = cst.ensure_type(node.args[0].value, cst.GeneratorExp)
        over, target = generator.for_in, cst.ensure_type(generator.for_in.target, cst.Name).value
        items = self.expression(over.iter, environment)
        if items.op != "tuple" or over.ifs or over.inner_for_in is not None:
            raise NotComputable("a generator over no tuple")
        return Term("tuple", tuple(self.expression(generator.elt, {**environment, target: x}) for x in items.args))
