"""Functions that apply a rotary embedding call one kernel."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import libcst as cst

from rewrite.analysis.effects import effects_of, why_unsure
from rewrite.analysis.patterns.prepared_tables import blocks_of, prepared
from rewrite.analysis.patterns.rope import Choice, Rotation, Turning, other_part, same_rotation, turning
from rewrite.analysis.patterns.turning import looks_turning, multiplies
from rewrite.analysis.terms.computation import NotComputable, body
from rewrite.analysis.tree.module import ClassInfo, Module, walk
from rewrite.analysis.tree.nodes import local_names, names_bound_by, parameters
from rewrite.analysis.tree.replacement import call_statement, ending, line, returning
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Transform


class FuseRope(Transform):
    """Rotate queries and keys in one kernel.

    What it does:
        Replaces the body of a function that applies a rotary embedding by one call of `rotary`, or of `rotary_single`
        where it takes one tensor. Name, signature, decorators and docstring stay, and so does every call of it.

    Why:
        PyTorch runs the two rotations as ten kernels that read and write queries and keys several times.

    What it needs:
        A function or method, also one inside another, that returns `x * cos + rotate(x) * sin` for one or two tensors,
        with the tables unsqueezed at one dimension, or as they come. It is compared by what it computes: halves
        (Llama; slices from either end, `chunk`, `split`, `unflatten`), neighbours (Cohere, GLM, GPT-J; also stacked,
        written into an empty tensor, or as complex numbers), neighbours written apart (DeepSeek-V3), tables of one
        column a pair (gpt-oss), a rotated first part (GPT-NeoX), in the tensors' dtype, in fp32, or rounded back to
        it. Statements in front that test the arguments, or that make, gather, cut or reshape the tables, stay as they
        are; where they ask the shape of a part of the tensor, they ask a view of it. Of a test that chooses between
        rotations each way becomes a call. A rotation by the negative angle is one with `-sin`, which is the same to
        the last bit.

    Numerics:
        Products and sum are rounded where the original rounds them; in fp32 a product and the sum may be one
        operation.

    Known limits:
        Rotated last parts stay, and so does what a function of another file computes. Where torch would broadcast
        queries, keys or tables to another shape, the products run one by one; so they do for tables that come with
        more than one head.
    """

    name = "fuse_rope"
    summary = "Rotary embeddings turn queries and keys in one kernel."
    numerics = Numerics.REORDERED
    reasons: ClassVar[Mapping[str, str]] = {
        "control_flow": "the body has a statement that the fused rotation has no place for",
        "other_computation": "the body is none of the rotations that `rotary` offers",
        "rebound": "a name that the body reads may mean something else than what the file defines",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every function that multiplies a tensor with two tables, whatever it calls them.

        What a rotation is made of is no site of its own where the whole becomes one call.
        """
        turning = [
            (where, function, owner)
            for where, function, owner in _functions(module)
            if looks_turning(function, module, owner) and self._is_site(function, owner, module)
        ]
        for where, function, _ in turning:
            callers = [(other, owner) for _, other, owner in turning if _mentions(other, function)]
            if not any(isinstance(self._read(other, owner, module), Found) for other, owner in callers):
                yield Candidate(function, where)

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Compare what the function returns with the operator's forms."""
        function, owner = next((f, owner) for _, f, owner in _functions(module) if f is candidate.node)
        return self._read(function, owner, module)

    def _is_site(self, function: cst.FunctionDef, owner: ClassInfo | None, module: Module) -> bool:
        """Whether the file calls a function, or other files may that find a rotation in it.

        What nothing calls any more once rotations are calls was a part of one.
        """
        if module.references.get(function.name.value, 0) > 0:
            return True
        if any(module.references.get(name) for name in ("rotary", "rotary_single")):
            return False
        return multiplies(function) and isinstance(self._read(function, owner, module), Found)

    def _read(self, function: cst.FunctionDef, owner: ClassInfo | None, module: Module) -> Found | Skip:
        if (compiled := _compiled(function, module)) is not None:
            return Skip("rebound", f"`{compiled}` compiles the source of the function")
        if unsure := why_unsure(effects_of(module), function, owner):
            return Skip("rebound", unsure)
        helpers = [h for name, h in module.functions.items() if _mentions(function, h)]
        if (decorated := next((h for h in helpers if h.decorators), None)) is not None:
            return Skip("rebound", f"{decorated.name.value} is decorated by `{module.code(decorated.decorators[0])}`")
        if (local := _around(function, module)) is not None:
            return Skip("rebound", f"`{local}` is a local of the function around it")
        if (listed := next(filter(None, (_listed(f, module) for f in (function, *helpers))), None)) is not None:
            return Skip("other_computation", f"a list where `rotary` gives a tuple: {listed}")
        found = self._whole(function, owner, module)
        if not isinstance(found, Skip):
            new = returning(function, *_statements(found, module, module.indentation(function) + 4))
            return Found((Edit(function, (new,)),), tuple(sorted(_uses(found))))
        return self._in_blocks(function, owner, module) or found

    def _in_blocks(self, function: cst.FunctionDef, owner: ClassInfo | None, module: Module) -> Found | None:
        """Return the rotations that blocks of a function end with, what stands in front of them left as it is."""
        scope = effects_of(module, plain_containers=True).scope(function, owner)
        edits: list[Edit] = []
        uses = set[str]()
        for block in blocks_of(function, owner, module):
            behind = None if any(_holds(edit.old, block.node) for edit in edits) else prepared(block, scope)
            if behind is not None:
                new = _statements(behind.turning, module, module.indentation(block.node) + 4)
                edits.append(Edit(block.node, (ending(block.node, new, behind.kept),)))
                uses |= _uses(behind.turning)
        return Found(tuple(edits), tuple(sorted(uses))) if edits else None

    def _whole(self, function: cst.FunctionDef, owner: ClassInfo | None, module: Module) -> Turning | Skip:
        """Return what the whole function turns, or why that is not known."""
        try:
            term = body(function, module, owner)
        except NotComputable as error:
            return Skip("control_flow", error.what)
        found = turning(term)
        if isinstance(found, list) and len(found) == 1 and found[0].other:
            return Skip("other_computation", f"the result has the dtype of {found[0].other}")
        return Skip("other_computation", other_part(term)) if found is None else found


