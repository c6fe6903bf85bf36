"""Projections of one input become one product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rewrite.analysis.projections.comprehended import comprehended, merge_comprehended
from rewrite.analysis.projections.projections import REASONS, is_gated_product, merge, projection_groups
from rewrite.analysis.tree.module import Module
from rewrite.transform import Candidate, Found, Numerics, Skip, Transform


class FuseQKV(Transform):
    """Query, key and value projections of one input become one product on packed weights.

    What it does:
        `self.q_proj(x)`, `self.k_proj(x)` and `self.v_proj(x)` become
        `packed_linear(x, self.q_proj, self.k_proj, self.v_proj)`. Any two or more `nn.Linear` of a class that are
        called once each with the same argument are merged, whatever their names, sizes and biases; so are those that
        a comprehension calls, `(p(x) for p in (self.q_proj, self.k_proj, self.v_proj))`, where it is unpacked.

    Why:
        One large product reads the input once and fills the chip; at batch 1 it is also one kernel launch instead of
        three. A compiler cannot do it, because the weights would have to lie in one tensor.

    What it needs:
        The calls stand in one block, on every path, and nothing writes the argument between them. The modules stay:
        from the first call on their weights lie one behind the other in one memory, each with a storage of its own, so
        checkpoints, what saves a model weight by weight, and adapters do not notice. Where something that is not known
        may ask how a result lies, `packed_linear_dense` makes one product of one row only, whose parts are contiguous.
        A subclass of `nn.Linear` in the file that casts its weight to the dtype of the input is marked
        (`@casts_weight`), and takes part where there is nothing to cast.

    Numerics:
        Reordered: the same sums, which a larger product may take in another order.

    Known limits:
        Where gradients are wanted the products stay apart, and on a GPU make their own gradients. `torch.func` and
        forward mode, fake and proxy tensors, hooks on a projection, adapters, quantised and distributed weights, and
        one weight twice, take the original calls, at run time and with the reason counted. So does a weight whose
        memory something else holds at the first call (a state dict, `.data`, an array, shared memory), for as long as
        it does. Conv1D and other linear layers are left alone.
    """

    name: ClassVar[str] = "fuse_qkv"
    summary: ClassVar[str] = "Query, key and value projections of one input become one product on packed weights."
    numerics: ClassVar[Numerics] = Numerics.REORDERED
    reasons = REASONS

    def candidates(self, module: Module) -> Iterator[Candidate]:
        """Yield every group of projections of one argument that is no gate and up pair, and comprehensions of them."""
        groups = (group for group in projection_groups(module) if not is_gated_product(group, module))
        yield from (group.candidate() for group in groups)
        yield from (found.candidate() for found in comprehended(module))

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Merge the group that starts at the candidate's call, or that the candidate's comprehension calls."""
        for found in comprehended(module):
            if found.line is candidate.node:
                return merge_comprehended(found, module)
        group = next(g for g in projection_groups(module) if g.calls[0].node is candidate.node)
        return merge(group, module)
