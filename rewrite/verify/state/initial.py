"""Gate 1: with the same seed both sides begin with the same weights, byte for byte, and the same random numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from ..judging.checks import CheckRun
from ..judging.compare import Mismatch
from ..judging.verdict import Figure
from ..models.inputs import seed_all
from ..models.model_pair import Workbench, on_original
from .class_structure import same_state, same_tying

RANGES = {"initializer_range": 0.05, "init_std": 0.05, "initializer_factor": 1.3}
"""Fields that say how large weights are at first, away from what they are by default."""


def initial_checks(bench: Workbench) -> Iterator[CheckRun]:
    """Weights as a class makes them, and as `_init_weights` makes them of anything."""
    yield CheckRun("initial weights", lambda: initial_alike(bench))


def initial_alike(bench: Workbench) -> Mapping[str, Figure]:
    """Compare the weights that both sides begin with, and those that initialising makes of others."""
    import torch

    original, first = on_original(_made, bench.subject.original, bench)
    rewritten, second = _made(bench.subject.rewritten, bench)
    same_state(original.state_dict(), rewritten.state_dict(), "initial weights: ")
    same_tying(original, rewritten)
    if not torch.equal(first, second):
        raise Mismatch("after a model is made, the random numbers go on differently")
    on_original(_again, original, bench)
    _again(rewritten, bench)
    same_state(original.state_dict(), rewritten.state_dict(), "weights as _init_weights makes them: ")
    return {"tensors": len(original.state_dict())}


def _made(model_class: Any, bench: Workbench) -> tuple[Any, Any]:
    import torch

    config = copy.deepcopy(bench.base.config)
    for name, value in RANGES.items():
        if isinstance(getattr(config, name, None), float):
            setattr(config, name, value)
    seed_all(bench.seed_for("initial"))
    return model_class._from_config(config), torch.get_rng_state()


def _again(model: Any, bench: Workbench) -> None:
    """Fill every parameter with one number, and have all initialised: what a missing weight goes through."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
            parameter._is_hf_initialized = False
        seed_all(bench.seed_for("again"))
        for module in model.modules():
            module._is_hf_initialized = False
        model.initialize_weights()  # parts that are models have their own way