def _statements(found: Turning, module: Module, indent: int) -> list[cst.BaseStatement]:
    """Return what rotates and returns."""
    if isinstance(found, Choice):
        test = cst.parse_statement(f"if {found.test}:\n    pass", config=module.tree.config_for_parsing)
        yes = cst.IndentedBlock(_statements(found.yes, module, indent + 4))
        return [test.with_changes(body=yes), *_statements(found.no, module, indent)]
    if len(found) == 2 and not same_rotation(*found):
        singles = [call_statement("", "rotary_single", _arguments([one]), module, indent=indent + 4) for one in found]
        both = "".join(f"{textwrap.indent(module.code(single), '    ')},\n" for single in singles)
        return [line(f"return (\n{both})", module)]
    name = "rotary" if len(found) == 2 else "rotary_single"
    return [call_statement("return ", name, _arguments(found), module, indent=indent)]


def _uses(found: Turning) -> set[str]:
    if isinstance(found, Choice):
        return _uses(found.yes) | _uses(found.no)
    return {"rotary" if len(found) == 2 and same_rotation(*found) else "rotary_single"}


def _functions(module: Module) -> Iterator[tuple[str, cst.FunctionDef, ClassInfo | None]]:
    """Yield functions and methods of the file, and the functions that they define."""
    whole: list[tuple[str, cst.FunctionDef, ClassInfo | None]]
    whole = [(name, function, None) for name, function in module.functions.items()]
    whole += [(f"{owner.name}.{name}", method, owner) for owner, name, method in module.methods()]
    for where, function, owner in whole:
        yield where, function, owner
        for node in walk(function.body):
            if isinstance(node, cst.FunctionDef):
                yield f"{where}.{node.name.value}", node, None


def _around(function: cst.FunctionDef, module: Module) -> str | None:
    """Return a name that a function reads of a function around it."""
    around = [node for node in module.ancestors(function) if isinstance(node, cst.FunctionDef)]
    own = {*parameters(function)}.union(*(names_bound_by(node) for node in walk(function.body)))
    bound = {name for outer in around for name in parameters(outer)}
    bound = bound.union(*(names_bound_by(node) for outer in around for node in walk(outer.body)))
    defined = {node.name.value for outer in around for node in walk(outer.body) if isinstance(node, cst.FunctionDef)}
    return min((local_names(function, module) & (bound | defined)) - own, default=None)


def _holds(node: cst.CSTNode, other: cst.CSTNode) -> bool:
    return any(inner is other for inner in walk(node))


def _mentions(function: cst.FunctionDef, other: cst.FunctionDef) -> bool:
    """Whether a function has the name of another one in it."""
    name = other.name.value
    return function is not other and any(
        isinstance(node, cst.Name) and node.value == name for node in walk(function.body)
    )


def _listed(function: cst.FunctionDef, module: Module) -> str | None:
    """Return the code of a list that is no argument of a call, and so may be returned."""
    lists = (node for node in walk(function.body) if isinstance(node, cst.List))
    return next((module.code(node) for node in lists if not isinstance(module.parent(node), cst.Arg)), None)


def _compiled(function: cst.FunctionDef, module: Module) -> str | None:
    """Return the decorator that reads the function's source, if it has one."""
    for decorator in function.decorators:
        made = decorator.decorator.func if isinstance(decorator.decorator, cst.Call) else decorator.decorator
        if module.qualified(made).startswith(("torch.jit.script", "torch.jit.trace", "triton.", "numba.")):
            return module.code(made)
    return None


def _arguments(found: list[Rotation]) -> list[str]:
    rounded = ["to_query_dtype=True"] if len(found) == 2 and found[1].other else []
    return [*(rotation.tensor for rotation in found), *found[0].tables, *found[0].options, *rounded]
