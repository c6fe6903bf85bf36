"""What `generate()` of any class is asked with: texts, an encoder's input, images among the tokens."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..judging.compare import NotRun
from ..models.configs import Variant
from ..models.inputs import Padding, prompt, tokens
from ..models.model_inputs import make, vocabulary
from ..models.model_pair import Workbench, on_original

if TYPE_CHECKING:
    from torch import Tensor

Arguments = dict[str, Any]
SPECIAL = 24
"""Ids at the end of the vocabulary that prompts leave to tokens with a meaning of their own."""
IMAGE_IDS = ("image_token_id", "image_token_index")
AMONG_TOKENS = {
    "images": ("pixel_values",),
    "videos": ("pixel_values_videos",),
    "sound": ("input_features", "input_values", "audio_values"),
}
AROUND = (("vision_start_token_id", "vision_end_token_id"), ("boi_token_id", "eoi_token_id"))
GRID = "image_grid_thw"


@dataclass(frozen=True)
class Ask:
    """A prompt in the making.

    `length` counts the tokens of a text, or of an encoder's input; a `padded` batch has rows of unequal length.
    `decoder` is the number of tokens that the text begins with behind an encoder, none by default.
    """

    name: str
    rows: int
    length: int
    padded: bool = False
    decoder: int = 0


def is_text(kind: tuple[str, ...]) -> bool:
    """Whether a class with these inputs runs on tokens, be it those of an encoder."""
    return "input_ids" in kind


def asked(bench: Workbench, variant: Variant, model: Any, ask: Ask) -> Arguments:
    """The arguments of a `generate()` without images.

    Raises:
        NotRun: nothing is known to generate from.
    """
    kind, seed = variant.inputs, bench.seed_for("generate", ask.name)
    made: Arguments = {**make(kind, model.config, ask.rows, seed, model.dtype)}
    made.pop("decoder_input_ids", None)
    if is_text(kind):
        made |= _text(bench, model, ask, seed, "right" if model.config.is_encoder_decoder else "left")
    elif not made:
        raise NotRun("nothing is known that this class generates from")
    if ask.decoder:
        made["decoder_input_ids"] = tokens(seed + 1, vocabulary(model.config), ask.rows, ask.decoder, "cpu")
    return {name: value.to(bench.options.device) for name, value in made.items()}


def _text(bench: Workbench, model: Any, ask: Ask, seed: int, side: Padding) -> Arguments:
    masked = bench.subject.accepts("attention_mask")
    highest = max(vocabulary(model.config) - SPECIAL, SPECIAL)
    padding: Padding = side if ask.padded and masked else "none"
    text = prompt(seed, highest, ask.rows, ask.length, padding, "cpu")
    made: Arguments = {"input_ids": text.input_ids}
    if masked:
        import torch

        made["attention_mask"] = torch.ones_like(text.input_ids) if text.mask is None else text.mask
    return made


def in_prompts(model_class: Any) -> tuple[str, ...]:
    """What a class takes among the tokens of a text besides text."""
    accepted = set(inspect.signature(model_class.forward).parameters)
    if "input_ids" not in accepted or "decoder_input_ids" in accepted:
        return ()
    return tuple(kind for kind, names in AMONG_TOKENS.items() if accepted & set(names))


def with_image_tokens(variant: Variant) -> Variant:
    """The variant with ids of their own for the tokens that stand for images and what is around them.

    Where attention among patches has windows, one is as large as what becomes four tokens: less may be none at all.
    """
    config = copy.deepcopy(variant.config)
    last = vocabulary(config) - 1
    names = [name for name in sorted(vars(config)) if name.endswith(("_token_id", "_token_index"))]
    for number, name in enumerate(name for name in names if not name.startswith(("pad_", "bos_", "eos_", "decoder_"))):
        if isinstance(getattr(config, name), int):
            setattr(config, name, last - number % SPECIAL)
    vision: Any = getattr(config, "vision_config", None)
    if isinstance(getattr(vision, "window_size", None), int) and hasattr(vision, "spatial_merge_size"):
        vision.window_size = max(vision.window_size, 2 * vision.spatial_merge_size * vision.patch_size)
    return replace(variant, name=f"{variant.name}, images", config=config)


def pictured(
    bench: Workbench, variant: Variant, model: Any, ask: Ask, sides: Sequence[tuple[int, int]] = ((2, 2),)
) -> Arguments:
    """The arguments of a `generate()` with images of random values in every row.

    `sides` are the height and width of each, in what becomes one token, where the class takes images of any size and
    says what each becomes; others have one image in a row.

    Raises:
        NotRun: which tokens stand for an image, or how many, cannot be said.
    """
    import torch

    seed, config = bench.seed_for("image", ask.name), model.config
    token = next((getattr(config, name) for name in IMAGE_IDS if isinstance(getattr(config, name, None), int)), None)
    if token is None:
        raise NotRun("the configuration does not say which token stands for an image")
    image, counts = _fitting(model, _image(model, ask.rows, seed, sides))
    if len(sides) > 1 and len(counts) != ask.rows * len(sides):
        return pictured(bench, variant, model, ask, sides[:1])
    counts = counts[: len(sides)] if len(sides) > 1 else [sum(counts) // ask.rows]
    text = _text(bench, model, ask, seed, "left")
    ids = text["input_ids"]
    around = next(([getattr(config, name) for name in pair] for pair in AROUND if _has(config, pair)), [])
    half = ask.length - 3
    shown = [torch.tensor([*around[:1], *[token] * count, *around[1:]]) for count in counts]
    between = [part for one in shown for part in (ids[0, half - 1 : half], one)][1:]
    inner = torch.cat(between).expand(ask.rows, -1)
    made: Arguments = {"input_ids": torch.cat([ids[:, :half], inner, ids[:, half:]], 1), **image}
    if "attention_mask" in text:
        made["attention_mask"] = torch.cat(
            [text["attention_mask"][:, :half], torch.ones_like(inner), text["attention_mask"][:, half:]], 1
        )
    for name in ("mm_token_type_ids", "token_type_ids"):
        if bench.subject.accepts(name):
            made[name] = (made["input_ids"] == token).long()
    return {name: value.to(bench.options.device) for name, value in made.items()}


def _has(config: Any, names: tuple[str, ...]) -> bool:
    return all(isinstance(getattr(config, name, None), int) for name in names)


def _image(model: Any, rows: int, seed: int, sides: Sequence[tuple[int, int]]) -> Arguments:
    """An image for each row, or several as patches with a grid where the class takes such."""
    import torch

    if GRID not in inspect.signature(type(model).forward).parameters:
        return {"pixel_values": make(("pixel_values",), model.config, rows, seed, model.dtype)["pixel_values"]}
    vision = model.config.vision_config
    merge, patch = int(getattr(vision, "spatial_merge_size", 1)), int(vision.patch_size)
    grid = torch.tensor([[1, merge * height, merge * width] for height, width in sides]).repeat(rows, 1)
    channels = int(getattr(vision, "in_channels", None) or getattr(vision, "num_channels", None) or 3)
    width = channels * int(getattr(vision, "temporal_patch_size", 1)) * patch**2
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(int(grid.prod(1).sum()), width, generator=generator).to(model.dtype)
    return {"pixel_values": patches, GRID: grid}


def _fitting(model: Any, image: Arguments) -> tuple[Arguments, list[int]]:
    """An image as a class takes it, alone in its row or the first of a list there, and the tokens that they become."""
    try:
        return image, on_original(_tokens_of, model, image)
    except NotRun as reason:
        if GRID in image:
            raise
        listed = {name: value[:, None] for name, value in image.items()}
        try:
            return listed, on_original(_tokens_of, model, listed)
        except NotRun:
            raise reason from None


def _tokens_of(model: Any, image: Mapping[str, Tensor]) -> list[int]:
    """How many tokens each image becomes, or several images together where the class returns them so."""
    import torch

    device = next(model.parameters()).device
    found = getattr(model, "model", model).get_image_features(**{k: v.to(device) for k, v in image.items()})
    found = getattr(found, "pooler_output", found)
    parts = found if isinstance(found, (list, tuple)) else [found]
    return [part.flatten(0, -2).shape[0] for part in parts if isinstance(part, torch.Tensor)]
