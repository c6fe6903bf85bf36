"""Whether what reads a projection's result would notice that it is a slice of a larger tensor.

The results of `packed_linear` are slices of one buffer along the last dimension: equal in value, but not contiguous.
Arithmetic, splitting the last dimension and whatever copies do not notice. A `view` that is not seen to split heads
becomes `reshape`, since one that merges the last dimension with others fails; `is_contiguous` or `as_strided` see
something else, and so may what nobody knows: for these `packed_linear_dense` gives tensors that lie as `nn.Linear`'s
do. A result that leaves `forward` is copied there: outside, one of `nn.Linear` is contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import libcst as cst

from rewrite.analysis.effects import Scope, attribute, known
from rewrite.analysis.effects.identity import Identity, plainly_bound
from rewrite.analysis.patterns.residual import choices
from rewrite.analysis.projections.linear_calls import LinearCall
from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute, walk
from rewrite.analysis.tree.nodes import parameters

MAX_DEPTH = 4
_HEADS = 4
"""How many sizes a `view` names that splits `[B, S, H * D]` into heads."""
_NOTICES = known.names(
    """
    is_contiguous stride as_strided as_strided_ resize_ resize_as_ data_ptr storage untyped_storage storage_offset
    set_ view_as numpy __dlpack__ view_as_real
    """
)
_ASKS_OTHER = known.names("type_as view_as expand_as reshape_as to")
"""What asks another tensor for its shape or dtype."""
_MAY_COPY = known.names("reshape flatten ravel reshape_as unflatten")
"""What gives a view of a contiguous tensor, and may give a copy of a slice."""
_REORDERS = known.names("transpose permute swapaxes swapdims movedim moveaxis t T mT chunk split unbind")
"""What makes a contiguous tensor not contiguous anyway."""
_SAYS = known.names("size dim numel nelement element_size item tolist get_device is_floating_point ndimension")


@dataclass
class Reads:
    """What reads some results, and what has to change for that."""

    problem: str = ""
    """What would notice, empty if nothing does."""
    reshapes: list[cst.Name] = field(default_factory=list)
    """The `view` in `x.view(…)` that a slice needs to be `reshape`."""
    leaving: set[int] = field(default_factory=set)
    """The calls, by `id`, whose results, or views of them, may be returned by a method `forward`."""


_Entry = tuple[int, str, str, bool]
"""A function, by its `id`, a parameter, and how what comes in by that lies and was copied."""


@dataclass(frozen=True)
class _Tracked:
    """An expression that may be a result, or a view of it."""

    scope: Scope
    depth: int = 0
    lies: str = "slice"
    """As a slice; "turned" where it would not be contiguous anyway; "alone" where it was copied if it was a slice."""
    copied: bool = False
    """Whether this may be a copy where a contiguous result would give a view."""
    entry: _Entry | None = None
    """Through what it came into the function; None in the method of the call."""


def relied_on(scope: Scope, calls: Sequence[LinearCall]) -> Reads:
    """Return what reads the results of these calls, through locals, functions of the file and who calls the method."""
    reads, alike = Reads(), _split_alike(scope, calls)
    for call in calls:
        follower = _Follower(reads, alike)
        follower.expression(call.node, _Tracked(scope))
        if follower.leaves:
            reads.leaving.add(id(call.node))
    return reads


class _Follower:
    """Goes after a projection's result: to everything that reads it, unchanged, split or as part of something."""

    def __init__(self, reads: Reads, alike: bool) -> None:
        self.reads = reads
        self.alike = alike
        """Whether all results are split into heads of one size first: if that is even, so are all places."""
        self.leaves = False
        self.seen = set[tuple[int, str, bool, _Entry | None]]()
        self.returning: dict[_Entry, set[tuple[str, bool]]] = {}
        """How what came into a function lies where that returns it, and whether it was copied."""

    def notices(self, text: str, what: _Tracked) -> None:
        """Note the first thing that would notice."""
        if what.lies == "slice":
            self.reads.problem = self.reads.problem or text

    def expression(self, node: cst.CSTNode, what: _Tracked) -> None:
        """Look at what is done with the value of `node`."""
        key = (id(node), what.lies, what.copied, what.entry)
        if self.reads.problem or key in self.seen:
            return
        self.seen.add(key)
        module = what.scope.module
        above = module.parent(node)
        if isinstance(above, cst.Attribute):
            self._attribute(above, what)
        elif isinstance(above, cst.Arg):
            call = module.parent(above)
            assert isinstance(call, cst.Call)
            self._argument(call, above, what)
        elif isinstance(above, (cst.Element, cst.StarredElement)):
            self._element(module.parent(above), above, what)
        elif isinstance(above, cst.Subscript) and above.value is node:
            self.expression(above, what)
        elif what.copied and _is_written(node, above):
            self.reads.problem = f"`{module.code(node)}` is written in place, and would be a copy"
        elif isinstance(above, (cst.IfExp, cst.BooleanOperation)):
            self.expression(above, what)
        elif isinstance(above, cst.NamedExpr):
            self.expression(above, what)
            self._bound(above.target, above, what)
        elif isinstance(above, (cst.Assign, cst.AnnAssign)):
            targets = [t.target for t in above.targets] if isinstance(above, cst.Assign) else [above.target]
            for target in targets:
                self._bound(target, above, what)
        elif isinstance(above, (cst.For, cst.CompFor)) and above.iter is node:
            self._bound(above.target, above, what)
        elif isinstance(above, cst.Return):
            self._returned(what)
        elif isinstance(above, (cst.DictElement, cst.Yield, cst.Await, cst.Lambda, cst.BaseComp)):
            self.notices(f"`{module.code(node)}` goes where it cannot be followed", what)

    def _attribute(self, above: cst.Attribute, what: _Tracked) -> None:
        name, module = above.attr.value, what.scope.module
        call = module.parent(above)
        if isinstance(call, cst.Call) and call.func is above:
            self._operation(name, call, above.attr, what)
        elif name in _REORDERS or name == "data":
            self.expression(above, what if name == "data" else _turned(what))
        elif name not in known.NO_TENSOR:
            self.notices(f"`{module.code(above)}`", what)

    def _operation(self, name: str, call: cst.Call, spelled: cst.Name | None, what: _Tracked) -> None:
        """Look at `x.name(…)` or `torch.name(x, …)`."""
        scope, text = what.scope, f"`{what.scope.module.code(call)}`"
        if what.copied and name.endswith("_"):
            self.reads.problem = f"{text} writes in place what would be a copy"
        elif name == "contiguous":
            self.expression(call, replace(what, lies="alone", copied=what.lies == "slice" or what.copied))
        elif name in _REORDERS:
            self.expression(call, _turned(what))
        elif name in _SAYS or name in known.FRESH:
            return
        elif name in _NOTICES:
            self.notices(text, what)
        elif name == "view" and spelled is not None and what.lies == "slice" and not _splits_heads(call, scope):
            if not _names_sizes(call, scope):
                self.notices(f"{text} is not proven to only split the last dimension", what)
            self.reads.reshapes.append(spelled)
            self.expression(call, replace(what, copied=True))
        elif name == "view_as_complex" and not self.alike:
            self.notices(f"{text} is not proven to read pairs that lie at even places", what)
        elif name in known.VIEWS or name in known.RANDOM or name.endswith("_") or name == "view_as_complex":
            may_copy = what.lies == "slice" and name in _MAY_COPY and not _splits_heads(call, scope)
            self.expression(call, replace(what, copied=what.copied or may_copy))
        else:
            self.notices(f"{text}, of which nothing is known", what)

    def _argument(self, call: cst.Call, argument: cst.Arg, what: _Tracked) -> None:
        scope, func = what.scope, call.func
        if isinstance(func, cst.Attribute) and func.attr.value in known.CONTAINER_WRITES:
            self._kept(func.value, what)
            return
        name = known.torch_function(scope.names.resolved(func))
        if isinstance(func, cst.Attribute) and not name and self_attribute(func) is None:
            name = func.attr.value if func.attr.value in known.FRESH else ""
            if func.attr.value in _ASKS_OTHER:
                return
        if name and not argument.star:
            self._operation(name, call, None, what)
        else:
            self._followed(call, argument, what)

    def _kept(self, container: cst.BaseExpression, what: _Tracked) -> None:
        """Look at every read of a list that now holds it."""
        scope = what.scope
        if not isinstance(container, cst.Name) or container.value not in scope.single:
            self.notices(f"it is kept in `{scope.module.code(container)}`", what)
            return
        for read in reads_of(container.value, scope):
            above = scope.module.parent(read)
            if not (isinstance(above, cst.Attribute) and above.attr.value in known.CONTAINER_WRITES):
                self.expression(read, what)

    def _followed(self, call: cst.Call, argument: cst.Arg, what: _Tracked) -> None:
        """Go on inside the functions of the file that may be called; modules of torch take any strides."""
        scope = what.scope
        targets = _targets(call, scope) if what.depth < MAX_DEPTH and not argument.star else None
        if targets is None:
            self.notices(f"it is handed to `{scope.module.code(call.func)}`, of which nothing is known", what)
        for function, owner in targets or ():
            inner = scope.effects.scope(function, owner, scope.depth + 1)
            if (name := _parameter(call, argument, function)) is None:
                self.notices(f"`{scope.module.code(call)}`", what)
            else:
                for lies, copied in sorted(self._returned_by(inner, name, what)):
                    self.expression(call, replace(what, lies=lies, copied=copied))

    def _returned_by(self, inner: Scope, name: str, what: _Tracked) -> set[tuple[str, bool]]:
        """Look at what a function does with a parameter; return how it may return it."""
        entry = (id(inner.function), name, what.lies, what.copied)
        if entry not in self.returning:
            self.returning[entry] = set()
            for read in reads_of(name, inner):
                if Identity(inner).assignment(name, read) is None:
                    self.expression(read, replace(what, scope=inner, depth=what.depth + 1, entry=entry))
        return self.returning[entry]

    def _element(self, display: cst.CSTNode, element: cst.BaseElement, what: _Tracked) -> None:
        above = what.scope.module.parent(display)
        if not isinstance(above, cst.Assign) or not isinstance(display, cst.Tuple):
            return self.expression(display, what)
        place = next(i for i, e in enumerate(display.elements) if e is element)
        for target in (line.target for line in above.targets):
            same = isinstance(target, cst.Tuple) and len(target.elements) == len(display.elements)
            self._bound(target.elements[place].value if same else target, above, what)  # type: ignore[attr-defined]

    def _bound(self, target: cst.CSTNode, line: cst.CSTNode, what: _Tracked) -> None:
        """Look at every read of what an assignment binds."""
        module = what.scope.module
        if isinstance(target, (cst.Tuple, cst.List)):
            for element in target.elements:
                self._bound(element.value, line, what)
        elif isinstance(target, cst.Name):
            statement = module.statement(line)
            for read in reads_of(target.value, what.scope):
                if read is not target and _may_reach(what.scope, target.value, statement, read):
                    self.expression(read, what)
        else:
            self.notices(f"it is kept in `{module.code(target)}`", what)

    def _returned(self, what: _Tracked) -> None:
        """Look at what the callers of this method do with what it returns."""
        if what.entry is not None:
            self.returning[what.entry].add((what.lies, what.copied))
            return
        self.leaves = self.leaves or (what.lies != "alone" and what.scope.function.name.value == "forward")
        if what.depth < MAX_DEPTH and what.scope.owner is not None:
            for call, scope in _callers(what.scope):
                self.expression(call, replace(what, scope=scope, depth=what.depth + 1))


