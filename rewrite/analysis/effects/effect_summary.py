"""What a call of a function of the file does, said of its parameters, so that every caller can put in what it gives.

A tensor that the function made itself is nobody else's: writing into it is no effect, returning it gives a value of
the caller's own. A parameter stands for whatever the caller hands in, `self` and starred parameters for `HEAP`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import libcst as cst

from rewrite.analysis.effects.effect import HEAP, Effect, Value
from rewrite.analysis.tree.module import ClassInfo, walk

if TYPE_CHECKING:
    from rewrite.analysis.effects.name_bindings import Names
    from rewrite.analysis.effects.scope import Scope

MADE = "<made>"
"""The root of what the function made and returns under a name: parts of its result may share it with each other."""
_HEAP = frozenset({HEAP})


@dataclass(frozen=True)
class Summary:
    """What a call does and whose memory its value may share, in names of parameters, `HEAP` and `MADE`."""

    effect: Effect
    roots: frozenset[str] = frozenset()
    joins: tuple[frozenset[str], ...] = ()
    """Groups of parameters and `HEAP` that may share memory once it has run."""

    def given(self, arguments: Mapping[str, frozenset[str]], call: cst.Call) -> Value:
        """Return what the call does to whoever gives these roots for the parameters."""
        own = {HEAP: _HEAP | arguments.get(HEAP, _HEAP), MADE: frozenset({f"{MADE} {id(call)}"})}

        def put(names: frozenset[str]) -> frozenset[str]:
            return frozenset[str]().union(*(own.get(name) or arguments.get(name, _HEAP) for name in names))

        return Value(
            put(self.roots), replace(self.effect, writes=put(self.effect.writes)), tuple(map(put, self.joins))
        )


def summary_of(scope: Scope) -> Summary:
    """Return the summary of a function, from a scope that keeps its parameters apart."""
    if any(isinstance(node, (cst.Yield, cst.Await)) for node in walk(scope.function.body)):
        return Summary(Effect(anything="it is a generator"))
    inside = scope.of(scope.function.body)
    if inside.anything:
        return Summary(Effect(anything=inside.anything))
    seen = [HEAP, *own_parameters(scope.function, scope.owner, scope.names)]
    classes = {scope.root(name): frozenset(n for n in seen if scope.root(n) == scope.root(name)) for name in seen}
    returned = [node.value for node in walk(scope.function.body) if isinstance(node, cst.Return) and node.value]
    held = scope.memory(root for value in returned for root in scope.value(value).roots)
    effect = Effect(
        attributes=inside.attributes,
        stores=inside.stores,
        writes=frozenset[str]().union(*(classes.get(name, frozenset()) for name in scope.memory(inside.writes))),
        draws=inside.draws,
    )
    joins = [group for group in classes.values() if len(group) > 1] if effect.writes or effect.stores else []
    roots = frozenset[str]().union(*(classes.get(name, frozenset({MADE})) for name in held))
    return Summary(effect, roots, tuple(joins))


def own_parameters(function: cst.FunctionDef, owner: ClassInfo | None, names: Names) -> list[str]:
    """Return the parameters that take one argument each, `self` or `cls` of a method left out."""
    params = function.params
    found = [param.name.value for param in (*params.posonly_params, *params.params, *params.kwonly_params)]
    above = names.owners(owner) if owner is not None else []
    method = any(info.methods.get(function.name.value) is function for info in above)
    return found[1:] if method and not _is_static(function) else found


def arguments(
    function: cst.FunctionDef, owner: ClassInfo | None, call: cst.Call, scope: Scope
) -> dict[str, frozenset[str]] | None:
    """Return the roots of what a call gives for each parameter, None where it does not show which is which.

    A method is called on `self`, which it gets besides the arguments; under `HEAP` stands what goes into starred
    parameters.
    """
    if any(argument.star for argument in call.args):
        return None
    own = own_parameters(function, owner, scope.names)
    plain = iter(own[: len(own) - len(function.params.kwonly_params)])
    found: dict[str, frozenset[str]] = {}
    for argument in call.args:
        name = next(plain, HEAP) if argument.keyword is None else argument.keyword.value
        name = name if name in own else HEAP
        found[name] = found.get(name, frozenset()) | scope.value(argument.value).roots
    return found


def _is_static(function: cst.FunctionDef) -> bool:
    return any(isinstance(d.decorator, cst.Name) and d.decorator.value == "staticmethod" for d in function.decorators)
