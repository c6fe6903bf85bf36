"""What generated files may import of the runtime: one entry a name, in the order of the files.

The registry is the tool's: it is read where the runtime is not installed, and without an import of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

DISTRIBUTION = "hf_rewrite_runtime"
"""Import name of the runtime."""
VENDORED = "_runtime"
"""Folder of a package with a runtime of its own (`rewrite vendor`)."""


def is_of_runtime(name: str) -> bool:
    """Return whether a dotted name is one of the runtime's, installed or vendored."""
    return name.startswith((f"{DISTRIBUTION}.", f".{VENDORED}."))


@dataclass(frozen=True)
class Offer:
    """A name that generated files may import."""

    name: str
    file: str
    """`norms/add_norm`."""
    shapes: str = ""
    """Of its tensors and of what it returns; of operators only."""
    computes: str = ""
    """A Python function, for which the analysis takes a call; empty where the operator is an operation of its own."""
    step: str = ""
    """The function that does its work in a decode step."""
    fp8: str = ""
    """The function that takes its place, and reads the weights of its projections in 8 bits."""
    fp8_rows: str = ""
    """The function that takes its place, and writes rows in 8 bits for those that do."""
    fp8_class: str = ""
    """The class that takes its place as a base of a class whose projections do."""

    @property
    def room(self) -> str:
        """`norms`."""
        return self.file.split("/")[0]

    @property
    def module(self) -> str:
        """`hf_rewrite_runtime.norms.add_norm`, as generated files import it."""
        return f"{DISTRIBUTION}.{self.file.replace('/', '.')}"