def _turned(what: _Tracked) -> _Tracked:
    return replace(what, lies="turned") if what.lies == "slice" else what


def _split_alike(scope: Scope, calls: Sequence[LinearCall]) -> bool:
    """Return whether the results of all calls are first split into heads, all by the same words."""
    said = set[str]()
    for call in calls:
        above = scope.module.parent(call.node)
        view = scope.module.parent(above)
        if not isinstance(above, cst.Attribute) or above.attr.value not in ("view", "reshape"):
            return False
        if not isinstance(view, cst.Call) or view.func is not above or not _splits_heads(view, scope):
            return False
        said.add(", ".join(scope.module.code(argument.value) for argument in view.args))
    return len(said) == 1


def _splits_heads(view: cst.Call, scope: Scope) -> bool:
    """Whether a `view` names as many sizes as heads have dimensions: the last dimension is split, and not merged."""
    return sum(_sizes(argument, scope) for argument in view.args) >= _HEADS


def _sizes(node: cst.CSTNode, scope: Scope) -> int:
    """Return how many sizes an argument names, two for `*x.shape[:-1]` and the like."""
    if isinstance(node, (cst.Arg, cst.StarredElement)):
        inside = _sizes(node.value, scope)
        return max(inside, 2) if isinstance(node, cst.StarredElement) or node.star else inside
    if isinstance(node, cst.Name):
        value = scope.single.get(node.value)
        return _sizes(value, scope) if isinstance(value, (cst.Tuple, cst.List, cst.BinaryOperation)) else 1
    if isinstance(node, (cst.Tuple, cst.List)):
        return sum(_sizes(e if isinstance(e, cst.StarredElement) else e.value, scope) for e in node.elements)
    if isinstance(node, cst.BinaryOperation) and isinstance(node.right, cst.Tuple):
        return max(_sizes(node.left, scope), 2) + _sizes(node.right, scope)
    return 1


