"""Latency: both sides interleaved and warm, prefill and decode apart, with a confidence interval on the ratio.

Nothing is called a win whose interval includes 1. On a CPU the figures are reported and no claim is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rewrite.measure import timing
from rewrite.measure.limits import bandwidths, weight_bytes
from rewrite.measure.profiling import kernels

from ..judging.checks import CheckRun
from ..judging.compare import Mismatch, NotRun
from ..judging.tolerances import bound
from ..judging.verdict import Figure
from ..models.configs import Variant
from ..models.inputs import positions_of, tokens
from ..models.model_inputs import TEXT, make, vocabulary
from ..models.model_pair import Pair, Workbench, attempted, build, on_original
from ..models.real_shapes import shaped_variant

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
    """Times in ms, one per repeat, of each side, between device-wide synchronisations."""

    original: Sequence[float]
    rewritten: Sequence[float]

    @property
    def figures(self) -> dict[str, Figure]:
        """Medians, 95th percentiles, and the speed-up with its 95% bootstrap interval."""
        ratio = timing.ratio(self.original, self.rewritten)
        return {
            "original ms": median(self.original),
            "rewritten ms": median(self.rewritten),
            "original p95 ms": timing.percentile(self.original, 0.95),
            "rewritten p95 ms": timing.percentile(self.rewritten, 0.95),
            "speed-up": ratio["value"],
            "interval low": ratio["low"],
            "interval high": ratio["high"],
            "repeats": len(self.original),
        }


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

        def timed(model: Any, repeat: int) -> float:
            given = made(repeat)
            return timing.wall_ms(self.device, lambda: call(model, given))

        for repeat in range(-self.plan.warmup, 0):  # what the original cannot do is no fault of the rewritten file
            on_original(timed, pair.original, repeat)
            timed(pair.rewritten, repeat)
        sides = {  # unwatched: `on_original` asks a CPU before each operator on a GPU
            "original": lambda repeat: attempted(timed, pair.original, repeat),
            "rewritten": lambda repeat: timed(pair.rewritten, repeat),
        }
        return Samples(**timing.interleaved(sides, (self.plan.repeats, self.plan.repeats), 0.0))

    def roofline(self) -> Mapping[str, Figure]:
        if self._decode_ms is None:
            raise NotRun("decode was not measured")
        pair = self.pair()
        bandwidth = bandwidths(self.device)["read"]
        limit_ms = weight_bytes(pair.original) / bandwidth * 1e3
        figures: dict[str, Figure] = {"bandwidth GB/s": bandwidth / 1e9, "memory limit ms": limit_ms}
        for side, model, ms in zip(vars(pair), vars(pair).values(), self._decode_ms, strict=True):
            figures[f"{side} share"] = limit_ms / ms
            figures[f"{side} kernels per token"] = kernels(_Generating(model), self._ids(0))["kernels_per_token"]
        return figures

    def memory(self) -> Mapping[str, Figure]:
        """Bytes allocated at the peak of a generation, above what was allocated before it."""
        import torch

        figures: dict[str, Figure] = {}
        for side, model in vars(self.pair()).items():
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            greedy(model, self._ids(0), self.plan.new)
            torch.cuda.synchronize(self.device)
            figures[f"{side} peak MiB"] = (torch.cuda.max_memory_allocated(self.device) - before) / 2**20
        return figures


@dataclass
class _Generating:
    """A side as `rewrite.measure.profiling` counts its kernels: in generations of 9 and of 25 tokens."""

    model: Any
    name: str = ""
    short: int = 9
    steps: int = 16

    def generate(self, prompt: Any, new: int, mask: Any = None) -> Any:
        return greedy(self.model, prompt, new)


def greedy(model: Any, ids: Any, new: int) -> Any:
    """Exactly `new` greedy tokens."""
    import torch

    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)


def large_pair(bench: Workbench, variant: Variant) -> Pair:
    """Both models of a real shape on the device, with equal weights; the original's are drawn there."""
    import torch

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
