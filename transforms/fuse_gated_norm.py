"""Gated norms of mixers call one kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import libcst as cst

from rewrite.analysis.patterns.gated_norms import gated_norm_call
from rewrite.analysis.patterns.mean_squares import norm_places
from rewrite.analysis.patterns.norm_patterns import NotProven
from rewrite.analysis.terms.computation import NotComputable
from rewrite.analysis.tree.module import Module
from rewrite.analysis.tree.nodes import calls_in, parameters
from rewrite.analysis.tree.replacement import call_statement, is_docstring, name_is_free
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Transform

OPERATOR, RESULT = "gated_norm", "normed"


class FuseGatedNorm(Transform):
    """Compute the gated norm of a mixer in one kernel.

    What it does:
        The `forward` of a norm with a gate asks `gated_norm` first, and returns its result if there is one. The code
        below stays, for training.

    Why:
        PyTorch runs it as ten to twelve kernels, in a decode step on a few thousand numbers each.

    What it needs:
        A `forward(x, gate)` that computes an RMSNorm of `x` times the activation of the gate over groups of columns
        (Mamba 2), or of `x` over its last dimension and then times the activation of the gate (gated delta rule),
        with the roundings of one of these families.

    Numerics:
        The order of roundings of each family is kept; the mean is summed in the kernel's order.

    Known limits:
        Norms whose order depends on the configuration stay as they are.
    """

    name = "fuse_gated_norm"
    summary = "The gated norm of a mixer is one kernel, with the rounding order of its family."
    numerics = Numerics.REORDERED
    reasons: ClassVar[Mapping[str, str]] = {
        "control_flow": "the body has a statement that a fused norm has no place for",
        "not_proven": "what the body computes, or besides computing it does, is not certain",
        "other_computation": "the body is none of the computations that `gated_norm` offers",
    }

    def candidates(self, module: Module) -> Iterator[Candidate]:
        """Yield every `forward` of a norm of two tensors."""
        for place in norm_places(module):
            if place.owner is None or not place.is_forward or place.centered or len(parameters(place.function)) != 3:
                continue
            if not any(isinstance(c.func, cst.Name) and c.func.value == OPERATOR for c in calls_in(place.function)):
                yield Candidate(place.function, place.where)

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Let the norm ask the operator first."""
        place = next(place for place in norm_places(module) if place.function is candidate.node)
        assert place.owner is not None
        try:
            arguments = gated_norm_call(place.owner, module)
        except NotComputable as error:
            return Skip("control_flow", error.what)
        if isinstance(arguments, NotProven):
            return Skip("not_proven", arguments.what)
        if arguments is None:
            return Skip("other_computation")
        function = place.function
        if not name_is_free(RESULT, module, function):
            return Skip("name_taken", RESULT)
        first = next(line for line in function.body.body if not is_docstring(line))
        assert isinstance(first, cst.BaseStatement)
        asks = call_statement(f"{RESULT} = ", OPERATOR, arguments, module)
        returns = cst.parse_statement(
            f"if {RESULT} is not None:\n    return {RESULT}\n", config=module.tree.config_for_parsing
        )
        return Found((Edit(first, (asks, returns, first)),), (OPERATOR,))
