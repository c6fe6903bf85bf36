"""Layers of caches, of a file's own classes, that grow more than keys and values by the same tokens."""

from __future__ import annotations

import re

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.tree.module import ClassInfo, Module, of_kind, self_attribute, small_statements, walk
from rewrite.analysis.tree.nodes import parameters

_OF_CACHES = re.compile(r"(^|.*\.)cache_utils\.\w+|transformers\.\w*Cache")
_STATIC = re.compile(r"Static\w*Layer$")
"""Layers of a cache that the loop is not asked for."""
BESIDE = frozenset({"batch_repeat_interleave", "batch_select_indices", "crop", "reorder_cache", "reset"})
"""What a step asks of no cache: a class may define it as it likes."""
_MAY_DIFFER = frozenset({"__init__", "__repr__", "offload", "prefetch", *BESIDE})
ASKED = frozenset({
    "activate_past_recording", "batch_size", "early_initialization", "get_conv_state", "get_mask_sizes",
    "get_max_cache_shape", "get_max_length", "get_query_offset", "get_recurrent_state", "get_seq_length",
    "get_usable_length", "has_previous_state", "is_compileable", "is_dummy", "is_initialized", "is_linear",
    "is_recording_past", "is_sliding", "key_cache", "layers", "lazy_initialization", "lazy_initialization_indexer",
    "offload", "prefetch", "update", "update_conv_state", "update_indexer", "update_recurrent_state", "value_cache",
})  # fmt: skip
"""What a model asks of a cache or its layers, or both keep there: buffers answer in the place of a file's class."""


def growing_methods(module: Module) -> dict[str, set[str]]:
    """Return the methods by which layers of the file's own grow what they keep, and the names of what they keep."""
    found: dict[str, set[str]] = {}
    for kind in module.classes.values():
        for method, attribute, _ in grown(kind, module) or ():
            found.setdefault(method, set()).add(attribute)
    return found


def is_of_caches(kind: ClassInfo, module: Module, below: tuple[str, ...] = ()) -> bool:
    """Whether a class is derived from a cache of transformers', or from a layer of one that grows."""
    if kind.name in below or any(_STATIC.search(base) for base in kind.bases):
        return False
    of_file = (module.classes[base] for base in kind.bases if base in module.classes)
    of_transformers = any(_OF_CACHES.fullmatch(base) for base in kind.bases)
    return of_transformers or any(is_of_caches(base, module, (*below, kind.name)) for base in of_file)


def is_plain(kind: ClassInfo, base: str) -> bool:
    """Whether a class has one base, of that name, no metaclass, and says of itself nothing that is asked of that."""
    if kind.node.decorators or kind.node.keywords or len(kind.node.bases) != 1:
        return False
    said = {target.value for line in _said(kind) for target in _targets(line) if isinstance(target, cst.Name)}
    named = [name.rpartition(".")[2] for name in kind.bases] == [base]
    return named and said.isdisjoint(ASKED) and keeps_nothing(kind)


def keeps_nothing(kind: ClassInfo) -> bool:
    """Whether a class, which all its objects share, has nothing of its own that could be written into."""
    constant = m.SimpleString() | m.Integer() | m.Float() | m.Name("True") | m.Name("False") | m.Name("None")
    of_objects = m.Call(func=m.Name("field"))
    return all(line.value is None or m.matches(line.value, constant | of_objects) for line in _said(kind))


def _said(kind: ClassInfo) -> list[cst.Assign | cst.AnnAssign]:
    """Return the assignments in the body of a class."""
    own = [line for part in kind.node.body.body if isinstance(part, cst.SimpleStatementLine) for line in part.body]
    return [line for line in own if isinstance(line, (cst.Assign, cst.AnnAssign))]


def grown(kind: ClassInfo, module: Module) -> list[tuple[str, str, int]] | None:
    """Return what a layer grows: method, attribute and dimension; None if it does anything else that a step asks."""
    if not is_plain(kind, "DynamicLayer") or not is_of_caches(kind, module):
        return None
    found: list[tuple[str, str, int]] = []
    for name, method in kind.methods.items():
        if name in _MAY_DIFFER:
            continue
        growth = None if name in ASKED or name.startswith("__") or method.decorators else _growth(method)
        if growth is None:
            return None
        found.append((name, *growth))
    attributes = {attribute for _, attribute, _ in found}
    empty = {name for name in kind.assigned if _begins_empty(kind, name)}
    same = len(attributes) == len(found) and attributes <= empty and _only_these(kind, attributes)
    return found if same and not _read_elsewhere(kind, attributes, module) else None


def _begins_empty(kind: ClassInfo, name: str) -> bool:
    init = kind.methods.get("__init__")
    if init is None:
        return False
    lines: list[cst.Assign | cst.AnnAssign] = [*of_kind(init.body, cst.Assign), *of_kind(init.body, cst.AnnAssign)]
    first = [line.value for line in lines for target in _targets(line) if self_attribute(target) == name]
    return len(first) == 1 and first[0] is not None and m.matches(first[0], m.Name("None"))


def _targets(line: cst.Assign | cst.AnnAssign) -> list[cst.BaseExpression]:
    return [line.target] if isinstance(line, cst.AnnAssign) else [target.target for target in line.targets]


def _only_these(kind: ClassInfo, attributes: set[str]) -> bool:
    """Whether `__init__` of a layer does nothing but call its base's and begin these attributes."""
    for line in small_statements(kind.methods["__init__"].body):
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
    parts = [element.value for element in both.value.elements] if isinstance(both.value, (cst.List, cst.Tuple)) else []
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
    if isinstance(line, cst.Assign) and len(line.targets) == 1:
        return line.value if self_attribute(line.targets[0].target) == attribute else None
    return None


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
