"""Gate 2, low precision where it shows: rows of hundreds of tokens, large values, many experts, every module alone.

A position, a norm or a softmax computed in too few bits is off by less than the logits' own rounding at 24 tokens, and
by more than that at 400; and a module shows it before the layers behind it blur it.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_rewrite_runtime.cache.cache_argument import argument_of, given_back

from ..judging.checks import CheckRun
from ..judging.compare import Mismatch, NotRun, Observations, about, finite, require_same_dtypes, same_names
from ..judging.fp32_free_reference import unrounded
from ..judging.low_precision_bound import Runs, compare_draws
from ..judging.verdict import Figure
from ..models.configs import Variant
from ..models.inputs import positions_of
from ..models.model_inputs import make
from ..models.model_pair import Pair, Workbench, on_original
from .norm_rounding import norms_round
from .observed import everything
from .scenarios import Outputs, Scenario, Setting, call, main_output, real

if TYPE_CHECKING:
    from torch import Tensor

TOKENS, ROWS, STEPS, LARGE, EXPERTS = 450, 2, 3, 8.0, 32
"""A prompt's length and rows, the tokens that follow it, the factor of large values, and how many experts are many."""

WIDE = 264
"""Columns of a head for which attention without a mask repeats keys, too."""

BEYOND = tuple(4.0**power for power in range(2, 8))
"""What matrices that lead back to the hidden states are multiplied with, until these pass the largest fp16."""

ENOUGH = 50_000
"""Of a module's larger outputs so many values are compared, in rows spread evenly; all of them where that fails."""

FEW = 500
"""A module's output of fewer values is compared together with its others."""

EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def precision_checks(bench: Workbench, variant: Variant) -> Iterator[CheckRun]:
    """Long rows in fp64 and in low precision, and every module by itself."""
    dtypes = [dtype for dtype in bench.low_precisions() if dtype in ("float32", bench.options.dtype)]
    for implementation in bench.implementations()[: 1 if bench.options.quick else None]:
        name = f"{implementation}, {variant.name}: a prompt of {TOKENS} tokens and {STEPS} more"
        yield CheckRun(f"fp64 {name}", partial(_exact, bench, variant, implementation))
        for dtype in dtypes:
            yield CheckRun(f"{dtype} {name}", partial(_long, bench, variant, implementation, dtype))
    for other in [variant, *(one for one in bench.variants if one is not variant)]:
        for dtype in dtypes:
            yield CheckRun(f"{dtype}, {other.name}: module by module", partial(modules_alone, bench, other, dtype))
    yield from rounding_checks(bench, variant)
    first = bench.implementations()[0]
    if not bench.options.quick:
        yield CheckRun(f"fp64 {first}, heads of {WIDE} columns", partial(_wide_heads, bench, variant, first))
    many = many_experts(variant)
    if many is None:
        return
    yield CheckRun(f"fp64 {first}, {many.name}: a prompt of {TOKENS} tokens", partial(_exact, bench, many, first))
    for dtype in dtypes:
        yield CheckRun(f"{dtype}, {many.name}: module by module", partial(modules_alone, bench, many, dtype))


def rounding_checks(bench: Workbench, variant: Variant) -> Iterator[CheckRun]:
    """What is asked of models that are fed more than text, too: norms by themselves, and infinities of fp16."""
    yield CheckRun("norms round as the original's do", partial(norms_round, bench, variant))
    if not bench.options.quick and _speaks_of_fp16(bench.subject.original):
        yield CheckRun(f"float16, {variant.name}: beyond the largest number", partial(_beyond, bench, variant))


def _exact(bench: Workbench, variant: Variant, implementation: str) -> Mapping[str, Figure]:
    from .parity import exact

    return exact(bench, variant, implementation, LONG)


def _long(bench: Workbench, variant: Variant, implementation: str, dtype: str) -> Mapping[str, Figure]:
    """The whole model by its error against fp64, as its long rows alone show it."""
    import torch

    from .parity import run_scenario, setting_for

    variant = variant.without_choice
    pair, exact = (bench.pair(variant, implementation, name) for name in (dtype, "float64"))

    def draw(number: int) -> Runs:
        setting = setting_for(bench, variant, LONG, -1 - number)
        truth = on_original(run_scenario, exact.original, LONG, setting)
        if not finite(truth):
            raise NotRun("the original's fp64 run is not finite")
        own = on_original(run_scenario, pair.original, LONG, setting)
        return Runs(truth, own, run_scenario(pair.rewritten, LONG, setting))

    return compare_draws(draw, torch.finfo(getattr(torch, dtype)).eps, variant.routed)


def _row(model: Any, setting: Setting) -> Outputs:
    length = positions_of(model, TOKENS)
    batch = setting.prompt(ROWS, length - STEPS)
    result = call(model, setting, batch)
    outputs = {"logits": real(main_output(result), batch)}
    cache = given_back(result)
    name = argument_of(model)
    for step in range(STEPS if setting.subject.causal and cache is not None else 0):
        ids = setting.tokens(step + 1, ROWS, 1)
        outputs[f"step {step}"] = main_output(model(input_ids=ids, use_cache=True, **{name: cache}))
    return outputs


