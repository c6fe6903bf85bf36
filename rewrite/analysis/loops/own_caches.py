"""Caches, and layers of caches, of a file's own classes, and what a step has to know of one to give it fixed buffers.

By what a class keeps and how it is read and written, three forms are known:

* a cache derived from `DynamicCache` that keeps something beside its layers, by methods of its own
  (`runtime/cache/own.py`);
* an object without a base that `forward` makes, takes and gives back by one name (`runtime/decode/carried.py`);
* a layer derived from `DynamicLayer` with tensors that a method grows by the tokens it is given, as keys grow
  (`runtime/cache/grown.py`).

Whether what lies in a cache or an object has a form that stays is seen where it runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.loops.window import reached
from rewrite.analysis.step.terms import PASSED
from rewrite.analysis.syntax.module import ClassInfo, Module, of_kind, self_attribute, small_statements, walk
from rewrite.analysis.syntax.nodes import calls_in, parameters

CACHES = (*PASSED, "cache_params")
_OF_CACHES = re.compile(r"(^|.*\.)cache_utils\.\w+|transformers\.\w*Cache")
_STATIC = re.compile(r"Static\w*Layer$")
"""Layers of a cache that the loop is not asked for."""
_BESIDE = frozenset({"batch_repeat_interleave", "batch_select_indices", "crop", "reorder_cache", "reset"})
"""What a step asks of no cache: a class may define it as it likes."""
_OF_A_CACHE = frozenset({"__init__", "__len__", "__repr__", *_BESIDE})
_OF_A_LAYER = frozenset({"__init__", "__repr__", "offload", "prefetch", *_BESIDE})
_ASKED = frozenset({
    "activate_past_recording", "batch_size", "early_initialization", "get_conv_state", "get_mask_sizes",
    "get_max_cache_shape", "get_max_length", "get_query_offset", "get_recurrent_state", "get_seq_length",
    "get_usable_length", "has_previous_state", "is_compileable", "is_dummy", "is_initialized", "is_linear",
    "is_recording_past", "is_sliding", "key_cache", "layers", "lazy_initialization", "lazy_initialization_indexer",
    "offload", "prefetch", "update", "update_conv_state", "update_indexer", "update_recurrent_state", "value_cache",
})  # fmt: skip
"""What a model asks of a cache or its layers, or both keep there: buffers answer in the place of a file's class."""
_HOLDS = ("layers", "key_cache", "value_cache", "keys", "values")
"""Where keys and values lie, of which a step has every slot."""


def marks_of_caches(info: ClassInfo, module: Module) -> tuple[list[str], str | None]:
    """Return the marks that tell the loop of a class what caches of the file's own it decodes with.

    Second the name of a class of the file that is a cache, or a layer of one, for which there are no buffers.
    """
    marks: list[str] = []
    for kind in module.classes.values():
        if not _is_of_caches(kind, module):
            continue
        mark = _as_cache(kind, info, module) or _as_layer(kind, info, module)
        if mark is None:
            return [], kind.name
        marks.append(mark)
    for name, made in _made(module):
        if not _is_of_caches(made, module):
            mark = _as_object(made, name, info, module)
            if mark is None:
                return [], made.name
            marks.append(mark)
    marks = list(dict.fromkeys(marks))
    several = [mark for mark in marks if not mark.startswith("grows_in_layers")]
    return ([], several[1]) if len(several) > 1 else (marks, None)


def growing_methods(module: Module) -> dict[str, set[str]]:
    """Return the methods by which layers of the file's own grow what they keep, and the names of what they keep."""
    found: dict[str, set[str]] = {}
    for kind in module.classes.values():
        for method, attribute, _ in _grown(kind, module) or ():
            found.setdefault(method, set()).add(attribute)
    return found


def _is_of_caches(kind: ClassInfo, module: Module, below: tuple[str, ...] = ()) -> bool:
    """Whether a class is derived from a cache of transformers', or from a layer of one that grows."""
    if kind.name in below or any(_STATIC.search(base) for base in kind.bases):
        return False
    of_file = (module.classes[base] for base in kind.bases if base in module.classes)
    of_transformers = any(_OF_CACHES.fullmatch(base) for base in kind.bases)
    return of_transformers or any(_is_of_caches(base, module, (*below, kind.name)) for base in of_file)