def _parameter(call: cst.Call, argument: cst.Arg, function: cst.FunctionDef) -> str | None:
    """Return the parameter that takes an argument of a call."""
    names = [name for name in parameters(function) if name != "self"]
    if argument.keyword is not None:
        return argument.keyword.value if argument.keyword.value in names else None
    place = next(i for i, given in enumerate(call.args) if given is argument)
    return names[place] if place < len(names) and not any(a.star for a in call.args[:place]) else None


_Function = tuple[cst.FunctionDef, "ClassInfo | None"]


def _targets(call: cst.Call, scope: Scope) -> list[_Function] | None:
    """Return the functions of the file that a call may run, what takes any strides left out; None if it may others."""
    module, func = scope.module, call.func
    if isinstance(func, cst.Name) and func.value in scope.single:
        func = scope.single[func.value]
    if isinstance(func, cst.Subscript) and _is_torchs(func, scope):
        return []
    if isinstance(func, cst.Name) and func.value in scope.functions:
        return [(scope.functions[func.value], scope.owner)]
    if isinstance(func, cst.Name) and func.value not in scope.locals:
        if func.value in module.functions:
            return [(module.functions[func.value], None)]
        if (info := module.classes.get(func.value)) is not None and _is_dataclass(info, module):
            return []
        return [] if func.value in known.RUNTIME or func.value in known.BUILTINS else None
    name = self_attribute(func)
    if name is None or scope.owner is None:
        bases = scope.owner.bases if scope.owner is not None and module.code(func) == "super().forward" else ()
        return [] if bases and known.torch_module(bases[0]) else None
    if (method := module.method(scope.owner, name)) is not None:
        return [(method, scope.owner)]
    found: list[_Function] = []
    for value in attribute(scope.owner, name, scope.names).values:
        for choice in choices(value):
            if _is_torchs(choice, scope):
                continue
            info = module.classes.get(module.qualified(choice.func)) if isinstance(choice, cst.Call) else None
            forward = module.method(info, "forward") if info is not None else None
            if forward is None:
                return None
            found.append((forward, info))
    return found


