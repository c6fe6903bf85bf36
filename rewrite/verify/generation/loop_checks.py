"""Gate 4, the decode loop of a rewritten package: one step in a graph, replayed, against the original's own loop.

On a GPU `generate()` takes the loop by itself; on a CPU it is asked to, and the step runs as plain calls. A check asks
the package what ran: where its loop does not take a call, the check is not run and says why.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_rewrite_runtime.guards.code_names import attends

from ..calls.approximate import step_by_step
from ..judging.checks import CheckRun
from ..judging.compare import Mismatch, NotRun, near_exact
from ..judging.fp32_free_reference import only_rounds, unrounded
from ..judging.verdict import Figure
from ..models.configs import Variant
from ..models.counting import uncounted
from ..models.inputs import Batch, prompt
from ..models.model_pair import Pair, Workbench, comparable, lent, on_original
from . import texts
from .poison import poison, poison_for, reads_padding
from .texts import Generated, Sink, near_tie, noise_of

if TYPE_CHECKING:
    from torch import Tensor

SWITCH = "_step_without_graph"
"""Set on a model, it makes the loop run on any device, its step as plain calls."""
MARK = "_within_window"
"""Set on a class, the loop runs for texts that a sliding window of its cache holds."""
WIDE = 128
LOOP = re.compile(r"\.generate\.generation$")
"""Where the loop is in a runtime, installed or vendored."""
PARTS = (
    "core.backend", "device.graph_capture", "decode.step_graph", "decode.graph_cache", "decode.validation",
    "decode.step_buffers", "decode.step_call",
)  # fmt: skip
NEW, LONGER = 16, 40
generate = partial(texts.generate, use_cache=True)
"""Asked for a cache, since a configuration may say none (MPT's does): there is no loop without."""
TRIED = {
    "step_fails", "step_differs", "step_changes", "step_reads", "step_not_capturable", "cache_kind", "cache_unused",
    "inputs",
}  # fmt: skip
"""Why a package's loop leaves a plain call to the original's: what it finds out of the model where it tries a step."""


def loop_checks(bench: Workbench, variants: list[Variant]) -> Iterator[CheckRun]:
    """The checks of a package that has a decode loop; none for one that has not."""
    if not hasattr(bench.subject.rewritten, SWITCH):
        return
    dtypes = ["float32"] if bench.options.quick else ["float32", bench.options.dtype]
    yield CheckRun("decode loop, runs as the package says", partial(_runs, bench, variants[0]))
    for variant in variants:
        for dtype in dtypes:
            yield CheckRun(f"decode loop, greedy, {dtype}, {variant.name}", partial(_greedy, bench, variant, dtype))
        yield CheckRun(
            f"decode loop, step by step, unused slots poisoned, {variant.name}", partial(stepwise, bench, variant)
        )
    if bench.varied is not None:
        yield CheckRun("decode loop, step by step, fields varied", partial(stepwise, bench, bench.varied))
    for variant in bench.stepped:
        yield CheckRun(f"decode loop, step by step, {variant.name}", partial(stepwise, bench, variant))
    for name, run in (
        ("sampling with a fixed seed", _sampled),
        ("step by step, one row without a mask", partial(stepwise, rows=1)),
        ("an end token, and a streamer", _ended),
        ("rows that end one after another", _rows_ended),
        ("unused slots poisoned while it runs", _poisoned),
    ):
        yield CheckRun(f"decode loop, {name}", partial(run, bench, variants[0]))


@dataclass(frozen=True)
class Package:
    """The parts of a package's runtime that say what ran."""

    backend: Any
    capture: Any
    graph: Any
    store: Any
    proof: Any
    buffers: Any
    call: Any

    @classmethod
    def of(cls, model_class: Any) -> Package:
        """The runtime that the class's loop comes from.

        Raises:
            NotRun: it is no runtime that this verifier knows.
        """
        origin = next(base.__module__ for base in model_class.__mro__ if SWITCH in vars(base))
        root = LOOP.sub("", origin)
        try:
            return cls(*(importlib.import_module(f"{root}.{name}") for name in PARTS))
        except ModuleNotFoundError as error:
            raise NotRun(f"the package's loop is not one that can be asked what ran: {error}") from error

    @contextlib.contextmanager
    def taken(self, model: Any) -> Iterator[None]:
        """Run a block in which every `generate()` has to take the loop.

        Raises:
            NotRun: one did not; the message says why.
            Mismatch: the package refused its own fused step, because that computes something else.
        """
        self.backend.reset_fallbacks()
        yield
        reasons = sorted({reason for operator, reason in self.backend.fallbacks() if operator == "generate"})
        if "step_differs" in reasons and fused(model):
            raise Mismatch("the fused decode step computes something else than the model's ordinary step")
        if reasons:
            details = [line for line in self.store.describe(model) if line.startswith("no graph")]
            raise NotRun(f"the original's loop ran: {'; '.join([', '.join(reasons), *details])}")


def fused(model: Any) -> bool:
    """Whether layers of a model have a method for one token, or read a preallocated cache by themselves."""
    return any(callable(getattr(module, "decode", None)) or attends(type(module)) for module in model.modules())


def loop_pair(bench: Workbench, variant: Variant, dtype: str) -> Pair:
    """A new pair whose rewritten model takes its loop on this device too."""
    if getattr(bench.subject.rewritten, MARK, False):
        variant = _with_wide_window(variant)
    pair = bench.fresh(variant, bench.implementations()[0], dtype)
    if bench.options.device == "cpu":
        setattr(pair.rewritten, SWITCH, True)
    return pair


def _with_wide_window(variant: Variant) -> Variant:
    """The variant with a window that holds every text that is asked for: no longer one is taken by the loop."""
    wide = variant.changed({})
    for part in (wide.config, wide.config.get_text_config(decoder=True)):
        if isinstance(getattr(part, "sliding_window", None), int):
            part.sliding_window = WIDE
    return wide


def needless(bench: Workbench, original: Any, run: Callable[[Any], object], reason: NotRun) -> None:
    """Try a call that a package's loop left to the original's with the loop of this version, on the original itself.

    The original is asked first whether it can, by its own loop and watched; what this version's raises after that is
    the loop's own fault, and is raised as it is.

    Raises:
        Mismatch: it takes the call, so that the package has no reason not to.
    """
    from hf_rewrite_runtime.core import backend
    from hf_rewrite_runtime.generate.generation import GraphGeneration

    if not comparable(bench) or str(reason).endswith(": window"):  # that the class is marked for is seen nowhere else
        return
    try:
        on_original(run, original)
    except NotRun:
        return
    backend.reset_fallbacks()
    with uncounted(), lent(original, GraphGeneration, SWITCH, bench.options.device == "cpu"):
        run(original)
    if not any(operator == "generate" for operator, _ in backend.fallbacks()):
        raise Mismatch(f"the original's step runs in a decode loop, and the package's does not: {reason}") from reason


def batch_of(bench: Workbench, variant: Variant, rows: int, length: int, name: str) -> Batch:
    """A prompt `[rows, length]` of random tokens, padded on the left where it has several rows."""
    pads = rows > 1 and bench.subject.accepts("attention_mask")
    padded = "left" if pads else "none"
    seed = bench.seed_for("loop", name)
    return prompt(seed, variant.vocab_size, rows, length, padded, bench.options.device)  # type: ignore[arg-type]


class Loop:
    """A new pair of models, of which the rewritten one takes its loop, and a prompt of `batch_of` for both."""

    def __init__(self, bench: Workbench, variant: Variant, rows: int, length: int, name: str, dtype: str = "float32"):
        self.bench, self.pair = bench, loop_pair(bench, variant, dtype)
        self.package = Package.of(bench.subject.rewritten)
        self.batch = batch_of(bench, variant, rows, length, name)

    def on(self, batch: Batch) -> Loop:
        """The same models with another prompt."""
        other = copy.copy(self)
        other.batch = batch
        return other

    def original(self, new: int = NEW, seed: int = 0, **settings: Any) -> Generated:
        """What the original writes by its own loop."""
        settings = {"do_sample": False, "disable_compile": True, **settings}
        return on_original(generate, self.pair.original, self.batch, new, seed, **settings)

    def rewritten(self, new: int = NEW, seed: int = 0, own_loop: bool = True, **settings: Any) -> Generated:
        """What the rewritten model writes, in its own loop where that is asked for.

        Raises:
            NotRun: the original's loop ran; the message says why.
        """
        with self.package.taken(self.pair.rewritten) if own_loop else contextlib.nullcontext():
            return generate(self.pair.rewritten, self.batch, new, seed, **{"do_sample": False, **settings})

    def needless(self, reason: NotRun, new: int, **settings: Any) -> None:
        """Raise `Mismatch` where this version's loop takes a call on the original that the package's loop left."""
        run = lambda model: generate(model, self.batch, new, 0, **{"do_sample": False, **settings})
        needless(self.bench, self.pair.original, run, reason)

    def same_text(self, **settings: Any) -> None:
        """Raise `Mismatch` unless both sides write the same, near-ties aside."""
        original = self.original()
        near_tie(original, self.rewritten(**settings), fp32_noise(original.logits))


def _runs(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """One plain `generate()`: a class that has the loop takes it, unless the model itself is found not to suit it.

    Raises:
        Mismatch: it does not; the message says why.
    """
    loop = Loop(bench, variant, 1, 9, "runs")
    loop.original(3)
    try:
        loop.rewritten(3)
    except NotRun as reason:
        refused = {why for operator, why in loop.package.backend.fallbacks() if operator == "generate"}
        if refused <= TRIED:
            loop.needless(reason, 3)
            raise
        raise Mismatch(f"the class has the decode loop, and it does not run: {reason}") from reason
    return {"tokens": 3}


def _greedy(bench: Workbench, variant: Variant, dtype: str) -> Mapping[str, Figure]:
    """Several batch sizes and lengths one after another on one model, each with left padding."""
    loop = Loop(bench, variant, 1, 9, "greedy 1", dtype)
    batches = [loop.batch, *(batch_of(bench, variant, *size, f"greedy {size[0]}") for size in ((3, 14), (8, 24)))]
    originals = [loop.on(batch).original(LONGER) for batch in batches]
    # One row is too few to know the noise by, above all where a rounding sends a token to another expert.
    noise = max(on_original(noise_of, bench, variant, dtype, *both) for both in zip(batches, originals, strict=True))
    figures: dict[str, Figure] = {}
    for batch, original in zip(batches, originals, strict=True):
        found = near_tie(original, loop.on(batch).rewritten(LONGER), noise)
        diverged = int(figures.get("rows that diverge", 0)) + int(found["rows that diverge"])
        figures = {**found, "rows": sum(len(one.input_ids) for one in batches), "rows that diverge": diverged}
    return figures


def stepwise(bench: Workbench, variant: Variant, rows: int = 3) -> Mapping[str, Figure]:
    """The logits of every step by hand, against the original's own steps, with poison in every unused slot.

    In fp64; in fp32 where the original's fp64 run is not finite: eager attention gives NaN there for padded rows.
    """
    import torch

    batch = batch_of(bench, variant, rows, 14, "stepwise")
    feed = batch_of(bench, variant, rows, NEW, "stepwise tokens").input_ids
    ids = torch.cat([batch.input_ids, feed], 1)
    mask = None if batch.mask is None else torch.cat([batch.mask, torch.ones_like(feed)], 1)
    for dtype in ("float64", "float32"):
        loop = Loop(bench, variant, rows, 14, "stepwise", dtype)
        pair = loop.pair
        expected = on_original(step_by_step, bench, pair.original, ids, mask, batch.input_ids.shape[1])[:, 1:]
        padded = on_original(_prompt_logits, pair.original, batch)  # NaN there may be out of a window's sight, or not
        if bool(expected.isfinite().all() and padded.isfinite().all()):
            break
    try:
        loop.rewritten(3)
    except NotRun as reason:
        loop.needless(reason, 3)
        raise
    padding = not on_original(reads_padding, bench, pair.original, batch)
    found = _steps(bench, pair.rewritten, batch, feed, padding)
    if dtype != "float64":
        return near_exact({"logits": expected}, {"logits": found}, "fp32 max")
    try:
        return near_exact({"logits": expected}, {"logits": found})
    except Mismatch:  # the model may compute in fp32 in every dtype
        with unrounded():
            truth = on_original(step_by_step, bench, pair.original, ids, mask, batch.input_ids.shape[1])[:, 1:]
            if not only_rounds({"logits": expected}, {"logits": found}, {"logits": truth}):
                raise
            exact = near_exact({"logits": truth}, {"logits": _steps(bench, pair.rewritten, batch, feed, padding)})
        return {**exact, "without roundings to fp32": 1}


def _steps(bench: Workbench, model: Any, batch: Batch, feed: Tensor, padding: bool) -> Tensor:
    """Return the logits `[B, n, V]` of steps by hand for the tokens of `feed`, with poison in every unused slot.

    Raises:
        NotRun: the package's graph does not take the model.
        Mismatch: its fused step computes something else than the model's ordinary step, or it finds no cache where
            this version's does.
    """
    import torch

    package = Package.of(bench.subject.rewritten)
    found: list[Tensor] = []
    size = len(feed), batch.input_ids.shape[1] + NEW + 5
    try:
        with torch.no_grad():
            graph = package.graph.DecodeGraph(model, *size)
            graph.prefill(batch.input_ids, batch.mask)
            graph.cache.fused = fused(model)
            for step in range(NEW):
                poison(graph, poison_for(model), padding)
                found.append(graph.step(feed[:, step]).clone())
    except package.buffers.UnknownCache as error:
        if comparable(bench) and _is_known(model, *size):
            raise Mismatch(f"a graph made by hand fails: {error}") from error
        raise NotRun(str(error)) from error
    except package.graph.CacheFull as error:
        raise NotRun(str(error)) from error
    except (package.proof.StepRefused, package.capture.CaptureFailed) as error:
        if fused(model):
            raise Mismatch(str(error)) from error
        raise NotRun(str(error)) from error
    return torch.stack(found, 1)


def _is_known(model: Any, rows: int, capacity: int) -> bool:
    """Whether this version's loop has buffers for what a model's cache holds."""
    from hf_rewrite_runtime.decode.step_buffers import UnknownCache
    from hf_rewrite_runtime.decode.step_graph import DecodeGraph

    try:
        DecodeGraph(model, rows, capacity)
    except UnknownCache:
        return False
    return True


def _prompt_logits(model: Any, batch: Batch) -> Tensor:
    """The logits of a prompt, those of its padding too."""
    import torch

    mask = {} if batch.mask is None else {"attention_mask": batch.mask}
    with torch.no_grad():
        found: Tensor = model(input_ids=batch.input_ids, **mask).logits
    return found


def _sampled(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """The same draws; where logits differ by rounding, a draw at the edge of two tokens may rightly differ."""
    loop = Loop(bench, variant, 8, 12, "sampled")
    settings: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
    }
    original, rewritten = loop.original(seed=11, **settings), loop.rewritten(seed=11, **settings)
    same = int((original.tokens == rewritten.tokens).all(1).sum())
    figures: dict[str, Figure] = {"rows": 8, "rows that are the same": same}
    if same < 6:
        raise Mismatch(f"{8 - same} of 8 sampled rows differ", figures)
    return figures


def _ended(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """A row that ends by itself, and a streamer that gets every token of it."""
    loop = Loop(bench, variant, 1, 10, "ended")
    end = int(loop.original().tokens[0, 9])
    sinks = Sink(), Sink()
    settings: dict[str, Any] = {"eos_token_id": end, "pad_token_id": 0}
    original = loop.original(streamer=sinks[0], **settings).tokens
    _require_same(original, loop.rewritten(streamer=sinks[1], **settings).tokens, f"with end token {end}: ")
    if sinks[0].tokens != sinks[1].tokens or not sinks[1].ended:
        raise Mismatch(f"the streamer got {sinks[1].tokens}, not {sinks[0].tokens}")
    return {"steps": int(original.shape[1])}


def _require_same(original: Tensor, rewritten: Tensor, said: str = "") -> None:
    import torch

    if not torch.equal(original, rewritten):
        raise Mismatch(f"{said}{rewritten.tolist()} instead of {original.tolist()}")


def _rows_ended(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """A row that ends while others go on is padded from there."""
    loop = Loop(bench, variant, 3, 10, "rows ended")
    free = loop.original().tokens
    ends = [int(token) for token in free[0] if not bool((free[1:] == token).any())]
    if not ends:
        raise NotRun("every token of one row is in another one too")
    settings: dict[str, Any] = {"eos_token_id": ends[len(ends) // 4], "pad_token_id": 3}
    original = loop.original(**settings).tokens
    _require_same(original, loop.rewritten(**settings).tokens)
    return {"steps": int(original.shape[1]), "padded": int((original[0] == 3).sum())}


def _poisoned(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """Poison the slots of a running `generate()` that are not in use, whenever tokens arrive."""
    loop = Loop(bench, variant, 3, 14, "poisoned")
    model = loop.pair.rewritten
    padding = not on_original(reads_padding, bench, loop.pair.original, loop.batch)

    def spoil() -> None:
        for graph in loop.package.store.store_of(model).graphs.values():
            if graph.cache.buffers and graph.cache.length:
                poison(graph, poison_for(model), padding)

    streamer = Sink(spoil)
    loop.same_text(streamer=streamer)
    return {"times": streamer.times}


def fp32_noise(logits: Tensor) -> float:
    """What fp32 sums in another order may move a logit by."""
    from ..judging.tolerances import bound

    return float(logits.abs().max()) * bound("fp32 max")