def _is_plain(kind: ClassInfo, base: str) -> bool:
    """Whether a class has one base, of that name, and nothing that makes another class of it."""
    bases = [argument for argument in kind.node.bases if argument.keyword is not None or argument.star]
    named = [name.rpartition(".")[2] for name in kind.bases]
    return named == [base] and not bases and not kind.node.decorators and not kind.node.keywords


def _made(module: Module) -> Iterator[tuple[str, ClassInfo]]:
    """Yield what objects of the file's classes the file gives the names of caches to."""
    for line in of_kind(module.tree, cst.Assign):
        name = module.qualified(line.value.func) if isinstance(line.value, cst.Call) else ""
        for target in line.targets:
            if name in module.classes and isinstance(target.target, cst.Name) and target.target.value in CACHES:
                yield target.target.value, module.classes[name]


def _stands_before(kind: ClassInfo, info: ClassInfo, module: Module) -> bool:
    """Whether a mark of one class can name the other."""
    places = {id(statement): place for place, statement in enumerate(module.tree.body)}
    return places.get(id(kind.node), len(places)) < places.get(id(info.node), -1)


def _as_cache(kind: ClassInfo, info: ClassInfo, module: Module) -> str | None:
    """Return the mark of a cache that keeps something beside its layers, if the class makes one."""
    if not _is_plain(kind, "DynamicCache") or not _stands_before(kind, info, module):
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
    if name in _ASKED or (name.startswith("__") and name.endswith("__")):
        return False
    return not any(isinstance(node, cst.Attribute) and node.attr.value in _HOLDS for node in walk(method.body))


def _as_object(kind: ClassInfo, name: str, info: ClassInfo, module: Module) -> str | None:
    """Return the mark of an object that holds states, if `forward` of the class takes and gives it back by a name."""
    odd = [one for one in kind.node.decorators if not m.matches(one, m.Decorator(m.Name("dataclass")))]
    if kind.bases not in ((), ("object",)) or odd or not _stands_before(kind, info, module):
        return None
    if "__slots__" in {node.value for node in of_kind(kind.node, cst.Name)}:
        return None
    forward = module.method(info, "forward")
    if forward is None or name not in parameters(forward) or any(one != name for one, _ in _made(module)):
        return None
    given = (argument for call in calls_in(forward.body) for argument in call.args)
    back = any(m.matches(one, m.Arg(value=m.Attribute(attr=m.Name(name)), keyword=m.Name(name))) for one in given)
    return f'hands_on_states("{name}", {kind.name})' if back else None


def _as_layer(kind: ClassInfo, info: ClassInfo, module: Module) -> str | None:
    """Return the mark of a layer with more tensors that grow as keys do."""
    grown = _grown(kind, module)
    if not grown or not _stands_before(kind, info, module):
        return None
    named = ", ".join(f'{method}=("{attribute}", {dimension})' for method, attribute, dimension in grown)
    return f"grows_in_layers({kind.name}, {named})"


def _grown(kind: ClassInfo, module: Module) -> list[tuple[str, str, int]] | None:
    """Return what a layer grows: method, attribute and dimension; None if it does anything else that a step asks."""
    if not _is_plain(kind, "DynamicLayer") or not _is_of_caches(kind, module):
        return None
    found: list[tuple[str, str, int]] = []
    for name, method in kind.methods.items():
        if name in _OF_A_LAYER:
            continue
        growth = None if name in _ASKED or name.startswith("__") or method.decorators else _growth(method)
        if growth is None:
            return None
        found.append((name, *growth))
    attributes = {attribute for _, attribute, _ in found}
    empty = {name for name, values in kind.assigned.items() if _begins_empty(kind, name, values)}
    same = len(attributes) == len(found) and attributes <= empty and _only_these(kind, attributes)
    return found if same and not _read_elsewhere(kind, attributes, module) else None


def _begins_empty(kind: ClassInfo, name: str, values: list[cst.BaseExpression]) -> bool:
    init = kind.methods.get("__init__")
    if init is None or not values:
        return False
    lines = [*of_kind(init.body, cst.Assign), *of_kind(init.body, cst.AnnAssign)]
    first = [line.value for line in lines for target in _targets(line) if self_attribute(target) == name]
    return len(first) == 1 and first[0] is not None and m.matches(first[0], m.Name("None"))


def _targets(line: cst.Assign | cst.AnnAssign) -> list[cst.BaseExpression]:
    return [line.target] if isinstance(line, cst.AnnAssign) else [target.target for target in line.targets]


