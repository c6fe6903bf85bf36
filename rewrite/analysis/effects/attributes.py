"""What `self.x` may be, from everything in the file that assigns it."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.effects.name_bindings import SETTERS, Names, dotted_end, is_self
from rewrite.analysis.tree.module import ClassInfo, walk


@dataclass(frozen=True)
class Attribute:
    """The values that an attribute of `self` may have."""

    values: tuple[cst.BaseExpression, ...]
    unknown: str = ""
    """Why it may be something else as well; empty where it is not."""


def attribute(owner: ClassInfo, name: str, names: Names) -> Attribute:
    """Return what the class, its bases and its heirs in this file assign to `self.<name>`."""
    heirs = names.heirs(owner)
    family = {info.name: info for info in (owner, *heirs) for info in names.owners(info)}
    holders = names.module.classes if name in names.handed_over else family
    values = tuple(value for info in holders.values() for value in info.assigned.get(name, ()))
    if not values:
        return Attribute((), f"nothing in the file says what self.{name} is")
    if name in names.stored or "*" in names.stored:
        return Attribute(values, f"`{name}` is also set from outside")
    built = [dotted_end(value.func) for value in values if isinstance(value, cst.Call)]
    if odd := next((kind for kind in built if kind in names.replaced_classes), ""):
        return Attribute(values, f"{odd} is replaced wherever it is found")
    if name in names.tampered:
        return Attribute(values, f"the file changes what a call of `{name}` does")
    for info in family.values():
        if names.class_names(info)[name]:
            return Attribute(values, f"{info.name} has a `{name}` of its own")
        if info.name not in names.computed:
            names.computed[info.name] = _sets_computed(info)
        if names.computed[info.name]:
            return Attribute(values, f"{info.name} sets attributes whose names it computes")
        if not (names.is_one_class(info.name) if info is owner else names.means(info.name)):
            return Attribute(values, f"{info.name} is defined or changed more than once")
    if why := next((why for info in family.values() if (why := _custom(info))), ""):
        return Attribute(values, why)
    return Attribute(values)


def _custom(info: ClassInfo) -> str:
    custom = ("__setattr__", "__getattr__", "__getattribute__", "__delattr__")
    return next((f"{info.name} defines {name}" for name in custom if name in info.methods), "")


def _sets_computed(info: ClassInfo) -> bool:
    """Whether a method sets an attribute of `self` under a name that it computes without a prefix or suffix."""
    for node in walk(info.node):
        if not isinstance(node, cst.Call) or dotted_end(node.func) not in SETTERS or not node.args:
            continue
        given = [argument.value for argument in node.args]
        if isinstance(node.func, cst.Attribute) and (not node.func.attr.value.startswith("__") or len(given) < 3):
            given = [node.func.value, *given]
        if is_self(given[0]) and not (
            len(given) > 1 and isinstance(given[1], (cst.SimpleString, cst.FormattedString))
        ):
            return True
    return False
