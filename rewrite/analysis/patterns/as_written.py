"""Whether a method computes what its text says, and nothing besides: asked before its body is replaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import libcst as cst

from rewrite.analysis.effects import Scope, attribute, effects_of, union
from rewrite.analysis.effects.name_bindings import Names, dotted_end
from rewrite.analysis.tree.module import ClassInfo, Module, self_assignments, self_attribute, walk
from rewrite.analysis.tree.nodes import calls_in, parameters
from rewrite.analysis.tree.replacement import name_is_free

_PARAMETERS = ("torch.nn.Parameter", "torch.nn.Buffer", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


def is_runtime_name(name: str, module: Module, *functions: cst.FunctionDef) -> bool:
    """Whether `name` can mean the runtime's function in `functions`: the file gives it no meaning of its own."""
    return name_is_free(name, module, *functions) and effects_of(module).names.is_free(name)


def why_not_as_written(info: ClassInfo, function: cst.FunctionDef, module: Module) -> str:
    """Return why a method may do something else than compute the value that its text says, `""` if it may not.

    The helpers that it calls count as part of the text: they must be the only ones of their name, in heirs as well.
    """
    effects = effects_of(module)
    names, name = effects.names, function.name.value
    if not names.is_one_class(info.name):
        return f"{info.name} is defined or changed more than once"
    if why := names.why_strange(info):
        return why
    if not names.method_is_plain(info, name) or not _is_of_instance(function):
        return f"{name} is decorated or defined more than once"
    if why := next(_unsure_names(function, info, names), ""):
        return why
    effect = effects.scope(function, info).of(function.body)
    if effect.writes or effect.stores:
        return "it writes something in place"
    return effect.anything or effect.draws


def is_set_once(attribute: str, info: ClassInfo, module: Module) -> bool:
    """Whether the file sets `self.<attribute>` nowhere but while the module is built."""
    names = effects_of(module).names
    family = {other.name: other for other in (*names.owners(info), *names.heirs(info))}
    others = [m for other in family.values() for name, m in other.methods.items() if name != "__init__"]
    return not {attribute, "*"} & names.stored and not any(
        attribute == a for m in others for a, _ in self_assignments(m)
    )


def why_replaced(attribute: str, arguments: Iterable[cst.BaseExpression], info: ClassInfo, scope: Scope) -> str:
    """Return why `self.<attribute>` may be another object once `arguments` are evaluated, `""` if it is the same.

    A call looks its function up before its arguments; an operator that is handed the module does so after them.
    """
    effect = union(scope.of(argument) for argument in arguments)
    if {attribute, "*"} & effect.stores:
        return f"self.{attribute} is set while its argument is computed"
    if effect.anything and not is_set_once(attribute, info, scope.module):
        return f"self.{attribute} may be set while its argument is computed: {effect.anything}"
    return ""


def why_no_parameter(name: str, info: ClassInfo, module: Module) -> str:
    """Return why `self.<name>` may be something else than a tensor of the module, `""` if it may not.

    Of a parameter or buffer, torch's modules take nothing but another one, or None, in its place.
    """
    names = effects_of(module).names
    found = attribute(info, name, names)
    if not found.values:
        return found.unknown
    if found.unknown and name not in names.stored and "*" not in names.stored:
        return found.unknown
    values = [*found.values, *(_stored(name, module) if name in names.stored else ())]
    if not all(isinstance(v, cst.Call) and names.resolved(v.func) in _PARAMETERS for v in found.values):
        return f"self.{name} may be something else than a parameter"
    if any(isinstance(value, cst.Name) and value.value == "None" for value in values):
        return f"self.{name} may be None"
    return ""


def _stored(name: str, module: Module) -> Iterator[cst.BaseExpression]:
    """Yield what the file assigns to an attribute of that name, of whatever object."""
    for node in walk(module.tree):
        if isinstance(node, cst.Assign) and any(
            isinstance(t.target, cst.Attribute) and t.target.attr.value == name for t in node.targets
        ):
            yield node.value


def _is_of_instance(function: cst.FunctionDef) -> bool:
    decorators = {dotted_end(decorator.decorator) for decorator in function.decorators}
    return parameters(function)[:1] == ["self"] and not decorators & {"staticmethod", "classmethod"}


def _unsure_names(function: cst.FunctionDef, info: ClassInfo, names: Names, depth: int = 4) -> Iterator[str]:
    """Yield what a method or a helper of it names that may mean something else."""
    module = names.module
    roots = {node.value for node in walk(function.body) if isinstance(node, cst.Name)}
    for name in sorted(roots & {*module.imports, *module.functions, *module.classes}):
        if not names.means(name):
            yield f"`{name}` may mean several things"
    family = {other.name: other for other in (*names.owners(info), *names.heirs(info))}
    for call in calls_in(function.body):
        name = self_attribute(call.func) or dotted_end(call.func)
        if self_attribute(call.func) is None:
            helper = module.functions.get(name) if isinstance(call.func, cst.Name) else None
            if helper is not None and depth:
                yield from _unsure_names(helper, info, names, depth - 1)
            continue
        holders = [other for other in family.values() if name in other.methods]
        if len(holders) > 1 or (
            holders and (name in names.stored or any(name in o.assigned for o in family.values()))
        ):
            yield f"self.{name} is defined more than once"
        elif holders and not (names.method_is_plain(holders[0], name) and _is_of_instance(holders[0].methods[name])):
            yield f"self.{name} is decorated or defined more than once"
        elif holders and depth:
            yield from _unsure_names(holders[0].methods[name], info, names, depth - 1)
