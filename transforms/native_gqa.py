"""Grouped-query attention without expanded keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.sites.expansion import expands_heads, grouped_product, product_of, reads_a_kept_size
from rewrite.analysis.syntax.module import Module, walk
from rewrite.analysis.syntax.nodes import block_of, bound_names
from rewrite.analysis.syntax.replacement import call_statement, name_is_free
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Transform

_GROUPS = "num_key_value_groups"
"""The attribute by which transformers' SDPA path decides to expand keys and values."""

_INTERFACES = "ALL_ATTENTION_FUNCTIONS"


class NativeGQA(Transform):
    """Keys and values are never expanded to the number of query heads.

    What it does:
        In a function that multiplies with `repeat_kv(key, n)`, the product becomes `grouped_matmul(query, key)`, which
        computes each group of query heads against its one key head; attention weights come out as before. Where the
        attention function is looked up, the line `attention_interface = native_gqa(attention_interface)` lets
        transformers' SDPA path, and only that one, share keys and values also when there is a mask.

    Why:
        Expanding copies the whole cache once a layer and step: for 4 query heads a group, five times the traffic.

    What it needs:
        The expansion is recognised by what the function does, not by its name; the expanded tensor is read by matrix
        products only, and for sizes that expansion does not change.

    Numerics:
        Reordered: the same sums in products of another shape.

    Known limits:
        Backends other than eager and sdpa (flash_attention_2, flex_attention …) share keys and values by themselves
        and are left as they are; but on an AMD GPU with aiter, flash_attention_2 runs aiter's kernel.
    """

    name: ClassVar[str] = "native_gqa"
    summary: ClassVar[str] = "Grouped-query attention never repeats keys and values: eager and SDPA, masks included."
    numerics: ClassVar[Numerics] = Numerics.REORDERED
    reasons: ClassVar[dict[str, str]] = {
        "other_use": "the expanded tensor is read by something other than a matrix product",
        "values_change": "the tensor is written between its expansion and a product that reads it",
        "not_a_statement": "the expansion or the look-up is part of a larger statement",
        "never_called": "the file defines the expanding function and does not use it",
        "name_taken": "the file has a name `grouped_matmul` or `native_gqa` of its own",
    }

    def candidates(self, module: Module) -> Iterator[Candidate]:
        """Yield every call of an expanding function, and every look-up of an attention function that may expand; an
        expanding function that nothing uses stands for itself.
        """
        repeats = [name for name, function in module.functions.items() if expands_heads(function, module)]
        yield from (Candidate(module.functions[name], name) for name in repeats if not _is_used(name, module))
        for where, function in _functions(module):
            for node in walk(function.body):
                if m.matches(node, m.Call(func=m.Name())) and module.code(node.func) in repeats:  # type: ignore[attr-defined]
                    yield Candidate(node, where, module.code(node))
                elif _is_lookup(node, module) and _may_expand(where, module) and not _is_done(node, module):
                    yield Candidate(node, where, "attention function")

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Replace products with the expanded tensor, or insert the line after the look-up."""
        if isinstance(candidate.node, cst.FunctionDef):
            return Skip("never_called")
        enclosing = [above for above in module.ancestors(candidate.node) if isinstance(above, cst.FunctionDef)]
        if not all(name_is_free(name, module, *enclosing) for name in ("grouped_matmul", "native_gqa")):
            return Skip("name_taken")
        if _is_lookup(candidate.node, module):
            return _after_lookup(candidate.node, module)
        return _without_expansion(candidate, module)


def _functions(module: Module) -> Iterator[tuple[str, cst.FunctionDef]]:
    yield from module.functions.items()
    for owner, name, method in module.methods():
        yield f"{owner.name}.{name}", method


def _is_used(name: str, module: Module) -> bool:
    """Whether a name stands anywhere but at the function that it names, or stood there before this transform ran."""
    names = {name, "grouped_matmul", "native_gqa"}
    return any(
        isinstance(node, cst.Name) and node.value in names and node is not module.functions[name].name
        for node in walk(module.tree)
    )


def _is_lookup(node: cst.CSTNode, module: Module) -> bool:
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == "get_interface":
        return module.qualified(node.func.value).endswith(_INTERFACES)
    return isinstance(node, cst.Subscript) and module.qualified(node.value).endswith(_INTERFACES)


def _may_expand(where: str, module: Module) -> bool:
    owner = where.split(".")[0]
    return owner in module.classes and bool(module.assignments(module.classes[owner], _GROUPS))


def _is_done(node: cst.CSTNode, module: Module) -> bool:
    block = block_of(node, module)
    place = next(i for i, line in enumerate(block) if line is module.statement(node))
    return place + 1 < len(block) and "= native_gqa(" in module.code(block[place + 1])


def _after_lookup(node: cst.CSTNode, module: Module) -> Found | Skip:
    line = module.statement(node)
    assigned = m.Assign(targets=[m.AssignTarget(target=m.Name())]) | m.AnnAssign(target=m.Name())
    if not isinstance(line, cst.SimpleStatementLine) or not m.matches(line, m.SimpleStatementLine(body=[assigned])):
        return Skip("not_a_statement", module.code(node))
    small = line.body[0]
    if not isinstance(small, (cst.Assign, cst.AnnAssign)) or small.value is not node:
        return Skip("not_a_statement", module.code(node))
    name = module.code(small.targets[0].target if isinstance(small, cst.Assign) else small.target)
    new = call_statement(f"{name} = ", "native_gqa", [name], module)
    return Found((Edit(line, (line, new)),), ("attention.native_gqa",))


def _without_expansion(candidate: Candidate, module: Module) -> Found | Skip:
    node = candidate.node
    line = module.statement(node)
    small = line.body[0] if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else None
    if not isinstance(small, cst.Assign) or small.value is not node or not isinstance(node, cst.Call):
        return Skip("not_a_statement", module.code(node))
    target = small.targets[0].target
    compact = node.args[0].value
    if not isinstance(target, cst.Name) or not isinstance(compact, cst.Name):
        return Skip("not_a_statement", module.code(node))
    block = list(block_of(node, module))
    after = block[next(i for i, s in enumerate(block) if s is line) + 1 :]
    function = next(above for above in module.ancestors(line) if isinstance(above, cst.FunctionDef))
    uses = [u for u in walk(function.body) if isinstance(u, cst.Name) and u.value == target.value]
    uses = [u for u in uses if u is not target and not _inside(u, line, module)]
    if any(compact.value in bound_names(s) or target.value in bound_names(s) for s in after):
        return Skip("values_change", target.value)
    products, lengths = [], []
    for use in uses:
        if reads_a_kept_size(use, module) and any(_inside(use, s, module) for s in after):
            lengths.append(Edit(use, (cst.Name(compact.value),)))
            continue
        product = product_of(use, module)
        if product is None or not any(_inside(use, s, module) for s in after):
            if compact.value == target.value and not any(_inside(use, s, module) for s in after):
                continue
            return Skip("other_use", module.code(module.statement(use)).splitlines()[0])
        products.append((product, use))
    edits = [Edit(product, (grouped_product(product, use, compact, module),)) for product, use in products]
    return Found((Edit(line, ()), *edits, *lengths), ("attention.grouped_matmul",))


def _inside(node: cst.CSTNode, top: cst.CSTNode, module: Module) -> bool:
    return node is top or any(above is top for above in module.ancestors(node))
