"""Caches, and layers of caches, of a file's own classes, and what a step has to know of one to give it fixed buffers.

By what a class keeps and how it is read and written, three forms are known:

* a cache derived from `DynamicCache` that keeps something beside its layers, by methods of its own
  (`runtime/cache/custom_cache.py`);
* an object without a base that `forward` makes, takes and gives back by one name
  (`runtime/decode/recurrent_state.py`);
* a layer derived from `DynamicLayer` with tensors that a method grows by the tokens it is given, as keys grow
  (`runtime/cache/extra_tensors.py`).

Whether what lies in a cache or an object has a form that stays is seen where it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.loops.cache_windows import reached
from rewrite.analysis.loops.carried_states import handed_states
from rewrite.analysis.loops.growing_layers import ASKED, BESIDE, grown, is_of_caches, is_plain, keeps_nothing
from rewrite.analysis.tree.cache_names import PASSED
from rewrite.analysis.tree.module import ClassInfo, Module, of_kind, walk
from rewrite.analysis.tree.nodes import calls_in, parameters

CACHES = (*PASSED, "cache_params")
_OF_A_CACHE = frozenset({"__init__", "__len__", "__repr__", *BESIDE})
_HOLDS = ("layers", "key_cache", "value_cache", "keys", "values")
"""Where keys and values lie, of which a step has every slot."""


def marks_of_caches(info: ClassInfo, module: Module) -> tuple[list[str], str | None]:
    """Return the marks that tell the loop of a class what caches of the file's own it decodes with.

    Second the name of a class of the file that is a cache, or a layer of one, for which there are no buffers.
    """
    marks: dict[str, str | None] = {}
    for kind in module.classes.values():
        if is_of_caches(kind, module):
            marks[kind.name] = _as_cache(kind, info, module) or _as_layer(kind, info, module)
    for name, made in _made(module, CACHES):
        if not is_of_caches(made, module):
            marks[made.name] = _as_object(made, name, info, module)
    if (handed := handed_states(info, module)) is not None and handed not in CACHES:
        marks |= {made.name: None for _, made in _made(module, (handed,))}  # it is no list of tensors
    if (unknown := next((name for name, mark in marks.items() if mark is None), None)) is not None:
        return [], unknown
    whole = [name for name, mark in marks.items() if mark and not mark.startswith("grows_in_layers")]
    return ([], whole[1]) if len(whole) > 1 else ([mark for mark in marks.values() if mark], None)


def _made(module: Module, names: Collection[str]) -> Iterator[tuple[str, ClassInfo]]:
    """Yield what objects of the file's classes the file gives some names to."""
    for line in of_kind(module.tree, cst.Assign):
        name = module.qualified(line.value.func) if isinstance(line.value, cst.Call) else ""
        for target in line.targets:
            if name in module.classes and isinstance(target.target, cst.Name) and target.target.value in names:
                yield target.target.value, module.classes[name]


def _stands_before(kind: ClassInfo, info: ClassInfo, module: Module) -> bool:
    """Whether a mark of one class can name the other."""
    places = {id(statement): place for place, statement in enumerate(module.tree.body)}
    return places.get(id(kind.node), len(places)) < places.get(id(info.node), -1)


def _as_cache(kind: ClassInfo, info: ClassInfo, module: Module) -> str | None:
    """Return the mark of a cache that keeps something beside its layers, if the class makes one."""
    if not is_plain(kind, "DynamicCache") or not _stands_before(kind, info, module):
        return None
    made = [line for line in of_kind(module.tree, cst.Assign) if _makes(line, kind, module)]
    bodies = {id(node) for body in reached(info, module) for node in walk(body)}
    if not made or any(line.value.args for line in made if isinstance(line.value, cst.Call)):
        return None
    if not any(id(line) in bodies for line in made) or not all(_known(*one) for one in kind.methods.items()):
        return None
    return f"keeps_own_cache({kind.name})"


def _makes(line: cst.Assign, kind: ClassInfo, module: Module) -> bool:
    named = any(isinstance(target.target, cst.Name) and target.target.value in CACHES for target in line.targets)
    return named and isinstance(line.value, cst.Call) and module.qualified(line.value.func) == kind.name


def _known(name: str, method: cst.FunctionDef) -> bool:
    """Whether a method of a cache is asked by no step, or does nothing with keys and values."""
    if name == "__init__":
        wanted = [one for one in (*method.params.params[1:], *method.params.kwonly_params) if one.default is None]
        return not wanted
    if name in _OF_A_CACHE:
        return True
    if name in ASKED or (name.startswith("__") and name.endswith("__")):
        return False
    called = {id(call.func) for call in calls_in(method.body)}  # `.values()` of a dictionary
    read = [node for node in of_kind(method.body, cst.Attribute) if id(node) not in called]
    return not any(node.attr.value in _HOLDS for node in read)


def _as_object(kind: ClassInfo, name: str, info: ClassInfo, module: Module) -> str | None:
    """Return the mark of an object that holds states, if `forward` of the class takes and gives it back by a name."""
    odd = [one for one in kind.node.decorators if not m.matches(one, m.Decorator(m.Name("dataclass")))]
    if kind.bases not in ((), ("object",)) or odd or not _stands_before(kind, info, module):
        return None
    if "__slots__" in {node.value for node in of_kind(kind.node, cst.Name)} or not keeps_nothing(kind):
        return None
    forward = module.method(info, "forward")
    if forward is None or name not in parameters(forward) or any(one != name for one, _ in _made(module, CACHES)):
        return None
    given = (argument for call in calls_in(forward.body) for argument in call.args)
    back = any(m.matches(one, m.Arg(value=m.Attribute(attr=m.Name(name)), keyword=m.Name(name))) for one in given)
    return f'hands_on_states("{name}", {kind.name})' if back else None


def _as_layer(kind: ClassInfo, info: ClassInfo, module: Module) -> str | None:
    """Return the mark of a layer with more tensors that grow as keys do."""
    found = grown(kind, module)
    if not found or not _stands_before(kind, info, module):
        return None
    named = ", ".join(f'{method}=("{attribute}", {dimension})' for method, attribute, dimension in found)
    return f"grows_in_layers({kind.name}, {named})"
