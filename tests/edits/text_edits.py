"""Twelve edits of a modeling file, as a person makes them: in `forward`, and in the constructor what that needs.

An edit finds its place by what stands there (the call of an attention function, a product with the output projection,
the last line of a layer), so that it is the same edit in a file whose layers have a method for a step beside their
`forward`, and in one where `forward` is all there is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import libcst as cst
import libcst.matchers as m

Function = Callable[[cst.FunctionDef], cst.FunctionDef]
Body = list[cst.BaseStatement]

FACTOR = "0.8"
BOUND = "0.5"
DROPPED = "0.3"
"""What a scale is multiplied with, where hidden states end, and the share of weights that is dropped."""

SELF = m.Arg(m.Name("self"), keyword=None)
ATTENTION = m.Call(args=[SELF, m.AtLeastN(n=1), m.Arg(keyword=m.Name("scaling")), m.ZeroOrMore()])
"""The call of an attention function: `attention_interface(self, query_states, …, scaling=self.scaling)`."""
OUT = m.Attribute(m.Name("self"), m.OneOf(*map(m.Name, ("o_proj", "out_proj", "c_proj", "dense"))))
PROJECTED = m.Call(func=OUT, args=[m.AtLeastN(n=1)]) | m.Call(args=[m.Arg(), m.Arg(OUT, keyword=None), m.ZeroOrMore()])
"""A product with the output projection of attention: `self.o_proj(x)`, or `linear(x, self.o_proj, …)`."""
ACTIVATION = m.Attribute(m.Name("self"), m.Name("act_fn") | m.Name("act"))
RESIDUAL = m.Name("residual")
SUM = m.BinaryOperation(operator=m.Add(), left=RESIDUAL) | m.BinaryOperation(operator=m.Add(), right=RESIDUAL)
HANDED_ON = m.Arg(keyword=RESIDUAL)
"""A sum with the residual: `residual + x`, or `residual=x` for the operator that adds it."""
_COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
_EQUAL = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
WIDTH = "config.num_attention_heads * self.head_dim"


class NoPlace(Exception):
    """A file has nothing that an edit could be made at."""

    def __init__(self, family: str, edit: str):
        super().__init__(f"{family}: no place for the edit '{edit}'; text_edits.py says what it looks for")


@dataclass(frozen=True)
class Edit:
    """One edit.

    Args:
        name: in tables.
        change: text of a file to text; the same text where there is no place for it.
        acts: whether the model computes something else with it: always, never, or where its layers are given a mask.
        logs: whether it writes to the log of the file's module.
        leaves: whether a package may leave a call to transformers' loop, or to the plain forward: where a step asks
            the device for a number, draws at random, or asks for a mask, of which it makes none.
    """

    name: str
    change: Callable[[str], str]
    acts: str = "always"
    logs: bool = False
    leaves: bool = False

    def of(self, text: str, family: str) -> str:
        """Return the edited text of a file.

        Raises:
            NoPlace: if there is no place for it.
        """
        found = self.change(text)
        if found == text:
            raise NoPlace(family, self.name)
        return found


def _methods(node: cst.ClassDef) -> dict[str, cst.FunctionDef]:
    return {one.name.value: one for one in node.body.body if isinstance(one, cst.FunctionDef)}


def _attends(node: cst.ClassDef) -> bool:
    forward = _methods(node).get("forward")
    return forward is not None and bool(m.findall(forward, ATTENTION))


def _is_layer(node: cst.ClassDef) -> bool:
    return any(m.matches(base, m.Arg(m.Name("GradientCheckpointingLayer"))) for base in node.bases)


def _activates(node: cst.ClassDef) -> bool:
    forward = _methods(node).get("forward")
    return forward is not None and bool(m.findall(forward, ACTIVATION))


def _replaced_in_whole(node: cst.ClassDef) -> bool:
    """Return whether transformers may call a function of its own in place of a class's `forward`."""
    return any(m.matches(one, m.Decorator(m.Name("use_experts_implementation"))) for one in node.decorators)


