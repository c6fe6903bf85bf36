"""Both models of a measurement: built on the device, with the same weights, and with one copy of them.

The rewritten model is built first and owns the weights, drawn on the device; every other model is built without memory
and takes its parameters and buffers from the first. So a model of 61 GB is compared with its original on a card of 80,
and the addresses and layouts that the products read are the same on both sides.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rewrite.errors import NotAPackage, OriginalNotFound, VerificationError
from rewrite.measure.runtime_part import runtime_part
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.subjects import find_subjects

LOCK = "rewrite.lock"


@dataclass(frozen=True)
class Subject:
    """The main class of a package and of its original, and the package's own `explain`."""

    package: Path
    original: Any
    rewritten: Any
    explain: Callable[[Any], Any]
    module: ModuleType
    """The original's module."""


def load(package: Path, original: str | None = None, *, calls: bool = False) -> Subject:
    """Import a package and its original; what is measured of it is decoding, or `calls`.

    Raises:
        NotAPackage: the folder has no lock.
        OriginalNotFound: the lock names an original that is not here.
        VerificationError: the main class does not decode.
    """
    source = lock_of(package)["source"]
    upstream = original or source["module"] or str(package.resolve() / source["target"])
    if original is None and source["module"] is None and not Path(upstream).is_file():
        raise OriginalNotFound(package, source["path"], source["sha256"])
    module, rewritten = (
        loaded_sides.load(loaded_sides.locate(upstream)),
        loaded_sides.load(loaded_sides.locate(package)),
    )
    main = find_subjects(module, rewritten).main
    if not calls and (not main.causal or not hasattr(main.original, "generate")):
        raise VerificationError(
            f"{main.name} does not generate, so there is no decoding to measure: --forward measures calls."
        )
    explain = runtime_part(str(rewritten.__package__), "core/explanation").explain
    return Subject(package, main.original, main.rewritten, explain, module)


def lock_of(package: Path) -> dict[str, Any]:
    """The content of a package's lock, read without the tool that wrote it.

    Raises:
        NotAPackage: there is none, or it is no JSON.
    """
    path = package / LOCK
    if not package.is_dir():
        raise NotAPackage(package, "it is a file" if package.is_file() else "there is no such folder")
    if not path.is_file():
        raise NotAPackage(package, f"it has no {LOCK}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise NotAPackage(package, f"its {LOCK} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise NotAPackage(package, f"its {LOCK} cannot be read: the whole should be an object")
    return content


def private_copy(module: ModuleType) -> ModuleType:
    """The same file imported once more, for a library that changes the module everyone shares."""
    assert module.__file__ is not None
    name = f"{module.__name__}__measured"
    spec = importlib.util.spec_from_file_location(name, module.__file__)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    sys.modules[name] = fresh
    spec.loader.exec_module(fresh)
    return fresh


def build(model_class: Any, config: Any, dtype: str, device: str, seed: int = 0) -> Any:
    """A model in eval mode with random weights, drawn on the device."""
    import torch

    torch.manual_seed(seed)
    with torch.device(device):
        model = model_class._from_config(copy.deepcopy(config), dtype=getattr(torch, dtype))
    model.to(device)  # `torch.Tensor(size)`, which some models make parameters of, is on the CPU all the same
    randomise(model)
    return settled(model)


def from_checkpoint(model_class: Any, weights: str, dtype: str, device: str) -> Any:
    """A model in eval mode with the weights of a checkpoint."""
    import torch

    return settled(model_class.from_pretrained(weights, dtype=getattr(torch, dtype)).to(device))


def settled(model: Any) -> Any:
    """The model in eval mode, without gradients, generating to the last token asked for."""
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.eos_token_id, generation.pad_token_id = None, 0
    return model.eval().requires_grad_(False)


def randomise(model: Any) -> None:
    """Draw matrices with variance 1 / fan-in and vary norms, so that logits are neither flat nor one-hot."""
    import torch

    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                scale = 2.0 if id(parameter) in embeddings else 1.5
                parameter.normal_(0.0, scale * parameter.shape[-1] ** -0.5)


def sharing(model_class: Any, donor: Any) -> Any:
    """A model of another class with the parameters and buffers of `donor`: the very same tensors.

    Raises:
        VerificationError: the donor lacks one of them.
    """
    import torch

    with torch.device("meta"):
        model = model_class._from_config(copy.deepcopy(donor.config), dtype=donor.dtype)
    modules = dict(donor.named_modules())
    for name, module in model.named_modules():
        given = modules.get(name)
        for table in ("_parameters", "_buffers"):
            for key, value in getattr(module, table).items():
                if value is not None:
                    getattr(module, table)[key] = _given(getattr(given, table, {}).get(key), f"{name}.{key}")
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                setattr(module, key, _given(getattr(given, key, None), f"{name}.{key}"))
    return settled(model)


def _given(tensor: Any, name: str) -> Any:
    if tensor is None:
        raise VerificationError(f"the rewritten model has no {name}, which the original has.")
    return tensor
