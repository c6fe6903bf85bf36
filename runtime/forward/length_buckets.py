"""Texts of many lengths share graphs: a call is padded on the right to the next bucket.

    text = text_of(model, call, settings())
    graph.launch(text.tensors, text.fills)  # of a graph of `text.padded()`

What is padded is known by name: `input_ids` [B, S], `inputs_embeds` [B, S, D], `token_type_ids`, `position_ids` and
`attention_mask` [B, S], [B, Q, S] or [B, H, Q, S]. The mask hides the padding, and is made where none is given.
Whether that changes the result is not known by name: `bucket_check` proves it for each bucket.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.position_count import position_count
from .call_structure import NotUnderstood, form_of

STEP = 32
"""Lengths up to 256 are padded to multiples of this: calls of few tokens wait for the host, whatever their length."""
PARTS = 8
"""Longer ones to an eighth of the next power of two: at most a fifth of the tokens is padding."""
TEXT = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids")
"""Arguments that have the length of the text."""
MASK = "attention_mask"


def bucket_of(length: int, most: int | None = None) -> int:
    """Return the length that a text is padded to; not more than `most`, which the model has positions for."""
    step = max(STEP, (1 << (length - 1).bit_length()) // PARTS)
    bucket = -(-length // step) * step
    return most if most is not None and length <= most < bucket else bucket


def rows_of(rows: int) -> int:
    """Return the number of texts that a batch is padded to: 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if power > 2 and rows <= power * 3 // 4 else power


def least_of(bucket: int, most: int | None = None) -> int:
    """Return the length of the shortest text that is padded to a bucket."""
    least = bucket
    while least > 1 and bucket_of(least - 1, most) == bucket:
        least -= 1
    return least


class Fill(NamedTuple):
    """What stands in a tensor where the text has ended, and where a mask shows what is there."""

    hidden: float
    shown: float = 0

    def write(self, own: Tensor, given: Tensor | None, length: int) -> None:
        """Write a text's tensor into one of the bucket's; where none is given, a mask that shows the text.

        Further rows are the first one again, so that they are texts like others.
        """
        if given is None:
            own[:, :length] = self.shown
            own[:, length:] = self.hidden
            return
        rows = given.shape[0]
        whole, own = own, own[:rows]
        region = own
        longer = [dim for dim in range(1, own.dim()) if own.shape[dim] != given.shape[dim]]
        for dim in longer:  # of a mask of queries and keys: padded queries see the text, so that none sees nothing
            last = dim == longer[-1]
            own.narrow(dim, length, own.shape[dim] - length).fill_(self.hidden if last else self.shown)
            region = region.narrow(dim, 0, length)
        region.copy_(given)
        if rows < whole.shape[0]:
            whole[rows:] = own[:1]


