"""What a GPU kernel or a torch operator is for, read from its name.

The names are those of NVIDIA's and AMD's libraries, of Triton, of torch's compiler and of our own kernels. A name
says what a kernel does, not whom it does it for: a `topk` may choose a token or an expert. Where the caller is known,
whoever knows it decides (`rewrite/profile/origins.py`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

GEMM = "gemm"
ATTENTION = "attention"
ELEMENTWISE = "elementwise"
ROTARY = "rotary"
COPIES = "copies"
SAMPLING = "sampling"
COMMUNICATION = "communication"
OTHER = "other"
CATEGORIES = (GEMM, ATTENTION, ELEMENTWISE, ROTARY, COPIES, SAMPLING, COMMUNICATION, OTHER)
"""In the order in which they are shown."""
TITLES = {
    GEMM: "products",
    ATTENTION: "attention, mixers",
    ELEMENTWISE: "norms, elementwise",
    ROTARY: "rotary",
    COPIES: "cache, copies",
    SAMPLING: "sampling",
    COMMUNICATION: "communication",
    OTHER: "other",
}

OURS = {
    GEMM: (
        "_linear_kernel _gated_kernel _skinny_linear_kernel _transposed_linear_kernel _fp8_skinny_kernel "
        "_experts_gate_up_kernel _experts_down_kernel _transposed_gate_up_kernel _transposed_down_kernel "
        "_joined_gate_up_kernel _joined_down_kernel "
        "_router_logits_kernel _qkv_kernel _qkv_rows_kernel _beside_kernel _latent_query_kernel "
        "_block_linear_kernel _block_gate_up_kernel _block_rows_kernel _block_down_kernel _grouped_kernel "
        "_mxfp4_gate_up_kernel _mxfp4_down_kernel "
        "_integer_linear_kernel _integer_skinny_kernel _integer_rows_kernel"
    ),
    ATTENTION: (
        "_decode_attention_kernel _masked_attention_kernel _latent_attention_kernel _latent_values_kernel "
        "_delta_rule_step_kernel _conv_step_kernel _state_space_step_kernel _log_decay_kernel"
    ),
    ELEMENTWISE: (
        "_rms_norm_kernel _layer_norm_kernel _gated_norm_kernel _gated_activation_kernel _select_experts_kernel "
        "_fp8_add_rms_norm_kernel _fp8_gated_activation_kernel _fp8_rows_kernel _dequantize_kernel "
        "_dequantize_integers_kernel _chain_kernel "
        "_rms_norm_backward_kernel _layer_norm_backward_kernel _gated_activation_backward_kernel "
        "_experts_gradient_kernel _sum_of_experts_kernel _cross_entropy_kernel"
    ),
    ROTARY: "_rotary_kernel _rotary_rows_kernel",
    COPIES: (
        "_rope_cache_kernel _qkv_prompt_kernel _write_token_kernel _keep_kernel _page_tables_kernel _slot_lists_kernel"
        " _move_rows_kernel"
    ),
    SAMPLING: "_best_of_block_kernel _take_best_kernel _look_up_kernel",
    COMMUNICATION: "_shared_sum_kernel",
}
"""Our own kernels; a test holds this table and the kernels that `runtime/` launches together."""
MANGLED = 120
"""Characters of a mangled name that count: its parameters follow, and are no work of its own."""
_OURS = {name: category for category, names in OURS.items() for name in names.split()}

_WRAPPERS = re.compile(
    r"(?:^|::)(?:kentry|device_kernel|Kernel2?|\w*elementwise\w*kernel\w*|reduce_kernel\w*|trampoline_kernel|"
    r"multi_tensor_apply_kernel|kernel_agent|transform_kernel|SharedMemReduce\w*)$"
)
"""Kernels that say in their template arguments alone what they do."""
_INDUCTOR = re.compile(r"triton_(poi|red|per|tem|for|mm|unk)_fused_?")
_MOVES = frozenset(
    [
        "clone",
        "copy",
        "copy_",
        "cat",
        "transpose",
        "slice",
        "view",
        "index_copy",
        "expand",
        "unsqueeze",
        "squeeze",
        "select",
        "permute",
        "stack",
        "_to_copy",
        "t",
        "split",
        "split_with_sizes",
        "reshape",
        "_unsafe_view",
        "unsafe_view",
        "slice_scatter",
        "index_put",
        "constant_pad_nd",
        "fill",
        "full",
        "zeros",
        "empty",
        "arange",
        "as_strided",
        "detach",
        "alias",
    ]
)

_RULES: tuple[tuple[str, str], ...] = (
    (
        COMMUNICATION,
        r"^nccl|^rccl|_nccl|all_?reduce|cross_device_reduce|reduce_?scatter(?!_elementwise)|all_?gather|all_?to_?all|"
        r"one_?shot|two_?shot|multimem|symm_mem|send_?recv|deep_ep|p2p_",
    ),
    (ROTARY, r"rotary|(?:^|[^a-z])i?rope(?:$|[^a-z])|_rope_(?!cache|insert|set|store)"),
    (
        COPIES,
        r"reshape_and_cache|kv_?cache(?!Kernel)|store_kv|set_kv|cache_kernel|concat_and_cache|write_token|^memcpy|^memset|"
        r"rocclr_(?:copy|fill|stream)|copyBuffer|fillBuffer",
    ),
    (
        ATTENTION,
        r"fmha|flash(?!infer)|DecodeWith|PrefillWith|sage_|attention|attn(?!_?res)|paged_(?:decode|prefill)|(?:^|[^a-z])mla_|sdpa|ssm|ssd_|selective_scan|mamba|"
        r"delta_rule|delta_net|causal_conv1d|conv1d_update|(?:^|_)(?:gdn|kda|gla|rwkv|wkv\d)_|state_scan|state_passing|"
        r"chunk_(?:fwd|bwd|scan|state|local|kda|scaled|cumsum|gated)|_fwd_(?:grouped_)?kernel_stage|pa_(?:fwd|decode|bf16|fp16)|"
        r"wkv|recurrent_|solve_tril|unified_attention",
    ),
    (
        ELEMENTWISE,
        r"rms_?norm|layer_?norm|group_?norm|batch_?norm|l2_?norm|Norm(?:Fwd|Bwd|Two|alize)|Rmsnorm|Layernorm|norm_kernel|"
        r"sbtopk|mbtopk|topk_?gating|gating_?softmax|moe_?(?:align|sort|sum|reduction)|moe_sorting|MoeSorting|routing|router|bitmatrix|"
        r"act_and_mul|silu_and_mul|swiglu|ComputeFusedParams|ComputeInternalGradients|GammaBeta|RowwiseMoments",
    ),
    (
        GEMM,
        r"Cijk_|nvjet|gemm|gemv|gemmk|cublas|cutlass|xmma|splitk_?reduce|split_k|wvSplitK|LLMM|matmul|(?:^|_)[ab]?mm_|"
        r"fmoe|moe_?(?:gemm|mxgemm|stage|\d_|kernel)|flatmm|fused_moe|kernel_moe|mfma_|conv(?!ert)|igemm|winograd|im2d?2?col|"
        r"Im2d2Col|SubTensorOp|dot_kernel|Tensile|projection|mmq|mul_mat|_linear_|stream_?k|tensorop|wmma",
    ),
    (SAMPLING, r"arg_?max|ArgMax|multinomial|(?<!up)sampl|top_?p_|min_?p_|penalt|speculat|gumbel|token_ids_kernel"),
    (
        COPIES,
        r"copy|CatArray|nchwTo|nhwcTo|transpose|permute|FillFunctor|fill_|gather|scatter|index_?select|indexSelect|index_put|"
        r"index_kernel|index_copy|index_fill|embedding|arange|clone|memset|roll_|flip|pad\d?d?|triu_tril|repeat|concat|"
        r"krn_part|compute_num_of_partial|sum_and_scatter|kv_indices|position|slot_mapping|pack_|unpack",
    ),
    (
        ELEMENTWISE,
        r"at::|cudnn|miopen|softmax|SoftMax|silu|gelu|relu|sigmoid|tanh|quant|elementwise|reduce|reduction|norm|dropout|"
        r"add|mul|pow|rsqrt|cos_|sin_|where|clamp|max_pool|avg_pool|upsample|cub::|rocprim|hipcub|thrust|topk|top_k|"
        r"sort|scan|bwd_kernel|activation|cast|swish|bias|loss|adam|sgd|apply|tensor_kernel|combine|finalize|append",
    ),
)
_COMPILED = tuple((category, re.compile(pattern, re.IGNORECASE)) for category, pattern in _RULES)

_OPERATORS: tuple[tuple[str, str], ...] = (
    (COMMUNICATION, r"^c10d|all_?reduce|all_?gather|reduce_scatter|broadcast_"),
    (ATTENTION, r"scaled_dot_product|flash_attention|efficient_attention|_attention|selective_scan"),
    (
        GEMM,
        r"::(?:t?mm|addmm|bmm|baddbmm|matmul|linear|addmv|mv|dot|einsum|_grouped_mm|mkldnn_linear|.*conv.*|.*linear)$",
    ),
    (SAMPLING, r"::(?:argmax|multinomial)"),
    (ROTARY, r"rotary|rope"),
    (
        COPIES,
        r"::(?:copy_?|_to_copy|to|clone|contiguous|cat|stack|index_select|index|index_put_?|_index_put_impl_|index_copy_?|"
        r"gather|scatter\w*|slice_scatter|embedding|fill_|zero_|zeros\w*|ones\w*|full\w*|empty\w*|arange|repeat\w*|"
        r"constant_pad_nd|pad|resize_|lift_fresh|masked_select|nonzero|roll|flip|new_\w+|reshape|flatten|view\w*|expand\w*|"
        r"unsqueeze|squeeze|transpose|permute|t|slice|select|split\w*|chunk|narrow|as_strided|unfold|detach\w*|alias|"
        r"_unsafe_view|_reshape_alias|unbind|movedim|swapaxes|resolve_\w+|item|_local_scalar_dense|is_nonzero|numpy_T|"
        r"tril_?|triu_?|set_|result_type|_has_compatible\w*|_nested\w*)$",
    ),
)
_COMPILED_OPERATORS = tuple((category, re.compile(pattern)) for category, pattern in _OPERATORS)


@functools.cache
def category(name: str) -> str:
    """Return the category of a GPU activity by its name: a kernel, or a copy or fill of the driver."""
    bare = name.removesuffix(".kd").removesuffix(" [clone .kd]").removesuffix(".kd")
    if bare in _OURS:
        return _OURS[bare]
    if bare.startswith(("Memcpy ", "Memset ")):
        return COPIES
    compiled = _INDUCTOR.match(bare)
    if compiled:
        return _inductor(compiled[1], bare[compiled.end() :])
    head = _head(bare)
    text = bare[:600] if _WRAPPERS.search(head) else head
    text = text[:MANGLED] if text.startswith("_Z") else text
    return next((found for found, pattern in _COMPILED if pattern.search(text)), OTHER)


@functools.cache
def operator_category(name: str) -> str:
    """Return the category of a torch operator, `aten::addmm`; what computes and is nothing else is elementwise."""
    name = name if "::" in name else f"aten::{name}"  # an in-place operator of autograd's own, `detach_`
    found = next((found for found, pattern in _COMPILED_OPERATORS if pattern.search(name)), None)
    if found is not None:
        return found
    own = category(f"_{name.rpartition('::')[2]}_kernel")
    return own if own != OTHER else ELEMENTWISE


def _head(name: str) -> str:
    """The function's own name, without return type, template arguments and parameters; mangled names whole."""
    text = (name.rpartition("::type ")[2] if name.startswith("std::enable_if") else name).replace(
        "(anonymous namespace)::", ""
    )
    kept, depth = [], 0
    for letter in text:
        depth += letter == "<"
        if not depth:
            if letter == "(":
                break
            kept.append(letter)
        depth -= letter == ">" and depth > 0
    return "".join(kept).split()[-1] if "".join(kept).split() else text


def _inductor(kind: str, rest: str) -> str:
    """A kernel that torch's compiler made: `rest` are the operators that it was made of, with underscores between."""
    if kind in ("tem", "mm"):
        return ATTENTION if "attention" in rest else GEMM
    if re.search(r"(?:^|_)argmax(?:_|$)|multinomial", rest):
        return SAMPLING
    if re.search(r"(?:^|_)cos_", rest) and re.search(r"(?:^|_)sin_", rest):
        return ROTARY
    return COPIES if _only_moves(re.sub(r"_?\d+$", "", rest)) else ELEMENTWISE


def _only_moves(rest: str) -> bool:
    """Whether a sequence of operators' names is made of those that move memory alone."""
    words = [word for word in rest.split("_") if word]
    return bool(words) and _splits(tuple(words), tuple(sorted(_MOVES)))


@functools.cache
def _splits(words: tuple[str, ...], names: tuple[str, ...]) -> bool:
    if not words:
        return True
    known: Sequence[list[str]] = [[part for part in name.split("_") if part] for name in names]
    return any(list(words[: len(parts)]) == parts and _splits(words[len(parts) :], names) for parts in known)
