"""Gate 4, the forms that a package computes in: what was rewritten runs, nothing is repeated or joined anew.

None of it shows in numbers: a method that is never taken, keys that are repeated for every query head, and biases that
are joined in each call give the same ones, only slower.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType
from typing import Any

from ..judging.checks import CheckRun
from ..judging.compare import Mismatch, NotRun
from ..judging.verdict import Figure
from ..models.inputs import prompt
from ..models.model_pair import Pair, Workbench, lock_of, on_original
from .runtime import called, each_call, used

TAKEN = ("decode",)
"""Methods that stand for others wherever their class is used: a layer's step.

What tells kernels of a class, or is a part's that another one stands in front of, may be called by nothing on a CPU.
"""


def form_checks(bench: Workbench) -> Iterator[CheckRun]:
    """The checks of a package of text."""
    yield CheckRun("methods that were added run", partial(_added_run, bench))
    yield CheckRun("keys and values are not repeated", partial(_not_repeated, bench))
    yield CheckRun("weights are joined once", partial(_joined_once, bench))


def _added_run(bench: Workbench) -> Mapping[str, Figure]:
    """Plain calls, and tokens generated where there is a loop: what stands for the original's methods is taken.

    Raises:
        Mismatch: one is not.
        NotRun: the modules have no method more.
    """
    wanted: dict[CodeType, str] = {}
    taken: set[CodeType] = set()
    for implementation in bench.implementations():
        pair = bench.fresh(bench.base, implementation, "float32")
        wanted |= _added(pair)
        on_original(called, bench, pair.original)
        with each_call(lambda frame: taken.add(frame.f_code)):
            used(bench, pair.rewritten)
    if not wanted:
        raise NotRun("no method was added that stands for others")
    left = sorted(name for code, name in wanted.items() if code not in taken)
    if left:
        raise Mismatch(f"{left[0]} was added, and nothing calls it" + (f"; {', '.join(left[1:])}" if left[1:] else ""))
    return {"methods": len(wanted)}


def _added(pair: Pair) -> dict[CodeType, str]:
    """The code of the methods that the rewritten modules' classes have beyond those of the original ones."""
    found: dict[CodeType, str] = {}
    originals = dict(pair.original.named_modules())
    for path, module in pair.rewritten.named_modules():
        kind = type(module)
        if path not in originals or kind.__module__ != type(pair.rewritten).__module__:
            continue
        before = vars(type(originals[path]))
        for name in TAKEN:
            member = vars(kind).get(name)
            if name not in before and inspect.isfunction(member):
                found[inspect.unwrap(member).__code__] = f"{kind.__name__}.{name}"
    return found


def _not_repeated(bench: Workbench) -> Mapping[str, Figure]:
    """Torch's attention, given a mask, gets keys and values as they are, where the original repeats them first.

    Raises:
        Mismatch: it gets as many of them as in the original.
        NotRun: the original repeats none, or the package leaves it so.
    """
    if not _rewritten(bench, "native_gqa"):
        raise NotRun("the package does not say that `native_gqa` rewrote it")
    if "sdpa" not in bench.implementations():
        raise NotRun("the original does not call torch's attention")
    pair = bench.fresh(bench.base, "sdpa", "float32")
    own = on_original(_keys, bench, pair.original)
    kept = _heads(pair.original.config)
    if not any(heads > kept for heads in own):
        raise NotRun("the original repeats no keys")
    repeated = [heads for heads in _keys(bench, pair.rewritten) if heads > kept]
    if repeated:
        raise Mismatch(f"attention is given {repeated[0]} heads of keys in memory, of which {kept} differ")
    return {"calls": len(own), "heads": kept}


def _rewritten(bench: Workbench, transform: str) -> bool:
    """Whether a transform rewrote something of the package, by its lock; False for a file without one."""
    return bool(lock_of(bench).get("transforms", {}).get(transform, {}).get("rewritten"))


def _heads(config: Any) -> int:
    text = config.get_text_config()
    found = getattr(text, "num_key_value_heads", None)
    return int(found) if isinstance(found, int) else sys.maxsize


def _keys(bench: Workbench, model: Any) -> list[int]:
    """How many heads of keys stand in memory, in each call of torch's attention in a pass over rows with padding."""
    import torch
    from torch.nn import functional

    found: list[int] = []

    def seen(attend: Any, query: Any, key: Any, *rest: Any, **named: Any) -> Any:
        if key.dim() == 4:
            found.append(key.shape[1] if key.stride(1) else 1)
        return attend(query, key, *rest, **named)

    text = prompt(bench.seed_for("keys"), bench.base.vocab_size, 2, 12, "left", bench.options.device)
    with _replaced(functional, "scaled_dot_product_attention", seen), torch.no_grad():
        model(input_ids=text.input_ids, attention_mask=text.mask)
    return found


@contextlib.contextmanager
def _replaced(module: Any, name: str, seen: Callable[..., Any]) -> Iterator[None]:
    """Let `seen` be called in place of a function of torch's, with that function before its arguments.

    No mode of torch's is used for it: where one is on, operators go another way.
    """
    plain = getattr(module, name)
    setattr(module, name, partial(seen, plain))
    try:
        yield
    finally:
        setattr(module, name, plain)


def _joined_once(bench: Workbench) -> Mapping[str, Figure]:
    """In a third call no tensor is made of parameters alone, but where the original makes one.

    Raises:
        Mismatch: parameters are joined anew.
    """
    count = 0
    for variant in (bench.base, *([bench.varied] if bench.varied else [])):
        pair = bench.fresh(variant, bench.implementations()[0], "float32")
        own = on_original(_joins, bench, pair.original)
        found = _joins(bench, pair.rewritten)
        if found > own:
            raise Mismatch(f"weights are joined {found} times in one call, in the original {own}, {variant.name}")
        count += 1
    return {"models": count}


def _joins(bench: Workbench, model: Any) -> int:
    """How many of the tensors that a third call joins from others are made of parameters alone."""
    import torch

    for _ in range(2):
        called(bench, model)
    weights = {parameter.data_ptr() for parameter in model.parameters() if parameter.numel()}
    found = 0

    def seen(join: Any, tensors: Any, *rest: Any, **named: Any) -> Any:
        nonlocal found
        found += all(tensor.data_ptr() in weights for tensor in tensors)
        return join(tensors, *rest, **named)

    with _replaced(torch, "cat", seen):
        called(bench, model)
    return found
