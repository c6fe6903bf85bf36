"""Gate 4, the decode loop of a package in calls that differ: other shapes, settings, weights, models and classes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..judging.checks import CheckRun
from ..judging.compare import Mismatch, NotRun, about
from ..judging.verdict import Figure
from ..models.configs import Variant
from ..models.model_pair import Pair, Workbench, on_original
from .loop_checks import LONGER, NEW, SWITCH, Loop, batch_of, fp32_noise, loop_pair, needless
from .step_checks import counted_steps
from .texts import Generated, near_tie

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS: tuple[Mapping[str, Any], ...] = (
    {"repetition_penalty": 1.2},
    {"repetition_penalty": 5.0},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"min_new_tokens": 2},
    {"do_sample": True, "temperature": 0.7, "min_p": 0.05},
    {"do_sample": True, "temperature": 1.5, "min_p": 0.3},
    {"do_sample": True, "top_k": 3, "typical_p": 0.9},
    {"do_sample": True, "top_k": 30, "typical_p": 0.4},
    {"added": 0.5},
    {"added": 8.0},
)
"""What calls ask for, one after another; `added` is for a processor of the user's own."""
ASIDE: tuple[Mapping[str, Any], ...] = (
    {"output_hidden_states": True},
    {"output_attentions": True},
    {"output_scores": True},
    {"cache_implementation": "static"},
    {"num_beams": 2},
)
"""What a loop may leave to the original's: whichever runs, the same comes back."""

EMBEDDED = (30.0, 6.0, 1.0)
"""Factors of the embedding of which the first is taken with which a text repeats itself."""


def turn_checks(bench: Workbench, variant: Variant) -> Iterator[CheckRun]:
    """The checks of a package that has a decode loop; none for one that has not."""
    if not hasattr(bench.subject.rewritten, SWITCH):
        return
    runs: list[tuple[str, Callable[[Workbench, Variant], Mapping[str, Figure]]]] = [
        ("tokens looked up in the text", _looked_up),
        ("reused, with other shapes between", _reused),
        ("two models in turn", _two_models),
        ("weights changed between two calls", _changed_weights),
    ]
    more = [
        ("other settings in turn", _other_settings),
        ("what comes back on request", _on_request),
        ("rows looked up in the text", _looked_up_by_row),
        ("a class of the user's own", _own_class),
    ]
    for name, run in runs if bench.options.quick else (*runs, *more):
        yield CheckRun(f"decode loop, {name}", partial(run, bench, variant))


