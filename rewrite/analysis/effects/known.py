"""What is known without being read: functions, tensor methods and modules of torch, and Python's own functions.

Whatever is not listed here and not defined in the file may do anything. A name stands in `FRESH` where the result
never shares memory with an argument, in `VIEWS` where it may.
"""

from __future__ import annotations


def names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


FRESH = names(
    """
    abs acos acosh add addcmul addmm all allclose amax amin any arange argmax argmin argsort asin atan atan2 baddbmm
    bincount bitwise_and bitwise_not bitwise_or bmm cat ceil celu clamp clamp_max clamp_min clip
    clone concat concatenate conv1d conv2d conv3d conv_transpose1d conv_transpose2d cos cosh count_nonzero cross
    cross_entropy cummax cumprod cumsum dequantize diff div divide dot einsum elu empty empty_like eq equal erf exp
    exp2 expm1 eye fill floor floor_divide fmod full full_like gather ge gelu glu greater greater_equal gt
    hardsigmoid hardswish hardtanh index_add index_select interpolate isclose isfinite isinf isnan kthvalue
    layer_norm le leaky_relu lerp less less_equal linear linspace log log10 log1p log2 log_softmax logaddexp
    logical_and logical_not logical_or logical_xor logsigmoid logsumexp lt masked_fill masked_scatter masked_select
    matmul matrix_exp max maximum mean median min minimum mish mm mse_loss mul multiply mv ne neg negative
    new_empty new_full new_ones new_tensor new_zeros nonzero norm normalize one_hot ones ones_like outer pow prod
    relu relu6 remainder repeat repeat_interleave roll round rsqrt scaled_dot_product_attention scatter scatter_add
    searchsorted selu sigmoid sign silu sin sinh softmax softplus softsign sort sqrt square stack std sub
    subtract sum tan tanh tensor tile topk tril triu true_divide trunc unique unique_consecutive var where zeros
    zeros_like rms_norm group_norm avg_pool1d avg_pool2d max_pool1d max_pool2d embedding bitwise_xor
    promote_types isin addbmm cdist index_fill reciprocal icdf histc binary_cross_entropy
    binary_cross_entropy_with_logits kl_div l1_loss nll_loss smooth_l1_loss
    """
)
ALONE = names(
    """
    abs acos acosh asin atan ceil cos cosh erf exp exp2 expm1 floor isfinite isinf isnan log log10 log1p log2
    neg negative relu rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc
    """
)
"""Of these, methods of tensors that take no argument by place: with one, it is a module that is called."""
NO_METHODS = names(
    """
    celu elu gelu glu hardsigmoid hardswish hardtanh leaky_relu linear conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d mish layer_norm rms_norm group_norm relu6 selu silu softplus softsign embedding interpolate
    avg_pool1d avg_pool2d max_pool1d max_pool2d scaled_dot_product_attention binary_cross_entropy
    binary_cross_entropy_with_logits kl_div l1_loss nll_loss smooth_l1_loss
    """
)
"""Of these, functions that tensors have no method of."""
VIEWS = names(
    """
    adaptive_avg_pool1d adaptive_avg_pool2d alias as_tensor as_strided atleast_1d atleast_2d bfloat16
    broadcast_tensors broadcast_to byte chunk contiguous cpu cuda detach diagonal double expand expand_as flatten
    flip float half int long meshgrid movedim moveaxis narrow pad permute real ravel reshape reshape_as select slice
    split split_with_sizes squeeze swapaxes swapdims t tensor_split to transpose type type_as unbind unflatten
    unfold unsqueeze view view_as view_as_complex view_as_real resolve_conj polar bool
    """
)
TENSORS = (FRESH | VIEWS) - names(
    "all any broadcast_tensors chunk clip divide equal max median min mode meshgrid norm round select sort split "
    "split_with_sizes std sum topk tensor_split type unbind unique where fill square transpose_ add pad normalize "
    "promote_types kthvalue cummax allclose index_fill int float bool half to multiply"
) | names("to float")
"""Functions and methods that return one tensor, and that nothing but tensors has a method of the name of."""
ABOUT = names(
    """
    size dim numel nelement stride element_size data_ptr is_contiguous is_floating_point is_complex get_device item
    tolist ndimension storage_offset untyped_storage
    """
)
"""Methods that say something about a tensor and return no tensor."""
NO_TENSOR = names(
    """
    shape dtype device ndim is_cuda requires_grad training layout itemsize nbytes is_meta __name__ __class__
    in_features out_features
    """
)
"""Attributes that hold no tensor."""
MOVES_MODULES = names("to half float double bfloat16 cuda cpu type train eval bool")
"""Methods that return a tensor's copy, but change a module in place."""
CONTAINER_WRITES = names(
    """
    append extend insert clear remove pop popitem sort reverse setdefault add discard
    """
)
CONTAINER_READS = names(
    """
    get items keys values index count copy startswith endswith format join lower upper
    """
)
CONFIG_READS = names("get_text_config")
"""The method of transformers' configurations that returns one of them, and writes nothing."""

