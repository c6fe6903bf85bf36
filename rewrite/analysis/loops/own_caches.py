"""Caches, and objects of states, of a file's own classes, and what a step has to know of one to give it fixed buffers.

One form is known: an object without a base that `forward` makes, takes and gives back by one name
(`runtime/decode/recurrent_state.py`). Whether what lies in it has a form that stays is seen where it runs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.loops.carried_states import handed_states
from rewrite.analysis.tree.cache_names import PASSED
from rewrite.analysis.tree.module import ClassInfo, Module, of_kind
from rewrite.analysis.tree.nodes import calls_in, parameters

CACHES = (*PASSED, "cache_params")
_OF_CACHES = re.compile(r"(^|.*\.)cache_utils\.\w+|transformers\.\w*Cache")
_STATIC = re.compile(r"Static\w*Layer$")
"""Layers of a cache that the loop is not asked for."""


def mark_of_caches(info: ClassInfo, module: Module) -> tuple[str | None, str | None]:
    """Return the mark that tells the loop of a class what object of the file's own it decodes with.

    Second the name of a class of the file that is a cache, a layer of one, or such an object, for which there are no
    buffers.
    """
    if (
        cache := next((kind.name for kind in module.classes.values() if _is_of_caches(kind, module)), None)
    ) is not None:
        return None, cache
    marks = {made.name: _as_object(made, name, info, module) for name, made in _made(module, CACHES)}
    if (handed := handed_states(info, module)) is not None and handed not in CACHES:
        marks |= {made.name: None for _, made in _made(module, (handed,))}  # it is no list of tensors
    if (unknown := next((name for name, mark in marks.items() if mark is None), None)) is not None:
        return None, unknown
    return (None, [*marks][1]) if len(marks) > 1 else (next(iter(marks.values()), None), None)


def _made(module: Module, names: Collection[str]) -> Iterator[tuple[str, ClassInfo]]:
    """Yield what objects of the file's classes the file gives some names to."""
    for line in of_kind(module.tree, cst.Assign):
        name = module.qualified(line.value.func) if isinstance(line.value, cst.Call) else ""
        for target in line.targets:
            if name in module.classes and isinstance(target.target, cst.Name) and target.target.value in names:
                yield target.target.value, module.classes[name]


def _is_of_caches(kind: ClassInfo, module: Module, below: tuple[str, ...] = ()) -> bool:
    """Whether a class is derived from a cache of transformers', or from a layer of one that grows."""
    if kind.name in below or any(_STATIC.search(base) for base in kind.bases):
        return False
    of_file = (module.classes[base] for base in kind.bases if base in module.classes)
    of_transformers = any(_OF_CACHES.fullmatch(base) for base in kind.bases)
    return of_transformers or any(_is_of_caches(base, module, (*below, kind.name)) for base in of_file)


def _as_object(kind: ClassInfo, name: str, info: ClassInfo, module: Module) -> str | None:
    """Return the mark of an object that holds states, if `forward` of the class takes and gives it back by a name."""
    odd = [one for one in kind.node.decorators if not m.matches(one, m.Decorator(m.Name("dataclass")))]
    if kind.bases not in ((), ("object",)) or odd or not _stands_before(kind, info, module):
        return None
    if "__slots__" in {node.value for node in of_kind(kind.node, cst.Name)} or not _keeps_nothing(kind):
        return None
    forward = module.method(info, "forward")
    if forward is None or name not in parameters(forward) or any(one != name for one, _ in _made(module, CACHES)):
        return None
    given = (argument for call in calls_in(forward.body) for argument in call.args)
    back = any(m.matches(one, m.Arg(value=m.Attribute(attr=m.Name(name)), keyword=m.Name(name))) for one in given)
    return f'hands_on_states("{name}", {kind.name})' if back else None


def _stands_before(kind: ClassInfo, info: ClassInfo, module: Module) -> bool:
    """Whether a mark of one class can name the other."""
    places = {id(statement): place for place, statement in enumerate(module.tree.body)}
    return places.get(id(kind.node), len(places)) < places.get(id(info.node), -1)


def _keeps_nothing(kind: ClassInfo) -> bool:
    """Whether a class, which all its objects share, has nothing of its own that could be written into."""
    constant = m.SimpleString() | m.Integer() | m.Float() | m.Name("True") | m.Name("False") | m.Name("None")
    of_objects = m.Call(func=m.Name("field"))
    own = [line for part in kind.node.body.body if isinstance(part, cst.SimpleStatementLine) for line in part.body]
    said = [line for line in own if isinstance(line, (cst.Assign, cst.AnnAssign))]
    return all(line.value is None or m.matches(line.value, constant | of_objects) for line in said)