@dataclass(frozen=True)
class Text:
    """A call whose tensors are those of a text.

    Args:
        others: its other arguments, by name.
        given: the text's tensors, by name; None for a mask that is made.
        fills: what each is padded with.
        length: of the text.
        bucket: that it is padded to.
        row_bucket: number of texts that the batch is padded to.
        most: positions of the model, where its configuration says.
        family: what it has in common with calls of other lengths, and other numbers of texts.
        kind: what it has in common with calls of the same bucket, which is what a graph is for.
        reason: why it is not padded, a key of `REASONS`; empty where it may be.
        tokens: that its layers run on, where they are packed (`packing`).
    """

    others: dict[str, Any]
    given: dict[str, Tensor | None]
    fills: tuple[Fill, ...]
    length: int
    bucket: int
    row_bucket: int
    most: int | None
    family: Hashable
    kind: Hashable
    reason: str = ""
    tokens: int = 0

    @property
    def call(self) -> Any:
        """The call as it was made, every argument by its name."""
        return (), {**{name: tensor for name, tensor in self.given.items() if tensor is not None}, **self.others}

    @property
    def tensors(self) -> list[Tensor | None]:
        """The text's tensors, in the order of a graph's inputs."""
        return list(self.given.values())

    @property
    def rows(self) -> int:
        """How many texts it has."""
        return _rows(self.given)

    @property
    def least(self) -> int:
        """Length of the shortest text that is padded to its bucket."""
        return least_of(self.bucket, self.most)

    @property
    def fewest(self) -> int:
        """Number of texts of the smallest batch that is padded to as many."""
        others = (rows for rows in range(1, self.row_bucket) if rows_of(rows) == self.row_bucket)
        return next(others, self.row_bucket)

    @property
    def is_padded(self) -> bool:
        """Whether a graph of its own shape would have less to do."""
        return (
            self.length < self.bucket
            or self.rows < self.row_bucket
            or any(tensor is None for tensor in self.given.values())
        )

    @property
    def hides(self) -> bool:
        """Whether its mask hides a position, which is read from the device; one of several dimensions may."""
        mask = self.given.get(MASK)
        return mask is not None and (mask.dim() != 2 or bool((mask == 0).any()))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one of its tensors in the bucket."""
        tensor = self.given[name]
        if tensor is None:
            return (self.row_bucket, self.bucket)
        dims = _length_dims(name, tensor, self.length)
        shape = [self.bucket if dim in dims else size for dim, size in enumerate(tensor.shape)]
        if shape[0] == self.rows:
            shape[0] = self.row_bucket
        return tuple(shape)

    def with_kind(self) -> Text:
        """Return the text with the kind that it has."""
        return replace(self, kind=(self.family, *[self.shape(name) for name in self.given]))

    def with_its_rows(self) -> Text:
        """Return the text as one whose length alone is padded."""
        return replace(self, row_bucket=self.rows).with_kind()

    def padded(self) -> tuple[Any, list[Tensor]]:
        """Return the call that the bucket's graph is for, and its tensors."""
        like = next(tensor for tensor in self.given.values() if tensor is not None)
        made: dict[str, Tensor] = {}
        for (name, tensor), fill in zip(self.given.items(), self.fills, strict=True):
            dtype = torch.int64 if tensor is None else tensor.dtype
            made[name] = torch.empty(self.shape(name), dtype=dtype, device=like.device)
            fill.write(made[name], tensor, self.length)
        return ((), {**made, **self.others}), list(made.values())

    def shortened(self, length: int, rows: int, *, shown: bool = False) -> Text:
        """Return the call with its first tokens and texts; `shown`: with a mask of two dimensions that hides none."""
        given: dict[str, Tensor | None] = {}
        for name, tensor in self.given.items():
            given[name] = tensor
            if tensor is not None:
                for dim in _length_dims(name, tensor, self.length):
                    tensor = tensor.narrow(dim, 0, length)
                tensor = tensor[:rows]
                given[name] = torch.ones_like(tensor) if shown and name == MASK and tensor.dim() == 2 else tensor
        return replace(self, given=given, length=length)

    def hiding(self, tokens: int) -> Text | None:
        """Return the call with its first tokens hidden, as padding on the left is; None if it has no plain mask."""
        mask = self.given.get(MASK)
        if mask is None or mask.dim() != 2 or not 0 < tokens < self.length:
            return None
        mask = torch.ones_like(mask)
        mask[:, :tokens] = 0
        return replace(self, given={**self.given, MASK: mask})

    def unmarked(self) -> Text | None:
        """Return the call with padding tokens in its last third; None if a mask or no ids are given."""
        ids = self.given.get("input_ids")
        if ids is None or self.given.get(MASK, ids) is not None or self.length < 3:
            return None
        ids = ids.clone()
        ids[:, -(self.length // 3) :] = self.fills[list(self.given).index("input_ids")].hidden
        return replace(self, given={**self.given, "input_ids": ids})


def text_of(model: Any, call: Any, settings: Hashable) -> Text | None:
    """Return a call as that of a text, None where it is none."""
    given = _by_name(model, call)
    if given is None:
        return None
    texts = {name: value for name in TEXT if (value := given.pop(name, None)) is not None}
    if not all(type(value) is Tensor for value in texts.values()):
        return None
    main = texts.get("input_ids", texts.get("inputs_embeds"))
    if main is None or main.dim() != (2 if "input_ids" in texts else 3) or not main.numel():
        return None
    length = main.shape[1]
    reason = _reason(texts, length)
    made = {**texts, MASK: texts.get(MASK)}
    kind: type = type(model)
    if MASK not in texts and not _takes_mask(kind):
        reason, made = reason or "lengths_mask", texts
    others: list[Tensor] = []
    try:
        form = form_of(given, others)
        hash(form)
    except (NotUnderstood, TypeError):
        return None
    family = ("lengths", form, settings, *[(name, tensor.dim(), tensor.dtype) for name, tensor in texts.items()])
    config = _text_config(model)
    most = position_count(config)
    fills = tuple(_fill(config, name, tensor) for name, tensor in made.items())
    reason = reason or ("lengths_arguments" if others else "")
    text = Text(
        others=given, given=made, fills=fills, length=length, bucket=bucket_of(length, most),
        row_bucket=rows_of(_rows(texts)), most=most, family=family, kind=None, reason=reason,
    )  # fmt: skip
    return text if text.reason else text.with_kind()


def _reason(texts: dict[str, Tensor], length: int) -> str:
    """Return why tensors of a text cannot be padded, a key of `REASONS`; empty where they can."""
    rows = _rows(texts)
    for name, tensor in texts.items():
        dims = _length_dims(name, tensor, length)
        plain = tensor.dim() == (3 if name == "inputs_embeds" else 2) or (name == MASK and tensor.dim() in (3, 4))
        if not plain or tensor.shape[0] not in (1, rows) or any(tensor.shape[dim] != length for dim in dims):
            return "lengths_arguments"
        if name == MASK and tensor.dim() > 2 and (length == 1 or tensor.shape[-2] not in (1, length)):
            return "lengths_arguments"
    return "lengths_positions" if "position_ids" in texts and MASK not in texts else ""


def _rows(given: dict[str, Any]) -> int:
    main = given["input_ids"] if "input_ids" in given else given["inputs_embeds"]
    return int(main.shape[0])


def _length_dims(name: str, tensor: Tensor, length: int) -> tuple[int, ...]:
    """Return the dimensions of a text's tensor that have its length."""
    if name == MASK and tensor.dim() > 2:
        keys = tensor.dim() - 1
        return (keys - 1, keys) if tensor.shape[keys - 1] == length else (keys,)
    return (1,)


def _fill(config: Any, name: str, tensor: Tensor | None) -> Fill:
    if name == MASK:
        if tensor is not None and tensor.dim() == 4 and tensor.is_floating_point():  # is added to scores
            return Fill(torch.finfo(tensor.dtype).min)
        return Fill(0, 1)
    if name == "input_ids":  # positions of RoBERTa count what is no padding
        return Fill(max(0, _number(config, "pad_token_id") or 0))
    return Fill(0)


def special_tokens(model: Any) -> list[int]:
    """Return the ids that the configuration gives a meaning."""
    found: list[int] = []
    for name, value in vars(_text_config(model)).items():
        if name.endswith("token_id"):
            found += [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)]
    return found


def _text_config(model: Any) -> Any:
    config = getattr(model, "config", None)
    inner = getattr(config, "get_text_config", None)
    return config if inner is None else inner()


def _number(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None


def _by_name(model: Any, call: Any) -> dict[str, Any] | None:
    """Return all arguments by name; None where some have none."""
    arguments: Sequence[Any]
    arguments, keywords = call
    kind: type = type(model)
    names = _names(kind)
    if len(arguments) > len(names) or not keywords.keys().isdisjoint(names[: len(arguments)]):
        return None
    return {**dict(zip(names, arguments, strict=False)), **keywords}


@functools.lru_cache(maxsize=256)
def _names(kind: type) -> tuple[str, ...]:
    """Return the names of a forward's arguments in their order, without `self`, up to the first that has none."""
    names: list[str] = []
    for parameter in [*inspect.signature(kind.forward).parameters.values()][1:]:  # type: ignore[attr-defined]
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            break
        names.append(parameter.name)
    return tuple(names)


@functools.lru_cache(maxsize=256)
def _takes_mask(kind: type) -> bool:
    return MASK in inspect.signature(kind.forward).parameters  # type: ignore[attr-defined]
