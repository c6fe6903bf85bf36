"""The fastest attention of each prompt is found, kept in the package, and what the package then takes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_rewrite_runtime.launching import card_tables
from rewrite.benchmark.rungs import prepare
from rewrite.source.resolve import resolve
from rewrite.transforms import select
from rewrite.tuning import attention_tiles
from rewrite.tuning.attention_tiles import Attention, plain_attention
from rewrite.tuning.choices import Choice
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.subjects import find_subjects

FIXTURE = Path(__file__).parents[2] / "fixtures" / "models" / "modeling_tiny_llama.py"


def test_what_other_chips_and_sizes_say_stays(tmp_path: Path) -> None:
    one, two = (Choice(f"bfloat16 {n}x8/8x64 8:8 full", 1, "own", {"own": 2.0}) for n in (1, 2))
    attention_tiles.write(tmp_path, "b", [two])
    path = attention_tiles.write(tmp_path, "a", [one])
    attention_tiles.write(tmp_path, "b", [one])
    content = json.loads(path.read_text())
    assert list(content) == ["a", "b"]
    assert list(content["b"]) == [one.size, two.size]


def model_of(folder: Path, rule: str) -> Any:
    """A tiny model of a package made with one rule, under whose name torch knows its operators."""
    (folder / "modeling_tiny.py").write_bytes(FIXTURE.read_bytes())
    rules = [one for one in select() if one.name == rule]
    prepare(resolve(str(folder / "modeling_tiny.py")), rules, folder / "rungs")
    package = sorted((folder / "rungs").glob("rung_*"))[-1].rename(folder / f"attention_{rule}")
    module = loaded_sides.load(loaded_sides.locate(package))
    main = find_subjects(module, module).main
    config = main.config_class(vocab_size=64)
    config._attn_implementation = "sdpa"
    return main.rewritten(config).eval().requires_grad_(False)


def forgotten(model: Any) -> None:
    for name in [name for name in sys.modules if name.startswith(type(model).__module__.rpartition(".")[0])]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attention]:
    """The attention of a model, with a kernel that computes something else and one that fails when it is called."""
    found = Attention(model_of(tmp_path_factory.mktemp("attention"), "native_gqa"))
    plain, failure = found.backends.attend, found.backends.failure

    def attend(name: str, *given: Any) -> Any:
        if name == "cudnn":
            raise RuntimeError("no plan")
        out = plain("math", *given)
        return {"flash": out * 1.1, "efficient": None}.get(name, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found.backends, "attend", attend)
        patch.setattr(
            found.backends, "failure", lambda name: None if name not in ("ck", "aotriton") else failure(name)
        )
        yield found
    forgotten(found.model)


def test_the_attention_of_a_model(package: Attention) -> None:
    sizes = package.sizes((5, 100), (1, 2))
    kinds = {(size.rows, size.queries, size.kind.split()[0]) for size in sizes}
    assert kinds >= {(rows, queries, "causal") for rows in (1, 2) for queries in (8, 128)}
    assert {kind for *_, kind in kinds} - {"causal"} <= {"bool", "number"}
    assert any(kind != "causal" for *_, kind in kinds)
    for size in sizes:
        us = package.times(size)
        assert set(us) == {"own", "math"}  # the others compute something else, refuse, fail, or are not here
        assert all(value > 0 for value in us.values())


def test_the_package_takes_what_was_found(package: Attention, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = package.sizes((5,))
    monkeypatch.setenv(card_tables.VARIABLE, str(tmp_path))
    choices = [Choice(str(size), 1, "math", {"own": 2.0, "math": 1.0}) for size in sizes]
    attention_tiles.write(card_tables.folder(), "cpu", choices)
    card_tables.forget()
    package.backends._counts.clear()
    ids = torch.full((1, 5), 4)
    with torch.no_grad():
        package.model(ids, use_cache=False)
    assert package.backends._counts["math"] == len(package.model.model.layers)
    explain = sys.modules[type(package.model).__module__.rpartition(".")[0]].explain
    assert "attention outside decode steps: 2 by math" in str(explain(package.model))
    card_tables.forget()


def test_a_package_whose_attention_is_its_own(tmp_path: Path) -> None:
    model = model_of(tmp_path, "fuse_rms_norm")
    assert Attention(model).sizes((5,)) == {}
    forgotten(model)


@pytest.mark.parametrize("kind", ["causal", "full", "bool", "number", "number heads"])
def test_the_yardstick_is_attention_by_its_definition(kind: str, package: Attention) -> None:
    size = package.backends.Size("float32", 2, 4, 2, 8, 8, 8, 8 if kind == "causal" else 16, kind)
    query, key, value, mask = package.tensors(size)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=kind == "causal", enable_gqa=True
    )
    found = plain_attention(query, key, value, mask, kind == "causal")
    torch.testing.assert_close(found, wanted.transpose(1, 2), rtol=1e-4, atol=1e-5)
    assert attention_tiles.near(found, wanted.transpose(1, 2))
    assert not attention_tiles.near(found * 1.1, wanted.transpose(1, 2))
