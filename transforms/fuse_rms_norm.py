"""RMSNorm classes call one kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from rewrite.analysis.sites.norms import computed, divides_by_root_mean_square, looks_like_norm, rms_norm_call, rms_norm_obstacle, subtracts_mean
from rewrite.analysis.syntax.module import Module, names_in
from rewrite.analysis.syntax.replacement import call_statement, name_is_free, returning
from rewrite.analysis.terms.computation import NotComputable
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Transform


class FuseRmsNorm(Transform):
    """Compute an RMSNorm in one kernel.

    What it does:
        Replaces the body of an RMSNorm's `forward` by one call of `rms_norm`. The class, its parameters, its other
        methods and the names of its attributes stay.

    Why:
        PyTorch runs a hand-written RMSNorm as six kernels, each of which reads and writes the hidden states; one
        kernel reads them once and writes them once.

    What it needs:
        A `forward` that computes `x * rsqrt(mean(x²) + eps)` in fp32 over the last dimension, in whatever spelling and
        through whatever helper methods, then one of: rounding and a product with the weight (Llama), a product with
        the weight and rounding (OLMo 2), a product with `1 + weight` in fp32 and rounding (Gemma), rounding alone.

    Numerics:
        The order of roundings of each family is kept; the mean is summed in the kernel's order.

    Known limits:
        Gated norms, norms over groups, T5's norm (the product is taken in the input's dtype) and sharded norms stay.
    """

    name = "fuse_rms_norm"
    summary = "RMSNorm classes call one kernel, with the rounding order of their family."
    numerics = Numerics.REORDERED
    reasons: ClassVar[Mapping[str, str]] = {
        "control_flow": "the body has a statement that a fused norm has no place for",
        "second_tensor": "another tensor takes part, as in a gated norm",
        "other_dimension": "the mean is taken over another dimension than the last",
        "product_in_input_dtype": "the input is multiplied before it is brought to fp32, as in T5",
        "other_computation": "the body is a norm, but none of the computations that `rms_norm` offers",
        "name_taken": "the file has a name `rms_norm` of its own",
    }

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every class whose `forward` multiplies by the inverse root of a mean of squares, or might."""
        for info in module.classes.values():
            if not looks_like_norm(info):
                continue
            term = computed(info, module)
            if isinstance(term, NotComputable):
                is_norm = "rsqrt" in names_in([info.methods["forward"]])
            else:
                is_norm = divides_by_root_mean_square(term) and not subtracts_mean(term)
            if is_norm:
                yield Candidate(info.methods["forward"], f"{info.name}.forward")

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Find the family of the norm."""
        info = module.classes[candidate.where.split(".")[0]]
        forward = info.methods["forward"]
        term = computed(info, module)
        if isinstance(term, NotComputable):
            return Skip("control_flow", term.what)
        call = rms_norm_call(term, info, module)
        if call is None:
            return Skip(rms_norm_obstacle(term))
        if not name_is_free(call.function, module, forward):
            return Skip("name_taken")
        new = returning(forward, call_statement("return ", call.function, call.given, module))
        return Found((Edit(forward, (new,)),), ("norms.rms_norm",))
