"""Grouped-query attention without expanded keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.effects import Scope, effects_of
from rewrite.analysis.patterns.attended import is_attended
from rewrite.analysis.patterns.expansion import (
    NotAnExpansion,
    called_function,
    is_expanding,
    is_lengthening,
    repetition,
)
from rewrite.analysis.patterns.grouping import Repeated, grouped
from rewrite.analysis.patterns.lookups import is_lookup
from rewrite.analysis.patterns.readers import reads_of
from rewrite.analysis.patterns.turning import looks_turning
from rewrite.analysis.tree.module import ClassInfo, Module, walk
from rewrite.analysis.tree.nodes import block_of
from rewrite.analysis.tree.replacement import call_statement, name_is_free
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Transform

_GROUPS = "num_key_value_groups"
"""The attribute by which transformers' SDPA path decides to expand keys and values."""

_NEW = ("grouped_matmul", "grouped_attention", "native_gqa")


class NativeGQA(Transform):
    """Keys and values are never expanded to the number of query heads.

    What it does:
        In a function that multiplies with `repeat_kv(key, n)`, the product becomes `grouped_matmul(query, key, n)`,
        which computes each group of query heads against its one key head; attention weights come out as before.
        `F.scaled_dot_product_attention` of repeated keys or values becomes `grouped_attention`, which is told how
        often each is repeated. Where the attention function is looked up, the line
        `attention_interface = native_gqa(attention_interface)` lets transformers' SDPA path, and only that one, share
        keys and values also when there is a mask.

    Why:
        Expanding copies the whole cache once a layer and step: for 4 query heads a group, five times the traffic.

    What it needs:
        The expansion is recognised by what the function does, not by its name, whether heads are the second dimension
        or, as in Meta's Llama, the third until they are moved; the expanded tensor is read by matrix products and
        torch's attention only, perhaps cast before, and for sizes and dtypes that expansion does not change. It may
        stand on a condition that leaves heads alone which nothing shares: `if groups > 1:`.

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
        "other_use": "the expanded tensor is read by something other than a matrix product or torch's attention, or "
        "nothing proves that it is still the same there",
        "other_expansion": "what makes the tensor longer is not the repetition of heads, or was not understood",
        "rebound": "the name of the expanding function may mean another function",
        "never_called": "the file defines the expanding function and does not use it",
    }

    def candidates(self, module: Module) -> Iterator[Candidate]:
        """Yield everything that makes a tensor longer for a product, and every look-up of an attention function that
        may expand; an expanding function that nothing uses stands for itself.
        """
        for name, function in module.functions.items():
            if is_expanding(function) and not _is_used(name, module) and repetition(function, module) is not None:
                yield Candidate(function, name)
        for where, function, owner in _functions(module):
            scope = effects_of(module).scope(function, owner)
            inside: set[int] = set()
            for node in walk(function.body):
                if isinstance(node, cst.Call) and id(node) not in inside and _lengthens(node, scope):
                    inside |= {id(inner) for inner in walk(node)}
                    yield Candidate(node, where, " ".join(module.code(node).split()))
                elif is_lookup(node, module) and _may_expand(where, module) and not _is_done(node, module):
                    yield Candidate(node, where, "attention function")

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Replace products with the expanded tensor, or put `native_gqa` around what was looked up."""
        node = candidate.node
        if isinstance(node, cst.FunctionDef):
            return Skip("never_called")
        if not isinstance(node, (cst.Call, cst.Subscript)):
            raise TypeError("a candidate is a function, a call or a look-up")
        enclosing = [above for above in module.ancestors(node) if isinstance(above, cst.FunctionDef)]
        if not all(name_is_free(name, module, *enclosing) for name in _NEW):
            return Skip("name_taken")
        if is_lookup(node, module) or not isinstance(node, cst.Call):
            return _after_lookup(node, module)
        _, function, owner = next(f for f in _functions(module) if f[1] is enclosing[-1])
        try:
            return grouped(Repeated.by(node, effects_of(module).scope(function, owner)))
        except NotAnExpansion as error:
            return Skip(error.reason, error.detail)


def _functions(module: Module) -> Iterator[tuple[str, cst.FunctionDef, ClassInfo | None]]:
    yield from ((name, function, None) for name, function in module.functions.items())
    for owner, name, method in module.methods():
        yield f"{owner.name}.{name}", method, owner


def _is_used(name: str, module: Module) -> bool:
    """Whether a name stands anywhere but at the function that it names, or stood there before this transform ran."""
    names = {name, *_NEW}
    return any(
        isinstance(node, cst.Name) and node.value in names and node is not module.functions[name].name
        for node in walk(module.tree)
    )


def _lengthens(node: cst.Call, scope: Scope) -> bool:
    """Whether a call makes a tensor longer: one of a function that repeats heads, or what attention reads."""
    function, owner = called_function(node, scope)
    if function is not None:
        if not is_expanding(function, owner) or looks_turning(function, scope.module, owner):
            return False
        return repetition(function, scope.module, owner) is not None or is_attended(node, scope)
    return is_lengthening(node) and any(reads_of(node, scope, heads).products for heads in (1, 2))


def _may_expand(where: str, module: Module) -> bool:
    owner = where.split(".")[0]
    return owner in module.classes and bool(module.assignments(module.classes[owner], _GROUPS))


def _is_done(node: cst.CSTNode, module: Module) -> bool:
    """Whether `native_gqa` stands around a look-up, or in the line after it."""
    call = m.Call(func=m.Name("native_gqa"))
    if m.matches(module.parent(module.parent(node)), call):
        return True
    block = block_of(node, module)
    place = next(i for i, line in enumerate(block) if line is module.statement(node))
    made = m.SimpleStatementLine(body=[m.Assign(value=call)])
    return place + 1 < len(block) and m.matches(block[place + 1], made)


def _after_lookup(node: cst.Call | cst.Subscript, module: Module) -> Found:
    """Insert the line after a look-up that is all its statement assigns; call `native_gqa` around any other."""
    line = module.statement(node)
    small = line.body[0] if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else None
    target = small.targets[0].target if isinstance(small, cst.Assign) and len(small.targets) == 1 else None
    target = small.target if isinstance(small, cst.AnnAssign) else target
    if isinstance(target, cst.Name) and isinstance(small, (cst.Assign, cst.AnnAssign)) and small.value is node:
        new = call_statement(f"{target.value} = ", "native_gqa", [target.value], module)
        return Found((Edit(line, (line, new)),), ("native_gqa",))
    around = cst.Call(cst.Name("native_gqa"), [cst.Arg(node.with_changes(lpar=[], rpar=[]))])
    return Found((Edit(node, (around,)),), ("native_gqa",))
