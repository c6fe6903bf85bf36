"""Caches that a class decodes with and that are none of transformers': tuples, or what another file makes of them."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from rewrite.analysis.loops.cache_windows import reached
from rewrite.analysis.tree.cache_names import PASSED
from rewrite.analysis.tree.module import ClassInfo, Module, of_kind, self_attribute
from rewrite.analysis.tree.nodes import calls_in

_NAMES = (*PASSED, "past_key_value")
_KNOWN = ("transformers", "torch")


def taken_by_place(info: ClassInfo, module: Module) -> str | None:
    """Return the code that takes an item of a cache, which transformers' caches have not had since release 5."""
    for body in reached(info, module):
        for node in of_kind(body, cst.Subscript):
            if isinstance(node.value, cst.Name) and node.value.value in _NAMES:
                return module.code(node)
    return None


def handed_out(info: ClassInfo, module: Module) -> str | None:
    """Return the class of a file that is neither this one nor transformers', to which `forward` hands the cache."""
    forward = module.method(info, "forward")
    for call in calls_in(forward.body) if forward is not None else ():
        func = call.func
        if isinstance(func, cst.Attribute) and func.attr.value == "forward":
            func = func.value
        attribute = self_attribute(func)
        if attribute is None or not any(a.keyword is not None and a.keyword.value in PASSED for a in call.args):
            continue
        for name in _made(info, attribute, module):
            if "." in name and name.split(".")[0] not in _KNOWN:
                return name
    return None


def _made(info: ClassInfo, attribute: str, module: Module) -> Iterator[str]:
    """Yield the imported classes that `self.<attribute>` is made from, by their full names."""
    for value in module.assignments(info, attribute):
        if isinstance(value, cst.Call) and isinstance(value.func, cst.Name) and value.func.value in module.imports:
            yield module.qualified(value.func)
