"""Gate 2: `torch.compile(fullgraph=True)` of the rewritten model, without a graph break or a recompile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from hf_rewrite_runtime.cache.cache_argument import argument_of

from ..judging.checks import CheckRun
from ..judging.compare import Mismatch
from ..judging.low_precision_bound import compare
from ..judging.verdict import Figure
from ..models.configs import Variant
from ..models.inputs import tokens
from ..models.model_pair import Workbench, attempted, on_original
from .caches import new_cache


def compile_checks(bench: Workbench, variant: Variant) -> Iterator[CheckRun]:
    """Prefill and, for causal models, a decode step on a static cache."""
    if not bench.options.compile or bench.options.quick:
        return
    backend = "aot_eager" if bench.options.device == "cpu" else "inductor"
    yield CheckRun(f"torch.compile(fullgraph), {backend}: prefill", lambda: _prefill(bench, variant, backend))
    yield CheckRun("torch.compile(fullgraph), aot_eager: prefill in 16 bits", lambda: _in_16_bits(bench, variant))
    if bench.subject.causal:
        yield CheckRun(f"torch.compile(fullgraph), {backend}: decode", lambda: _decode(bench, variant, backend))


def _compiled(model: Any, backend: str) -> Any:
    import torch

    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend, dynamic=False)


def _require_original(error: Exception, model: Any, call: Any, backend: str) -> NoReturn:
    """A graph break is only the rewrite's fault if the original compiles."""
    attempted(call, _compiled(model, backend))
    said = " ".join(str(error).split())[:300]
    raise Mismatch(f"does not compile in one graph, the original does: {type(error).__name__}: {said}") from error


def _prefill(bench: Workbench, variant: Variant, backend: str) -> Mapping[str, Figure]:
    return _measure(bench, variant, backend, _prompts_read(bench, variant))


def _in_16_bits(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """The same in the low precision, where an operator that promises fp32 to the compiler is found out."""
    return _measure(bench, variant.without_choice, "aot_eager", _prompts_read(bench, variant), bench.options.dtype)


def _prompts_read(bench: Workbench, variant: Variant) -> Callable[[Any], dict[str, Any]]:
    """Return what computes the logits of prompts, without a cache where the original can be told so."""
    import torch

    device = bench.options.device
    prompts = [tokens(bench.seed_for("compile", i), variant.vocab_size, 2, 12, device) for i in range(3)]
    without = {"use_cache": False} if bench.subject.may_be_given("use_cache") else {}

    def run(model: Any) -> dict[str, Any]:
        with torch.no_grad():
            return {f"logits#{i}": model(input_ids=ids, **without)[0].clone() for i, ids in enumerate(prompts)}

    return run


def _decode(bench: Workbench, variant: Variant, backend: str) -> Mapping[str, Figure]:
    """Four steps after each of several prompts: the few logits of one prompt share their roundings."""
    device, vocab = bench.options.device, variant.vocab_size
    prompts = [tokens(bench.seed_for("compile decode", i), vocab, 1, 12, device) for i in range(6)]

    def run(model: Any) -> dict[str, Any]:
        import torch

        inner = getattr(model, "_orig_mod", model)
        cache = new_cache(inner, "static")
        cached = {argument_of(inner): cache, "use_cache": True}
        outputs = {}
        with torch.no_grad():
            for number, ids in enumerate(prompts):
                if number:
                    cache.reset()
                inner(input_ids=ids[:, :8], **cached)
                for step in range(8, 12):
                    found = model(input_ids=ids[:, step : step + 1], **cached)
                    outputs[f"step {step}#{number}"] = found[0].clone()
        return outputs

    return _measure(bench, variant, backend, run)


def _counted(model: Any, run: Any, backend: str) -> tuple[Any, int, int]:
    """Run the compiled model. Returns what `run` does, the graph breaks and the graphs."""
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    found = run(_compiled(model, backend))
    breaks, graphs = sum(counters["graph_break"].values()), int(counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    return found, breaks, graphs


def _measure(
    bench: Workbench, variant: Variant, backend: str, run: Any, dtype: str = "float32"
) -> Mapping[str, Figure]:
    import torch
    from torch._dynamo.utils import counters

    implementation = bench.implementations()[0]
    pair, exact = (bench.pair(variant, implementation, one) for one in (dtype, "float64"))
    truth, own = on_original(run, exact.original), on_original(run, pair.original)
    run(pair.rewritten)  # as the original was: what a model does once, at its first call, is another graph
    if backend == "inductor":  # it contracts and reorders: the yardstick is the original as inductor compiles it
        own = attempted(_counted, pair.original, run, backend)[0]
    try:
        found, breaks, graphs = _counted(pair.rewritten, run, backend)
    except Exception as error:  # torch.compile raises many kinds of error
        _require_original(error, pair.original, run, backend)
    figures: dict[str, Figure] = {"graph breaks": breaks, "graphs": graphs}
    if breaks:
        raise Mismatch(f"{breaks} graph breaks: {next(iter(counters['graph_break']))}", figures)
    if graphs > 1:  # sliding-window caches guard on their length, in the original too
        figures["original graphs"] = theirs = attempted(_counted, pair.original, run, backend)[2]
        if graphs > theirs:
            raise Mismatch(f"{graphs} graphs were compiled for one shape, {theirs} of the original", figures)
    return figures | compare(truth, own, found, torch.finfo(getattr(torch, dtype)).eps, variant.routed)
