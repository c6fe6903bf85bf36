"""Attention over the segments of a packed sequence without a loop over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import libcst as cst

from rewrite.analysis.effects import effects_of
from rewrite.analysis.patterns.segments import Loop, NotSegments, Segments, loops_over_pieces, segments
from rewrite.analysis.tree.module import ClassInfo, Module, walk
from rewrite.analysis.tree.replacement import call_statement, with_call
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Transform

ATTENTION, WEIGHTS = "segment_attention", "segment_attention_weights"


class BatchSegments(Transform):
    """Images, windows and clips that lie in one sequence are attended to in one call for each of their lengths.

    What it does:
        Queries, keys and values that are split by the lengths of the segments, a loop that calls the attention
        function once for each piece, and the concatenation of the results become one call of `segment_attention`. It
        calls that function with the segments of one length as the rows of a batch.

    Why:
        A tower over images has hundreds of windows, and each was a call in each layer, some kernels on a few dozen
        tokens. The lengths are brought to the host once in place of three times. The tower of Qwen2.5-VL took 31 ms
        in place of 67 for one image of 52 × 78 patches (8 layers, bf16, H100).

    What it needs:
        All three are split along the sequence by the same sizes, nothing else that a call is given depends on the
        turn, and nothing else reads the pieces or the results.

    Numerics:
        Reordered: each row is computed as it was, by a kernel that torch chooses for the shape of the batch.

    Known limits:
        The segments are rows of a batch for `sdpa` alone, without a mask and without dropout; another attention
        function, `eager` too, is called once for each, and so it is under torch.compile. `explain` counts these calls.
        Where gradients are wanted, neighbours of one length share a call, and nothing is copied to have more in one.
        Loops over images that do something else are skipped: modules in them may be hooked, and shapes differ.
    """

    name = "batch_segments"
    summary = "Attention to each image or window of a packed sequence is one call for each length, not for each piece."
    numerics = Numerics.REORDERED
    reasons: ClassVar[Mapping[str, str]] = {
        "other_turn": "the loop does something else than to call the attention function that the configuration names "
        "for pieces and to concatenate the results, or nothing proves that the calls may run together",
    }

    def candidates(self, module: Module) -> Iterator[Candidate]:
        """Yield every loop over pieces of split tensors that calls something in its turns, but for making a module."""
        for where, function, owner in _functions(module):
            if where.endswith(".__init__"):
                continue
            for loop in loops_over_pieces(function, effects_of(module).scope(function, owner)):
                header = loop if isinstance(loop, cst.For) else loop.for_in
                yield Candidate(loop, where, f"for {module.code(header.target)}")

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Put one call in the place of the split, the loop and the concatenation."""
        node = candidate.node
        if not isinstance(node, Loop):
            raise TypeError("a candidate is a loop")
        _, function, owner = next(found for found in _functions(module) if found[0] == candidate.where)
        try:
            found = segments(node, effects_of(module).scope(function, owner))
        except NotSegments as error:
            return Skip("other_turn", error.detail)
        operator = WEIGHTS if found.weights else ATTENTION
        return Found(_edits(found, operator, module), (operator,))


def _functions(module: Module) -> Iterator[tuple[str, cst.FunctionDef, ClassInfo | None]]:
    yield from ((name, function, None) for name, function in module.functions.items())
    for owner, name, method in module.methods():
        yield f"{owner.name}.{name}", method, owner


def _edits(found: Segments, operator: str, module: Module) -> tuple[Edit, ...]:
    """Return the call in the place of the concatenation; comments of what goes stand above it."""
    first, *others = [found.call.args[0], *found.call.args[4:]]
    tensors = [split.tensor for split in found.splits]
    arguments = [module.code(found.call.func), _code(first, module), *tensors, module.code(found.splits[0].sizes)]
    arguments += [_code(other, module) for other in others]
    if found.weights:
        target = module.code(cst.ensure_type(found.line.body[0], cst.Assign).targets[0].target)
        start, indent = f"{target}, {found.weights} = ", module.indentation(found.line)
        old: cst.CSTNode = found.line
        new: cst.CSTNode = call_statement(start, operator, arguments, module, indent=indent)
        new = new.with_changes(
            leading_lines=found.line.leading_lines, trailing_whitespace=found.line.trailing_whitespace
        )
    else:
        old, new = with_call(found.join, operator, arguments, module)
    if isinstance(new, cst.SimpleStatementLine):
        comments = [node for gone in found.gone for node in walk(gone) if isinstance(node, cst.Comment)]
        above = [cst.EmptyLine(comment=comment) for comment in comments]
        new = new.with_changes(leading_lines=[*above, *new.leading_lines])
    return (*(Edit(gone, ()) for gone in found.gone), Edit(old, (new,)))


def _code(argument: cst.Arg, module: Module) -> str:
    """Return an argument as it is written, without the comma after it."""
    return module.code(argument.with_changes(comma=cst.MaybeSentinel.DEFAULT))
