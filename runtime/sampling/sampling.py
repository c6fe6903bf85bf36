"""The end of a decode step, on the device: a token from the logits, and what the next step needs to know.

B rows, V vocabulary, S capacity, E number of end-of-sequence ids.

`select` and `advance` are what a graph holds after the model's forward; nothing in them asks the host.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as processors

Run = Callable[[Tensor, Tensor, Tensor], Tensor]

_BY_SCORES_ALONE = (
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper,
    processors.LogitNormalization,
    processors.InfNanRemoveLogitsProcessor,
    processors.SuppressTokensLogitsProcessor,
    processors.BarkEosPrioritizerLogitsProcessor,
)
"""These read nothing but the scores, and do not ask the host."""


@dataclass
class Form:
    """A logits processor as a graph can hold it."""

    key: Hashable
    """Two forms with the same key differ in their tensors only."""
    run: Run
    """`(ids [B, S], scores [B, V], length [B, 1]) -> scores`; each row's first `length` ids are visible."""
    tensors: list[Tensor] = field(default_factory=list)
    """What it reads besides; a replay of the same graph for another `generate` gets other contents."""
    reads_ids: bool = False


MOST_DRAFTS = 15
"""Tokens that are drafted at a time, at most; with the one before them they are the rows of one step."""


NO_END = 1 << 62
"""A number of tokens that no text has."""


@dataclass(frozen=True)
class Lookup:
    """How tokens are drafted from the text: what followed the last few tokens where they were before."""

    tokens: int
    """Drafted at a time, at most."""
    ngram: int
    """Last tokens to look for, at most; the longest match counts, and of several the first. 0 for none: another model
    drafts."""


@dataclass
class Sampling:
    """How a token is chosen: what one graph is captured for."""

    forms: list[Form]
    sample: bool
    """Whether a token is drawn, instead of taking the most probable."""
    eos: Tensor | None
    """`[E]` ids that end a row; None if none does."""
    pad: Tensor | None
    """`[1]` id that follows the end of a row."""
    keep: bool = False
    """Whether the logits and scores of every step are wanted."""
    lookup: Lookup | None = None
    """How the step drafts tokens for the next one; None for not at all."""

    @property
    def key(self) -> Hashable:
        """What two samplings that can share a graph have in common."""
        ids = None if self.eos is None else len(self.eos)
        return tuple(form.key for form in self.forms), self.sample, ids, self.keep, self.lookup

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that differs between two samplings with the same key."""
        ends = [] if self.eos is None or self.pad is None else [self.eos, self.pad]
        return [*ends, *(tensor for form in self.forms for tensor in form.tensors)]

    @property
    def reads_ids(self) -> bool:
        """Whether the tokens so far take part."""
        return self.lookup is not None or any(form.reads_ids for form in self.forms)

    def load(self, other: Sampling) -> None:
        """Take over the tensors of another sampling with the same key."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine.copy_(theirs)