def _looked_up(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """Steps of several tokens, in a text that repeats itself, write what single tokens do; and once more, reused."""
    looked_up: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
    for scale in EMBEDDED:
        loop = Loop(bench, variant, 1, 11, "looked up")
        loop.batch = replace(loop.batch, input_ids=loop.batch.input_ids.repeat(1, 3))
        embed_larger(loop.pair, scale)
        loop.original(LONGER, **looked_up)  # some models do not take it
        original = loop.original(LONGER)
        repeats = _repeats_itself(original.tokens[0].tolist())
        if repeats:
            break
    figures: dict[str, Figure] = {}
    for _ in range(2):
        try:
            with counted_steps(loop.package.call.StepCall) as steps:
                rewritten = loop.rewritten(LONGER, **looked_up)
        except NotRun as reason:
            loop.needless(reason, LONGER, **looked_up)
            raise
        figures = near_tie(original, rewritten, fp32_noise(original.logits))
        if repeats and not figures["rows that diverge"] and 2 * len(steps) > LONGER:
            raise Mismatch(f"{len(steps)} steps for {LONGER} tokens of a text whose drafts are right")
    return {**figures, "steps": len(steps)}


def _looked_up_by_row(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """Rows of which each keeps the drafts that were right of it write what they do without drafts.

    Two of them repeat themselves from the first token on, which is where the third falls behind.
    """
    import torch

    loop = Loop(bench, variant, 3, 11, "rows looked up")
    pair, package, batch = loop.pair, loop.package, loop.batch
    embed_larger(pair, EMBEDDED[0])
    begun = loop.original(11)
    more = torch.cat([begun.tokens[:2], batch.input_ids[2:]])
    mask = None if batch.mask is None else torch.cat([batch.mask, torch.ones_like(batch.mask)], dim=1)
    batch = replace(batch, input_ids=torch.cat([batch.input_ids, more], dim=1), mask=mask)
    original = loop.on(batch).original(LONGER)

    def run(model: Any) -> Tensor:
        given = {"attention_mask": batch.mask} if batch.mask is not None else {}
        settings = {"do_sample": False, "prompt_lookup_num_tokens": 10, "max_new_tokens": LONGER}
        tokens: Tensor = model.generate(batch.input_ids, **given, **settings)
        return tokens[:, batch.input_ids.shape[1] :]

    try:
        with package.taken(pair.rewritten), counted_steps(package.call.StepCall) as steps:
            tokens = run(pair.rewritten)
    except ValueError as error:  # transformers' own loop takes one row only
        reason = NotRun(f"the original's loop ran, and raised: {error}")
        needless(bench, pair.original, run, reason)
        raise reason from error
    figures = near_tie(original, replace(original, tokens=tokens), fp32_noise(original.logits))
    return {**figures, "steps": len(steps)}


def embed_larger(pair: Pair, scale: float) -> None:
    """Let the last token decide on the next, the one behind it of five, so that drafts of the text's own are right."""
    import torch

    with torch.no_grad():
        for model in (pair.original, pair.rewritten):
            weight = model.get_input_embeddings().weight.mul_(scale)
            head = model.get_output_embeddings()
            if head is not None and head.weight.shape == weight.shape:
                rows = torch.arange(len(weight), device=weight.device)
                behind = (rows - rows % 5 + (rows + 1) % 5).clamp(max=len(weight) - 1)
                head.weight = torch.nn.Parameter(weight.index_copy(0, behind, weight))


def _repeats_itself(tokens: list[int]) -> bool:
    """Whether a text is the same few tokens over and over, and no two of them the same beside each other."""
    return tokens[5:] == tokens[:-5] and all(one != other for one, other in pairwise(tokens))


def _reused(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """A text, another one of another shape, and the first again; each as a new model gives it."""
    loop = Loop(bench, variant, 2, 11, "reused 2")
    batches = [loop.batch, *(batch_of(bench, variant, *size, f"reused {size[0]}") for size in ((4, 30), (1, 7)))]
    order = (0, 1, 0, 2, 1, 0)
    for number in order:
        loop.on(batches[number]).same_text()
    return {"texts": len(order)}


def _two_models(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """Two models of one class with different weights, in turn."""
    loops = [Loop(bench, variant, 2, 11, "two models") for _ in range(2)]
    for model in (loops[1].pair.original, loops[1].pair.rewritten):
        _change(model)
    for number in (0, 1, 0, 1):
        loops[number].same_text()
    return {"texts": 4}


def _changed_weights(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """New values in the same memory, then the same values in new memory: neither may leave an old one in use."""
    loop = Loop(bench, variant, 2, 11, "changed")
    graphs: list[Any] = []
    for change in (None, _change, _move):
        if change is not None:
            for model in (loop.pair.original, loop.pair.rewritten):
                change(model)
        loop.same_text()
        graphs += loop.package.store.store_of(loop.pair.rewritten).graphs.values()
    if graphs[-1] is graphs[0]:
        raise Mismatch("a graph that reads weights where they were is kept where they have moved")
    return {"texts": 3}


def _change(model: Any) -> None:
    """Other values in place: every matrix with its rows in another order, so that logits keep their size."""
    import torch

    with torch.no_grad():
        for parameter in dict.fromkeys(model.parameters()):
            if parameter.dim() >= 2:
                parameter.copy_(parameter.flip(-1).clone())


def _move(model: Any) -> None:
    """Other values in other memory, as assigning to `data` and `Module.to` do."""
    import torch

    with torch.no_grad():
        for parameter in dict.fromkeys(model.parameters()):
            if parameter.dim() >= 2:
                parameter.data = parameter.data.roll(1, -1).clone()


def _other_settings(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """Texts of one shape with other settings each: what a step was made for is not taken for another one."""
    loop = Loop(bench, variant, 2, 11, "settings")
    for number, given in enumerate(SETTINGS):
        settings = {**given}
        if added := settings.pop("added", None):
            settings["logits_processor"] = [_adding()(added)]
        original = loop.original(seed=number, **settings)
        rewritten = loop.rewritten(seed=number, own_loop=False, **settings)
        with about(f"with {dict(given)}"):
            near_tie(original, rewritten, fp32_noise(original.logits))
    return {"calls": len(SETTINGS)}


@functools.cache
def _adding() -> Any:
    """The class of processors that prefer every third token by so much; one class, so that the number tells them."""
    import torch
    from transformers import LogitsProcessor

    class Added(LogitsProcessor):
        def __init__(self, by: float) -> None:
            self.by = by

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores + self.by * (torch.arange(scores.shape[-1], device=scores.device) % 3 == 0)

    return Added


def _on_request(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """Outputs by their names and numbers, and the calls that a hook sees: none is lost in a loop."""
    pair = loop_pair(bench, variant, "float32")
    batch = batch_of(bench, variant, 2, 11, "on request")
    asked = 0
    for given in ({}, *ASIDE):
        try:
            expected = on_original(_outputs, pair.original, batch, given)
        except NotRun:
            continue
        found = _outputs(pair.rewritten, batch, given)
        if found[1] != expected[1]:
            raise Mismatch(f"with {dict(given)}: {found[1]} came back, not {expected[1]}")
        near_tie(expected[0], found[0], fp32_noise(expected[0].logits))
        asked += 1
    if not asked:
        raise NotRun("the original does not generate")
    return {"calls": asked}


def _outputs(model: Any, batch: Any, given: Mapping[str, Any]) -> tuple[Generated, list[str]]:
    """What was generated, and how much of what came back, with the calls that a hook on the embedding saw."""
    import torch

    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1

    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True, **given}
    mask = batch.mask if batch.mask is not None else torch.ones_like(batch.input_ids)
    hooked = model.get_input_embeddings().register_forward_hook(hook) if not given else contextlib.nullcontext()
    with torch.no_grad(), hooked:
        out = model.generate(
            batch.input_ids, attention_mask=mask, output_logits=True, disable_compile=True, **settings
        )
    counts = [f"{name}: {len(value)}" for name, value in out.items() if isinstance(value, tuple)]
    logits = torch.stack(out.logits, 1)
    return Generated(out.sequences[:, -logits.shape[1] :], logits), [type(out).__name__, *counts, f"calls: {calls}"]


def _own_class(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """A class of the user's own that prepares its steps in another way is obeyed."""
    loop = Loop(bench, variant, 2, 11, "own class")
    for model in (loop.pair.original, loop.pair.rewritten):
        _prepares_others(model, variant.vocab_size)
    for _ in range(2):
        loop.same_text(own_loop=False)
    return {"texts": 2}


def _prepares_others(model: Any, vocab_size: int) -> None:
    """Make a model one of a class that gives its forward other tokens than were generated."""
    kind = type(model)

    def prepare(self: Any, input_ids: Tensor, attention_mask: Tensor | None = None, **more: Any) -> Any:
        inputs = kind.prepare_inputs_for_generation(self, input_ids, attention_mask=attention_mask, **more)
        for name in ("input_ids", "decoder_input_ids"):
            if inputs.get(name) is not None:
                inputs[name] = (inputs[name] + 1) % vocab_size
        return inputs

    members = {"prepare_inputs_for_generation": prepare, "__module__": kind.__module__}
    model.__class__ = type(f"Own{kind.__name__}", (kind,), members)
