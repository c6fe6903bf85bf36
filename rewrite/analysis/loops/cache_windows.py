"""Sliding windows that a growing cache keeps to, and masks that hide what is outside of them."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from rewrite.analysis.tree.module import ClassInfo, Module, names_in, of_kind

_WINDOW = "sliding_window"
_MASKS = {"create_sliding_window_causal_mask", "create_masks_for_generate"}


def keeps_unmasked_window(info: ClassInfo, module: Module) -> bool:
    """Whether layers of a class have a window, which its cache may keep to, and no mask of the file hides the rest."""
    imported = {name.rpartition(".")[2] for name in module.imports.values()}
    if not _MASKS.isdisjoint(imported | _attributes(module.tree)):
        return False
    return any(_WINDOW in _attributes(node) for node in reached(info, module))


def _attributes(node: cst.CSTNode) -> set[str]:
    return {attribute.attr.value for attribute in of_kind(node, cst.Attribute)}


def reached(info: ClassInfo, module: Module) -> Iterator[cst.CSTNode]:
    """Yield the code of a class, of its bases, and of what that may make or call of the file, by any name."""
    tables = {target: line.value for line, target in _assigned(module)}
    waiting, seen = [info.name], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in module.classes:
            one = module.classes[name]
            bodies: list[cst.CSTNode] = [method.body for method in one.methods.values()]
            waiting += one.bases
        else:
            known = module.functions.get(name) or tables.get(name)
            bodies = [] if known is None else [known]
        yield from bodies
        waiting += names_in(bodies)


def _assigned(module: Module) -> Iterator[tuple[cst.Assign, str]]:
    """Yield the assignments of the file's own level, with each name."""
    for statement in module.tree.body:
        for line in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
            if isinstance(line, cst.Assign):
                for target in line.targets:
                    if isinstance(target.target, cst.Name):
                        yield line, target.target.value
