"""Which classes of a rewritten file generate in a decode loop, and which of its sites such a loop reaches.

What a rule writes for the loop alone does nothing where no loop comes: it is rewritten, and not applied.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from rewrite.analysis.loops.generate_delegation import always_hands_up, asks_states, generating_parts, hands_up
from rewrite.transform import COMMON_REASONS, Rewritten, Transform, TransformReport

YES = "yes"
LOOP = "GraphGeneration"
"""Ends the name of the mixins that have the loop."""
_MIXIN = "GenerationMixin"
_ASKS_STATES = "no: its `generate` asks for the hidden states of every token; it would take a step that keeps them"
_LEFT_OUT = "no: the transform that gives classes one was left out; it would take that"
_OWN = "no: it has a `generate` of its own; it would take a step of that which can be captured"


def with_loops(rewritten: Rewritten, transforms: Sequence[Transform]) -> Rewritten:
    """Return a result that says which classes have a loop, and which sites wait for one in vain."""
    file = _File(ast.parse(rewritten.text))
    rule = next((transform for transform in transforms if transform.needs), None)
    refused = _refusals(rule, rewritten.transforms)
    asking = dict(_asking(transforms, rewritten.transforms))
    loops = {
        name: _unless_asked(said, name, file, asking) for name in file.classes if (said := _said(name, file, refused))
    }
    reached = file.reached(name for name, said in loops.items() if said.startswith(YES))
    inside = {transform.name for transform in transforms if transform.in_decode_loop}
    reports = tuple(_marked(report, reached) if report.name in inside else report for report in rewritten.transforms)
    return replace(rewritten, transforms=reports, decode_loops=loops)


def _asking(transforms: Sequence[Transform], reports: Iterable[TransformReport]) -> Iterator[tuple[str, str]]:
    """Yield the class or function of each site that stays and asks the device how to go on, and the site."""
    reasons = {transform.name: transform.keeps_from_graph for transform in transforms}
    for report in reports:
        for skip in report.skipped:
            if skip.reason in reasons.get(report.name, ()):
                yield skip.site.split(":")[0].split(".")[0], skip.site


def _unless_asked(said: str, name: str, file: _File, asking: Mapping[str, str]) -> str:
    """Return what to say of a class with a loop whose step asks the device how to go on."""
    found = sorted(asking.keys() & file.reached([name])) if said.startswith(YES) else []
    return (
        f"no: {asking[found[0]]} asks the device how to go on; it would take a loop of a fixed count"
        if found
        else said
    )


def _refusals(rule: Transform | None, reports: Iterable[TransformReport]) -> Mapping[str, str]:
    """Return why the rule that gives classes a loop gave one none, and what it would take, by site."""
    if rule is None:
        return {}
    found = {}
    for skip in next(report for report in reports if report.name == rule.name).skipped:
        reason = {**COMMON_REASONS, **rule.reasons}.get(skip.reason, skip.reason)
        need = rule.needs.get(skip.reason)
        detail = f" ({skip.detail})" if skip.detail else ""
        found[skip.site] = f"no: {reason}{detail}" + (f"; it would take {need}" if need else "")
    return found


def _said(name: str, file: _File, refused: Mapping[str, str], above: tuple[str, ...] = ()) -> str:
    """Return what to say of a class, nothing of one that does not generate; `above` are those it is a part of."""
    own: ast.FunctionDef | None = None
    for owner in file.lineage(name):
        bases = file.bases(owner)
        own = own or file.methods(owner).get("generate")
        elsewhere = [base for base in bases if base.endswith(_MIXIN) and base not in (_MIXIN, *file.classes)]
        if elsewhere and any(base.endswith(LOOP) for base in bases):
            return f"{YES}, as far as {elsewhere[0]} of another file leaves the loop to it"
        if elsewhere:
            return f"no: its loop is in another file ({elsewhere[0]}); it would take that one rewritten along"
        has_loop = any(base.endswith(LOOP) for base in bases)
        if has_loop and (own is None or (hands_up(own) and not asks_states(own))):
            return _with_loop(own, file.classes[owner])
        if has_loop or _MIXIN in bases:
            refusal = _ASKS_STATES if own is not None and hands_up(own) else _OWN
            refusal = refusal if has_loop else refused.get(owner, _LEFT_OUT)
            adds = own is not None and hands_up(own) and not has_loop  # to a loop that the class does not get
            return refusal if adds else _of_parts(name, file, refused, above) or refusal
    return "" if own is None else _of_parts(name, file, refused, above) or _OWN


def _with_loop(own: ast.FunctionDef | None, owner: ast.ClassDef) -> str:
    """Return what to say of a class that has the loop, and a `generate` of its own around it."""
    told = []
    marks = [ast.unparse(decorator).partition("(")[0] for decorator in owner.decorator_list]
    if "within_window" in marks:
        told.append("for texts that a sliding window of its cache holds")
    if "grows_in_layers" in marks:
        told.append("for rows without padding")
    if own is not None and not always_hands_up(own):
        told.append("as far as its own `generate` leaves the loop to it")
    return ", ".join([YES, *told])


def _of_parts(name: str, file: _File, refused: Mapping[str, str], above: tuple[str, ...]) -> str:
    """Return what to say of a class whose `generate` calls that of models it holds, nothing of another one."""
    owner = next((owner for owner in file.lineage(name) if "generate" in file.methods(owner)), None)
    if owner is None:
        return ""
    having, outside, others = [], [], []
    for attribute in generating_parts(file.methods(owner)["generate"]):
        for made in file.made(name, attribute):
            known = made in file.classes and made not in (name, *above)
            said = _said(made, file, refused, (name, *above)) if known else ""
            if said.startswith(YES):
                having.append(f"`{attribute}` ({made})")
            elif made not in file.classes:
                outside.append(made)
            else:
                others.append(said)
    if having:
        return f"{YES}, that of its {' and '.join(having)}"
    if outside:
        named = " or ".join(dict.fromkeys(outside))
        return f"no: its loop is in another file ({named}); it would take that one rewritten along"
    return next((said for said in others if said), "")


def _marked(report: TransformReport, reached: set[str]) -> TransformReport:
    owners = {site: site.split(":")[0].split(".")[0] for site in report.rewritten}
    return replace(report, unreached=tuple(site for site in report.rewritten if owners[site] not in reached))


class _File:
    """The names that a file defines, and which of them the code of each needs."""

    def __init__(self, tree: ast.Module):
        self.defined: dict[str, ast.stmt] = {}
        for statement in tree.body:
            if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
                self.defined[statement.name] = statement
            elif isinstance(statement, ast.Assign):
                names = (target.id for target in statement.targets if isinstance(target, ast.Name))
                self.defined.update(dict.fromkeys(names, statement))
        self.classes = {name: node for name, node in self.defined.items() if isinstance(node, ast.ClassDef)}

    def bases(self, name: str) -> list[str]:
        """Return the bases of a class, each by the last part of its name."""
        return [ast.unparse(base).rpartition(".")[2] for base in self.classes[name].bases]

    def methods(self, name: str) -> dict[str, ast.FunctionDef]:
        """Return the methods of a class."""
        return {node.name: node for node in self.classes[name].body if isinstance(node, ast.FunctionDef)}

    def made(self, name: str, attribute: str) -> Iterator[str]:
        """Yield the classes that a class or its bases make `self.<attribute>` from, by the last part of their names.

        One that a function makes of a configuration has the name of the `Auto…` class that it is asked for.
        """
        for owner in self.lineage(name):
            for method in self.methods(owner).values():
                for value in _given(method, f"self.{attribute}"):
                    local = list(_given(method, value.id)) if isinstance(value, ast.Name) else [value]
                    yield from (_maker(call) for call in local if isinstance(call, ast.Call))

    def lineage(self, name: str, below: tuple[str, ...] = ()) -> Iterator[str]:
        """Yield a class and its bases in this file, nearest first."""
        yield name
        for base in self.bases(name):
            if base in self.classes and base not in (name, *below):
                yield from self.lineage(base, (name, *below))

    def reached(self, names: Iterable[str]) -> set[str]:
        """Return what code of these names may run, and what that may."""
        waiting, found = list(names), set[str]()
        while waiting:
            name = waiting.pop()
            if name in self.defined and name not in found:
                found.add(name)
                waiting += self._needed(name)
        return found

    def _needed(self, name: str) -> Iterator[str]:
        """Yield the names in the bodies of functions, and bases: what a class declares of itself runs nothing."""
        node = self.defined[name]
        if isinstance(node, ast.ClassDef):
            yield from self.bases(name)
            bodies = [statement for method in self.methods(name).values() for statement in method.body]
        else:
            bodies = node.body if isinstance(node, ast.FunctionDef) else [node]
        waiting: list[ast.AST] = [*bodies]
        while waiting:
            inner = waiting.pop()
            if isinstance(inner, ast.Name):
                yield inner.id
            elif not (
                isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "isinstance"
            ):
                waiting += ast.iter_child_nodes(inner)


def _given(method: ast.FunctionDef, target: str) -> Iterator[ast.expr]:
    """Yield what a method assigns to a target."""
    for line in ast.walk(method):
        if isinstance(line, ast.Assign) and any(ast.unparse(one) == target for one in line.targets):
            yield line.value


def _maker(call: ast.Call) -> str:
    """Return the class that a call makes something of: `Auto…` for `Auto….from_config(…)`, `from_config(Auto…, …)`."""
    made = call.func
    if isinstance(made, ast.Attribute) and made.attr in ("from_config", "_from_config", "from_pretrained"):
        made = made.value
    elif ast.unparse(made) == "from_config" and call.args:
        made = call.args[0]
    return ast.unparse(made).rpartition(".")[2]
