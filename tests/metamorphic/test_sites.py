"""Every rewriting on modeling files of the installed transformers: no site may be lost. `--every-model` takes all."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from rewrite.benchmark.rungs import write
from rewrite.codemod.build import build
from rewrite.package.assemble import assemble
from rewrite.package.lock import Options
from rewrite.source.resolve import resolve
from rewrite.sweep.sweep_plan import files, library
from rewrite.transforms import select
from rewrite.verify import Options as Checks
from rewrite.verify import verify

from . import sites
from .rewriting import respell
from .rewritings import all_rewritings
from .sites import LOST, REWRITTEN, Fate, Site, fates

FIXTURES = Path(__file__).parents[2] / "fixtures"
TINY = FIXTURES / "models" / "modeling_tiny_llama.py"
SAMPLE = (
    "cohere2", "gemma2", "gpt_neox", "granite", "llama", "mixtral", "mpt", "nemotron", "olmo2", "persimmon", "qwen3",
    "vit",
)  # fmt: skip
EACH = 1
"""On how many files of the sample a rewriting is tried; with `--every-model` on all files."""
KEPT_AT_LEAST = 0.98
"""Of the sites rewritten in a file as it was, how many have to be under each rewriting."""
PINNED = sorted(
    {model for models in json.loads((FIXTURES / "sites.json").read_text("utf-8")).values() for model in models}
)
"""The models whose sites are counted for each version."""


@cache
def sites_before(path: Path) -> list[Site]:
    source = resolve(str(path))
    return sites.sites_of(source, source.text)


def fates_of(path: Path, name: str) -> list[Fate] | None:
    """What a rewriting makes of the sites of a file; None where it changes nothing."""
    source = resolve(str(path))
    respelled = respell(source.text, all_rewritings()[name])
    return fates(sites_before(path), sites.sites_of(source, respelled.text)) if respelled.places else None


def kept(found: list[Fate]) -> float:
    """The share of the rewritten sites that still are."""
    counts = Counter(fate.after == REWRITTEN for fate in found if fate.site.outcome == REWRITTEN)
    return counts[True] / max(1, counts.total())


@pytest.mark.slow
@pytest.mark.parametrize("name", list(all_rewritings()))
def test_no_site_is_lost(name: str, request: pytest.FixtureRequest) -> None:
    every = request.config.getoption("--every-model")
    paths = [path for _, path in files(library(None), () if every else SAMPLE)]
    start = list(all_rewritings()).index(name) % len(paths)
    found: list[Fate] = []
    tried = 0
    for path in (*paths[start:], *paths[:start]):
        some = fates_of(path, name)
        found += some or ()
        tried += some is not None
        if tried == EACH and not every:
            break
    assert tried, "no file of the sample has a place for this rewriting"
    assert found, "the files have no site to lose"
    told = [f"{fate.site.transform} · {fate.site.where}: {fate.site.label} → {fate.after}" for fate in found]
    assert [line for line, fate in zip(told, found, strict=True) if fate.after == LOST] == []
    assert kept(found) >= KEPT_AT_LEAST, "\n".join(told)


@pytest.mark.slow
@pytest.mark.parametrize("model", PINNED)
def test_a_respelled_model_is_verified(model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The respelling kept the meaning, and so did the rewriting of it; weights keep their names for the original."""
    if not request.config.getoption("--every-model"):
        pytest.skip("takes a minute for each model: --every-model")
    names = [name for name, rewriting in all_rewritings().items() if rewriting.keeps_names]
    source = resolve(model)
    start = int(hashlib.sha256(model.encode()).hexdigest(), 16) % len(names)
    turned = (respell(source.text, all_rewritings()[name]) for name in (*names[start:], *names[:start]))
    text = next(respelled.text for respelled in turned if respelled.places)
    transforms, folder = select(), tmp_path / f"respelled_{model}"
    built = build(replace(source, text=text), transforms)
    write(assemble(built, transforms, Options((), ()), folder), folder)
    verdict = verify(source.path, folder, Checks(quick=True, compile=False, clean_process=False, others=False))
    assert verdict.passed, verdict.reason


def site(label: str, outcome: str = REWRITTEN, where: str = "A.forward") -> Site:
    return Site("fuse_qkv", where, label, outcome)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([site("q, k"), site("gate, up")], [site("gate, up"), site("q_kept, k_kept")], [REWRITTEN, REWRITTEN]),
        ([site("b"), site("a"), site("c", "not_linear")], [site("b", "called_twice")], ["called_twice", LOST, LOST]),
        ([site("a")], [site("a", where="B.forward")], [LOST]),
    ],
    ids=["a label renamed", "missing, and refused with a reason", "elsewhere"],
)
def test_what_becomes_of_a_site(before: list[Site], after: list[Site], expected: list[str]) -> None:
    assert [fate.after for fate in fates(before, after)] == expected


def test_a_rule_that_looks_at_names_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that no longer sees a method once its local has another name."""
    real = sites.sites_of

    def by_name(source, text):  # type: ignore[no-untyped-def]
        found = real(source, text)
        return found if "variance = " in text else [s for s in found if s.transform != "fuse_rms_norm"]

    monkeypatch.setattr(sites, "sites_of", by_name)
    found = fates_of(TINY, "rename_locals")
    assert found is not None
    assert {fate.site.transform for fate in found if fate.after == LOST} == {"fuse_rms_norm"}
    assert kept(found) < KEPT_AT_LEAST
