"""Gate 1: checkpoints of the original load in the rewritten class, and what that saves is the same, byte for byte."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..judging.checks import CheckRun
from ..judging.compare import Mismatch
from ..judging.verdict import Figure
from ..models.configs import Variant
from ..models.model_inputs import make
from ..models.model_pair import Workbench, build, on_original
from .class_structure import same_state, same_tying

SHARD = 60_000


def checkpoint_checks(bench: Workbench) -> Iterator[CheckRun]:
    """Round trips through `save_pretrained` and `from_pretrained`."""
    variants = bench.variants[:1] if bench.options.quick else bench.variants
    for variant in variants:
        yield CheckRun(f"checkpoint round trip, {variant.name}", partial(round_trip, bench, variant, None))
    if not bench.options.quick:
        yield CheckRun("checkpoint round trip, sharded", lambda: round_trip(bench, bench.base, SHARD))
    yield CheckRun("another state dict saved", lambda: _another_state(bench))


def round_trip(bench: Workbench, variant: Variant, shard: int | None = None) -> Mapping[str, Figure]:
    """Original saves, rewritten loads, runs and saves, original loads that."""
    import torch

    sharding = {} if shard is None else {"max_shard_size": shard}
    with TemporaryDirectory() as folder:
        first, second, stock = (Path(folder) / name for name in ("first", "second", "stock"))
        model = on_original(build, bench.subject.original, variant, "eager", "float32", "cpu")
        model.load_state_dict(bench.weights(variant))
        on_original(model.save_pretrained, first, **sharding)
        reloaded, expected_info = on_original(_load, bench.subject.original, first, variant)
        on_original(reloaded.save_pretrained, stock, **sharding)
        loaded, info = _load(bench.subject.rewritten, first, variant)
        _same_report(expected_info, info)
        same_state(reloaded.state_dict(), loaded.state_dict(), "after from_pretrained: ")
        same_tying(reloaded, loaded)
        with torch.no_grad():
            loaded(**make(variant.inputs, loaded.config, 1, 0, torch.float32))
        loaded.save_pretrained(second, **sharding)
        files = _same_files(stock, second)
        back, back_info = _load(bench.subject.original, second, variant)
        _same_report(expected_info, back_info)
        # The same bytes were saved: what differs now, the original leaves as it finds it in memory (PixioBackbone).
        on_original(same_state, reloaded.state_dict(), back.state_dict(), "the same file loaded twice: ")
    return {"files": files, "tensors": len(loaded.state_dict())}


def _another_state(bench: Workbench) -> Mapping[str, Figure]:
    """`save_pretrained(state_dict=…)` writes what it is given: what trainers that gather weights do."""
    import torch

    pair = bench.fresh(bench.base, bench.implementations()[0], "float32")
    with TemporaryDirectory() as folder, torch.no_grad():
        for model, name in ((pair.original, "expected"), (pair.rewritten, "found")):
            on = on_original if model is pair.original else lambda call, *given, **named: call(*given, **named)
            arguments = make(bench.base.inputs, model.config, 1, 0, torch.float32)
            on(model, **{key: value.to(bench.options.device) for key, value in arguments.items()})
            state = {key: value * 3 + 1 for key, value in model.state_dict().items()}
            on(model.save_pretrained, Path(folder) / name, state_dict=state)
        return {"files": _same_files(Path(folder) / "expected", Path(folder) / "found")}


def _load(model_class: Any, folder: Path, variant: Variant) -> tuple[Any, Mapping[str, Any]]:
    # A part of a larger model may name the whole's configuration class: `from_pretrained` would read it as that.
    own = isinstance(variant.config, model_class.config_class)
    given = {} if own else {"config": copy.deepcopy(variant.config)}
    model, info = model_class.from_pretrained(folder, output_loading_info=True, **given)
    return model, info


def _same_report(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for name in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        wanted, given = sorted(map(str, expected.get(name) or ())), sorted(map(str, found.get(name) or ()))
        if wanted != given:
            raise Mismatch(f"from_pretrained reports {name} {given[:5]}, the original {wanted[:5] or 'none'}")


def _same_files(expected: Path, found: Path) -> int:
    wanted, given = _digests(expected), _digests(found)
    if wanted.keys() != given.keys():
        raise Mismatch(f"save_pretrained wrote {sorted(given)}, the original {sorted(wanted)}")
    for name, digest in wanted.items():
        if given[name] != digest:
            raise Mismatch(f"save_pretrained wrote another {name} than the original")
    return len(wanted)


def _digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}