def _in_classes(text: str, kind: Callable[[cst.ClassDef], bool], **changes: Function) -> str:
    """Return a text with methods changed, in the classes of a kind where that changes the first one named."""
    module = cst.parse_module(text)
    body = [_changed(one, changes) if isinstance(one, cst.ClassDef) and kind(one) else one for one in module.body]
    return module.with_changes(body=body).code


def _changed(node: cst.ClassDef, changes: dict[str, Function]) -> cst.ClassDef:
    first, methods = next(iter(changes)), _methods(node)
    if first not in methods or changes[first](methods[first]).deep_equals(methods[first]):
        return node
    new = {id(methods[name]): change(methods[name]) for name, change in changes.items()}
    return node.with_changes(body=node.body.with_changes(body=[new.get(id(one), one) for one in node.body.body]))


class _Replacing(cst.CSTTransformer):
    """Puts what `new` makes of a node in the place of each of some nodes."""

    def __init__(self, nodes: Iterable[cst.CSTNode], new: Callable[[cst.CSTNode], cst.CSTNode]):
        super().__init__()
        self._nodes, self._new = list(nodes), new

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> Any:
        found = super().on_leave(original_node, updated_node)
        return self._new(updated_node) if any(original_node is one for one in self._nodes) else found


def _replacing(matcher: Any, new: Callable[[cst.CSTNode], cst.CSTNode], last: bool = False) -> Function:
    """Return what puts something else in the place of every node that matches, or of the last one."""

    def change(function: cst.FunctionDef) -> cst.FunctionDef:
        found = m.findall(function, matcher)
        return cst.ensure_type(function.visit(_Replacing(found[-1:] if last else found, new)), cst.FunctionDef)

    return change


