"""Bugs of arguments, outputs, long rows and changed models are caught by the check that is meant to.

The checks are called by themselves; `bench/planted.py` runs a whole verification of every bug in `argument_bugs`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from rewrite.verify import Options
from rewrite.verify.calls.argument_checks import argument_checks
from rewrite.verify.calls.precision import precision_checks
from rewrite.verify.calls.registered import registered_checks
from rewrite.verify.judging.checks import Check, CheckRun, run_check
from rewrite.verify.judging.verdict import Figure
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.configs import small_variants
from rewrite.verify.models.model_pair import Workbench
from rewrite.verify.models.subjects import Subject, find_subjects
from rewrite.verify.runner import settled
from rewrite.verify.secondary_classes import class_alone
from rewrite.verify.state.checkpoints import checkpoint_checks
from rewrite.verify.state.declarations import declared_checks
from rewrite.verify.state.embeddings import embedding_checks
from rewrite.verify.state.initial import initial_checks
from rewrite.verify.state.training_checks import changing_checks

from .argument_bugs import ARGUMENTS
from .copies import plant, upstream

CAUGHT = {
    "llama": {
        "num_items_in_batch dropped": "given num_items_in_batch",
        "logits_to_keep only as a number": "given logits_to_keep, a tensor",
        "a cache against the caller's wish": "given without a cache",
        "packed positions do not reach the mask": "given positions that begin again",
        "keys copied in another order for many queries": "sdpa, base: given left padding, many tokens",
        "embeddings with a cache": "given the cache that came back, embeddings",
        "a registered attention function ignored": "a registered attention function",
        "frequencies in the model's dtype": "bfloat16, base: module by module",
        "packed weights remembered by the first": "after some weights replaced by assignment",
        "embeddings copied instead of set": "LlamaModel",
        "a state dict to save ignored": "another state dict saved",
        "plan for FSDP lost": "what model classes declare",
        "initial weights too large": "initial weights",
    },
    "bert": {
        "encoder's keys taken anew": "given encoder states, the cache that came back",
        "token types ignored": "given token types",
        "chunks without their residual": "chunked: given the plain arguments",
        "next sentence the other way": "BertForNextSentencePrediction",
    },
    "qwen3_moe": {
        "auxiliary loss of padding too": "given router's logits and loss, padding",
        "experts beyond the sixteenth": "fp64 sdpa, many experts",
    },
}
CASES = [(model, name) for model, bugs in CAUGHT.items() for name in bugs]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the tool generates, a model each."""
    root = tmp_path_factory.mktemp("packages")
    for model in CAUGHT:
        command = [sys.executable, "-c", "from rewrite.cli import main; main()", model, "--out", str(root / model)]
        subprocess.run([*command, "--no-verify", "--diff", "none"], check=True, capture_output=True)
    return {model: root / model for model in CAUGHT}


def all_checks(model: str, package: Path) -> Iterator[CheckRun]:
    """The checks that these bugs are about, none of them run yet."""
    modules = loaded_sides.load(loaded_sides.locate(upstream(model))), loaded_sides.load(loaded_sides.locate(package))
    subjects = find_subjects(*modules)
    main = subjects.main
    bench = Workbench(main, small_variants(main.original, main.causal, {}), Options(seeds=1))
    yield from declared_checks(subjects, modules, bench)
    yield from initial_checks(bench)
    yield from embedding_checks(bench)
    yield from checkpoint_checks(bench)
    yield from argument_checks(bench, bench.base)
    yield from changing_checks(bench, bench.base)
    yield from registered_checks(bench, bench.base)
    yield from precision_checks(bench, bench.base)
    for other in subjects.others:
        yield CheckRun(other.name, partial(alone, other))


def alone(subject: Subject) -> Mapping[str, Figure]:
    variants = small_variants(subject.original, subject.causal, {})
    return class_alone(Workbench(subject, variants[:1], Options(seeds=1)))


def result_of(model: str, package: Path, words: str) -> Check:
    with settled(Options()):
        named = [check for check in all_checks(model, package) if words in check.name]
        assert named, f"no check is called {words!r}"
        return run_check(named[0])


@pytest.mark.parametrize(("model", "name"), CASES, ids=lambda part: str(part).replace(" ", "_"))
def test_bug_is_caught_by_its_check(model: str, name: str, packages: dict[str, Path], tmp_path: Path) -> None:
    bug = next(bug for bug in ARGUMENTS if (bug.model, bug.name) == (model, name))
    package = tmp_path / model
    shutil.copytree(packages[model], package)
    plant(package, bug.file or f"modeling_{model}.py", bug.old, bug.new, bug.count)
    result = result_of(model, package, CAUGHT[model][name])
    assert result.status == "failed", f"{result.name}: {result.status}"
    print(result.detail)


@pytest.mark.parametrize("model", CAUGHT)
def test_without_a_bug_the_same_checks_pass(model: str, packages: dict[str, Path]) -> None:
    with settled(Options()):
        wanted = [words for words in CAUGHT[model].values() if "precision" not in words]
        checks = [
            check for check in all_checks(model, packages[model]) if any(words in check.name for words in wanted)
        ]
        results = [run_check(check) for check in checks]
    assert [(result.name, result.detail) for result in results if result.status != "passed"] == []


def test_every_bug_is_named_once() -> None:
    assert len({bug.id for bug in ARGUMENTS}) == len(ARGUMENTS)
