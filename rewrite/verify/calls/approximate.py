"""Packages that round on request: they are compared with the original, rounded in the same way by plain torch.

The transform `fp8` reads weights, and for more than one token a sequence activations, in 8 bits. What it writes is
held to the ordinary bounds against the original with those tensors rounded where it stands, so a wrong kernel shows as
it does in any package; how far the rounding itself moves the model is a figure of its own, in KL.

The rounding is written here from its definition, and not taken from the package: a row is divided by the smallest
power of two that brings its largest magnitude into the format's range, and rounded to e4m3.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hf_rewrite_runtime.cache.cache_argument import argument_of, given_back, keeps_states_alone

from ..judging.checks import CheckRun
from ..judging.compare import Mismatch
from ..judging.tolerances import bound
from ..judging.verdict import Figure
from ..models.configs import WINDOW, Variant

if TYPE_CHECKING:
    from torch import Tensor

    from ..models.inputs import Batch
    from ..models.model_pair import Workbench


def approximation_checks(bench: Workbench, variant: Variant) -> Iterator[CheckRun]:
    """How far the package is from the original, beside how far the rounding alone is; none for an exact package."""
    if bench.rounding is not None:
        for dtype in dict.fromkeys(("float32", bench.options.dtype)):
            name = f"approximate, {dtype}: KL of a prompt and of steps from the original"
            yield CheckRun(name, functools.partial(_approximation, bench, variant, dtype), essential=True)


def _approximation(bench: Workbench, variant: Variant, dtype: str) -> Mapping[str, Figure]:
    from ..models.inputs import prompt

    batch = prompt(bench.seed_for("approximate"), variant.vocab_size, 8, 3 * WINDOW, "none", bench.options.device)
    implementation = bench.implementations()[0]
    pair = bench.pair(variant, implementation, dtype)
    exact = bench.plain_original(variant, implementation, "float64")
    original, own, new = (observed(bench, model, batch) for model in (exact, pair.original, pair.rewritten))
    return judged(divergence(original, own), divergence(original, new), divergence(own, new))


def observed(bench: Workbench, model: Any, batch: Batch) -> Tensor:
    """Log-probabilities `[tokens, V]` of prompts, and of the same tokens with the second half fed one at a time."""
    import torch

    if not bench.subject.causal:
        with torch.no_grad():
            states: Tensor = model(input_ids=batch.input_ids)[0]
        return states.flatten(0, 1).double().log_softmax(-1)
    half = batch.input_ids.shape[1] // 2
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids).logits
    steps = step_by_step(bench, model, batch.input_ids, None, half)
    return torch.cat([logits, steps.to(logits)], 1).flatten(0, 1).double().log_softmax(-1)


HANDED = "_hands_on_states"
"""Set on a class, the name by which its `forward` takes states and gives them back."""


def step_by_step(bench: Workbench, model: Any, ids: Tensor, mask: Tensor | None, start: int) -> Tensor:
    """Logits after the first `start` tokens of a text, and after each of the others, which are fed one at a time."""
    import torch

    from .caches import new_cache

    name = argument_of(model)
    states = name == "cache_params" or keeps_states_alone(new_cache(model, "dynamic"))
    cache: dict[str, Any] = {} if states else {name: new_cache(model, "dynamic")}
    found = []
    mask = torch.ones_like(ids) if mask is None else mask
    spans = [(0, start), *((column, column + 1) for column in range(start, ids.shape[1]))]
    with torch.no_grad():
        for first, last in spans:
            arguments: dict[str, Any] = {"attention_mask": mask[:, :last]}
            if first and states:  # states saw the padding with the prompt; some take no longer mask
                del arguments["attention_mask"]
            if bench.subject.accepts("position_ids"):
                arguments["position_ids"] = (mask[:, :last].cumsum(1) - 1).clamp(min=0)[:, first:]
            out = model(input_ids=ids[:, first:last], use_cache=True, **cache, **arguments)
            if handed := getattr(bench.subject.rewritten, HANDED, ""):
                cache = {handed: out[handed]}
            if (came := given_back(out)) is not None:  # some models write one, and do not give it back
                cache = {name: came}
            found.append(out.logits[:, -1])
    return torch.stack(found, 1)


def divergence(first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second) of log-probabilities, per token."""
    return (first.exp() * (first - second.to(first))).sum(-1).clamp(min=0)


def judged(rounding: Tensor, package: Tensor, between: Tensor) -> dict[str, Figure]:
    """The figures of an approximation, per token: KL to the original of the rounding alone and of the package.

    Raises:
        Mismatch: the package moves the model further than the rounding does.
    """
    limit = bound("approximate kl") * float(rounding.mean()) + bound("approximate kl floor")
    figures: dict[str, Figure] = {
        "KL mean": float(package.mean()),
        "bound": limit,
        "KL mean, of the rounding alone": float(rounding.mean()),
        "KL 99%": float(package.quantile(0.99)),
        "KL to the rounding": float(between.mean()),
        "tokens": int(package.numel()),
    }
    if not float(package.mean()) <= limit:
        raise Mismatch(f"mean KL {float(package.mean()):.3g} > {limit:.3g}", figures)
    return figures