OF_TENSORS = (
    (FRESH | VIEWS | ABOUT | NO_TENSOR | MOVES_MODULES | CONTAINER_WRITES | CONTAINER_READS) - NO_METHODS
    | names("T H mT mH real imag data grad grad_fn is_leaf is_sparse is_quantized names backward retain_grad numpy")
) - names("training in_features out_features")
"""Attributes of tensors and containers: who has another is an object of its own kind."""

TORCH = names(
    """
    torch.is_tensor torch.is_grad_enabled torch.is_autocast_enabled torch.finfo torch.iinfo torch.jit.is_tracing
    torch.is_floating_point torch.numel torch.compiler.is_compiling torch.device torch.Size torch.get_default_dtype
    torch.autocast torch.no_grad torch.enable_grad torch.inference_mode torch.jit.is_scripting
    torch.get_autocast_dtype torch.get_autocast_gpu_dtype torch.is_complex torch.compiler.is_exporting
    torch._dynamo.is_compiling
    """
)
"""Functions of torch that read modes and make no tensor that shares memory."""
HOLDERS = names("torch.distributions.Normal torch.distributions.normal.Normal")
"""Classes of torch that only hold what they are built with."""
RANDOM = names(
    """
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout rand rand_like randn
    randn_like randint randint_like randperm bernoulli multinomial normal poisson gumbel_softmax rrelu manual_seed
    """
)
"""Functions that draw random numbers, some of them in training only."""
_TORCH_ROOTS = ("torch", "torch.functional", "torch.nn.functional", "torch.special", "torch.fft", "torch.linalg")

BUILTINS = names(
    """
    abs all any bool complex dict divmod enumerate float format frozenset getattr hasattr hash id int isinstance
    issubclass len list max min ord pow range repr reversed round set slice sorted str sum tuple type zip
    Exception ArithmeticError AssertionError AttributeError IndexError KeyError LookupError NotImplementedError
    OverflowError RuntimeError StopIteration TypeError ValueError ZeroDivisionError
    """
)
"""Python's own functions that write nothing; those that call back get no function here (see `calls`)."""
NAMELESS = names("getattr hasattr")
"""Of these, the ones that may run a property: only with a constant name."""
CALLS_BACK = names("sorted max min")

QUIET = names("logger warnings logging math")
"""Roots of calls that only tell somebody something."""

FRESH_MODULES = names(
    """
    Linear LayerNorm RMSNorm GroupNorm Embedding Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d Bilinear SiLU
    GELU Sigmoid Tanh Softmax LogSoftmax Softplus Mish Softsign LogSigmoid Tanhshrink GLU PReLU AvgPool1d AvgPool2d
    MaxPool1d MaxPool2d
    """
)
INPLACE_MODULES = names(
    """
    ReLU ReLU6 ELU SELU CELU LeakyReLU Hardswish Hardsigmoid Hardtanh Threshold
    """
)
"""Activations that write their argument when built with `inplace=True`; so do `SiLU` and `Mish`."""
VIEW_MODULES = names(
    """
    Identity Flatten Unflatten ZeroPad2d AdaptiveAvgPool1d AdaptiveAvgPool2d Upsample
    """
)
RANDOM_MODULES = names(
    """
    Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout RReLU
    """
)

MODULE_STATE = names(
    """
    weight bias forward training eps p inplace in_features out_features normalized_shape negative_slope dim
    approximate num_groups stride padding dilation groups padding_idx max_norm norm_type _parameters _buffers
    _modules
    """
)
"""Attributes of a module of torch that its call reads."""

RUNTIME = names(
    """
    packed_linear packed_linear_dense gated_activation rms_norm layer_norm add_norm linear gated_linear
    routed_linear grouped_attention grouped_matmul native_gqa rotary_rows gated_norm packed_step
    """
)
"""Operators that earlier transforms put in: they are imported only when the rewriting is done."""

CLASS_DECORATORS = names(
    """
    auto_docstring dataclass use_kernel_forward_from_hub use_kernelized_func use_experts_implementation
    add_start_docstrings requires total_ordering casts_weight
    """
)
METHOD_DECORATORS = names(
    """
    auto_docstring can_return_tuple torch.no_grad torch.inference_mode merge_with_config_defaults capture_outputs
    deprecate_kwarg add_start_docstrings_to_model_forward replace_return_docstrings abc.abstractmethod
    abstractmethod staticmethod classmethod torch.jit.ignore use_kernel_func_from_hub_with_fallback override
    typing.override use_kernel_func_from_hub use_kernel_forward_from_hub
    """
)
"""Decorators, by the end of their name, that let the function write and return what it does by itself."""


def torch_function(qualified: str) -> str:
    """Return `x` of `torch.x` or `torch.nn.functional.x`, or `""`."""
    root, _, name = qualified.rpartition(".")
    return name if root in _TORCH_ROOTS else ""


def torch_module(qualified: str) -> str:
    """Return `X` of `torch.nn.X`, or `""`."""
    root, _, name = qualified.rpartition(".")
    return name if root == "torch.nn" or root.startswith("torch.nn.modules.") else ""