def _is_dataclass(info: ClassInfo, module: Module) -> bool:
    """Whether a class only holds what it is given."""
    return any(module.qualified(d.decorator).endswith("dataclass") for d in info.node.decorators)


def _is_torchs(value: cst.BaseExpression, scope: Scope) -> bool:
    """Whether this is a module or function of torch, or an activation: they take any strides."""
    if isinstance(value, cst.Subscript):
        return scope.module.qualified(value.value).endswith("ACT2FN")
    name = scope.module.qualified(value.func if isinstance(value, cst.Call) else value)
    return name.startswith("torch.nn.") or known.torch_function(name) != ""


def _callers(scope: Scope) -> Iterator[tuple[cst.Call, Scope]]:
    """Yield the calls in the file that may run this method."""
    module, owner, name = scope.module, scope.owner, scope.function.name.value
    assert owner is not None
    family = {info.name for info in (owner, *scope.names.heirs(owner), *scope.names.owners(owner))}
    for info, _, function in module.methods():
        for call in _calls(function, scope):
            called = self_attribute(call.func)
            if called is None:
                continue
            direct = called == name and info.name in family
            built = name == "forward" and any(
                isinstance(node, cst.Call) and module.qualified(node.func) in family
                for value in module.assignments(info, called)
                for node in walk(value)
            )
            if direct or built:
                yield call, scope.effects.scope(function, info)


