"""Latency: both sides interleaved and warm, prefill and decode apart, with a confidence interval on the ratio.

Nothing is called a win whose interval includes 1. On a CPU the figures are reported and no claim is made.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rewrite.measure.limits import weight_bytes

from ..judging.checks import CheckRun
from ..judging.compare import Mismatch, NotRun
from ..judging.tolerances import bound
from ..judging.verdict import Figure
from ..models.configs import Variant
from ..models.device import kernels_per_token, memory_bandwidth, peak_memory, stopwatch
from ..models.inputs import positions_of, tokens
from ..models.model_inputs import TEXT, make, vocabulary
from ..models.model_pair import Pair, Workbench, on_original
from ..models.real_shapes import shaped_variant

RESAMPLES = 2000
SHORT = 8
"""Tokens of the generation whose time is taken off."""
LONGEST = 32 + SHORT
"""Tokens of the longest generation."""


@dataclass(frozen=True)
class Plan:
    """How much to measure: repeats per side, prompt length, new tokens per decode repeat."""

    repeats: int
    prompt: int
    new: int
    warmup: int


@dataclass(frozen=True)
class Samples:
    """Times in ms, one per repeat, of each side: by the wall clock, and between events on the current stream.

    The wall clock between device-wide synchronisations decides; work moved to another stream shows as a gap.
    """

    original: Sequence[float]
    rewritten: Sequence[float]
    original_events: Sequence[float] = ()
    rewritten_events: Sequence[float] = ()

    @property
    def figures(self) -> dict[str, Figure]:
        """Medians, 95th percentiles, and the speed-up with its 95% bootstrap interval."""
        low, high = bootstrap_ratio(self.original, self.rewritten)
        events: dict[str, Figure] = {}
        if any(self.rewritten_events):
            events["original ms by events"] = median(self.original_events)
            events["rewritten ms by events"] = median(self.rewritten_events)
        return events | {
            "original ms": median(self.original),
            "rewritten ms": median(self.rewritten),
            "original p95 ms": percentile(self.original, 0.95),
            "rewritten p95 ms": percentile(self.rewritten, 0.95),
            "speed-up": median(self.original) / median(self.rewritten),
            "interval low": low,
            "interval high": high,
            "repeats": len(self.original),
        }


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, by the nearest rank."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def bootstrap_ratio(original: Sequence[float], rewritten: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of median(original) / median(rewritten) over resampled pairs of neighbours in time."""
    generator = random.Random(0)
    pairs = list(zip(original, rewritten, strict=True))
    ratios = []
    for _ in range(RESAMPLES):
        drawn = generator.choices(pairs, k=len(pairs))
        ratios.append(median(pair[0] for pair in drawn) / median(pair[1] for pair in drawn))
    return percentile(ratios, 0.025), percentile(ratios, 0.975)


def outcome(low: float, high: float, device: str) -> str:
    """What may be said about a ratio's interval."""
    if device == "cpu":
        return "not claimed on a CPU"
    return "faster" if low > 1.0 else "slower" if high < 1.0 - bound("slower") else "no difference shown"


def plan_for(device: str, shape: str) -> Plan:
    """A short, honest measurement on a CPU; at least 30 repeats and 300 steps on a GPU."""
    if device == "cpu":
        return Plan(repeats=10, prompt=32, new=8, warmup=2)
    return Plan(repeats=30, prompt=512 if shape != "tiny" else 64, new=LONGEST - SHORT, warmup=3)


def latency_checks(bench: Workbench) -> Iterator[CheckRun]:
    """Prefill and decode on the shape asked for, batch 1; then memory. What is fed more than text is called."""
    shape = bench.options.shape or ("tiny" if bench.options.device == "cpu" else "1b")
    stage = _Stage(bench, shape, plan_for(bench.options.device, shape))
    if bench.base.inputs != TEXT:
        yield CheckRun(f"forward, {shape}", stage.forward)
        return
    yield CheckRun(f"prefill, {shape}", stage.prefill)
    if bench.subject.writes:
        yield CheckRun(f"decode, {shape}", stage.decode)
    if bench.options.device != "cpu":
        yield CheckRun(f"kernels and share of the memory limit, {shape}", stage.roofline)
        yield CheckRun(f"peak memory, {shape}", stage.memory)