def _only_these(kind: ClassInfo, attributes: set[str]) -> bool:
    """Whether `__init__` of a layer does nothing but call its base's and begin these attributes."""
    lines = [*small_statements(kind.methods["__init__"].body)]
    for line in lines:
        if isinstance(line, (cst.Assign, cst.AnnAssign)):
            if not all(self_attribute(target) in attributes for target in _targets(line)):
                return False
        elif not m.matches(line, m.Expr(m.SimpleString() | m.ConcatenatedString() | _TO_BASE)):
            return False
    return True


_TO_BASE = m.Call(func=m.Attribute(value=m.Call(func=m.Name("super")), attr=m.Name("__init__")))
_CAT = m.Call(
    func=m.Attribute(value=m.Name("torch"), attr=m.Name("cat") | m.Name("concat")),
    args=[m.Arg(value=m.List() | m.Tuple()), m.Arg()],
)


def _growth(method: cst.FunctionDef) -> tuple[str, int] | None:
    """Return the attribute and dimension that a method grows by what it is given, and returns whole.

    `self.x = new if self.x is None else torch.cat([self.x, new], dim=d)`, or the same as a statement.
    """
    taken = parameters(method)
    body = [line for line in method.body.body if not _is_text(line)]
    if len(taken) != 2 or len(body) != 2 or not isinstance(body[1], cst.SimpleStatementLine):
        return None
    returned = body[1].body[0]
    attribute = self_attribute(returned.value) if isinstance(returned, cst.Return) and returned.value else None
    first = _begun(body[0], attribute) if attribute is not None else None
    if attribute is None or first is None:
        return None
    begun, grown = first
    if not m.matches(begun, m.Name(taken[1])) or not m.matches(grown, _CAT):
        return None
    both, dimension = cst.ensure_type(grown, cst.Call).args
    parts = [element.value for element in cst.ensure_type(both.value, cst.List).elements] if isinstance(
        both.value, cst.List) else [element.value for element in cst.ensure_type(both.value, cst.Tuple).elements]  # fmt: skip
    keyword = dimension.keyword is None or dimension.keyword.value in ("dim", "axis")
    same = len(parts) == 2 and self_attribute(parts[0]) == attribute and m.matches(parts[1], m.Name(taken[1]))
    number = _integer(dimension.value)
    return (attribute, number) if same and keyword and number is not None else None


def _begun(line: cst.CSTNode, attribute: str) -> tuple[cst.BaseExpression, cst.BaseExpression] | None:
    """Return what an attribute becomes if it is None, and otherwise."""
    none = m.Comparison(
        left=m.Attribute(value=m.Name("self"), attr=m.Name(attribute)),
        comparisons=[m.ComparisonTarget(operator=m.Is(), comparator=m.Name("None"))],
    )
    if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
        value = _given(line.body[0], attribute)
        if isinstance(value, cst.IfExp) and m.matches(value.test, none):
            return value.body, value.orelse
    if isinstance(line, cst.If) and m.matches(line.test, none) and isinstance(line.orelse, cst.Else):
        ways = [list(small_statements(branch)) for branch in (line.body, line.orelse.body)]
        values = [_given(way[0], attribute) for way in ways if len(way) == 1]
        if len(values) == 2 and values[0] is not None and values[1] is not None:
            return values[0], values[1]
    return None


def _given(line: cst.CSTNode, attribute: str) -> cst.BaseExpression | None:
    single = isinstance(line, cst.Assign) and len(line.targets) == 1
    return line.value if single and self_attribute(line.targets[0].target) == attribute else None


def _integer(node: cst.BaseExpression) -> int | None:
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
        inner = _integer(node.expression)
        return None if inner is None else -inner
    return int(node.value) if isinstance(node, cst.Integer) else None


def _is_text(line: cst.CSTNode) -> bool:
    text = m.Expr(m.SimpleString() | m.ConcatenatedString())
    return m.matches(line, m.SimpleStatementLine(body=[text]))


def _read_elsewhere(kind: ClassInfo, attributes: set[str], module: Module) -> bool:
    """Whether code that is of no cache reads what a layer keeps, or asks whether something is one."""
    for owner, _, method in module.methods():
        if any(_OF_CACHES.fullmatch(base) for base in owner.bases):
            continue
        for node in walk(method.body):
            if isinstance(node, cst.Attribute) and node.attr.value in attributes and self_attribute(node) is None:
                return True
            if isinstance(node, cst.Call) and any(m.matches(one.value, m.Name(kind.name)) for one in node.args):
                return True
    return False
