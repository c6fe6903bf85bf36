"""Whether a respelled file still computes what it did: small models of both, with the same weights and inputs.

`python -m tests.metamorphic.computes llama mixtral` answers for every rewriting of these models' files.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rewrite.source.resolve import Source, resolve
from rewrite.verify.judging.tolerances import bound
from rewrite.verify.models.configs import Variant, small_variants
from rewrite.verify.models.model_inputs import make, tensors
from rewrite.verify.models.subjects import Subject, find_subjects

from .rewriting import respell
from .rewritings import all_rewritings

SEED = 7


def differences(source: Source, text: str, folder: Path) -> Iterator[tuple[str, float]]:
    """Yield a name and the largest difference, in fp64 relative to the largest value, of every comparison.

    The main class of the file is built small in each of its variants; it is run in evaluation with the attention
    function of the file itself, and in training with the one that transformers chooses.
    """
    original = importlib.import_module(str(source.module))
    respelled = load(source, text, folder)
    subject = find_subjects(original, respelled).main
    for variant in small_variants(subject.original, subject.causal, {}):
        for training in (False, True):
            mode = "training" if training else "evaluation"
            yield f"{subject.name} {variant.name} {mode}", _difference(subject, variant, training)


def load(source: Source, text: str, folder: Path) -> ModuleType:
    """Load a text as a neighbour of the file that it was made of, so that its relative imports work."""
    path = folder / f"{source.path.stem}_respelled.py"
    path.write_text(text, "utf-8")
    name = f"{source.module}_respelled"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _difference(subject: Subject, variant: Variant, training: bool) -> float:
    original, respelled = (
        _built(cls, variant, training).double().train(training) for cls in (subject.original, subject.rewritten)
    )
    with torch.no_grad():
        theirs, ours = original.state_dict(), respelled.state_dict()
        assert len(theirs) == len(ours), "another number of weights"
        for one, other in zip(theirs.values(), ours.values(), strict=True):  # attributes may have been renamed
            other.copy_(one)
    arguments = make(variant.inputs, original.config, 2, SEED, torch.float64)
    runs = []
    for model in (original, respelled):
        torch.manual_seed(SEED)
        with torch.no_grad():
            runs.append(tensors(model(**{name: value.clone() for name, value in arguments.items()})))
    assert runs[0], "no outputs"
    assert runs[0].keys() == runs[1].keys(), "other outputs"
    return max(_relative(runs[0][name], runs[1][name]) for name in runs[0])


def _built(cls: Any, variant: Variant, training: bool) -> Any:
    config = copy.deepcopy(variant.config)
    for part in (config, config.get_text_config()):
        part._experts_implementation = "eager"  # the grouped product knows no fp64
        if not training:
            part._attn_implementation = "eager"
    torch.manual_seed(SEED)
    return cls(config)


def _relative(one: Any, other: Any) -> float:
    assert (one.shape, one.dtype) == (other.shape, other.dtype), "an output of another shape or dtype"
    if torch.equal(one, other) or not one.numel():
        return 0.0
    return float((one - other).abs().max() / one.abs().max().clamp_min(1e-30))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare what was asked for; 1 if a rewriting changed what a model computes."""
    parser = argparse.ArgumentParser(prog="python -m tests.metamorphic.computes", description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a model type, as `rewrite` takes it")
    parser.add_argument("--rewriting", nargs="*", choices=list(all_rewritings()), metavar="NAME", help="only these")
    options = parser.parse_args(arguments)
    wrong = 0
    for model in options.models:
        source = resolve(model)
        for name in options.rewriting or all_rewritings():
            respelled = respell(source.text, all_rewritings()[name])
            if not respelled.places:
                continue
            with tempfile.TemporaryDirectory() as folder:
                found = dict(differences(source, respelled.text, Path(folder)))
            same = max(found.values()) <= bound("fp64 max")
            wrong += not same
            print(f"{model:12} {name:28} {'same' if same else 'DIFFERENT':10} {max(found.values()):.1e}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
