"""Sparse blocks get a method for one new token a row, and their routers say what they compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.blocks.mlp_step import NAME, PARAMETERS, mlp_method
from rewrite.analysis.blocks.own_methods import is_own_method, why_taken
from rewrite.analysis.blocks.terms import is_number
from rewrite.analysis.decode.attention_text import augmented_by
from rewrite.analysis.decode.handed_on import (
    Block,
    NotInPlace,
    check_plain,
    comments,
    free,
    hands_on,
    mlp_block,
    taking,
)
from rewrite.analysis.decode.mixer_text import bound_by
from rewrite.analysis.moe.all_experts import EveryExpert, every_expert, every_form
from rewrite.analysis.moe.mixture import (
    Mixture,
    class_of,
    classes_of,
    decorator_of,
    experts_attributes,
    form_of,
    mixture,
)
from rewrite.analysis.moe.routing import routing_rule
from rewrite.analysis.terms.computation import NotComputable
from rewrite.analysis.tree.methods import TENSOR, Method
from rewrite.analysis.tree.module import ClassInfo, Module, names_in, self_attribute, walk
from rewrite.analysis.tree.nodes import called_attribute, calls_in, expression, parameters
from rewrite.analysis.tree.replacement import call_statement, is_docstring, line
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Stage, Transform

_NONE = m.Name("None")


_ROUTED = m.Call(func=m.Name("router"), args=[m.Arg(), m.Arg(), m.ZeroOrMore()])


class FuseExperts(Transform):
    """A sparse mixture of experts computes one new token with four kernels.

    What it does:
        Calls of experts become `fused_experts(hidden_states, self.experts, index, weights)`: two kernels for a few
        tokens, the experts themselves for many. A block of router and experts takes a norm and a residual by keyword,
        and calls `router(hidden_states, self.gate, norm=norm)`: for a few tokens norm, router and choice of the
        experts are two kernels more. Routers get a method `rule` that says what they compute. A block that returns
        more than hidden states and weights has a second method for one token, `decode_residual`.

    Why:
        transformers sorts the tokens by expert and multiplies group by group, or copies the chosen experts' weights,
        in some forty kernels. For one token the time is that of reading the chosen weights, once.

    What it needs:
        Experts that `use_experts_implementation` decorates, gated by an activation, with limits or without, whose
        weights may be transposed, interleaved and biased: a method `form` says so. A router that takes a softmax or
        sigmoid of one product and the largest of the scores, corrected, of some groups, or as the configuration says.
        Any other router is called as it stands, and its choice goes to the same kernels. Experts that all tokens
        share are added. Experts that are given every token times its weights, most of them zero, are computed of the
        others (`chosen_experts`).

    Numerics:
        Reordered: sums are taken in another order and what stays inside a kernel is not rounded. The logits are
        rounded as the original rounds them.

    Known limits:
        Many tokens (from 32 for
        Qwen3-30B-A3B, from 4 for Mixtral 8x7B), the CPU, quantised or sharded experts and hooks call the modules as
        they stand. So do gradients, but for experts in bf16 that take gates first and have no biases.
    """

    name = "fuse_experts"
    summary = "Sparse blocks compute a few tokens with four kernels: norm and router, choice, experts."
    numerics = Numerics.REORDERED
    stage = Stage.STEP
    after = ("fuse_gate_up", "fuse_gated_activation")
    reasons: ClassVar[Mapping[str, str]] = {
        "experts_layout": "the experts are a list, or may be of a class of another file",
        "experts_form": "the experts are ungated, normed after, or gated in a way that no form says",
        "other_block": "the block does something else than to route, compute experts and add",
        "block_stays": "no block that calls the router has a method for one token, so nobody would ask for its rule",
        "other_router": "the router computes something else than a softmax or sigmoid and its largest; it is called",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every call of decorated experts, every class that makes one or chooses among modules, and their routers."""
        routers: dict[str, ClassInfo] = {}
        for info in module.classes.values():
            if (
                NAME not in info.methods
                and not hands_on(info)
                and (_reads_experts(info, module) or _chooses_modules(info, module))
            ):
                yield Candidate(info.node, info.name)
            for attribute, call in _calls(info, module):
                yield Candidate(call, f"{info.name}.forward", attribute)
            routers |= {router.name: router for router in _routers(info, module)}
            if (every := every_expert(info, module)) is not None:
                yield Candidate(every.call, f"{info.name}.forward", called_attribute(every.call) or "")
                for experts in classes_of(info, called_attribute(every.call) or "", module) or []:
                    if not is_own_method(experts.methods.get("form"), (), module):
                        yield Candidate(experts.methods["forward"], f"{experts.name}.forward", "form")
            if decorator_of(info, module) is not None and "forward" in info.methods:
                if not is_own_method(info.methods.get("form"), (), module) and not _is_plain(info, module):
                    yield Candidate(info.methods["forward"], f"{info.name}.forward", "form")
        for name, router in routers.items():
            if not is_own_method(router.methods.get("rule"), parameters(router.methods["forward"])[2:], module):
                yield Candidate(router.methods["forward"], f"{name}.forward", "rule")

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Read a block, a call of experts or a router."""
        info = module.classes[candidate.where.split(".")[0]]
        if isinstance(candidate.node, cst.Call):
            if (every := every_expert(info, module)) is not None and every.call is candidate.node:
                return _every(every, info, module)
            return _call(candidate.node, candidate.label, info, module)
        if candidate.label == "form":
            return _experts(info, module)
        return _router(info, module) if candidate.label == "rule" else _block(info, module)


def _reads_experts(info: ClassInfo, module: Module) -> bool:
    """Whether the `forward` of a class reads an attribute that holds experts, which it calls or hands over."""
    if "forward" not in info.methods or not (attributes := experts_attributes(info, module)):
        return False
    return any(self_attribute(node) in attributes for node in walk(info.methods["forward"].body))


def _chooses_modules(info: ClassInfo, module: Module) -> bool:
    """Whether a `forward` takes the largest of some scores, or calls what does, and calls modules of a list by number.

    That is a mixture in the form that it had before experts were two tensors.
    """
    if "forward" not in info.methods:
        return False
    calls = list(calls_in(info.methods["forward"].body))
    parts = [part for call in calls for part in classes_of(info, called_attribute(call) or "", module) or []]
    routers = [part for part in (info, *parts) if "forward" in part.methods]
    lists = (call.func.value for call in calls if isinstance(call.func, cst.Subscript))
    return any(self_attribute(value) for value in lists) and any(_chooses(part, module) for part in routers)


def _calls(info: ClassInfo, module: Module) -> list[tuple[str, cst.Call]]:
    """Return the calls of experts in the `forward` of a class, with the attributes that hold them."""
    if "forward" not in info.methods or not (attributes := experts_attributes(info, module)):
        return []
    calls = [(called_attribute(call), call) for call in calls_in(info.methods["forward"].body)]
    return [(attribute, call) for attribute, call in calls if attribute is not None and attribute in attributes]


def _call(call: cst.Call, attribute: str, info: ClassInfo, module: Module) -> Found | Skip:
    if (unusual := _unusual(info, attribute, module)) is not None:
        return unusual
    given = _given(call, classes_of(info, attribute, module) or [])
    if given is None:
        return Skip("other_block", module.code(call))
    first, *rest = (module.code(value) for value in given)
    fused = expression(f"fused_experts({', '.join([first, f'self.{attribute}', *rest])})")
    return Found((Edit(call, (fused,)),), ("fused_experts",))


def _every(found: EveryExpert, info: ClassInfo, module: Module) -> Found | Skip:
    attribute = called_attribute(found.call) or ""
    for experts in classes_of(info, attribute, module) or []:
        if (taken := why_taken(experts, "form", module)) is not None:
            return Skip("name_taken", taken)
    given = f"{module.code(found.call.args[0].value)}, self.{attribute}, {found.scores}, {found.top_k}"
    fused = expression(f"chosen_experts({given})")
    return Found((Edit(found.call, (fused,)),), ("chosen_experts",))


def _given(call: cst.Call, experts: list[ClassInfo]) -> list[cst.BaseExpression] | None:
    """Return hidden states, index and weights as a call of experts passes them, by position or by name."""
    orders = {tuple(parameters(e.methods["forward"])[1:]) for e in experts if "forward" in e.methods}
    if len(orders) != 1 or any(argument.star for argument in call.args):
        return None
    names = orders.pop()
    plain = [argument.value for argument in call.args if argument.keyword is None]
    given = dict(zip(names, plain, strict=False))
    given |= {argument.keyword.value: argument.value for argument in call.args if argument.keyword is not None}
    in_order = list(given) == list(names)  # else they would be evaluated in another order
    return list(given.values()) if in_order and len(call.args) == len(names) == 3 else None


def _unusual(info: ClassInfo, attribute: str, module: Module) -> Skip | None:
    """Say what the kernels do not take about the experts that an attribute holds."""
    holders = classes_of(info, attribute, module)
    if holders is None:
        return Skip("experts_layout", f"{attribute} may be of a class of another file")
    for experts in holders:
        try:
            form_of(experts, module)
        except NotComputable as error:
            return Skip("experts_form", error.what)
        if (taken := why_taken(experts, "form", module)) is not None:  # the runtime asks experts for it
            return Skip("name_taken", taken)
    return None


def _is_plain(info: ClassInfo, module: Module) -> bool:
    """Whether experts are of the form that the runtime takes for granted."""
    try:
        return not form_of(info, module)
    except NotComputable:
        return False


def _experts(info: ClassInfo, module: Module) -> Found | Skip:
    try:
        given = form_of(info, module) if decorator_of(info, module) is not None else every_form(info, module)
    except NotComputable as error:
        return Skip("experts_form", error.what)
    if (taken := why_taken(info, "form", module)) is not None:
        return Skip("name_taken", taken)
    forward = info.methods["forward"]
    statement = call_statement("return ", "ExpertsForm", list(given), module)
    uses = ("ExpertsForm",)
    method = Method(forward, "form", {}, "ExpertsForm", "Returns what these experts compute.", (statement,), uses)
    return Found((method.edit(module),), uses)


def _routers(info: ClassInfo, module: Module) -> list[ClassInfo]:
    """Return the classes that a block of experts may route with: those it calls that choose the largest."""
    if "forward" not in info.methods or not experts_attributes(info, module):
        return []
    calls = list(calls_in(info.methods["forward"].body))
    called = {called_attribute(call) for call in calls}
    called |= {self_attribute(call.args[1].value) for call in calls if m.matches(call, _ROUTED)}
    parts = [part for name in sorted(filter(None, called)) for part in classes_of(info, name, module) or []]
    routers = [part for part in parts if "forward" in part.methods and decorator_of(part, module) is None]
    return [part for part in routers if _chooses(part, module)]


def _chooses(info: ClassInfo, module: Module) -> bool:
    """Whether a class takes the largest of something in its `forward`, or a method or function that this calls."""
    names = names_in([info.methods["forward"].body])
    helpers = [function.body for name, function in {**module.functions, **info.methods}.items() if name in names]
    return bool({"topk", "sort", "argsort", "argmax", "max"} & names_in([info.methods["forward"].body, *helpers]))


def _router(info: ClassInfo, module: Module) -> Found | Skip:
    blocks = [block for block in module.classes.values() if info in _routers(block, module)]
    if not any(NAME in block.methods or hands_on(block) for block in blocks):
        return Skip("block_stays", ", ".join(block.name for block in blocks))
    if (taken := why_taken(info, "rule", module)) is not None:
        return Skip("name_taken", taken)
    try:
        given = routing_rule(info, module)
    except NotComputable as error:
        return Skip("other_router", error.what)
    forward = info.methods["forward"]
    statement = call_statement("return ", "RoutingRule", list(given), module)
    uses = ("RoutingRule",)
    takes = dict.fromkeys(parameters(forward)[2:], TENSOR)
    method = Method(forward, "rule", takes, "RoutingRule", "Returns what this router computes.", (statement,), uses)
    return Found((method.edit(module),), uses)


def _block(info: ClassInfo, module: Module) -> Found | Skip:
    if not experts_attributes(info, module):
        return Skip("experts_layout", "its experts are a list of modules")
    if (taken := why_taken(info, NAME, module)) is not None:
        return Skip("name_taken", taken)
    try:
        found = mixture(info, module)
    except NotComputable as error:
        return Skip("other_block", error.what)
    if (unusual := _unusual(info, found.experts, module)) is not None:
        return unusual
    routers = classes_of(info, found.router, module)
    if routers is None:
        return Skip("other_router", f"what self.{found.router} holds is no class of the file")
    for router in routers:  # the runtime asks a router for its rule
        if (taken := why_taken(router, "rule", module)) is not None:
            return Skip("name_taken", taken)
    if not found.flat and not all(_has_rule(router, module) for router in routers):
        return Skip("other_block", "the router is given the batch as it stands")
    try:
        return _in_place(info, found, module)
    except NotInPlace:
        pass  # a method beside its `forward`
    shared = _shared_method(info, found, module)
    method = _method(info, found, shared is not None, module)
    uses = {*method.uses, *(() if shared is None else shared.uses)}
    edits = [method.edit(module)]
    if shared is not None and not _has_decode(info, found, module):
        edits.append(shared.edit(module))
    return Found(tuple(edits), tuple(sorted(uses)))


def _in_place(info: ClassInfo, found: Mixture, module: Module) -> Found:
    """Return the edits of a block that computes all of this in its `forward`.

    Raises:
        NotInPlace: if something else stands there, too.
    """
    forward = free(info, module)
    heirs = (other for other in module.classes.values() if info.name in other.bases and "forward" not in other.methods)
    if next(heirs, None) is not None or len(parameters(forward)) != 2:
        raise NotInPlace("others have the same `forward`")
    hidden = parameters(forward)[1]
    returned = [node.value for node in walk(forward.body) if isinstance(node, cst.Return)]
    if len(returned) != 1:
        raise NotInPlace("it returns in several places")
    pair = returned[0] if isinstance(returned[0], cst.Tuple) else None
    if pair is not None and not _are_weights(pair, found, forward):
        raise NotInPlace("it returns more than hidden states and weights")
    if found.scaling is not None and not _is_number(found.scaling, info, module):
        raise NotInPlace("the experts' sum is multiplied by a tensor")
    if not _keeps_shape(forward, hidden):
        raise NotInPlace("it returns another shape than it takes")
    kept, removed = [], []
    for one in forward.body.body:
        if is_docstring(one):
            kept.append(one)
        elif _is_for_training(one, hidden):
            kept.append(_normed_first(one, hidden, module))
        else:
            check_plain(one, info, module)
            removed.append(one)
    classes = _shared_classes(info, found, module) if found.shared is not None else None
    shared, handed = [], bool(classes)
    for part in classes or []:
        try:
            shared += [] if hands_on(part) else [mlp_block(part, module)]
        except NotInPlace:
            handed = False
    statements = _statements(hidden, found, handed, ", top_k_weights" * (pair is not None), module)
    statements[0] = statements[0].with_changes(leading_lines=comments(removed))
    block = Block(forward, taking(forward, [*kept, *statements], module), ("fused_experts", "router"))
    blocks = [block, *(shared if handed else [])]
    edits = tuple(Edit(one.before, (one.after,)) for one in blocks)
    return Found(edits, tuple(sorted({use for one in blocks for use in one.uses})))


def _is_number(text: str, info: ClassInfo, module: Module) -> bool:
    """Whether an expression is a number: written out, or an attribute that surely is one."""
    value = cst.parse_expression(text)
    return m.matches(value, m.Integer() | m.Float()) or is_number(text.removeprefix("self."), info, module)


def _keeps_shape(forward: cst.FunctionDef, hidden: str) -> bool:
    """Whether something is viewed as the hidden states came, if anything is viewed."""
    shape = m.Attribute(m.Name(hidden), m.Name("shape"))
    given = [[m.Arg(shape)]]
    for node in walk(forward.body):
        if isinstance(node, cst.Assign) and m.matches(node.value, shape):
            names = [m.Arg() if name == "_" else m.Arg(m.Name(name)) for name in _in_order(node.targets[0].target)]
            given.append(names)
    views = [call for call in calls_in(forward.body) if m.matches(call.func, m.Attribute(attr=_VIEWS))]
    return not views or any(m.matches(call, m.Call(args=args)) for call in views for args in given)


_VIEWS = m.Name("view") | m.Name("reshape") | m.Name("flatten")


def _in_order(target: cst.BaseExpression) -> list[str]:
    """Return the names that a target binds, in their order."""
    if isinstance(target, cst.Name):
        return [target.value]
    elements = target.elements if isinstance(target, cst.Tuple) else ()
    return [element.value.value for element in elements if isinstance(element.value, cst.Name)]


def _are_weights(returned: cst.Tuple, found: Mixture, forward: cst.FunctionDef) -> bool:
    """Whether a block returns the weights that its router gave the experts beside the hidden states."""
    second = returned.elements[1].value if len(returned.elements) == 2 else None
    for node in walk(forward.body):
        if isinstance(node, cst.Assign) and called_attribute(node.value) == found.router:
            target = node.targets[0].target
            if isinstance(target, cst.Tuple) and len(target.elements) == 3:
                return second is not None and target.elements[1].value.deep_equals(second)
    return False


def _is_for_training(statement: cst.CSTNode, hidden: str) -> bool:
    """Whether a statement changes the hidden states in training and does nothing else."""
    if not isinstance(statement, cst.If) or statement.orelse is not None:
        return False
    training = m.findall(statement.test, m.Attribute(value=m.Name("self"), attr=m.Name("training")))
    return bool(training) and bound_by(statement) | augmented_by(statement) <= {hidden}


def _normed_first(statement: cst.CSTNode, hidden: str, module: Module) -> cst.BaseStatement:
    """Return a statement that changes the hidden states, behind their norm."""
    branch = cst.ensure_type(statement, cst.If)
    normed = cst.parse_statement(
        f"if norm is not None:\n    {hidden}, norm = norm({hidden}), None\n", config=module.tree.config_for_parsing
    )
    return branch.with_changes(body=branch.body.with_changes(body=[normed, *branch.body.body]))


def _statements(hidden: str, found: Mixture, handed: bool, besides: str, module: Module) -> list[cst.BaseStatement]:
    """Return what a block does with its hidden states, the norm in the router and the residual in the experts."""
    given = [hidden, f"self.{found.router}", *found.given, "norm=norm"]
    statements: list[cst.BaseStatement] = [
        call_statement("hidden_states, top_k_weights, top_k_index = ", "router", given, module)
    ]
    if found.shared is not None:
        added = [line(text, module) for text in _shared_statements(found, handed)]
        statements += [_unless_none(found.shared, added, module)] if found.may_lack_shared else added
    arguments = ["hidden_states", f"self.{found.experts}", "top_k_index", "top_k_weights", "residual=residual"]
    arguments += [] if found.scaling is None else [f"scaling={found.scaling}"]
    return [*statements, call_statement("return ", "fused_experts", arguments, module, suffix=besides)]


def _shared_statements(found: Mixture, handed: bool) -> list[str]:
    """Return what adds to the residual what the module for all tokens returns, given the shape it has in the file."""
    given, back = ("rows", ".view_as(hidden_states)") if found.shared_flat else ("hidden_states", "")
    rows = ["rows = hidden_states.flatten(0, -2)"] if found.shared_flat else []
    output = f"self.{found.shared}({given})"
    if found.shared_gate is not None:
        output = f"self.{found.shared_gate}({given}).sigmoid() * {output}"
    elif handed:
        flat = ["added = None if residual is None else residual.flatten(0, -2)"] if found.shared_flat else []
        residual = "added" if found.shared_flat else "residual"
        return [*rows, *flat, f"residual = self.{found.shared}({given}, residual={residual}){back}"]
    output = f"({output}){back}" if back and found.shared_gate is not None else f"{output}{back}"
    return [
        *rows,
        f"shared_output = {output}",
        "residual = shared_output if residual is None else residual + shared_output",
    ]


def _has_rule(router: ClassInfo, module: Module) -> bool:
    try:
        routing_rule(router, module)
    except NotComputable:
        return False
    return True


def _shared_method(info: ClassInfo, found: Mixture, module: Module) -> Method | None:
    """Return the method for one token of the experts that all tokens share, where they are the usual products."""
    classes = _shared_classes(info, found, module)
    return mlp_method(classes[0], module) if classes is not None and len(classes) == 1 else None


def _shared_classes(info: ClassInfo, found: Mixture, module: Module) -> list[ClassInfo] | None:
    """Return the classes of the file that the module for all tokens may be of; it may be None where that is asked."""
    if found.shared is None:
        return None
    built = [v for v in module.assignments(info, found.shared) if not (found.may_lack_shared and m.matches(v, _NONE))]
    classes = [class_of(value, module) for value in built]
    return None if not classes or None in classes else [c for c in classes if c is not None]


def _has_decode(info: ClassInfo, found: Mixture, module: Module) -> bool:
    return found.shared is not None and NAME in (_shared_classes(info, found, module) or [info])[0].methods


def _added(found: Mixture, shared_has_step: bool) -> list[str]:
    """Return statements that add what the experts that all tokens share return to the residual."""
    shared, gate = f"self.{found.shared}", f"self.{found.shared_gate}(hidden_states).sigmoid()"
    if found.shared_gate is None:
        stepped = f"residual = {shared}.{NAME}(hidden_states, None, residual)"
        return [stepped if shared_has_step else f"residual = residual + {shared}(hidden_states)"]
    output = f"{shared}.{NAME}(hidden_states, None, None)" if shared_has_step else f"{shared}(hidden_states)"
    return [f"shared_output = {output}", f"residual = residual + {gate} * shared_output"]


def _unless_none(attribute: str, statements: list[cst.SimpleStatementLine], module: Module) -> cst.If:
    text = f"if self.{attribute} is not None:\n    pass\n"
    test = cst.parse_statement(text, config=module.tree.config_for_parsing)
    if not isinstance(test, cst.If):
        raise TypeError("not a condition")
    return test.with_changes(body=test.body.with_changes(body=statements))


def _method(info: ClassInfo, found: Mixture, shared_has_step: bool, module: Module) -> Method:
    target = "hidden_states, top_k_weights, top_k_index = "
    statements: list[cst.BaseStatement] = [
        call_statement(target, "router", ["hidden_states", f"self.{found.router}", *found.given, "norm=norm"], module)
    ]
    if found.shared is not None:
        added = [line(text, module) for text in _added(found, shared_has_step)]
        statements += [_unless_none(found.shared, added, module)] if found.may_lack_shared else added
    arguments = ["hidden_states", f"self.{found.experts}", "top_k_index", "top_k_weights", "residual=residual"]
    arguments += [] if found.scaling is None else [f"scaling={found.scaling}"]
    statements.append(call_statement("return ", "fused_experts", arguments, module))
    uses = ("fused_experts", "router")
    text = "Returns `residual + self(norm(hidden_states))` for one token a row."
    return Method(info.methods["forward"], NAME, PARAMETERS, TENSOR, text, tuple(statements), uses)