def _calls(function: cst.FunctionDef, scope: Scope) -> list[cst.Call]:
    found = scope.effects.calls.get(id(function))
    if found is None:
        found = scope.effects.calls[id(function)] = [n for n in walk(function.body) if isinstance(n, cst.Call)]
    return found


_TARGETS = (cst.AssignTarget, cst.AnnAssign, cst.For, cst.CompFor, cst.NamedExpr)


def reads_of(name: str, scope: Scope) -> Iterator[cst.Name]:
    """Yield where a local's name stands as a value."""
    for node in walk(scope.function.body):
        if isinstance(node, cst.Name) and node.value == name:
            above = scope.module.parent(node)
            attribute_name = isinstance(above, cst.Attribute) and above.attr is node
            keyword = isinstance(above, cst.Arg) and above.keyword is node
            target = isinstance(above, _TARGETS) and above.target is node
            if not attribute_name and not keyword and not target and not isinstance(above, cst.Param):
                yield node


def _may_reach(scope: Scope, name: str, line: cst.BaseStatement, read: cst.Name) -> bool:
    """Whether the value that `line` gives a local may still be there at `read`: nothing certainly came between."""
    order = scope.order
    start, end = order[id(line)], order[id(scope.module.statement(read))]
    if any(start < order[id(s)] < end or end <= start < order[id(s)] for s in _rebinding(scope, name, line)):
        return False
    last = Identity(scope).assignment(name, read)
    return last is None or last is line or order[id(last)] < start


def _rebinding(scope: Scope, name: str, line: cst.BaseStatement) -> Iterator[cst.CSTNode]:
    """Yield the statements that bind `name` anew and that whatever runs on after `line` passes."""
    node: cst.CSTNode = line
    while node is not scope.function:
        above = scope.module.parent(node)
        block = getattr(above, "body", ())
        if isinstance(above, cst.IndentedBlock) and isinstance(block, Sequence):
            place = next(i for i, statement in enumerate(block) if statement is node)
            for statement in block[place + 1 :]:
                if isinstance(statement, cst.SimpleStatementLine) and name in plainly_bound(statement):
                    yield statement
                    break
        if isinstance(above, (cst.For, cst.While)):
            return
        node = above


def _names_sizes(call: cst.Call, scope: Scope) -> bool:
    """Whether a `view` names sizes by their place, and no dtype."""
    if any(argument.keyword is not None for argument in call.args) or not call.args:
        return False
    first = call.args[0].value
    name = scope.module.qualified(first)
    return not (name.startswith("torch.") or name.endswith("dtype"))


def _is_written(node: cst.CSTNode, above: cst.CSTNode) -> bool:
    """Whether a statement writes `node` in place."""
    if isinstance(above, cst.AugAssign):
        return above.target is node
    return isinstance(above, cst.AssignTarget) and isinstance(node, cst.Subscript)
