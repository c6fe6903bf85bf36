"""Gate 4, the steps of a package's decode loop: how many are made, and where they round."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_rewrite_runtime.cache.cache_argument import argument_of, given_back

from ..judging.checks import CheckRun
from ..judging.compare import Mismatch, NotRun
from ..judging.tolerances import bound
from ..judging.verdict import Figure
from ..models.configs import Variant
from ..models.loaded_sides import BEGINS
from ..models.model_pair import Workbench, on_original
from .loop_checks import LONGER, SWITCH, Loop, Package, batch_of, loop_pair
from .texts import near_tie, noise_of

if TYPE_CHECKING:
    from torch import Tensor

AHEAD = 8
"""Fewer steps than these are made that nobody reads: a chunk of four is read while the next one runs."""
DRAWN: Mapping[str, Any] = {"do_sample": True, "temperature": 5.0, "top_k": 0}
"""How a row comes to say something else at every token."""
TEXTS, ROWS, SHORT = 8, 4, 5
"""Texts whose steps are compared by their rounding, the rows of each, and its tokens: fewer than a window has."""


def step_checks(bench: Workbench, variant: Variant) -> Iterator[CheckRun]:
    """The checks of a package that has a decode loop; none for one that has not."""
    if not hasattr(bench.subject.rewritten, SWITCH):
        return
    yield CheckRun("decode loop, a step for each token", partial(_step_for_each, bench, variant))
    yield CheckRun("decode loop, no steps behind the end", partial(_none_behind_the_end, bench, variant))
    yield CheckRun("decode loop, steps round as the original's", partial(_rounded, bench, variant))
    if hasattr(bench.subject.rewritten, BEGINS):
        yield CheckRun("decode loop, begun without kernels", partial(_begun_plainly, bench, variant))


@contextlib.contextmanager
def counted_steps(kind: Any) -> Iterator[list[None]]:
    """Count the steps of one token and of several that run as they are, as on a CPU; what is captured is one step."""
    steps: list[None] = []
    one, several = kind.forward, kind.forward_several

    def counted(self: Any) -> Any:
        steps.append(None)
        return one(self)

    def counted_several(self: Any, tokens: Tensor) -> Any:
        steps.append(None)
        return several(self, tokens)

    kind.forward, kind.forward_several = counted, counted_several
    try:
        yield steps
    finally:
        kind.forward, kind.forward_several = one, several


def _step_for_each(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """A call like one before makes a step for each token but the first, and no other: nothing is proved again."""
    loop = Loop(bench, variant, 2, 11, "steps")
    loop.rewritten()
    with counted_steps(loop.package.call.StepCall) as steps:
        made = loop.rewritten().tokens.shape[1]
    if len(steps) > made - 1:
        raise Mismatch(f"{len(steps)} steps for {made} tokens, of which the prompt gives the first")
    return {"tokens": made, "steps": len(steps)}


def _begun_plainly(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """A first call whose first tokens are chosen in torch's own operators, and the one after it, of padded rows."""
    loop = Loop(bench, variant, 3, 11, "begun")
    setattr(loop.pair.rewritten, BEGINS, True)
    original = loop.original()
    noise = on_original(noise_of, bench, variant, "float32", loop.batch, original)
    return [near_tie(original, loop.rewritten(), noise) for _ in range(2)][-1]


def _none_behind_the_end(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """Where a row ends by itself, early or late in a chunk, no more steps follow than were on their way."""
    loop = Loop(bench, variant, 1, 11, "steps")
    free = loop.original(LONGER, **DRAWN).tokens[0].tolist()
    loop.rewritten(LONGER, **DRAWN)
    ends = [place for place in range(4, 12) if free.index(free[place]) == place]
    for place in ends:
        with counted_steps(loop.package.call.StepCall) as steps:
            heard = loop.rewritten(LONGER, eos_token_id=free[place], **DRAWN).tokens.shape[1]
        if len(steps) >= heard - 1 + AHEAD:
            raise Mismatch(f"{len(steps)} steps for a row of {heard} tokens, of which the prompt gives the first")
    if not ends:
        raise NotRun("the row says the same all the time")
    return {"texts": len(ends)}


def _rounded(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """In 16 bits, the keys that steps write are the original's bit by bit: no cast on their way is left out.

    On a CPU, where every operator takes its form in torch; a kernel may round less often.

    Raises:
        Mismatch: more differ than sums in another order explain.
        NotRun: on a GPU, or where the caches of the two do not hold the same keys.
    """
    if bench.options.device != "cpu":
        raise NotRun("a fused step may round less often than the original")
    package = Package.of(bench.subject.rewritten)
    pair = loop_pair(bench, variant, "bfloat16")
    same: list[Tensor] = []
    problem: NotRun | None = None
    for number in range(TEXTS):
        ids = batch_of(bench, variant, ROWS, SHORT, f"rounded {number}").input_ids
        own = on_original(_original_keys, pair.original, ids)
        try:
            new = _keys_of_a_step(package, pair.rewritten, ids)
        except NotRun as reason:  # in 16 bits a text may go to another expert, and the loop refuses it
            problem = reason
            continue
        if new.shape != own.shape:
            raise NotRun("the first layer keeps other keys than the original's")
        same.append(own == new)
    if not same:
        raise problem or NotRun("no text was read")
    share = sum(float(one.double().mean()) for one in same) / len(same)
    if share < bound("keys bit by bit"):
        raise Mismatch(f"of the keys of a step, {share:.0%} are the original's bit by bit", {"bit-equal": share})
    return {"bit-equal": share, "texts": len(same)}


def _keys_of_a_step(package: Package, model: Any, ids: Tensor) -> Tensor:
    """The keys `[B, H, 1, D]` that a step by hand writes for the last token in the first layer.

    Raises:
        NotRun: there is no such step, or it keeps no keys.
    """
    import torch

    refused = (package.buffers.UnknownCache, package.proof.StepRefused)
    try:
        with torch.no_grad():
            graph = package.graph.DecodeGraph(model, *ids.shape)
            graph.prefill(ids[:, :-1])
            graph.step(ids[:, -1])
    except refused as error:
        raise NotRun(str(error)) from error
    keys = getattr((*graph.cache.layers, None)[0], "keys", None)
    if keys is None or keys.dim() != 4:
        raise NotRun("the first layer keeps no keys as the original's does")
    found: Tensor = keys[:, :, ids.shape[1] - 1 : ids.shape[1]]
    return found


def _original_keys(model: Any, ids: Tensor) -> Tensor:
    """The keys `[B, H, 1, D]` of the last token in the first layer, written by a step behind the others."""
    import torch

    with torch.no_grad():
        cache = given_back(model(input_ids=ids[:, :-1], use_cache=True))
        if cache is None or getattr((*getattr(cache, "layers", ()), None)[0], "keys", None) is None:
            raise NotRun("the original's first layer keeps no keys")
        model(input_ids=ids[:, -1:], use_cache=True, **{argument_of(model): cache})
        keys: Tensor = cache.layers[0].keys[:, :, -1:]
    return keys
