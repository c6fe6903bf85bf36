"""A language model's loss in training is computed without its logits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import libcst as cst

from rewrite.analysis.blocks.terms import LINEAR
from rewrite.analysis.effects import Effect, effects_of, union, why_not_move
from rewrite.analysis.patterns.as_written import is_runtime_name, why_replaced
from rewrite.analysis.projections.linear_calls import only_argument
from rewrite.analysis.tree.module import ClassInfo, Module, self_assignments, self_attribute, walk
from rewrite.analysis.tree.nodes import called_attribute, calls_in, names_bound_by, parameters
from rewrite.analysis.tree.replacement import with_call
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Transform

HEAD, LOSS = "head_logits", "chunked_loss"


class FuseLoss(Transform):
    """Compute the loss from hidden states, a few thousand rows of logits at a time. Runs on request only.

    What it does:
        `self.lm_head(hidden_states)` becomes `head_logits(self, hidden_states, self.lm_head, labels)`, and
        `self.loss_function(…)` of these logits `chunked_loss(self.loss_function, …)`. What stands between the two, a
        scale or a cap, stays as it is.

    Why:
        The logits of a training step, in 16 bits, in fp32 and as gradients, are the largest tensors of a small model:
        10 GiB for 8,192 tokens and 128,256 words.

    What it needs:
        A `forward` with `labels` that multiplies hidden states with a plain `nn.Linear` and gives the product, times a
        number or capped by a tanh, to `self.loss_function` with the size of the vocabulary. Nothing after it writes
        to the hidden states or the head in place.

    Numerics:
        Reordered: the logits are rounded as the head rounds them, everything after that is computed in fp32 and
        summed in another order; the gradients of the head are summed in fp32 and rounded once.

    Known limits:
        Takes effect in training mode, with labels and gradients, for transformers' own loss functions. Elsewhere, and
        where the head is an adapter, is watched by a hook or is sharded, the logits are computed as before. Where it
        does, the output's `logits` are computed when they are read.
    """

    name: ClassVar[str] = "fuse_loss"
    summary: ClassVar[str] = "A language model's loss in training is computed without its logits."
    numerics: ClassVar[Numerics] = Numerics.REORDERED
    on_request: ClassVar[bool] = True
    after: ClassVar[tuple[str, ...]] = ("decode_head", "static_cache")
    reasons: ClassVar[Mapping[str, str]] = {
        "other_call": "the loss is not called with logits, labels and the size of the vocabulary",
        "no_product": "the logits are not one product of hidden states with an attribute of the class",
        "not_linear": "the head is not built as a plain nn.Linear",
        "other_use": "the logits are used for something else than a scale, a cap, the loss and the output",
        "written": "what makes the logits may be written in place before they are read",
        "own_loss": "the class has a loss function of its own",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every call of `self.loss_function` that is told the size of a vocabulary."""
        for owner, name, method in module.methods():
            for call in calls_in(method.body):
                size = _argument(call, 2, "vocab_size") if called_attribute(call) == "loss_function" else None
                if size is not None and (_named(call, "vocab_size") or "vocab" in module.code(size)):
                    yield Candidate(call, f"{owner.name}.{name}")

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Find the product that makes the logits, and whether nothing but the loss and the output reads them."""
        owner, name = candidate.where.split(".")
        info, call = module.classes[owner], candidate.node
        assert isinstance(call, cst.Call)
        method = info.methods[name]
        logits, labels = _argument(call, 0, "logits"), _argument(call, 1, "labels")
        if not isinstance(logits, cst.Name) or not isinstance(labels, cst.Name):
            return Skip("other_call", module.code(call)[:80])
        if labels.value not in parameters(method):
            return Skip("other_call", f"`{labels.value}` is no argument of {name}")
        names = effects_of(module).names
        family = {other.name: other for other in (info, *names.owners(info), *names.heirs(info))}
        if any("loss_function" in {*other.methods, *other.assigned} for other in family.values()):
            return Skip("own_loss")
        head = _head(method, logits.value, info, module)
        if isinstance(head, Skip):
            return head
        if (use := _other_use(method, logits.value, call, head, module)) is not None:
            return Skip("other_use", use)
        if (why := _why_not_later(method, logits.value, head, call, info, module)) is not None:
            return Skip("written", why)
        first = (module.code(head.hidden_states), f"self.{head.attribute}", labels.value)
        product = with_call(head.call, HEAD, ["self", *first], module)
        given = [module.code(a.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for a in call.args]
        loss = with_call(call, LOSS, ["self.loss_function", *given], module)
        edits = tuple(Edit(old, (new,)) for old, new in (product, loss))
        return Found(edits, (HEAD, LOSS))


@dataclass(frozen=True)
class _Head:
    """The product with the vocabulary."""

    call: cst.Call
    attribute: str
    hidden_states: cst.BaseExpression


def _named(call: cst.Call, name: str) -> bool:
    return any(argument.keyword is not None and argument.keyword.value == name for argument in call.args)


def _argument(call: cst.Call, position: int, name: str) -> cst.BaseExpression | None:
    """Return an argument of the loss function, by its name or its place."""
    for argument in call.args:
        if argument.keyword is not None and argument.keyword.value == name:
            return argument.value
    plain = [argument for argument in call.args if argument.keyword is None]
    if len(plain) <= position or any(argument.star for argument in plain[: position + 1]):
        return None
    return plain[position].value


def _head(method: cst.FunctionDef, logits: str, info: ClassInfo, module: Module) -> _Head | Skip:
    """Return the product that is first given the name of the logits; what else binds it only changes them."""
    lines = [line for line in walk(method.body) if logits in names_bound_by(line)]
    products = [(line, found) for line in lines if (found := _product(line, logits, module)) is not None]
    if len(products) != 1 or logits in parameters(method):
        return Skip("no_product", f"{len(products)} products are called `{logits}`")
    line, head = products[0]
    others = [other for other in lines if other is not line]
    if any(not isinstance(o, cst.AssignTarget) or not _changes(module.parent(o), logits, module) for o in others):
        return Skip("no_product", f"`{logits}` is also something else")
    if not _is_linear(info, head.attribute, module):
        return Skip("not_linear", head.attribute)
    return head


def _product(line: cst.CSTNode, logits: str, module: Module) -> _Head | None:
    """Return the call of a head that a statement `logits = …` assigns, itself or in fp32."""
    statement = module.parent(line)
    if not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
        return None
    value = statement.value
    if _is_method(value, "float") and isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute):
        value = value.func.value
    if not isinstance(value, cst.Call):
        return None
    if (attribute := called_attribute(value)) is not None:
        hidden_states = only_argument(value)
        return None if hidden_states is None else _Head(value, attribute, hidden_states)
    if isinstance(value.func, cst.Name) and value.func.value == "linear" and len(value.args) == 2:
        if is_runtime_name("linear", module):
            attribute = self_attribute(value.args[1].value)
            return None if attribute is None else _Head(value, attribute, value.args[0].value)
    return None


def _changes(statement: cst.CSTNode, logits: str, module: Module) -> bool:
    """Whether a statement is `logits = logits * x`, `/ x`, `torch.tanh(logits)` or `logits.float()`, or several."""
    if not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
        return False
    return _is_changed(statement.value, logits, module)


def _is_changed(value: cst.BaseExpression, logits: str, module: Module) -> bool:
    if isinstance(value, cst.Name):
        return value.value == logits
    if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, (cst.Multiply, cst.Divide)):
        sides = (value.left, value.right)
        if isinstance(value.operator, cst.Multiply) and not _reads(value.left, logits):
            sides = (value.right, value.left)
        return _is_changed(sides[0], logits, module) and not _reads(sides[1], logits)
    if isinstance(value, cst.Call):
        if module.qualified(value.func) == "torch.tanh" and len(value.args) == 1:
            return _is_changed(value.args[0].value, logits, module)
        if any(_is_method(value, name) for name in ("float", "tanh")) and isinstance(value.func, cst.Attribute):
            return _is_changed(value.func.value, logits, module)
    return False


def _is_method(value: cst.BaseExpression, name: str) -> bool:
    """Whether this is `x.name()`."""
    called = isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute) and not value.args
    return called and value.func.attr.value == name  # type: ignore[attr-defined]


def _reads(node: cst.CSTNode, name: str) -> bool:
    return any(isinstance(inner, cst.Name) and inner.value == name for inner in walk(node))


def _other_use(method: cst.FunctionDef, logits: str, loss: cst.Call, head: _Head, module: Module) -> str | None:
    """Return a use of the logits that is none of those that deferred logits are made for."""
    for node in _uses(method, logits, module):
        above = module.parent(node)
        if isinstance(above, cst.Arg) and module.parent(above) is loss:
            continue
        if isinstance(above, cst.Attribute) and above.attr.value in ("device", "dtype", "shape"):
            continue
        if _is_output(node, method, module):
            continue
        statement = module.statement(node)
        if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
            if _changes(statement.body[0], logits, module):
                continue
        return module.code(module.statement(node)).split("\n")[0][:80]
    return None


def _why_not_later(
    method: cst.FunctionDef, logits: str, head: _Head, loss: cst.Call, info: ClassInfo, module: Module
) -> str | None:
    """Return why the product may be another at the end of the method, where its output is read at the earliest.

    Nothing is known of the loss function, nor of the class of the output: neither writes to what it is given.
    """
    returned = [node.value for node in walk(method.body) if isinstance(node, cst.Return)]
    outputs = [value for value in returned if isinstance(value, cst.Call) and _reads(value, logits)]
    scope = effects_of(module, plain_containers=True).scope(method, info).trusting([head.call, loss, *outputs])
    later: list[cst.CSTNode] = []
    node: cst.CSTNode = head.call
    while node is not method:
        above = module.parent(node)
        if isinstance(above, (cst.For, cst.While, cst.Try, cst.TryStar, cst.With, cst.Lambda, cst.BaseComp)):
            return f"it stands in `{type(above).__name__.lower()}`"
        if isinstance(above, cst.IndentedBlock):
            place = next(i for i, statement in enumerate(above.body) if statement is node)
            later += above.body[place + 1 :]
        node = above
    product = scope.of(head.call) | Effect(attributes=frozenset(("weight", "bias")))
    after = union(scope.of(statement) for statement in later)
    why = why_not_move(scope, product, replace(after, binds=frozenset(), leaves=frozenset()))
    return why or why_replaced(head.attribute, [head.hidden_states], info, scope) or None


def _uses(method: cst.FunctionDef, name: str, module: Module) -> Iterator[cst.Name]:
    """Yield where a local is read."""
    for node in walk(method.body):
        if isinstance(node, cst.Name) and node.value == name:
            above = module.parent(node)
            keyword = isinstance(above, cst.Arg) and above.keyword is node
            attribute = isinstance(above, cst.Attribute) and above.attr is node
            if not keyword and not attribute and not isinstance(above, cst.AssignTarget):
                yield node


def _is_output(node: cst.Name, method: cst.FunctionDef, module: Module) -> bool:
    """Whether the value goes, as it is, into what the method returns or into a tuple."""
    above = module.parent(node)
    if isinstance(above, cst.Element) and isinstance(module.parent(above), cst.Tuple):
        return True
    if not (isinstance(above, cst.Arg) and above.keyword is not None and above.keyword.value == node.value):
        return False
    return isinstance(module.parent(module.parent(above)), cst.Return)


def _is_linear(info: ClassInfo, attribute: str, module: Module) -> bool:
    """Whether `__init__` makes the head a plain one; the operators look at what was put in its place later."""
    names = effects_of(module).names
    if not names.means(info.name) or names.why_strange(info) or attribute in names.tampered:
        return False
    init = info.methods.get("__init__")
    values = [value for name, value in (self_assignments(init) if init else ()) if name == attribute]
    return bool(values) and all(isinstance(v, cst.Call) and names.resolved(v.func) in LINEAR for v in values)