def _code(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def _factor(node: cst.CSTNode, factor: str) -> cst.BaseExpression:
    """Return an expression, or what an argument is, times a factor."""
    text = _code(node)
    simple = m.matches(node, m.Name() | m.Attribute() | m.Call())
    return cst.parse_expression(f"{text if simple else f'({text})'} * {factor}")


def _lines(text: str) -> Body:
    return list(cst.parse_module(text).body)


def _at_the_end(*lines: str) -> Function:
    """Return what puts lines before the last `return`, where `output` is what is returned, the first of a tuple."""

    def change(function: cst.FunctionDef) -> cst.FunctionDef:
        *before, last = function.body.body
        if not m.matches(last, m.SimpleStatementLine([m.Return()])):
            return function
        value, rest = cst.ensure_type(cst.ensure_type(last, cst.SimpleStatementLine).body[0], cst.Return).value, ""
        if isinstance(value, cst.Tuple):
            rest = "".join(f", {_code(one.value)}" for one in value.elements[1:]) or ","
            value = value.elements[0].value
        if value is None:
            return function
        new = _lines("\n".join([f"output = {_code(value)}", *lines, f"return output{rest}"]) + "\n")
        return function.with_changes(body=function.body.with_changes(body=[*before, *new]))

    return change


def _at_the_start(text: str) -> Function:
    """Return what puts a statement first, behind a docstring and a way out that is there already."""

    def change(function: cst.FunctionDef) -> cst.FunctionDef:
        body = list(function.body.body)
        out = m.If(body=m.IndentedBlock([m.SimpleStatementLine([m.Return()])]))
        docstring = m.SimpleStatementLine([m.Expr(m.SimpleString() | m.ConcatenatedString())])
        place = next(n for n, one in enumerate(body) if not m.matches(one, out | docstring))
        return function.with_changes(
            body=function.body.with_changes(body=[*body[:place], *_lines(text), *body[place:]])
        )

    return change


def _made(*lines: str) -> Function:
    """Return what puts lines at the end of a constructor."""

    def change(function: cst.FunctionDef) -> cst.FunctionDef:
        return function.with_changes(
            body=function.body.with_changes(body=[*function.body.body, *_lines("\n".join(lines))])
        )

    return change


def _keyword(name: str, new: Callable[[cst.BaseExpression], cst.BaseExpression]) -> Function:
    """Return what changes an argument of the attention function."""

    def changed(call: cst.CSTNode) -> cst.CSTNode:
        arguments = [
            one.with_changes(value=new(one.value)) if one.keyword is not None and one.keyword.value == name else one
            for one in cst.ensure_type(call, cst.Call).args
        ]
        return call.with_changes(args=arguments)

    return _replacing(ATTENTION, changed)


def scaling(text: str) -> str:
    """Return a file whose scores have another scale."""
    return _in_classes(text, _attends, forward=_keyword("scaling", lambda value: _factor(value, FACTOR)))


def branch(text: str) -> str:
    """Return a file with two small projections beside the output projection, as a LoRA adapter has them."""

    def beside(node: cst.CSTNode) -> cst.CSTNode:
        given = _code(cst.ensure_type(node, cst.Call).args[0].value)
        return cst.parse_expression(f"{_code(node)} + self.branch_b(self.branch_a({given}))")

    return _in_classes(
        text,
        _attends,
        forward=_replacing(PROJECTED, beside),
        __init__=_made(
            f"self.branch_a = nn.Linear({WIDTH}, 4, bias=False)",
            "self.branch_b = nn.Linear(4, config.hidden_size, bias=False)",
        ),
    )


def extra_norm(text: str) -> str:
    """Return a file that norms what attention gives to the output projection."""

    def normed(node: cst.CSTNode) -> cst.CSTNode:
        first, *others = cst.ensure_type(node, cst.Call).args
        value = cst.parse_expression(f"self.extra_norm({_code(first.value)})")
        return node.with_changes(args=[first.with_changes(value=value), *others])

    made = _made(f"self.extra_norm = nn.RMSNorm({WIDTH}, eps=1e-6)")
    return _in_classes(text, _attends, forward=_replacing(PROJECTED, normed), __init__=made)


def clamp(text: str) -> str:
    """Return a file whose layers keep hidden states between two bounds."""
    return _in_classes(text, _is_layer, forward=_at_the_end(f"output = output.clamp(-{BOUND}, {BOUND})"))


def activation(text: str) -> str:
    """Return a file with another activation; where `forward` may not be what runs, the constructor names it."""
    own = lambda node: _activates(node) and not _replaced_in_whole(node)
    relu = _replacing(ACTIVATION, lambda _: cst.parse_expression("nn.functional.relu"))
    text = _in_classes(text, own, forward=relu)
    named = m.Assign([m.AssignTarget(ACTIVATION)])
    made = _replacing(named, lambda node: node.with_changes(value=cst.parse_expression("nn.ReLU()")))
    return _in_classes(text, lambda node: _activates(node) and _replaced_in_whole(node), __init__=made)


def residual(text: str) -> str:
    """Return a file whose layers scale the residual of their last sum."""

    def scaled(node: cst.CSTNode) -> cst.CSTNode:
        if isinstance(node, cst.Arg):
            return node.with_changes(value=_factor(node.value, FACTOR))
        side = "left" if m.matches(node, m.BinaryOperation(left=RESIDUAL)) else "right"
        return node.with_changes(**{side: _factor(getattr(node, side), FACTOR)})

    return _in_classes(text, _is_layer, forward=_replacing(SUM | HANDED_ON, scaled, last=True))


def logging(text: str) -> str:
    """Return a file whose layers log how large hidden states are."""
    line = 'getLogger(__name__).info("largest hidden state: %s", float(output.abs().max()))'
    changed = _in_classes(text, _is_layer, forward=_at_the_end(line))
    if changed == text:
        return text
    return re.sub(r"^(?=from collections|import )", "from logging import getLogger\n", changed, count=1, flags=re.M)


def early_return(text: str) -> str:
    """Return a file whose second layer does nothing where there is a mask."""
    out = "if self.layer_idx == 1 and attention_mask is not None:\n    return hidden_states\n"
    made = _made("self.layer_idx = layer_idx")
    return _in_classes(text, _is_layer, forward=_at_the_start(out), __init__=made)


def renamed(text: str) -> str:
    """Return a file whose layers and attention are called otherwise, wherever they are named."""
    classes = [one for one in cst.parse_module(text).body if isinstance(one, cst.ClassDef)]
    for name in [one.name.value for one in classes if _is_layer(one) or _attends(one)]:
        text = re.sub(rf"\b{name}\b", f"Own{name}", text)
    return text


def new_argument(text: str) -> str:
    """Return a file whose layers take an argument more, which the model gives them."""
    parameter = cst.Param(cst.Name("output_scale"), cst.Annotation(cst.Name("float")), default=cst.Float("1.0"))

    def taken(function: cst.FunctionDef) -> cst.FunctionDef:
        known = function.params
        function = _at_the_end("output = output * output_scale")(function)
        return function.with_changes(params=known.with_changes(params=[*known.params, parameter]))

    def given(call: cst.CSTNode) -> cst.CSTNode:
        arguments = list(cst.ensure_type(call, cst.Call).args)
        place = next((n for n, one in enumerate(arguments) if one.star == "**"), len(arguments))
        new = cst.Arg(keyword=cst.Name("output_scale"), value=cst.Float(FACTOR), equal=_EQUAL, comma=_COMMA)
        before = [one.with_changes(comma=_COMMA) if n == place - 1 else one for n, one in enumerate(arguments[:place])]
        return call.with_changes(args=[*before, new, *arguments[place:]])

    def handed_on(function: cst.FunctionDef) -> cst.FunctionDef:
        calls: list[cst.CSTNode] = []
        for loop in m.findall(function, m.For()):
            names = [_code(one) for one in m.findall(cst.ensure_type(loop, cst.For).target, m.Name())]
            found = m.findall(cst.ensure_type(loop, cst.For).body, m.Call())
            calls += [call for call in found if _code(cst.ensure_type(call, cst.Call).func) in names]
        return cst.ensure_type(function.visit(_Replacing(calls, given)), cst.FunctionDef)

    changed = _in_classes(text, _is_layer, forward=taken)
    whole = _in_classes(changed, lambda node: not _is_layer(node), forward=handed_on)
    return text if changed in (text, whole) else whole


def query_per_head(text: str) -> str:
    """Return a file that scales the queries of each head by a weight."""

    def scaled(call: cst.CSTNode) -> cst.CSTNode:
        module, query, *others = cst.ensure_type(call, cst.Call).args
        value = _factor(query.value, "self.head_scale[:, None, None]")
        return call.with_changes(args=[module, query.with_changes(value=value), *others])

    made = _made("self.head_scale = nn.Parameter(torch.linspace(0.5, 1.5, config.num_attention_heads))")
    return _in_classes(text, _attends, forward=_replacing(ATTENTION, scaled), __init__=made)


def dropout(text: str) -> str:
    """Return a file that drops attention weights in evaluation too."""
    changed = _in_classes(text, _attends, forward=_keyword("dropout", lambda _: cst.Float(DROPPED)))
    return text if changed == text else changed.replace("training=module.training", "training=True")


EDITS = {
    edit.name: edit
    for edit in (
        Edit("scaling", scaling),
        Edit("branch", branch),
        Edit("extra norm", extra_norm),
        Edit("clamp", clamp),
        Edit("activation", activation),
        Edit("residual scaled", residual),
        Edit("logging", logging, acts="never", logs=True, leaves=True),
        Edit("early return", early_return, acts="with a mask", leaves=True),
        Edit("renamed class", renamed, acts="never"),
        Edit("new argument", new_argument),
        Edit("query per head", query_per_head),
        Edit("dropout in eval", dropout, leaves=True),
    )
}
"""By their names."""