@dataclass
class _Stage:
    bench: Workbench
    shape: str
    plan: Plan
    _pair: Pair | None = None
    _size: str = ""
    _decode_ms: tuple[float, float] | None = None

    @property
    def device(self) -> str:
        return self.bench.options.device

    def pair(self) -> Pair:
        if self._pair is None:
            variant = shaped_variant(self.bench, self.shape)
            self._size = variant.name
            if variant.name == "base":
                dtype = "float32" if self.device == "cpu" else self.bench.options.dtype
                self._pair = self.bench.pair(variant, self.bench.implementations()[0], dtype)
            else:
                self._pair = large_pair(self.bench, variant)
        return self._pair

    def _ids(self, number: int) -> Any:
        """A prompt that leaves positions for what is generated."""
        model = self.pair().original
        length = min(self.plan.prompt, positions_of(model, self.plan.prompt + LONGEST) - LONGEST)
        if length < 1:
            raise NotRun("the model has too few positions")
        return tokens(self.bench.seed_for("latency", number), vocabulary(model.config), 1, length, self.device)

    def prefill(self) -> Mapping[str, Figure]:
        given = {"use_cache": False} if self.bench.subject.accepts("use_cache") else {}
        samples = self._interleaved(lambda model, ids: model(input_ids=ids, **given), self._ids)
        return self._judged("prefill", samples)

    def forward(self) -> Mapping[str, Figure]:
        kind, seed = self.bench.base.inputs, self.bench.seed_for("latency", 0)
        model = self.pair().original
        made = make(kind, model.config, 1, seed, model.dtype)
        given = {name: value.to(self.device) for name, value in made.items()}
        return self._judged("forward", self._interleaved(lambda model, given: model(**given), lambda number: given))

    def decode(self) -> Mapping[str, Figure]:
        """Time per new token of `generate()`: a long generation less a short one, over the tokens between.

        Both are long enough for a package's own decode loop, which leaves a single token to the original's.
        """
        if not hasattr(self.pair().original, "generate"):
            raise NotRun("the class does not generate")
        long = self._interleaved(lambda model, ids: greedy(model, ids, self.plan.new + SHORT), self._ids)
        short = self._interleaved(lambda model, ids: greedy(model, ids, SHORT), self._ids)
        first = median(short.original), median(short.rewritten)
        per_token = Samples(
            [max(value - first[0], 1e-6) / self.plan.new for value in long.original],
            [max(value - first[1], 1e-6) / self.plan.new for value in long.rewritten],
        )
        self._decode_ms = median(per_token.original), median(per_token.rewritten)
        return self._judged("decode", per_token)

    def _judged(self, what: str, samples: Samples) -> Mapping[str, Figure]:
        figures = samples.figures
        said = outcome(float(figures["interval low"]), float(figures["interval high"]), self.device)
        figures |= {"outcome": said, "size": self._size}
        if said == "slower":
            raise Mismatch(
                f"{what} is slower: {figures['speed-up']:.3f}× (interval below {1 - bound('slower'):.2f})", figures
            )
        return figures

    def _interleaved(self, call: Callable[[Any, Any], Any], made: Callable[[int], Any]) -> Samples:
        pair = self.pair()
        walls: tuple[list[float], list[float]] = ([], [])
        events: tuple[list[float], list[float]] = ([], [])
        for repeat in range(-self.plan.warmup, self.plan.repeats):
            given = made(repeat)
            sides = [(0, pair.original), (1, pair.rewritten)]
            # the original first until both are warm: what it cannot do is no fault of the rewritten file
            for side, model in sides if repeat < 0 or repeat % 2 else reversed(sides):
                timed = on_original if side == 0 else _directly
                wall, event = timed(stopwatch, self.device, call, model, given)
                if repeat >= 0:
                    walls[side].append(wall)
                    events[side].append(event)
        return Samples(*walls, *events)

    def roofline(self) -> Mapping[str, Figure]:
        if self._decode_ms is None:
            raise NotRun("decode was not measured")
        pair = self.pair()
        bandwidth = memory_bandwidth(self.device)
        limit_ms = weight_bytes(pair.original) / bandwidth * 1e3
        run = lambda model, new: greedy(model, self._ids(0), new)
        original, rewritten = (kernels_per_token(run, model) for model in (pair.original, pair.rewritten))
        layers = int(pair.original.config.get_text_config().num_hidden_layers)
        return {
            "bandwidth GB/s": bandwidth / 1e9,
            "memory limit ms": limit_ms,
            "original share": limit_ms / self._decode_ms[0],
            "rewritten share": limit_ms / self._decode_ms[1],
            "original kernels per token": original[0],
            "rewritten kernels per token": rewritten[0],
            "original copies a layer": copies_a_layer(original[1], layers),
            "rewritten copies a layer": copies_a_layer(rewritten[1], layers),
        }

    def memory(self) -> Mapping[str, Figure]:
        pair = self.pair()
        run = lambda model: greedy(model, self._ids(0), self.plan.new)
        return {
            "original peak MiB": peak_memory(self.device, run, pair.original) / 2**20,
            "rewritten peak MiB": peak_memory(self.device, run, pair.rewritten) / 2**20,
        }


def copies_a_layer(per_token: Mapping[str, float], layers: int) -> str:
    """The copies of a token that each layer makes, by the name of the kernel; what runs once a token is left out."""
    rows = [f"{count / layers:g} × {name[:80]}" for name, count in per_token.items() if count >= layers / 2]
    return ", ".join(rows) or "none"


def _directly(call: Callable[..., Any], *arguments: Any) -> Any:
    return call(*arguments)


def greedy(model: Any, ids: Any, new: int) -> Any:
    """Exactly `new` greedy tokens."""
    import torch

    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)


def large_pair(bench: Workbench, variant: Variant) -> Pair:
    """Both models of a real shape on the device, with equal weights; the original's are drawn there."""
    import torch

    from ..models.model_pair import build

    arguments = (variant, bench.implementations()[0], bench.options.dtype, bench.options.device)
    torch.manual_seed(bench.seed_for("large"))
    with torch.device(bench.options.device):
        original = on_original(build, bench.subject.original, *arguments)
        rewritten = build(bench.subject.rewritten, *arguments)
    if bench.options.weights is not None:
        dtype = getattr(torch, bench.options.dtype)
        original, rewritten = (
            side.from_pretrained(bench.options.weights, dtype=dtype).to(bench.options.device).eval()
            for side in (bench.subject.original, bench.subject.rewritten)
        )
    rewritten.load_state_dict(bench.completed(original.state_dict(), rewritten, rewritten.state_dict()))
    return Pair(original, rewritten)
