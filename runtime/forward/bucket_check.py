"""Proves for a model and a bucket that texts may be padded to it.

    padding = Padding(model, text, run)
    call, tensors = padding.tried(expected)  # once the call itself has run, and was seen to do nothing else
    graph = ...                              # of `call`
    cut = padding.proved(graph)
    graph.results(text.tensors, cut.parts(text))

Texts are tried: the call's own, its first quarter of the bucket and of the batch, and one with padding on the left, or
if there is no mask with padding tokens, which the model may hide by itself. Padded, each has to give what it gives by
itself, at every position that it has; and nothing at all may change where other tokens, embeddings, types and
positions stand in the padding. Which dimensions of an output are the length, and which the number of texts, is read
from the shapes with and without padding.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .agreement import compare, compare_positions, equal, tensors_in
from .bounds import Bounds
from .call_structure import form_of
from .forward_graph import ForwardGraph, Part, Run, Unsuitable
from .length_buckets import MASK, Text, special_tokens

PROVED_PART = 4
"""The shorter text has this part of the bucket's length: whoever reads the padding, or counts it, is far off."""


class Dims(NamedTuple):
    """Dimensions of a tensor that are the length of the texts, and those that are their number."""

    length: tuple[int, ...]
    rows: tuple[int, ...]


class Cut(NamedTuple):
    """How outputs of a bucket's graph become those of a text."""

    dims: tuple[Dims, ...]
    """Of each tensor in their order."""
    shortest: int = 1
    """Length from which on a replay is faster than the forward of a text that is not padded."""
    fewest: int = 1
    """Number of texts from which on it is."""
    tokens: int = 0
    """That its layers run on, where they are packed."""

    def parts(self, text: Text) -> list[Part]:
        """Return what of each output is the text's."""
        return [
            (*((dim, text.length) for dim in dims.length), *((dim, text.rows) for dim in dims.rows))
            for dims in self.dims
        ]

    def serves(self, text: Text) -> bool:
        """Return whether a replay is faster than a text's own forward."""
        return text.length >= self.shortest and text.rows >= self.fewest


class InBucket(NamedTuple):
    """A text that a graph of its bucket serves."""

    text: Text
    cut: Cut

    @property
    def call(self) -> Any:
        """The call without padding."""
        return self.text.call

    def launch(self, graph: ForwardGraph) -> None:
        """Run a graph on its padded tensors."""
        graph.launch(self.text.tensors, self.text.fills, self.text.length)

    def results(self, graph: ForwardGraph) -> Any:
        """Return what that computed, without the padding."""
        return graph.results(self.text.tensors, self.cut.parts(self.text))


class _Case(NamedTuple):
    """A text that is tried, what it gives by itself, and its tensors with something else in their padding."""

    text: Text
    wanted: Any
    other: list[Tensor]


