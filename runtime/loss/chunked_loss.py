"""A language model's loss in training, from hidden states: the logits are not computed unless somebody reads them.

`head_logits` stands where a file multiplies with the vocabulary, `chunked_loss` where it calls the loss function. In
between, and in the output, are the logits, or `DeferredLogits` in their place. They are deferred where labels are
given to a model in training mode with gradients, its loss function is transformers' own, and its head is a plain
`nn.Linear` that nothing watches; else both functions do what stood in their place. `REWRITE_CHUNKED_LOSS=0` or
`use_chunked_loss(False)` turns it off.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn import functional as F
from transformers.loss import loss_utils

from ..core import backend
from ..linear.linear import linear
from .cross_entropy import total_loss
from .deferred_logits import DeferredLogits, plain

ENVIRONMENT_VARIABLE = "REWRITE_CHUNKED_LOSS"
SHIFTED = loss_utils.ForCausalLMLoss
"""Compares each token with the label after it."""
IN_PLACE = loss_utils.ForMaskedLMLoss
"""Compares each token with its own label."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_KEYWORDS = {"logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels"}
_OF_ALL = {name for function in (SHIFTED, IN_PLACE) for name in inspect.signature(function).parameters}
_OF_THEIR_OWN = {"source", "target", "kwargs"}  # of what they call, which gets the keywords that they do not know
_OTHER_KEYWORDS = sorted(
    (_OF_ALL | {*inspect.signature(loss_utils.fixed_cross_entropy).parameters}) - _KEYWORDS - _OF_THEIR_OWN
)
"""What another version's loss functions take beside these, label smoothing for one."""
_chosen: bool | None = None


def use_chunked_loss(enabled: bool) -> None:
    """Choose whether the loss in training is computed without logits, for all models of this package."""
    global _chosen
    _chosen = enabled


def uses_chunked_loss() -> bool:
    """Return the last choice of `use_chunked_loss`, else whether `REWRITE_CHUNKED_LOSS` is not 0."""
    return os.environ.get(ENVIRONMENT_VARIABLE, "1") != "0" if _chosen is None else _chosen


def head_logits(
    model: nn.Module, hidden_states: Tensor, head: nn.Module, labels: Tensor | None
) -> Tensor | DeferredLogits:
    """Return the product of hidden states with the vocabulary, deferred where only the loss will need it.

    Args:
        model: whose loss function it is for.
        hidden_states: `[B, S, H]`.
        head: `nn.Linear(H, V)`, or what was put in its place.
        labels: of the loss; None where there will be none.

    Returns:
        `[B, S, V]`.
    """
    if labels is None or not model.training or not torch.is_grad_enabled():
        return linear(hidden_states, head)
    reason = _refusal(model, hidden_states, head, labels)
    if reason is not None:
        backend.count_fallback("chunked_loss", reason, model)
        return linear(hidden_states, head)
    return DeferredLogits(hidden_states, head, _product_dtype(hidden_states))  # type: ignore[arg-type]


def chunked_loss(loss_function: Callable[..., Tensor], *arguments: Any, **keywords: Any) -> Tensor:
    """Return `loss_function(*arguments, **keywords)`, from hidden states where the logits among them are deferred.

    Args:
        loss_function: that of the model.
        arguments: `logits, labels, vocab_size`, as the file gives them.
        keywords: the same, and what the caller of the model gave for the loss: `num_items_in_batch`, `ignore_index`,
            `shift_labels`. With any other that transformers' functions know, the logits are computed.
    """
    logits = arguments[0] if arguments else keywords.get("logits")
    if isinstance(logits, DeferredLogits) and not logits.is_computed:
        loss = _of_hidden_states(loss_function, *arguments, **keywords)
        if not isinstance(loss, str):
            return loss
        backend.count_fallback("chunked_loss", loss)
    return loss_function(*plain(arguments), **plain(keywords))


def _refusal(model: nn.Module, hidden_states: Tensor, head: nn.Module, labels: Tensor) -> str | None:
    """Return why the logits have to be computed."""
    if not uses_chunked_loss():
        return "turned_off"
    if isinstance(hidden_states, Proxy) or backend.transformed() or torch._C._get_tracing_state() is not None:
        return "watched"
    if type(hidden_states) is not Tensor or type(labels) is not Tensor or hidden_states.dim() < 2:
        return "no_tensor"
    if type(head) is not nn.Linear:
        return "not_linear"
    if backend.observed(head) or getattr(model, "_is_replica", False):
        return "observed"
    if any(type(parameter) is not nn.Parameter for parameter in head._parameters.values() if parameter is not None):
        return "not_a_plain_parameter"
    if not any(tensor.requires_grad for tensor in (hidden_states, *head.parameters())):
        return "no_gradient_wanted"
    if model.loss_function not in (SHIFTED, IN_PLACE):
        return "other_loss_function"
    return _of_dtypes(hidden_states, head, labels)


def _of_dtypes(hidden_states: Tensor, head: nn.Linear, labels: Tensor) -> str | None:
    if hidden_states.device != head.weight.device:
        return "device"
    same = backend.autocasts(hidden_states.device.type) or hidden_states.dtype == head.weight.dtype
    if not same or hidden_states.dtype not in _DTYPES or labels.dtype != torch.int64:
        return "dtype"
    return None


def _product_dtype(hidden_states: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer computes here."""
    kind = hidden_states.device.type
    if backend.autocasts(kind) and hidden_states.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden_states.dtype


def _of_hidden_states(
    loss_function: Callable[..., Tensor],
    logits: DeferredLogits,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **others: Any,
) -> Tensor | str:
    """Return the loss as `loss_utils` defines it, or why it has to be computed from logits."""
    shape = logits.form()
    if shape is None or vocab_size != logits.shape[-1]:
        return "other_logits"
    if loss_function not in (SHIFTED, IN_PLACE):
        return "other_loss_function"
    if any(others.get(name) is not None for name in _OTHER_KEYWORDS):
        return "other_keyword"
    if loss_function is SHIFTED:
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        labels = shift_labels
    logits.check()
    states, weight, bias = logits.hidden_states, logits.head.weight, logits.head.bias
    flat = states.reshape(-1, states.shape[-1])
    labels = labels.reshape(-1).to(flat.device)
    if labels.shape[0] != flat.shape[0]:
        return "other_labels"
    total = total_loss(flat, weight, bias, labels, ignore_index, shape, logits.product_dtype).float()
    if num_items_in_batch is None:
        count = (labels != ignore_index).sum()
        mean = total / count.clamp(min=1)
        return torch.where(count > 0, mean, torch.nan)  # of nothing, with a gradient of zero, as torch's own
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch
