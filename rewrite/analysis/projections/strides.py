"""Whether what reads a projection's result would notice that it is a slice of a larger tensor.

The results of `packed_linear` are slices of one buffer along the last dimension: equal in value, but not contiguous.
Arithmetic, splitting the last dimension and whatever copies do not notice. A `view` that merges the last dimension
with others fails on them, and `is_contiguous`, `stride` or `as_strided` see something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import libcst as cst

from rewrite.analysis.effects import Scope, attribute, known
from rewrite.analysis.effects.identity import Identity, plainly_bound
from rewrite.analysis.patterns.residual import choices
from rewrite.analysis.projections.linear_calls import LinearCall
from rewrite.analysis.projections.view_shapes import pairs_last, split_alike, splits_last
from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute, walk
from rewrite.analysis.tree.nodes import parameters

MAX_DEPTH = 4
_NOTICES = known.names(
    """
    is_contiguous stride as_strided as_strided_ resize_ resize_as_ data_ptr storage untyped_storage storage_offset
    set_ view_as numpy __dlpack__ view_as_real
    """
)
_ASKS_OTHER = known.names("type_as view_as expand_as reshape_as to")
"""What asks another tensor for its shape or dtype."""
_SAME = known.names("to float type half bfloat16 double detach dropout")
"""What may return the tensor itself."""
_MAY_COPY = known.names("contiguous reshape flatten ravel reshape_as unflatten")
"""What gives a view of a contiguous tensor, and may give a copy of a slice."""
_COPIES = known.names("contiguous clone")
REORDERS = known.names("transpose permute swapaxes swapdims movedim moveaxis t T mT chunk split unbind")
"""What makes a contiguous tensor not contiguous anyway."""
_SAYS = known.names(
    """
    size dim numel nelement element_size item tolist get_device is_floating_point ndimension
    """
)


@dataclass
class Reads:
    """What reads some results, and what has to change for that."""

    problem: str = ""
    """What would notice, empty if nothing does."""
    reshapes: list[cst.Name] = field(default_factory=list)
    """The `view` in `x.view(…)` that a slice needs to be `reshape`."""


@dataclass(frozen=True)
class Tracked:
    """An expression that may be a result, unchanged or split."""

    scope: Scope
    call: LinearCall | None
    """The projection, while nothing has changed the shape of its result."""
    depth: int = 0
    copied: bool = False
    """Whether this is a copy where a contiguous result would give a view, and the result is read elsewhere."""
    entry: tuple[int, str] | None = None
    """The function, by its `id`, and the parameter through which it came here; None in the method of the call."""
    last: str = ""
    """What the last dimension is: "heads" once the result was split, then "pairs", `""` where that is not known."""

    def other(self, *, last: str = "") -> Tracked:
        """Return what is left of it once its shape is another."""
        return replace(self, call=None, last=last)


def relied_on(scope: Scope, calls: Sequence[LinearCall]) -> Reads:
    """Return what reads the results of these calls, through locals, functions of the file and who calls the method."""
    follower = Follower(split_alike(scope, calls))
    for call in calls:
        follower.expression(call.node, Tracked(scope, call))
    return follower.reads


class Follower:
    """Goes after a projection's result: to everything that reads it, unchanged, split or as part of something."""

    def __init__(self, split_alike: bool) -> None:
        self.reads = Reads()
        self.split_alike = split_alike
        self.seen = set[tuple[int, bool, bool, str, tuple[int, str] | None]]()
        self.returning: dict[tuple[int, str], bool] = {}
        """Whether a function returns what came in by a parameter, for those that were followed."""

    def notices(self, text: str) -> None:
        """Note the first thing that would notice."""
        self.reads.problem = self.reads.problem or text

    def expression(self, node: cst.CSTNode, what: Tracked) -> None:
        """Look at what is done with the value of `node`."""
        key = (id(node), what.call is not None, what.copied, what.last, what.entry)
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
            self.expression(above, what.other())
        elif what.copied and _is_written(node, above):
            self.notices(f"`{module.code(node)}` is written in place, and would be a copy")
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
            self.notices(f"`{module.code(node)}` goes where it cannot be followed")

    def _attribute(self, above: cst.Attribute, what: Tracked) -> None:
        name, module = above.attr.value, what.scope.module
        call = module.parent(above)
        if not isinstance(call, cst.Call) or call.func is not above:
            if name == "data":
                self.expression(above, what)
            elif name not in known.NO_TENSOR and name not in REORDERS:
                self.notices(f"`{module.code(above)}`")
            return
        self._operation(name, call, above.attr, what)

    def _operation(self, name: str, call: cst.Call, spelled: cst.Name | None, what: Tracked) -> None:
        """Look at `x.name(…)` or `torch.name(x, …)`."""
        scope = what.scope
        if name in _NOTICES:
            self.notices(f"`{scope.module.code(call)}`")
        elif name == "view" and spelled is not None:
            self._view(call, spelled, what)
        elif name == "view_as_complex":
            if what.last == "pairs" and self.split_alike:
                self.expression(call, what.other())
            else:
                self.notices(f"`{scope.module.code(call)}` is not proven to read pairs that lie at even places")
        elif what.copied and name.endswith("_"):
            self.notices(f"`{scope.module.code(call)}` writes in place what would be a copy")
        elif name in REORDERS or name in _SAYS or (name in known.FRESH and name not in _COPIES):
            return
        elif name in known.VIEWS or name in known.RANDOM or name in _COPIES or name.endswith("_"):
            base = call.func.value if spelled is not None and isinstance(call.func, cst.Attribute) else call
            same = name not in _MAY_COPY or (name == "reshape" and splits_last(scope, call, what.call))
            copied = what.copied or not (same or _is_dead(scope, base))
            if name not in _COPIES or copied:
                pairs = what.last == "heads" and name == "reshape" and pairs_last(scope, call)
                after = what if name in _SAME else what.other(last="pairs" if pairs else "")
                self.expression(call, replace(after, copied=copied))
        else:
            self.notices(f"`{scope.module.code(call)}`, of which nothing is known")

    def _view(self, call: cst.Call, spelled: cst.Name, what: Tracked) -> None:
        """A `view` that may merge the last dimension becomes `reshape`, where nobody sees that this may copy."""
        scope, base = what.scope, call.func.value if isinstance(call.func, cst.Attribute) else call
        split = splits_last(scope, call, what.call)
        if not split:
            if not _names_sizes(call, scope) or not _is_dead(scope, base):
                self.notices(f"`{scope.module.code(call)}` is not proven to only split the last dimension")
                return
            self.reads.reshapes.append(spelled)
        pairs = what.last == "heads" and pairs_last(scope, call)
        heads = split and what.call is not None
        self.expression(call, what.other(last="pairs" if pairs else "heads" if heads else ""))

    def _argument(self, call: cst.Call, argument: cst.Arg, what: Tracked) -> None:
        scope = what.scope
        if argument.star:
            self.notices(f"`{scope.module.code(call)}`")
            return
        if isinstance(call.func, cst.Attribute) and call.func.attr.value in known.CONTAINER_WRITES:
            self._kept(call.func.value, what)
            return
        name = known.torch_function(scope.names.resolved(call.func))
        if isinstance(call.func, cst.Attribute) and not name and self_attribute(call.func) is None:
            name = call.func.attr.value if call.func.attr.value in known.FRESH else ""
            if call.func.attr.value in _ASKS_OTHER:
                return
        if name:
            self._operation(name, call, None, what)
            return
        self._followed(call, argument, what)

    def _kept(self, container: cst.BaseExpression, what: Tracked) -> None:
        """Look at every read of a list that now holds it."""
        if (name := self_attribute(container)) is not None:
            self._kept_as(name, what)
            return
        if not isinstance(container, cst.Name) or container.value not in what.scope.single:
            self.notices(f"it is kept in `{what.scope.module.code(container)}`")
            return
        for read in reads_of(container.value, what.scope):
            above = what.scope.module.parent(read)
            if not (isinstance(above, cst.Attribute) and above.attr.value in known.CONTAINER_WRITES):
                self.expression(read, what.other())

    def _kept_as(self, name: str, what: Tracked) -> None:
        """Look at every read of the attribute of `self` that now holds it, in whatever class of the file."""
        if what.depth >= MAX_DEPTH:
            self.notices(f"it is kept in `self.{name}`")
            return
        module = what.scope.module
        for info, _, function in module.methods():
            for read in walk(function.body):
                if isinstance(read, cst.Attribute) and read.attr.value == name and not _is_target(read, module):
                    scope = what.scope.effects.scope(function, info)
                    self.expression(read, Tracked(scope, None, what.depth + 1))

    def _followed(self, call: cst.Call, argument: cst.Arg, what: Tracked) -> None:
        """Go on inside the functions of the file that may be called; modules of torch take any strides."""
        scope = what.scope
        targets = _targets(call, scope) if what.depth < MAX_DEPTH else None
        if targets is None:
            self.notices(f"it is handed to `{scope.module.code(call.func)}`, of which nothing is known")
            return
        for function, owner in targets:
            inner = scope.effects.scope(function, owner, scope.depth + 1)
            if (name := _parameter(call, argument, function)) is None:
                self.notices(f"`{scope.module.code(call)}`")
                return
            if self._returns(inner, name, replace(what, call=what.call if owner is scope.owner else None)):
                self.expression(call, what.other())

    def _returns(self, inner: Scope, name: str, what: Tracked) -> bool:
        """Look at what a function does with a parameter; return whether it may return it."""
        entry = (id(inner.function), name)
        if entry not in self.returning:
            self.returning[entry] = False
            for read in reads_of(name, inner):
                if Identity(inner).assignment(name, read) is None:
                    here = Tracked(inner, what.call, what.depth + 1, what.copied, entry, what.last)
                    self.expression(read, here)
        return self.returning[entry]

    def _element(self, display: cst.CSTNode, element: cst.BaseElement, what: Tracked) -> None:
        module = what.scope.module
        above = module.parent(display)
        if isinstance(above, cst.Assign) and isinstance(display, cst.Tuple):
            place = next(i for i, e in enumerate(display.elements) if e is element)
            for target in above.targets:
                same = isinstance(target.target, cst.Tuple) and len(target.target.elements) == len(display.elements)
                inner = (
                    target.target.elements[place].value
                    if isinstance(target.target, cst.Tuple) and same
                    else target.target
                )
                self._bound(inner, above, what)
        else:
            self.expression(display, what)

    def _bound(self, target: cst.CSTNode, line: cst.CSTNode, what: Tracked) -> None:
        """Look at every read of what an assignment binds."""
        module = what.scope.module
        if isinstance(target, (cst.Tuple, cst.List)):
            for element in target.elements:
                self._bound(element.value, line, what)
            return
        if (name := self_attribute(target)) is not None:
            self._kept_as(name, what)
            return
        if not isinstance(target, cst.Name):
            self.notices(f"it is kept in `{module.code(target)}`")
            return
        statement = module.statement(line)
        for read in reads_of(target.value, what.scope):
            if read is not target and _may_reach(what.scope, target.value, statement, read):
                self.expression(read, what)

    def _returned(self, what: Tracked) -> None:
        """Look at what the callers of this method do with what it returns."""
        if what.entry is not None:
            self.returning[what.entry] = True
            return
        if what.depth >= MAX_DEPTH or what.scope.owner is None:
            return
        for call, scope in _callers(what.scope):
            same = what.call if scope.owner is what.scope.owner else None
            self.expression(call, Tracked(scope, same, what.depth + 1))


def _is_target(node: cst.Attribute, module: Module) -> bool:
    """Whether an attribute is set or added to, and not read."""
    above = module.parent(node)
    adds = isinstance(above, cst.Attribute) and above.attr.value in known.CONTAINER_WRITES
    return (
        adds
        or isinstance(above, (cst.AssignTarget, cst.Del))
        or (isinstance(above, cst.AnnAssign) and above.target is node)
    )


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


def _is_dead(scope: Scope, base: cst.BaseExpression) -> bool:
    """Whether the tensor that an operation is applied to is read by nothing else."""
    if not isinstance(base, cst.Name):
        return isinstance(base, cst.Call)
    reads = list(reads_of(base.value, scope))
    if len(reads) == 1:
        return True
    statement = scope.module.statement(base)
    if not isinstance(statement, cst.SimpleStatementLine) or base.value not in plainly_bound(statement):
        return False
    return [read for read in reads if scope.module.statement(read) is statement] == [base]


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
