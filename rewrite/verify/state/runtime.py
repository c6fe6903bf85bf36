"""Gate 2, a package's runtime by itself: operators step aside for a reason that is so, and no model is kept.

Neither shows in what a model computes: an operator that steps aside gives the same numbers, only slower, and what is
kept of a model that is gone costs memory, or is taken for another model's.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from hf_rewrite_runtime.cache.cache_argument import argument_of, given_back
from rewrite.measure.runtime_part import has_runtime, runtime_part

from ..judging.checks import CheckRun
from ..judging.compare import Mismatch, NotRun
from ..judging.verdict import Figure
from ..models.configs import Variant
from ..models.inputs import prompt
from ..models.model_inputs import make
from ..models.model_pair import Workbench, build, on_original

if TYPE_CHECKING:
    from torch import Tensor

NOT_SO = frozenset({
    "gradient", "gradient_wanted", "observed", "autocast", "watched", "traced", "capturing",
    "not_a_tensor", "not_linear", "dtype", "shape", "strided", "shared_storage",
})  # fmt: skip
"""Reasons that no operator has in a plain call of a new model, which nobody watches, in one dtype and one batch."""

ROWS = 5
"""Of a plain call: no number of heads, so that one taken for the other shows."""

STEP = "_step_without_graph"
"""Set on a model that has a decode loop, it takes that on a CPU."""

CONTAINERS = (
    dict, list, set, weakref.WeakKeyDictionary, weakref.WeakSet, weakref.WeakValueDictionary,
)  # fmt: skip


def runtime_checks(bench: Workbench, variants: Sequence[Variant]) -> Iterator[CheckRun]:
    """Two checks of a package that has a runtime; the second takes longer, and is no part of a quick verification."""
    yield CheckRun("operators step aside for a cause alone", partial(step_aside, bench, variants))
    if not bench.options.quick:
        yield CheckRun("nothing is kept of a model that is gone", partial(nothing_kept, bench))


def step_aside(bench: Workbench, variants: Sequence[Variant]) -> Mapping[str, Figure]:
    """Plain calls in fp32, and a token more where there is a cache: no operator counts a reason that is not so.

    Raises:
        Mismatch: one does.
    """
    backend = backend_of(bench)
    calls = 0
    for variant in variants:
        for implementation in bench.implementations():
            pair = bench.fresh(variant, implementation, "float32")
            on_original(called, bench, pair.original)
            backend.reset_fallbacks()
            calls += called(bench, pair.rewritten)
            wrong = NOT_SO - {"observed"} if _records(variant.config) else NOT_SO
            found = sorted(f"{operator}: {reason}" for operator, reason in backend.fallbacks() if reason in wrong)
            if found:
                raise Mismatch(
                    f"an operator steps aside without a cause, {implementation}, {variant.name}: {found[0]}"
                )
    return {"calls": calls}


def _records(config: Any) -> bool:
    """Whether a configuration asks for outputs that transformers takes from modules as they are called."""
    return any(
        value is True for name, value in config.get_text_config().to_dict().items() if name.startswith("output_")
    )


def called(bench: Workbench, model: Any) -> int:
    """Call a model as it is used to generate; returns how often."""
    import torch

    given: dict[str, Tensor] = make(bench.base.inputs, model.config, ROWS, bench.seed_for("plain calls"), model.dtype)
    given = {name: value.to(bench.options.device) for name, value in given.items()}
    with torch.no_grad():
        cache = given_back(model(**given))
        if cache is None or not bench.goes_on:
            return 1
        model(input_ids=given["input_ids"][:, :1], **{argument_of(model): cache})
    return 2


def nothing_kept(bench: Workbench) -> Mapping[str, Figure]:
    """Models are used and given up, one and then two at once: the runtime's tables are as large after both.

    Raises:
        Mismatch: they grew, a model stays in memory, or an error was swallowed when one went.
    """
    modules = _modules(bench)
    backend_of(bench)
    sizes: list[dict[str, int]] = []
    with only_new_objects(), swallowed(modules) as errors:
        if on_original(_alive, bench, bench.subject.original, 1):
            raise NotRun("a model of the original stays in memory, too")
        for count in (1, 2):
            if _alive(bench, bench.subject.rewritten, count):
                raise Mismatch("a model that nobody holds any more stays in memory")
            sizes.append(_sizes(modules))
    if errors:
        raise Mismatch(f"an error is swallowed when a model goes: {errors[0]}")
    grown = [f"{name} from {sizes[0].get(name, 0)} to {size}" for name, size in sizes[1].items()
             if size > sizes[0].get(name, 0)]  # fmt: skip
    if grown:
        raise Mismatch(f"the runtime keeps something of models that are gone: {grown[0]}")
    return {"tables": len(sizes[1])}


def _alive(bench: Workbench, model_class: Any, count: int) -> int:
    """How many of `count` models, that were used at the same time, are there after the last reference is gone."""
    models = [_used(bench, model_class) for _ in range(count)]
    seen = [weakref.ref(model) for model in models]
    models.clear()
    gc.collect()
    return sum(one() is not None for one in seen)


def _used(bench: Workbench, model_class: Any) -> Any:
    """A new model that was used."""
    model = build(model_class, bench.base, bench.implementations()[0], "float32", bench.options.device)
    bench.load(model, bench.base)
    used(bench, model)
    return model


def used(bench: Workbench, model: Any) -> None:
    """Call a model, and let it generate where it has a loop for that."""
    import torch

    called(bench, model)
    if hasattr(model, STEP) and bench.goes_on:
        setattr(model, STEP, True)
        ids = prompt(bench.seed_for("forms"), bench.base.vocab_size, 2, 9, "none", bench.options.device).input_ids
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)


@contextlib.contextmanager
def each_call(seen: Callable[[FrameType], None]) -> Iterator[None]:
    """Show every function that is called in a block as it begins."""
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: seen(frame) if event == "call" else None)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextlib.contextmanager
def only_new_objects() -> Iterator[None]:
    """Let the collector look at what is made in a block alone, as all that torch brings takes it long."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def swallowed(modules: Sequence[ModuleType]) -> Iterator[list[str]]:
    """Collect the errors in callbacks and finalizers of modules, which Python prints and goes on from."""
    names = {module.__name__ for module in modules}
    found: list[str] = []

    def take(given: sys.UnraisableHookArgs) -> None:
        trace = given.exc_traceback
        while trace is not None and trace.tb_frame.f_globals.get("__name__") not in names:
            trace = trace.tb_next
        if trace is not None:
            place = f"{trace.tb_frame.f_code.co_name}, line {trace.tb_lineno}"
            found.append(f"{given.exc_type.__name__}: {given.exc_value} (in {place})")

    before, sys.unraisablehook = sys.unraisablehook, take
    try:
        yield found
    finally:
        sys.unraisablehook = before


def _sizes(modules: Sequence[ModuleType]) -> dict[str, int]:
    """How much each table holds that the modules keep."""
    return {
        f"{'.'.join(module.__name__.split('.')[-2:])}.{name}": len(value)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, CONTAINERS) and isinstance(value, Sized) and not name.startswith("__")
    }


def _modules(bench: Workbench) -> list[ModuleType]:
    """The modules of the package's runtime."""
    root = runtime_part(package_of(bench), "core/backend").__name__.removesuffix("core.backend")
    return [module for name, module in list(sys.modules.items()) if name.startswith(root)]


def package_of(bench: Workbench) -> str:
    """The dotted name of the package that the rewritten side is in."""
    return str(bench.subject.rewritten.__module__.rpartition(".")[0])


def backend_of(bench: Workbench) -> Any:
    """The part of the runtime that counts what stepped aside.

    Raises:
        NotRun: the rewritten side has no runtime.
    """
    if not has_runtime(bench.subject.rewritten.__module__):
        raise NotRun("there is no runtime that can be asked")
    return runtime_part(package_of(bench), "core/backend")