LONG = Scenario("long rows", _row)


def many_experts(variant: Variant) -> Variant | None:
    """The variant with as many experts as large models have; None where tokens are not routed."""
    found = [name for name in EXPERT_FIELDS if (getattr(variant.config, name, None) or 0) > 1]
    return variant.changed(dict.fromkeys(found, EXPERTS), "many experts") if found else None


def _wide_heads(bench: Workbench, variant: Variant, implementation: str) -> Mapping[str, Figure]:
    """Heads that torch's attention treats in another way: one row, and a prompt with tokens that follow."""
    from .parity import SCENARIOS, exact

    config = copy.deepcopy(variant.config)
    config.get_text_config().head_dim = WIDE
    wide = replace(variant, name="wide heads", config=config)
    shapes = [{name: value.shape for name, value in bench.weights(one).items()} for one in (variant, wide)]
    if shapes[0] == shapes[1]:
        raise NotRun("no field of the configuration says how wide a head is")
    exact(bench, wide, implementation, SCENARIOS[0])
    return exact(bench, wide, implementation, LONG)


def _speaks_of_fp16(model_class: Any) -> bool:
    """Whether a modeling file does something about fp16, as T5 does where hidden states become infinite."""
    return "float16" in Path(inspect.getfile(model_class)).read_text("utf-8")


def _beyond(bench: Workbench, variant: Variant) -> Mapping[str, Figure]:
    """Where the original's hidden states pass the largest number of fp16 and its output is finite, so is the other's.

    Raises:
        NotRun: the original's is not finite either, whatever its matrices are multiplied with.
    """
    import torch

    for factor in BEYOND:
        pair = bench.fresh(variant, "eager", "float16")
        for model in (pair.original, pair.rewritten):
            width = getattr(model.config.get_text_config(), "hidden_size", None)
            with torch.no_grad():
                for module in model.modules():
                    if isinstance(module, torch.nn.Linear) and module.in_features != module.out_features == width:
                        module.weight.mul_(factor)
        largest, own = on_original(_largest, bench, pair.original)
        if largest == float("inf") and own:
            if not _largest(bench, pair.rewritten, False)[1]:
                raise Mismatch(f"an output that is finite in the original is not, weights × {factor:g}")
            return {"factor": factor}
    raise NotRun("the original is not finite where its hidden states are not")


def _largest(bench: Workbench, model: Any, watch: bool = True) -> tuple[float, bool]:
    """The largest number that a part of a model gives, if that is watched, and whether its outputs are finite."""
    import torch

    found = [0.0]

    def seen(module: Any, arguments: Any, output: Any) -> None:
        values = everything(output).values()
        found.extend(float(value.abs().amax()) for value in values if value.is_floating_point() and value.numel())

    given = make(bench.base.inputs, model.config, 2, bench.seed_for("beyond"), model.dtype)
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for module in model.modules() if watch else ():
            hooks.enter_context(module.register_forward_hook(seen))
        out = model(**{name: value.to(bench.options.device) for name, value in given.items()})
    return max(found), finite({name: value for name, value in everything(out).items() if value.is_floating_point()})


def modules_alone(bench: Workbench, variant: Variant, dtype: str) -> Mapping[str, Figure]:
    """Every module of the file on what the original hands it, as it is and times `LARGE`, by its error against fp64.

    Raises:
        Mismatch: a module is further from fp64 than the original's own rounding explains.
    """
    import torch

    modules = Modules(bench, variant, dtype)
    eps = torch.finfo(getattr(torch, dtype)).eps
    worst, done = 0.0, 0
    for name in modules.inputs(0):
        for scale in (1.0, LARGE):
            try:
                first = modules.runs(name, scale, 0)
            except NotRun:
                continue  # a module that does not run alone on the original is compared with the whole
            with about(f"{name}, inputs × {scale:g}"):
                for names in _by_themselves(first.original):
                    draw = partial(modules.draw, name, scale, first.only(names))
                    figures = compare_draws(draw, eps, modules.routes(name))
                    worst = max(worst, float(figures.get("rms ratio", 0.0)))
            done += 1
    if not done:
        raise NotRun("no module of the original runs by itself")
    return {"modules": done, "rms ratio": worst}


