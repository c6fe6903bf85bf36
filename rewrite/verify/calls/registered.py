"""Gate 2: an attention function that a user registers and names is called by both sides, with the same arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..judging.checks import CheckRun
from ..judging.compare import NotRun, near_exact
from ..judging.verdict import Figure
from ..models.configs import Variant
from ..models.inputs import Padding
from ..models.model_pair import Workbench, on_original, unrounded_original
from .observed import everything
from .scenarios import Outputs, Setting, call

if TYPE_CHECKING:
    from torch import Tensor

NAME = "a_users_own"

DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_dropout", "attn_pdrop", "dropout_rate")


def registered_checks(bench: Workbench, variant: Variant) -> Iterator[CheckRun]:
    """One check: with padding, without, and with a cache; with dropout in the configuration, which is for training."""
    yield CheckRun(
        f"a registered attention function, {variant.name}", partial(_registered, bench, with_dropout(variant))
    )


def with_dropout(variant: Variant) -> Variant:
    """The variant with a dropout of attention weights, where its configuration has one."""
    return variant.changed({name: 0.25 for name in DROPOUTS if isinstance(getattr(variant.config, name, None), float)})


def _registered(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    pair = bench.fresh(variant, bench.implementations()[0], "float64")
    seed = bench.seed_for(variant.name, NAME)
    setting = Setting(bench.subject, variant.vocab_size, bench.options.device, seed)
    expected = on_original(calls_of, pair.original, setting)
    if not any(name.startswith("call 0") for name in expected):
        raise NotRun("the original calls no registered attention function")
    truth = unrounded_original(calls_of, pair.original, setting)
    return near_exact(expected, calls_of(pair.rewritten, setting), unrounded=truth)


def calls_of(model: Any, setting: Setting) -> Outputs:
    """What the function is called with, every time, and what the model makes of it."""
    import torch

    seen: Outputs = {}
    with registered(seen), torch.no_grad():
        model.set_attn_implementation(NAME)
        outputs: Outputs = {}
        paddings: tuple[Padding, ...] = ("none", "left") if setting.subject.accepts("attention_mask") else ("none",)
        for padding in paddings:
            batch = setting.prompt(2, 11, padding)
            outputs |= everything(call(model, setting, batch), f"padding {padding}")
    return {**seen, **{name: value for name, value in outputs.items() if "padding left" not in name}}


@contextlib.contextmanager
def registered(seen: Outputs) -> Iterator[None]:
    """Register a function of attention that is none of transformers', and note what it is called with."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
    ) -> tuple[Tensor, None]:
        number = len({name.split(",")[0] for name in seen})
        given = {"query": query, "key": key, "value": value, "mask": attention_mask, **keywords}
        found = everything(given, f"call {number}, {type(module).__name__}")
        seen.update({name: tensor.clone() for name, tensor in found.items()})
        return _attended(query, key, value, attention_mask), None

    ALL_ATTENTION_FUNCTIONS[NAME] = attend
    ALL_MASK_ATTENTION_FUNCTIONS[NAME] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[NAME], ALL_MASK_ATTENTION_FUNCTIONS[NAME]


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention without a softmax, so that nobody's own can be taken for it: each key weighs 1 / (1 + score²)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    weights = 1 / (1 + (query @ key.transpose(2, 3)).square())
    earlier = key.shape[2] - query.shape[2]
    weights = weights.tril(earlier) if mask is None else weights.masked_fill(~mask, 0)
    return (weights @ value).transpose(1, 2).contiguous()
