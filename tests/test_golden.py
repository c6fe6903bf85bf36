"""Every transform on the small files of fixtures/transforms/<transform>/<case>.

`before.py` is rewritten by the transform (and those that it runs after) and compared with `after.py`; `report.json`
holds what it reports. A case with a `run.py` is also executed: `run(module)` returns what is equal before and after.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rewrite.codemod.passes import rewrite_text
from rewrite.transform import Rewritten, Transform
from rewrite.transforms import all_transforms

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "fixtures" / "transforms"
CASES = sorted(path.parent for path in FIXTURES.glob("*/*/before.py"))
RUNNABLE = [case for case in CASES if (case / "run.py").exists()]
TRANSFORMS = {transform.name: transform for transform in all_transforms()}


def case_name(case: Path) -> str:
    return f"{case.parent.name}/{case.name}"


def with_predecessors(transform: Transform) -> list[Transform]:
    """Return the transform and those whose output it reads."""
    names = [name for name in transform.after if name in TRANSFORMS]
    return [transform, *(inner for name in names for inner in with_predecessors(TRANSFORMS[name]))]


def rewrite_case(case: Path, text: str) -> Rewritten:
    chosen = {transform.name: transform for transform in with_predecessors(TRANSFORMS[case.parent.name])}
    return rewrite_text(text, list(chosen.values()))


def report_of(case: Path, rewritten: Rewritten) -> dict[str, Any]:
    report = next(report for report in rewritten.transforms if report.name == case.parent.name)
    return {
        "rewritten": list(report.rewritten),
        "skipped": [[skipped.site, skipped.reason] for skipped in report.skipped],
    }


def in_today_s_words(text: str) -> str:
    """What transformers made of its files in release 5.24: the cache has another name, and takes the keywords."""
    text = re.sub(r"\bpast_key_values\b", "cache", text)
    text = re.sub(r"(\bcache\.update\([^()]*\b(?:layer_idx|index))\)", r"\1, kwargs={})", text)
    renames = '    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")\n'
    taking = re.compile(r"^    def forward\([^)]*\bcache\b[^)]*\)", re.M)
    text = taking.sub(lambda found: renames + found[0], text)
    return re.sub(
        r"^import torch\n", "\\g<0>from transformers.utils.deprecation import deprecate_kwarg\n", text, flags=re.M
    )


class _WithoutKeywords(ast.NodeTransformer):
    """Takes away the keywords of a cache that stands inside an operator."""

    def visit_keyword(self, node: ast.keyword) -> ast.keyword | None:
        return None if node.arg == "update" and ast.unparse(node.value) == "{'kwargs': {}}" else node


WITH_CACHES = [
    case
    for case in CASES
    if "past_key_values" in (case / "before.py").read_text()
    and not re.search(r"\bcache\b", (case / "before.py").read_text())
]


@pytest.mark.parametrize("case", WITH_CACHES, ids=case_name)
def test_a_cache_by_its_other_name(case: Path) -> None:
    expected = in_today_s_words((case / "after.py").read_text())
    rewritten = rewrite_case(case, in_today_s_words((case / "before.py").read_text()))
    assert ast.unparse(_WithoutKeywords().visit(ast.parse(rewritten.text))) == ast.unparse(ast.parse(expected))
    report = json.loads((case / "report.json").read_text())
    assert len(report_of(case, rewritten)["rewritten"]) == len(report["rewritten"])


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_golden(case: Path, refresh: bool) -> None:
    rewritten = rewrite_case(case, (case / "before.py").read_text())
    report = report_of(case, rewritten)
    if refresh:
        (case / "after.py").write_text(rewritten.text)
        (case / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    assert rewritten.text == (case / "after.py").read_text()
    assert report == json.loads((case / "report.json").read_text())
    assert report["rewritten"] or report["skipped"] or rewritten.text == (case / "before.py").read_text()


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_second_run_changes_nothing(case: Path) -> None:
    text = rewrite_case(case, (case / "before.py").read_text()).text
    again = rewrite_case(case, text)
    assert again.text == text
    assert [report.rewritten for report in again.transforms if report.rewritten] == []


@pytest.mark.parametrize("name", sorted({case.parent.name for case in CASES}))
def test_every_reason_has_a_case(name: str) -> None:
    reports = (json.loads((case / "report.json").read_text()) for case in CASES if case.parent.name == name)
    seen = {reason for report in reports for _, reason in report["skipped"]}
    assert set(TRANSFORMS[name].reasons) - seen == set()


@pytest.mark.parametrize("name", sorted({case.parent.name for case in CASES}))
def test_every_transform_has_a_rewritten_case(name: str) -> None:
    reports = (json.loads((case / "report.json").read_text()) for case in CASES if case.parent.name == name)
    assert any(report["rewritten"] for report in reports)


def imported(case: Path, texts: dict[str, str], folder: Path) -> Iterable[ModuleType]:
    """Import `texts` as modules of a package of their own that has the runtime."""
    package = f"golden_{case.parent.name}_{case.name}"
    (folder / package).mkdir()
    (folder / package / "__init__.py").touch()
    for name, text in texts.items():
        (folder / package / f"{name}.py").write_text(text)
    return [importlib.import_module(f"{package}.{name}") for name in texts]


def tensors_in(value: Any) -> list[Any]:
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (tuple, list)) else [value]


@pytest.mark.parametrize("case", RUNNABLE, ids=case_name)
def test_computes_the_same_bits(case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    rewritten = rewrite_case(case, (case / "before.py").read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    texts = {"before": (case / "before.py").read_text(), "after": rewritten.text, "run": (case / "run.py").read_text()}
    before, after, run = imported(case, texts, tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        outputs = []
        for module in (before, after):
            torch.manual_seed(0)
            with torch.no_grad():
                outputs.append(tensors_in(run.run(module, dtype)))
        assert len(outputs[0]) == len(outputs[1]) > 0
        for expected, actual in zip(*outputs, strict=True):
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
            assert torch.equal(actual, expected), f"{dtype}: {(actual - expected).abs().max()}"
    for module in (before, after, run):
        sys.modules.pop(module.__name__)
