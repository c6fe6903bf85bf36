"""Gate 2: the embeddings and the head that a model names can be asked for and replaced, and grow as the original's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from ..calls.argument_values import IDS, Call
from ..calls.scenarios import Outputs, Setting, main_output
from ..judging.checks import CheckRun
from ..judging.compare import Mismatch, NotRun, about, near_exact
from ..judging.verdict import Figure
from ..models.inputs import seed_all
from ..models.model_pair import Workbench, on_original, unrounded_original, without_added
from .class_structure import same_state, same_tying

MORE = 8
"""How many rows a vocabulary grows by."""


def embedding_checks(bench: Workbench) -> Iterator[CheckRun]:
    """Each way in which a user gets at the embeddings."""
    for name, change in WAYS.items():
        yield CheckRun(name, partial(_changed, bench, change))


def embeddings_alone(bench: Workbench) -> Mapping[str, Figure]:
    """The first two ways, for a class beside the main one."""
    names = list(WAYS)[:2]
    for name in names:
        with about(name):
            _changed(bench, WAYS[name])
    return {"embeddings": len(names)}


def _changed(bench: Workbench, change: Callable[[Any, Setting], None]) -> Mapping[str, Figure]:
    if IDS not in bench.base.inputs:
        raise NotRun(f"{bench.subject.name} reads no text")
    if bench.rounding is not None:
        raise NotRun("the original is rounded in the modules that it was built with")
    pair, again = bench.fresh(bench.base, "eager", "float64"), bench.plain_original(bench.base, "eager", "float64")
    setting = Setting(bench.subject, bench.base.vocab_size, bench.options.device, bench.seed_for("embeddings"))
    expected = on_original(_after, pair.original, bench, setting, change)
    found = _after(pair.rewritten, bench, setting, change)
    try:
        same_state(pair.original.state_dict(), without_added(pair.rewritten))
    except Mismatch:  # new rows are drawn by the mean and the spread of the others, which a GPU may sum in any order
        other = bench.plain_original(bench.base, "eager", "float64")
        on_original(_after, other, bench, setting, change)
        _require_alike(pair.original, other)
        raise
    same_tying(pair.original, pair.rewritten)
    for get in ("get_input_embeddings", "get_output_embeddings"):
        wanted, given = on_original(_place, pair.original, get), _place(pair.rewritten, get)
        if wanted != given:
            raise Mismatch(f"{get}() is {given or 'no module of the model'}, expected {wanted or 'none'}")
    return near_exact(expected, found, unrounded=unrounded_original(_after, again, bench, setting, change))


def _require_alike(first: Any, second: Any) -> None:
    """Two models of the original have the same weights now.

    Raises:
        NotRun: they have not.
    """
    try:
        same_state(first.state_dict(), second.state_dict())
    except Mismatch as mismatch:
        raise NotRun(f"the original makes other weights each time: {mismatch}") from None


def _place(model: Any, get: str) -> str:
    module = getattr(model, get)()
    return next((name for name, other in model.named_modules() if other is module), "")


def _after(model: Any, bench: Workbench, setting: Setting, change: Callable[[Any, Setting], None]) -> Outputs:
    """A forward pass before, so that what is packed is packed, and what comes out afterwards, of new tokens too."""
    import torch

    with torch.no_grad():
        plain = Call(model, setting, bench.base.inputs).plain
        model(**plain)
        seed_all(setting.seed)
        change(model, setting)
        rows = int(model.get_input_embeddings().weight.shape[0])
        plain[IDS][:, 3] = rows - 1
        return {"logits": main_output(model(**plain))}


def _unchanged(model: Any, setting: Setting) -> None:
    """Nothing is done: the embeddings are only asked for."""


def _set_input(model: Any, setting: Setting) -> None:
    import torch

    old = model.get_input_embeddings().weight
    new = torch.nn.Embedding(old.shape[0], old.shape[1], dtype=old.dtype).to(old.device)
    model.set_input_embeddings(new)
    if model.get_input_embeddings() is not new:
        raise Mismatch("get_input_embeddings() is not what set_input_embeddings() was given")


def _set_output(model: Any, setting: Setting) -> None:
    import torch

    old = model.get_output_embeddings()
    if old is None:
        raise NotRun("the model has no output embeddings")
    new = torch.nn.Linear(old.in_features, old.out_features, bias=old.bias is not None, dtype=old.weight.dtype)
    model.set_output_embeddings(new.to(old.weight.device))


def _grown(model: Any, setting: Setting) -> None:
    model.resize_token_embeddings(int(model.get_input_embeddings().weight.shape[0]) + MORE)


WAYS: dict[str, Callable[[Any, Setting], None]] = {
    "input and output embeddings": _unchanged,
    "input embeddings replaced": _set_input,
    "output embeddings replaced": _set_output,
    "a larger vocabulary": _grown,
}
