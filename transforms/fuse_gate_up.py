"""The gate and up projections of a gated MLP become one product.

Reading on: `rewrite/analysis/projections/projections.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rewrite.analysis.projections.projections import REASONS, is_gated_product, merge, projection_groups
from rewrite.analysis.tree.module import Module
from rewrite.transform import Candidate, Found, Numerics, Skip, Transform


class FuseGateUp(Transform):
    """The gate and up projections of a gated MLP become one product on packed weights.

    What it does:
        In `act(self.gate_proj(x)) * self.up_proj(x)` the two projections become
        `gate, up = packed_linear(x, self.gate_proj, self.up_proj)`. The pair is found by what is done with it, one
        side through an activation and the product of both, also when locals stand in between.

    Why:
        The two weights are the largest of a layer; one product reads the input once, runs as one kernel and leaves
        both halves in one buffer, which the fused activation reads in one pass.

    What it needs:
        Both are `nn.Linear`, called once each with the same argument in one block, with no write to it in between.

    Numerics:
        Reordered: the same sums, which a larger product may take in another order.

    Known limits:
        As for fuse_qkv. Weights that the checkpoint already stores as one tensor are one product anyway.
    """

    name: ClassVar[str] = "fuse_gate_up"
    summary: ClassVar[str] = "Gate and up projections of a gated MLP become one product on packed weights."
    numerics: ClassVar[Numerics] = Numerics.REORDERED
    reasons = REASONS

    def candidates(self, module: Module) -> Iterator[Candidate]:
        """Yield every group of projections whose results are multiplied, one of them activated."""
        groups = (group for group in projection_groups(module) if is_gated_product(group, module))
        return (group.candidate() for group in groups)

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Merge the group that starts at the candidate's call."""
        group = next(g for g in projection_groups(module) if g.calls[0].node is candidate.node)
        return merge(group, module)
