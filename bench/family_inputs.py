"""What a model of any kind is fed: text, an image or a sound, made from its configuration alone.

L tokens of the prompt, H width. An image of random pixels goes through the model's own `get_image_features` once, only
to see how many tokens it becomes; that many placeholders stand in the middle of the prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from family_sizes import IMAGE, SOUND
from torch import Tensor
from transformers.utils import ModelOutput

FIRST_ID = 4
"""Ids below it mean padding, a beginning or an end."""
LAST_TEXT = 32
"""Tokens behind an image, and the fewest that stand around it."""
GRID = 32
"""Patches of an image's side, in models that take images of any size."""
SECONDS, RATE = 10, 16000
TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments that say which tokens belong to an image."""


@dataclass(frozen=True)
class Prompt:
    """The arguments of `generate()`.

    Args:
        tokens: how many the decoder or, where the model `encodes`, the encoder reads before the first new one.
        holds: what it consists of, in words.
        start: the decoder's first token, of an encoder–decoder model.
        new_marks: what the arguments that tell kinds of tokens apart say of new ones.
    """

    arguments: dict[str, Any]
    tokens: int
    encodes: bool
    holds: str = "text"
    start: list[int] = field(default_factory=list)
    new_marks: dict[str, int] = field(default_factory=dict)

    def followed_by(self, new: Tensor) -> dict[str, Any]:
        """Return the arguments of a forward pass whose last `n` logits choose `new` `[1, n]`."""
        given = dict(self.arguments)
        if self.encodes:
            start = torch.tensor([self.start], device=new.device)
            return given | {"decoder_input_ids": torch.cat([start, new[:, :-1]], 1)}
        more = new.shape[1] - 1
        given["input_ids"] = torch.cat([given["input_ids"], new[:, :-1]], 1)
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        for name, mark in self.new_marks.items():
            given[name] = torch.nn.functional.pad(given[name], (0, more), value=mark)
        return given


def prompt(model: Any, feed: str, tokens: int) -> Prompt:
    """A prompt of about `tokens` tokens, more where an image takes more."""
    config, device = model.config, model.device
    generator = torch.Generator().manual_seed(0)
    encodes = bool(config.is_encoder_decoder)
    start = [model.generation_config.decoder_start_token_id] if encodes else []
    if feed == SOUND:
        arguments = sound(model, generator)
        return Prompt(arguments, int(next(iter(arguments.values())).shape[-1]), encodes, "sound", start)
    found: dict[str, Any] = {}
    marks = torch.zeros(0, dtype=torch.long)
    if feed == IMAGE:
        found = image(model, generator)
        marks = torch.ones(_tokens_of(model, found), dtype=torch.long)
    around = max(tokens - len(marks), 2 * LAST_TEXT)
    marks = torch.cat([marks.new_zeros(around - LAST_TEXT), marks, marks.new_zeros(LAST_TEXT)])[None]
    ids = torch.randint(FIRST_ID, _plain_ids(config), marks.shape, generator=generator)
    accepted = inspect.signature(model.forward).parameters
    new_marks = {}
    if feed == IMAGE:
        ids[marks == 1] = _placeholder(config)
        new_marks = {name: _mark_of_new(model, name) for name in TYPES if name in accepted}
        found |= {name: (marks * (1 - mark)).to(device) for name, mark in new_marks.items()}
    found |= {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids, device=device)}
    return Prompt(found, ids.shape[1], encodes, "text and image" if feed == IMAGE else "text", start, new_marks)


def _mark_of_new(model: Any, name: str) -> int:
    """What a model's own loop marks new tokens with: 1 if it tells them from the prompt, not images from text."""
    before = {name: torch.zeros(1, 1, dtype=torch.long), "attention_mask": torch.ones(1, 1, dtype=torch.long)}
    after = model._update_model_kwargs_for_generation(ModelOutput(), before | {"use_cache": True})
    return int(after[name][0, -1])


def sound(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """A spectrogram as long as the encoder's positions (30 s for Whisper), or ten seconds of samples."""
    config = model.config
    bands = getattr(config, "num_mel_bins", None)
    shape = (1, bands, 2 * config.max_source_positions) if bands else (1, SECONDS * RATE)
    name = "input_features" if bands else "input_values"
    return {name: torch.randn(shape, generator=generator).to(model.device, model.dtype)}


def image(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """One image, in the form that the model's `forward` has arguments for."""
    accepted = inspect.signature(model.forward).parameters
    vision = model.config.vision_config
    patch = getattr(vision, "patch_size", 14)
    if "image_grid_thw" in accepted:  # patches of any number, in a row
        width = vision.in_channels * vision.temporal_patch_size * patch**2
        pixels = torch.randn((GRID * GRID, width), generator=generator)
        return _on(model, pixels) | {"image_grid_thw": torch.tensor([[1, GRID, GRID]], device=model.device)}
    if "image_position_ids" in accepted:  # patches and where they are
        side = GRID // 2 * vision.pooling_kernel_size
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(1)[None]
        pixels = torch.rand((1, side * side, 3 * patch**2), generator=generator)
        return _on(model, pixels) | {"image_position_ids": places.to(model.device)}
    side = getattr(vision, "image_size", None) or 768
    return _on(model, torch.randn((1, 3, side, side), generator=generator))


def _on(model: Any, pixels: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": pixels.to(model.device, model.dtype)}


def _tokens_of(model: Any, arguments: dict[str, Tensor]) -> int:
    """How many tokens of the text an image stands for."""
    with torch.no_grad():
        features = model.get_image_features(**arguments)
    found = getattr(features, "pooler_output", features)
    parts = [found] if isinstance(found, Tensor) else list(found)
    return sum(part.numel() // part.shape[-1] for part in parts)


def _placeholder(config: Any) -> int:
    found = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    return next(int(value) for value in found if value is not None)


def _plain_ids(config: Any) -> int:
    """The end of the ids that mean nothing of their own: the special ones of large vocabularies are the last."""
    vocab = int(config.get_text_config(decoder=True).vocab_size)
    return min([vocab, *(value for value in _special(config) if value > vocab // 2)])


def _special(config: Any) -> Iterator[int]:
    for name, value in config.to_dict().items():
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            yield value