OFFERS = (
    Offer("attend_step", "attention/attend_step", shapes="[B, H, 1, D] -> [B, 1, H, Dv]"),
    Offer("decode_attention", "attention/decode_attention", shapes="[B, H, 1, D] -> [B, 1, H Dv]"),
    Offer("cached_attention", "attention/cached_attention", shapes="an attention function of transformers -> one"),
    Offer("latent_attention", "attention/latent_attention", shapes="[B, 1, I] -> [B, 1, H V]"),
    Offer(
        "grouped_attention",
        "attention/grouped_query",
        shapes="[B, H, S, D], [B, Hk, T, D], [B, Hk, T, Dv] -> [B, H, S, Dv]",
    ),
    Offer("grouped_matmul", "attention/grouped_query", shapes="[B, H, S, K], [B, Hk, K, M] -> [B, H, S, M]"),
    Offer(
        "native_gqa",
        "attention/grouped_query",
        shapes="an attention function of transformers -> one",
        step="decode_attention",
    ),
    Offer("qkv_step", "rope/qkv_step", shapes="[B, 1, I] -> [B, H, 1, D]", fp8="fp8_qkv_step"),
    Offer(
        "qkv_rope_cache",
        "rope/qkv_rope_cache",
        shapes="[B, S, I] -> [B, H, S, D], 2 × [B, Hk, T, D]",
        fp8="fp8_qkv_rope_cache",
    ),
    Offer("projected_step", "rope/qkv_step", shapes="[B, 1, (H + 2 Hk) D] -> [B, H, 1, D]"),
    Offer("rotary", "rope/rotary", shapes="[B, H, S, D], [B, Hk, S, D] -> the same", step="qkv_step"),
    Offer("rotary_single", "rope/rotary", shapes="[B, H, S, D] -> [B, H, S, D]", step="qkv_step"),
    Offer("rotary_rows", "rope/rope_cos_sin", shapes="[B, n] -> 2 × [B, n, R]"),
    Offer(
        "segment_attention",
        "attention/segment_attention",
        shapes="[1, H, S, D], [1, Hk, S, D], [1, Hk, S, Dv] -> [1, S, H, Dv]",
    ),
    Offer(
        "segment_attention_weights",
        "attention/segment_attention",
        shapes="[1, H, S, D], [1, Hk, S, D], [1, Hk, S, Dv] -> [1, S, H, Dv], a list",
    ),
    Offer("key_length", "cache/key_length"),
    Offer("PreallocatedCache", "cache/preallocated"),
    Offer("is_decode_step", "cache/preallocated"),
    Offer("skips_mask", "cache/preallocated"),
    Offer("keeps_states", "decode/recurrent_state"),
    Offer("hands_on_states", "decode/recurrent_state"),
    Offer("recomputes_at_switch", "decode/eligibility"),
    Offer("within_window", "decode/eligibility"),
    Offer("GraphGeneration", "generate/generation", fp8_class="Fp8GraphGeneration"),
    Offer("CapturedForward", "forward/captured"),
    Offer("fp8_add_norm", "fp8/fp8_add_rms_norm", shapes="[N, H], [N, H] -> ([N, H], [N, H])"),
    Offer("Fp8GraphGeneration", "fp8/fp8_generation"),
    Offer("fp8_gated_linear", "fp8/fp8_linear", shapes="[N, I] -> [N, O]"),
    Offer("fp8_gated_product", "fp8/fp8_linear", shapes="[N, I], [N, I] -> [N, O]"),
    Offer("fp8_linear", "fp8/fp8_linear", shapes="[N, I] -> [N, O]"),
    Offer("fp8_packed_linear", "fp8/fp8_linear", shapes="[N, I] -> ([N, O_i], …)"),
    Offer("fp8_qkv_rope_cache", "fp8/fp8_qkv_rope_cache", shapes="[B, S, I] -> [B, H, S, D], 2 × [B, Hk, T, D]"),
    Offer("fp8_qkv_step", "fp8/fp8_qkv_step", shapes="[B, 1, I] -> [B, H, 1, D]"),
    Offer(
        "head_logits",
        "loss/chunked_loss",
        computes="""
def head_logits(model, hidden_states, head, labels):
    return head(hidden_states)
""",
    ),
    Offer(
        "chunked_loss",
        "loss/chunked_loss",
        computes="""
def chunked_loss(loss_function, *arguments, **keywords):
    return loss_function(*arguments, **keywords)
""",
    ),
    Offer("conv_step", "recurrent/conv_step", shapes="[B, C, n], [B, C, W] -> [B, C, n]"),
    Offer(
        "delta_rule_step",
        "recurrent/delta_rule_step",
        shapes="2 × [B, n, Hk, D], [B, n, Hv, Dv], 2 × [B, n, Hv] -> [B, n, Hv, Dv], [B, Hv, D, Dv]",
    ),
    Offer("gated_norm", "recurrent/gated_norm", shapes="2 × [N, H], [H] -> [N, H]"),
    Offer("log_decay", "recurrent/log_decay", shapes="[N, H], 2 × [H] -> [N, H]"),
    Offer("selective_scan_step", "recurrent/selective_scan_step", shapes="[B, P, N], [B, P] -> [B, P]"),
    Offer("state_space_step", "recurrent/state_space_step", shapes="[B, H, P, N], [B, H, P] -> [B, H, P]"),
    Offer("chosen_experts", "moe/every_expert", shapes="[E N, H] -> [E N, H]"),
    Offer("fused_experts", "moe/experts", shapes="[…, H] -> […, H]"),
    Offer("ExpertsForm", "moe/form"),
    Offer("routed", "moe/routed"),
    Offer("select", "moe/routed"),
    Offer("RoutingRule", "moe/router"),
    Offer("router", "moe/router", shapes="[N, H] -> what the file's router returns"),
    Offer(
        "add_norm",
        "norms/add_norm",
        shapes="[N, H], [N, H] -> ([N, H], [N, H])",
        computes="""
def add_norm(hidden_states, residual, norm):
    summed = residual + hidden_states
    return norm(summed), summed
""",
        fp8_rows="fp8_add_norm",
    ),
    Offer("add_rms_norm", "norms/add_rms_norm", shapes="[N, H], [N, H] -> ([N, H], [N, H])"),
    Offer("layer_norm", "norms/layer_norm", shapes="[N, H] -> [N, H]"),
    Offer("rms_norm", "norms/rms_norm", shapes="[N, H] -> [N, H]"),
    Offer("torch_rms_norm", "norms/torch_rms_norm"),
    Offer("from_config", "loading/auto"),
    Offer("OriginalCheckpoint", "loading/original_checkpoint"),
    Offer(
        "gated_activation",
        "linear/gated_activation",
        shapes="[N, I], [N, I] -> [N, I]",
        step="gated_linear",
    ),
    Offer(
        "gated_product",
        "linear/gated_product",
        shapes="[N, I], [N, I] -> [N, O]",
        computes="""
def gated_product(gate, up, activation, projection):
    return projection(activation(gate) * up)
""",
    ),
    Offer(
        "routed_linear",
        "linear/gemm",
        shapes="[N, K] -> [N, O]",
        computes="""
def routed_linear(input, projection):
    return projection(input)
""",
    ),
    Offer(
        "routed_packed_linear",
        "linear/gemm",
        shapes="[N, K] -> ([N, O_i], …)",
        computes="""
def routed_packed_linear(input, *projections):
    return tuple(projection(input) for projection in projections)
""",
    ),
    Offer("gated_linear", "linear/linear", shapes="[N, I] -> [N, O]", fp8="fp8_gated_linear"),
    Offer("residual_block", "linear/residual_block", shapes="[B, S, H] -> [B, S, H]"),
    Offer("linear", "linear/linear", shapes="[N, I] -> [N, O]", fp8="fp8_linear"),
    Offer("packed_step", "linear/packed_gemv", shapes="[N, I] -> [N, O_1], [N, O_2], …"),
    Offer(
        "packed_linear",
        "linear/packing",
        shapes="[N, I] -> ([N, O_i], …)",
        computes="""
def packed_linear(input, *projections):
    return tuple(projection(input) for projection in projections)
""",
        step="qkv_step",
        fp8="fp8_packed_linear",
    ),
    Offer("casts_weight", "linear/packing"),
    Offer(
        "packed_linear_dense",
        "linear/packing",
        shapes="[N, I] -> ([N, O_i], …)",
        computes="""
def packed_linear_dense(input, *projections):
    return tuple(projection(input) for projection in projections)
""",
    ),
    Offer(
        "patch_product",
        "linear/patch_product",
        shapes="[B, C, g_i k_i, …] -> [B, O, g_i, …]",
        computes="""
def patch_product(input, convolution):
    return convolution(input)
""",
    ),
)