class StepState:
    """What a step reads and writes besides the cache; every tensor keeps its address."""

    def __init__(self, batch_size: int, capacity: int, position: Tensor, starts: Tensor | None = None):
        device = position.device
        with torch.inference_mode(False):
            self.position = position
            """`[1]` the slot that the step writes, as in the cache."""
            self.starts = torch.zeros(batch_size, dtype=torch.int64, device=device) if starts is None else starts
            """The first slot of each row that is no padding, as in the cache."""
            self.input_ids = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
            self.position_ids = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
            self.sequence = torch.zeros(batch_size, capacity + 1, dtype=torch.int64, device=device)
            """`[B, S + 1]` the token of every slot; slots after the last are filled with a token that the row has."""
            self.length_offset = torch.ones(1, dtype=torch.int64, device=device)
            """Number of visible ids, less `position`."""
            self.behind = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
            """By how many tokens each row has come less far than the first: so many ids fewer are visible."""
            self.most = torch.full((1,), NO_END, dtype=torch.int64, device=device)
            """Number of visible ids with which a row is complete."""
            self.flags = torch.zeros(2, batch_size, dtype=torch.bool, device=device)
            """Both of the following, which begin as zeros."""
            self.finished, self.invalid = self.flags[0], self.flags[1]
            """Rows that have ended, and rows whose probabilities were no numbers."""
            self.drafts = torch.zeros(batch_size, MOST_DRAFTS, dtype=torch.int64, device=device)
            """What the next tokens may be."""
            self.counts = torch.zeros(3, batch_size, dtype=torch.int64, device=device)
            """All of the following."""
            self.drafted, self.matched, self.taken = self.counts[0], self.counts[1], self.counts[2]
            """How many drafts there are, how many tokens before them were found in the text, and how many tokens the
            last step of several added."""
            self.chosen = torch.zeros(batch_size, 1 + MOST_DRAFTS, dtype=torch.int64, device=device)
            """Those, and what was chosen behind them in vain."""
            self.shift = torch.zeros(batch_size, dtype=torch.int64, device=device)
            """By how many slots each row has to move to the right, to end where the others do: `alignment`."""

    def copy(self) -> dict[str, Tensor]:
        """Return copies of every tensor, by name."""
        return {name: tensor.clone() for name, tensor in vars(self).items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take over a copy, of this state or of one with less capacity."""
        for name, tensor in tensors.items():
            if name == "sequence":
                self.sequence.copy_(tensor[:, -1:])
                self.sequence[:, : tensor.shape[1]] = tensor
            else:
                getattr(self, name).copy_(tensor)


def select(
    logits: Tensor, state: StepState, sampling: Sampling, ahead: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose a token for each row.

    Args:
        logits: `[B, V]`.
        state: of the step.
        sampling: how; without a form that reads ids where `ahead` is given.
        ahead: `[B, 1]` where the rows are n tokens of each sequence in turn: how far each is behind the first of them.

    Returns:
        tokens `[B]`, and the logits and processed scores in fp32 `[B, V]`; the last two are as they came where
        nobody wants them.
    """
    if not sampling.forms and not sampling.sample and not sampling.keep:
        return torch.argmax(logits, dim=-1), logits, logits
    scores = logits = logits.to(torch.float32)
    if sampling.forms:
        length = state.position + state.length_offset - state.behind
        if ahead is not None:
            length = length.expand(-1, len(logits) // len(length)).reshape(-1, 1) + ahead
        for form in sampling.forms:
            scores = form.run(state.sequence, scores, length)
    if not sampling.sample:
        return torch.argmax(scores, dim=-1), logits, scores
    # What `torch.multinomial` computes for one draw, without the checks for which it asks the host.
    probabilities = torch.softmax(scores, dim=-1)
    noise = torch.empty_like(probabilities).exponential_(1)
    best, tokens = torch.div(probabilities, noise, out=noise).max(dim=-1)
    state.invalid.logical_or_(best.isnan().view(len(state.invalid), -1).any(dim=1))
    return tokens, logits, scores


def advance(tokens: Tensor, state: StepState, sampling: Sampling) -> None:
    """Write the tokens `[B]` down, pad the rows that had ended, and move on to the next slot."""
    if sampling.eos is not None and sampling.pad is not None:
        tokens = torch.where(state.finished, sampling.pad, tokens)
        state.finished.logical_or_((tokens[:, None] == sampling.eos).any(dim=-1))
    state.position.add_(1)
    state.position_ids.add_(1)
    state.input_ids.copy_(tokens[:, None])
    state.sequence.index_copy_(1, state.position, tokens[:, None])


def graph_forms(processor_list: Sequence[Any], device: torch.device, prompt_length: int) -> list[Form] | None:
    """Return what a graph runs instead of these processors, with the same result; None if one has no such form."""
    forms = []
    for processor in processor_list:
        form = _form(processor, device, prompt_length)
        if form is None:
            return None
        forms.append(form)
    return forms


def _form(processor: Any, device: torch.device, prompt_length: int) -> Form | None:
    kind = type(processor)
    if kind in _BY_SCORES_ALONE:
        return _as_it_stands(processor, device)
    if kind is processors.RepetitionPenaltyLogitsProcessor:
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, int) and ignored > prompt_length:
            return None
        return _as_it_stands(processor, device, reads_ids=True)
    if kind in (processors.SequenceBiasLogitsProcessor, processors.NoBadWordsLogitsProcessor):
        return _bias(processor, device)
    if kind is processors.MinLengthLogitsProcessor:
        return _until(processor.min_length, processor.eos_token_id, device)
    if kind is processors.MinNewTokensLengthLogitsProcessor:
        least = processor.prompt_length_to_skip + processor.min_new_tokens
        return _until(least, processor.eos_token_id, device)
    if kind is processors.ForcedEOSTokenLogitsProcessor:
        return _forced(processor, device)
    if kind is processors.ForcedBOSTokenLogitsProcessor:
        # It acts on the first token of all, which no graph makes.
        return Form("forced_bos", lambda ids, scores, length: scores)
    if kind is processors.SuppressTokensAtBeginLogitsProcessor and processor.begin_index <= prompt_length:
        return Form("suppressed_at_begin", lambda ids, scores, length: scores)
    if kind is processors.AlternatingCodebooksLogitsProcessor:
        return _in_turn(processor, device)
    if kind is processors.NoRepeatNGramLogitsProcessor:
        return _no_ngram_twice(processor.ngram_size)
    if kind is processors.EncoderNoRepeatNGramLogitsProcessor:
        return _no_ngram_of_the_encoder(processor, device)
    return None


def _as_it_stands(processor: Any, device: torch.device, reads_ids: bool = False) -> Form | None:
    """Return a form that calls a copy of the processor, which reads nothing but its arguments and its own tensors."""
    own = copy.copy(processor)
    tensors: list[Tensor] = []
    plain: list[Hashable] = []
    for name, value in sorted(vars(processor).items()):
        if isinstance(value, Tensor):
            tensors.append(value.to(device, copy=True))
            setattr(own, name, tensors[-1])
            plain.append((name, tuple(value.shape), value.dtype))
        elif isinstance(value, (bool, int, float, str, type(None))):
            plain.append((name, type(value), value))
        else:
            return None
    return Form((type(processor), *plain), lambda ids, scores, length: own(ids, scores), tensors, reads_ids)


def _bias(processor: Any, device: torch.device) -> Form | None:
    biases: dict[tuple[int, ...], float] = processor.sequence_bias
    if any(len(ids) != 1 for ids in biases):
        return None
    ids = torch.tensor([ids[0] for ids in biases], dtype=torch.int64, device=device)
    values = torch.tensor(list(biases.values()), dtype=torch.float32, device=device)

    def run(_: Tensor, scores: Tensor, length: Tensor) -> Tensor:
        return scores + torch.zeros_like(scores[0]).index_copy_(0, ids, values)

    return Form(("bias", len(ids)), run, [ids, values])


def _until(least: int, eos: Tensor, device: torch.device) -> Form:
    """Return a form that forbids the ends before `least` tokens."""
    ids, limit = eos.to(device, copy=True).view(-1), torch.tensor([least], device=device)

    def run(_: Tensor, scores: Tensor, length: Tensor) -> Tensor:
        ends = torch.zeros_like(scores[0], dtype=torch.bool).index_fill_(0, ids, True)
        return torch.where(ends & (length < limit), float("-inf"), scores)

    return Form(("until", len(ids)), run, [ids, limit])


def _forced(processor: Any, device: torch.device) -> Form:
    """Return a form that leaves nothing but the ends for the last token."""
    ids = processor.eos_token_id.to(device, copy=True).view(-1)
    last = torch.tensor([processor.max_length - 1], device=device)

    def run(_: Tensor, scores: Tensor, length: Tensor) -> Tensor:
        forced = torch.full_like(scores, float("-inf")).index_fill_(1, ids, 0.0)
        return torch.where(length == last, forced, scores)

    return Form(("forced", len(ids)), run, [ids, last])


def _in_turn(processor: Any, device: torch.device) -> Form:
    """Return a form that leaves the tokens of one codebook, and of the one behind it for every other token."""
    first, second = processor.semantic_vocab_size, processor.semantic_vocab_size + processor.codebook_size
    bounds = torch.tensor([processor.input_start_len, first, second], device=device)

    def run(_: Tensor, scores: Tensor, length: Tensor) -> Tensor:
        start, first, second = bounds
        tokens = torch.arange(scores.shape[1], device=scores.device)
        of_first = (tokens >= first) & (tokens < second)
        allowed = torch.where((length - start) % 2 == 0, of_first, tokens >= second)
        return scores.masked_fill(~allowed, float("-inf"))

    return Form("in_turn", run, [bounds])


def _no_ngram_twice(size: int) -> Form:
    """Return a form that forbids what would make `size` tokens in a row that the row already has."""

    def run(ids: Tensor, scores: Tensor, length: Tensor) -> Tensor:
        if ids.shape[1] < size:
            return scores
        complete = torch.arange(size - 1, ids.shape[1], device=ids.device) < length
        return _without(scores, ids.unfold(1, size, 1), _latest(ids, size - 1, length), complete)

    return Form(("ngrams", size), run, reads_ids=True)


def _no_ngram_of_the_encoder(processor: Any, device: torch.device) -> Form:
    """Return a form that forbids what would make `n` tokens in a row that the encoder's row has."""
    size = processor.ngram_size
    of_rows = [
        [(*before, token) for before, tokens in row.items() for token in tokens] for row in processor.generated_ngrams
    ]
    # Texts of about the same length share a graph.
    width = 1 << max(len(row) for row in of_rows).bit_length()
    filled = [row + [(-1,) * size] * (width - len(row)) for row in of_rows]
    ngrams = torch.tensor(filled, dtype=torch.int64, device=device)

    def run(ids: Tensor, scores: Tensor, length: Tensor) -> Tensor:
        known = ngrams.repeat_interleave(scores.shape[0] // ngrams.shape[0], dim=0)
        complete = (known[..., -1] >= 0) & (length.view(-1, 1) >= size - 1)
        return _without(scores, known, _latest(ids, size - 1, length), complete)

    return Form(("encoder_ngrams", tuple(ngrams.shape)), run, [ngrams], reads_ids=True)


def _latest(ids: Tensor, count: int, length: Tensor) -> Tensor:
    """Return the last `count` visible ids of each row, `[B, count]`."""
    positions = length.view(-1, 1) - count + torch.arange(count, device=ids.device)
    return ids.gather(1, positions.clamp(min=0).expand(ids.shape[0], -1))


def _without(scores: Tensor, ngrams: Tensor, latest: Tensor, complete: Tensor) -> Tensor:
    """Return the scores without the tokens that end one of the n-grams after the latest ids.

    Args:
        scores: `[B, V]`.
        ngrams: `[B, N, n]`.
        latest: `[B, n - 1]` ids.
        complete: `[N]`, `[1, N]` or `[B, N]`, which of the n-grams count.
    """
    follows = (ngrams[..., :-1] == latest[:, None]).all(-1) & complete
    nothing = scores.shape[1]
    last = torch.where(follows, ngrams[..., -1], nothing)
    forbidden = torch.zeros(scores.shape[0], nothing + 1, dtype=torch.bool, device=scores.device)
    return scores.masked_fill(forbidden.scatter_(1, last, True)[:, :nothing], float("-inf"))