class Padding:
    """A trial of a bucket.

    Args:
        model: whose forward it is.
        text: the call.
        run: runs the forward.
        run_padded: runs the forward of the bucket, which may be another one.
    """

    def __init__(self, model: Any, text: Text, run: Run, run_padded: Run):
        self._text, self._run, self._run_padded = text, run, run_padded
        self._garbage = Garbage(model)
        self._cases: list[_Case] = []
        self._cut = Cut(())
        self.hidden: Unsuitable | None = None
        """Why texts that hide positions are not padded, where others may be."""

    def tried(self, expected: Any) -> tuple[Any, list[Tensor]]:
        """Return the padded call and its tensors, once texts have been run with padding.

        Args:
            expected: what the call gave without padding.

        Raises:
            Unsuitable: if one does not give what it does by itself.
        """
        text = self._text
        most = text.tokens // text.rows if text.tokens else text.length
        length = max(1, min(text.length, text.bucket // PROVED_PART, most))
        rows = text.rows
        if text.row_bucket > text.fewest:  # other batches of the bucket are padded, if not this one
            rows = max(2, min(rows, text.row_bucket // PROVED_PART))  # of one text a tensor may be that of all
            if (rows, text.row_bucket) == (length, text.bucket):
                rows += 1  # so that an output's dimension is the one or the other
        short = text.shortened(length, rows, shown=True)
        left = None if text.tokens else text.hiding(text.length // 3)  # whose first token is hidden, and may be pooled
        for one in (short, text, left, text.unmarked()):
            if one is None:
                continue
            wanted = expected if one is text else self._run(one.call)
            try:
                self._cases.append(self._tried(one, wanted))
            except Unsuitable as error:
                if error.reason != "lengths_differ" or not one.hides:
                    raise
                self.hidden = Unsuitable("lengths_hidden", error.detail)
                if one is text:
                    raise self.hidden from error
        return text.padded()

    def _tried(self, text: Text, wanted: Any) -> _Case:
        call, _ = text.padded()
        other = self._other(call, text)
        try:
            with Bounds():
                found, changed = self._run_padded(call), self._run_padded(other)
        except (Unsuitable, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError, LookupError, TypeError, AssertionError) as error:
            raise Unsuitable(
                "packed_reach" if text.tokens else "lengths_reach", " ".join(str(error).split())[:200]
            ) from error
        if not self._cases:
            self._cut = Cut(_dims(wanted, found, text), tokens=self._text.tokens)
        parts = self._cut.parts(text)
        self._agree(text, wanted, _cut(tensors_in(found), parts))
        _same(*[_cut(tensors_in(value), parts) for value in (found, changed)])
        return _Case(text, wanted, tensors_in(other))

    def proved(self, graph: ForwardGraph) -> Cut:
        """Return how a bucket's graph is used, once it has given what the forward does.

        Raises:
            Unsuitable: if it gives something else.
        """
        for text, wanted, other in self._cases:
            given = InBucket(text, self._cut)
            given.launch(graph)
            found = given.results(graph)
            if _layout(found) != _layout(wanted):
                raise Unsuitable("lengths_outputs", "outputs of another form or layout")
            self._agree(text, wanted, tensors_in(found))
            graph.launch(other)
            _same(tensors_in(found), tensors_in(given.results(graph)))
        return self._cut

    def _agree(self, text: Text, wanted: Any, found: list[Tensor]) -> None:
        """Compare outputs as a whole, and position by position: a few that differ are lost among many.

        Of a batch whose layers were packed, only what the mask shows is compared.

        Raises:
            Unsuitable: if they differ by more than rounding in another order.
        """
        try:
            for tensor, other, dims in zip(tensors_in(wanted), found, self._cut.dims, strict=True):
                if text.tokens and dims.length and (mask := text.given[MASK]) is not None:
                    _agree_where_shown(tensor, other, dims, mask)
                    continue
                compare([tensor], [other])
                if dims.length or dims.rows:
                    compare_positions(tensor, other, {0, *dims.length[:1], *dims.rows[:1]})
        except Unsuitable as error:
            if error.reason == "differs":
                raise Unsuitable("packed_differ" if text.tokens else "lengths_differ", error.detail) from error
            raise

    def _other(self, call: Any, text: Text) -> Any:
        """Return a padded call with something else in its padding."""
        named = {**call[1]}
        for name in text.given:
            if name != MASK:
                named[name] = self._garbage.around(named[name], name, text)
        return (), named


class Garbage:
    """What stands behind a text, to see whether it has influence."""

    def __init__(self, model: Any):
        self._special = special_tokens(model)
        self._vocabulary = _vocabulary(model)

    def around(self, padded: Tensor, name: str, text: Text) -> Tensor:
        """Return a padded tensor [B, P, ...] with other values where the text is not."""
        rows = min(text.rows, padded.shape[0])
        known = padded[:rows, : text.length]
        generator = torch.Generator("cpu").manual_seed(text.length)
        if name == "inputs_embeds":
            other = torch.randn(padded.shape, generator=generator, device="cpu").to(padded)
            other = (other * 2 * known.float().std(correction=0)).to(padded.dtype)
        elif name == "input_ids" and self._vocabulary:
            ids = torch.randint(self._vocabulary, padded.shape, generator=generator, device="cpu")
            special = torch.tensor([t for t in self._special if 0 <= t < self._vocabulary], device="cpu")
            first = min(len(special), text.bucket - text.length)
            ids[:, text.length : text.length + first] = special[:first]
            ids[rows:, : len(special)] = special[: text.bucket]
            other = ids.to(padded)
        else:  # values that are known to be allowed
            places = torch.randint(text.length, (padded.shape[1],), generator=generator, device="cpu")
            texts = torch.randint(rows, (padded.shape[0],), generator=generator, device="cpu")
            other = known[texts.to(padded.device)][:, places.to(padded.device)]
        other[:rows, : text.length] = known
        return other


def _vocabulary(model: Any) -> int:
    """Return how many token ids a model has embeddings for, 0 if it does not say."""
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError):
        return 0


def _dims(wanted: Any, padded: Any, text: Text) -> tuple[Dims, ...]:
    """Return which dimensions of each output are the length or the number of texts, with padding and without.

    Raises:
        Unsuitable: if another one differs.
    """
    found: list[Dims] = []
    if _classes(wanted) != _classes(padded):
        raise Unsuitable("lengths_outputs", "outputs of another form")
    length, rows = (text.length, text.bucket), (text.rows, text.row_bucket)
    for short, long in zip(tensors_in(wanted), tensors_in(padded), strict=True):
        sizes = [*zip(short.shape, long.shape, strict=True)] if short.dim() == long.dim() else [(0, 1)]
        changed = [dim for dim, (size, other) in enumerate(sizes) if size != other]
        if any(sizes[dim] not in (length, rows) for dim in changed):
            said = [f"{tuple(shape)} of {count} × {tokens}" for shape, count, tokens in (
                (short.shape, rows[0], length[0]), (long.shape, rows[1], length[1]))]  # fmt: skip
            raise Unsuitable("lengths_outputs", ", ".join(said))
        lengths = tuple(dim for dim in changed if sizes[dim] == length)
        found.append(Dims(lengths, tuple(dim for dim in changed if dim not in lengths)))
    return tuple(found)


def _classes(value: Any) -> Hashable:
    return form_of(value, [], lambda tensor: tensor.dtype)


def _layout(value: Any) -> Hashable:
    """Return the form of something without the strides of dimensions that have one place."""

    def described(tensor: Tensor) -> Hashable:
        strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
        return tensor.shape, tuple(strides), tensor.dtype

    return form_of(value, [], described)


def _cut(tensors: list[Tensor], parts: list[Part]) -> list[Tensor]:
    found: list[Tensor] = []
    for tensor, part in zip(tensors, parts, strict=True):
        for dim, size in part:
            tensor = tensor.narrow(dim, 0, size)
        found.append(tensor)
    return found


def _agree_where_shown(tensor: Tensor, other: Tensor, dims: Dims, mask: Tensor) -> None:
    """Compare what the mask shows of a batch whose layers were packed.

    Raises:
        Unsuitable: if it differs by more than rounding, or has no place for every position of the mask.
    """
    if dims.length != (1,) or tensor.shape[:2] != mask.shape:
        raise Unsuitable("packed_outputs")
    shown = mask != 0
    compare([tensor[shown]], [other[shown]])
    compare_positions(tensor[shown], other[shown], {0})


def _same(one: list[Tensor], other: list[Tensor]) -> None:
    if not all(map(equal, one, other)):
        raise Unsuitable("lengths_read")
