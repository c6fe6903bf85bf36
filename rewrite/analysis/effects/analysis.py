"""The analysis of one module: a scope for every function that somebody asked about, remembered."""

from __future__ import annotations

import libcst as cst

from rewrite.analysis.effects.call_effects import MAX_DEPTH
from rewrite.analysis.effects.effect import Effect
from rewrite.analysis.effects.effect_summary import Summary, summary_of
from rewrite.analysis.effects.name_bindings import Names
from rewrite.analysis.effects.scope import Scope
from rewrite.analysis.tree.module import ClassInfo, Module


class Effects:
    """What the functions of one module may do.

    Args:
        module: the file.
        plain_containers: take it for granted that indexing a value and iterating over one run no code, whatever its
            class. Enough where the question is what is written in place, not what is counted or drawn.
    """

    def __init__(self, module: Module, plain_containers: bool = False):
        self.module = module
        self.plain_containers = plain_containers
        self.names = Names(module)
        self.calls: dict[int, list[cst.Call]] = {}
        """The calls inside a function, by its `id`, once somebody has looked for them."""
        self._scopes: dict[tuple[int, str, int], Scope] = {}
        self._summaries: dict[tuple[int, str], Summary] = {}
        self._running: set[tuple[int, str]] = set()

    def scope(self, function: cst.FunctionDef, owner: ClassInfo | None = None, depth: int = 0) -> Scope:
        """Return what is known about a function, a method of `owner` if that is given."""
        key = (id(function), owner.name if owner is not None else "", depth)
        if key not in self._scopes:
            self._scopes[key] = Scope(self, function, owner, depth)
        return self._scopes[key]

    def summary(self, function: cst.FunctionDef, owner: ClassInfo | None, depth: int) -> Summary:
        """Return what a call of a function may do to what its caller can see."""
        key = (id(function), owner.name if owner is not None else "")
        if key in self._summaries:
            return self._summaries[key]
        if depth > MAX_DEPTH or key in self._running:
            return Summary(Effect(anything="calls are nested too deeply"))
        self._running.add(key)
        try:
            found = summary_of(Scope(self, function, owner, depth, apart=True))
        finally:
            self._running.discard(key)
        if "nested too deeply" not in found.effect.anything:  # from elsewhere it may be less deep
            self._summaries[key] = found
        return found


def effects_of(module: Module, plain_containers: bool = False) -> Effects:
    """Return the analysis of a module, the same for as long as the module lives."""
    key = "effects, plain containers" if plain_containers else "effects"
    found = module.remembered.get(key)
    if not isinstance(found, Effects):
        found = module.remembered[key] = Effects(module, plain_containers)
    return found