@dataclass
class Modules:
    """Runs single modules of both sides on what the original hands them in one prompt or another."""

    bench: Workbench
    variant: Variant
    dtype: str
    _inputs: dict[int, dict[str, tuple[Any, Any]]] = field(default_factory=dict)

    def inputs(self, number: int) -> dict[str, tuple[Any, Any]]:
        """What each module is called with in the prompt of that number."""
        if number not in self._inputs:
            self._inputs[number] = on_original(inputs_of, self._pair.original, self.bench, self.variant, number)
        return self._inputs[number]

    def runs(self, name: str, scale: float, number: int) -> Runs:
        """A module's outputs; of the first prompt only some rows, where there are many.

        The truth of an fp32 run has no roundings to fp32: a norm makes the same ones in fp64, and was exact by that.

        Raises:
            NotRun: the original's module does not run alone.
            Mismatch: the rewritten one has other outputs, or in another dtype.
        """
        import torch

        if name not in self.inputs(number):
            raise NotRun("the original calls it with no other prompt")
        given = tuple(_scaled(part, scale) for part in self.inputs(number)[name])
        wide = tuple(_cast(part, getattr(torch, self.dtype), torch.float64) for part in given)
        run = partial(_run, whole=number > 0)
        with unrounded() if self.dtype == "float32" else contextlib.nullcontext():
            truth = on_original(run, self._exact.get_submodule(name), *wide)
        own = on_original(run, self._pair.original.get_submodule(name), *given)
        if own.keys() != truth.keys() or not finite(truth):
            raise NotRun("the original has other outputs in fp64, or not finite ones")
        new = run(self._pair.rewritten.get_submodule(name), *given)
        same_names(own, new)
        require_same_dtypes(own, new)
        return Runs(truth, own, new)

    def draw(self, name: str, scale: float, first: Runs, number: int) -> Runs:
        """The outputs of a module that `first` has, on the prompt of a number; of the first prompt `first` itself."""
        return self.runs(name, scale, number).only(list(first.original)) if number else first

    def routes(self, name: str) -> bool:
        """Whether a module chooses experts, which a rounding may flip."""
        return _routes(self._exact.get_submodule(name), self.variant)

    @property
    def _pair(self) -> Pair:
        return self.bench.pair(self.variant, "eager", self.dtype)

    @property
    def _exact(self) -> Any:
        return self.bench.pair(self.variant, "eager", "float64").original


def inputs_of(model: Any, bench: Workbench, variant: Variant, number: int = 0) -> dict[str, tuple[Any, Any]]:
    """What the modules of the modeling file are called with on the long prompt of a number, by name.

    Of modules that differ in their weights alone there is one, and of several calls the first.
    """
    import torch

    found: dict[str, tuple[Any, Any]] = {}
    own = type(model).__module__
    kinds = {_kind(module): name for name, module in model.named_modules() if name and type(module).__module__ == own}

    def note(name: str, module: Any, arguments: Any, keywords: Any) -> None:
        found.setdefault(name, (arguments, keywords))

    seed = bench.seed_for(variant.name, "modules", *([number] if number else []))
    setting = Setting(bench.subject, variant.vocab_size, bench.options.device, seed)
    arguments: dict[str, Any] = {"use_cache": False} if bench.subject.accepts("use_cache") else {}
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name in kinds.values():
            module = model.get_submodule(name)
            hooks.enter_context(module.register_forward_pre_hook(partial(note, name), with_kwargs=True))
        model(input_ids=setting.prompt(1, positions_of(model, TOKENS)).input_ids, **arguments)
    return found


def _run(module: Any, arguments: Any, keywords: Any, whole: bool) -> Outputs:
    import torch

    with torch.no_grad():
        found = everything(module(*arguments, **keywords))
    return {name: value if whole else _thinned(value) for name, value in found.items() if value.is_floating_point()}


def _by_themselves(outputs: Observations) -> list[list[str]]:
    """The outputs of a module one by one, where they are large enough to have an RMS, and the small ones together."""
    small = [name for name, value in outputs.items() if value.numel() < FEW]
    return [[name] for name in outputs if name not in small] + ([small] if small else [])


def _thinned(value: Tensor) -> Tensor:
    step = value.numel() // ENOUGH + 1
    return value if step == 1 or value.dim() < 2 else value.flatten(0, -2)[step - 1 :: step]


def _kind(module: Any) -> tuple[Any, ...]:
    """What tells modules apart but their weights and their number."""
    plain = (bool, int, float, str, type(None))
    return tuple(
        (path, type(part), name, value)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, plain) and not name.endswith("layer_idx")
    )


def _routes(module: Any, variant: Variant) -> bool:
    """Whether a module chooses experts, which a rounding may flip."""
    words = ("expert", "router", "gate", "moe")
    names = [type(part).__name__.lower() for part in module.modules()]
    return variant.routed and any(word in name for name in names for word in words)


def _scaled(value: Any, scale: float) -> Any:
    """Arguments of a module, its hidden states times `scale`; masks and rotations as they are."""
    if isinstance(value, dict):
        return {name: _one(part, scale) if name == "hidden_states" else part for name, part in value.items()}
    return tuple(_one(part, scale) if number == 0 else part for number, part in enumerate(value))


def _one(value: Any, scale: float) -> Any:
    import torch

    return value * scale if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _cast(value: Any, old: Any, new: Any) -> Any:
    """Arguments with the tensors of one dtype in another."""
    from torch.utils._pytree import tree_map

    return tree_map(lambda part: part.to(new) if getattr(part, "dtype", None) is old else part, value)
