"""What a model is fed when it is not only token ids: images, sound, a decoder's prompt, a robot's state and noise."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .inputs import FIRST_TOKEN, Padding, prompt
from .sizes import VOCAB

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LENGTH, FRAMES, SAMPLES, SIDE = 11, 64, 4000, 32


class Sizes(NamedTuple):
    """How much text and sound a model is fed."""

    tokens: int = LENGTH
    samples: int = SAMPLES


SMALL = Sizes()
TEXT: tuple[str, ...] = ("input_ids",)
KINDS: tuple[tuple[str, ...], ...] = (
    TEXT,
    ("input_ids", "decoder_input_ids"),
    ("pixel_values",),
    ("input_ids", "pixel_values"),
    ("input_values",),
    ("input_features",),
    ("input_features", "decoder_input_ids"),
    ("input_values", "decoder_input_ids"),
    ("pixel_values", "decoder_input_ids"),
    ("input_ids", "input_values"),
    ("input_ids", "input_features"),
    ("hidden_states",),
    ("inputs_embeds",),
    ("input_ids", "pixel_values", "state", "noise"),
)
"""Sets of arguments that some model runs on, the plainest first."""


def kinds_of(model_class: Any) -> list[tuple[str, ...]]:
    """The sets of arguments that `forward` has names for, those with the class's own main input first."""
    accepted = set(inspect.signature(model_class.forward).parameters)
    main = getattr(model_class, "main_input_name", "input_ids")
    possible = [kind for kind in KINDS if accepted.issuperset(kind)]
    return sorted(possible, key=lambda kind: main not in kind)


def make(
    kind: tuple[str, ...],
    config: Any,
    batch: int,
    seed: int,
    dtype: torch.dtype,
    padding: Padding = "none",
    sizes: Sizes = SMALL,
) -> dict[str, Tensor]:
    """The arguments of one forward pass: ids are [batch, tokens], images [batch, channels, side, side]."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    vocab = vocabulary(config)
    found: dict[str, Tensor] = {}
    for name in kind:
        if name == "input_ids":
            text = prompt(seed, vocab, batch, sizes.tokens, padding, "cpu")
            found["input_ids"] = text.input_ids
            if isinstance(end := getattr(config, "eos_token_id", None), int) and end < vocab:
                text.input_ids[:, 0] = end  # classifiers look for it, in every row once
            if text.mask is not None:
                found["attention_mask"] = text.mask
        elif name == "decoder_input_ids":
            found[name] = torch.randint(FIRST_TOKEN, vocab, (batch, max(1, sizes.tokens - 4)), generator=generator)
        else:
            found[name] = torch.randn((batch, *_shape(name, config, sizes)), generator=generator).to(dtype)
    return found


def vocabulary(config: Any) -> int:
    """The number of token ids that a prompt may use."""
    text = config.get_text_config()
    return max(FIRST_TOKEN + 1, int(_first((text, config), ("vocab_size", "n_words")) or VOCAB))


def _shape(name: str, config: Any, sizes: Sizes) -> tuple[int, ...]:
    parts = (*_parts(config),)
    if name == "pixel_values":
        side = _first(parts, ("image_size", "img_size", "input_size")) or SIDE
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        return int(_first(parts, ("num_channels", "in_channels", "in_chans")) or 3), int(height), int(width)
    if name == "input_features":
        bands = _first(parts, ("num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels")) or 80
        positions = _first(parts, ("max_source_positions",))
        return (int(bands), 2 * int(positions)) if positions else (FRAMES, int(bands))
    if name == "state":  # of a robot
        return (int(_first(parts, ("max_state_dim", "state_dim")) or SIDE),)
    if name == "noise":  # what a policy's actions begin as
        return int(_first(parts, ("chunk_size",)) or LENGTH), int(
            _first(parts, ("max_action_dim", "action_dim")) or SIDE
        )
    if name == "input_values":
        return (sizes.samples,)
    return sizes.tokens, int(_first(parts, ("hidden_size", "d_model")) or 64)


def _parts(config: Any) -> Iterator[Any]:
    """A configuration and those inside it."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            yield from _parts(part)


def _first(configs: tuple[Any, ...], names: tuple[str, ...]) -> Any:
    found = (getattr(config, name, None) for config in configs for name in names)
    return next((value for value in found if value), None)


def tensors(output: Any, name: str = "output") -> dict[str, Tensor]:
    """Every floating-point tensor of a model's output, by the way to it; caches are left out."""
    import torch

    if not isinstance(output, torch.Tensor) and hasattr(type(output), "__torch_function__"):
        output = torch.positive(output)  # what is computed when it is read, as logits that no loss needed
    if isinstance(output, torch.Tensor):
        return {name: output} if output.is_floating_point() else {}
    items: list[tuple[Any, Any]] = []
    if isinstance(output, Mapping):
        items = list(output.items())
    elif isinstance(output, (list, tuple)):
        items = list(enumerate(output))
    found: dict[str, Tensor] = {}
    for key, value in items:
        found |= tensors(value, f"{name}.{key}")
    return found
