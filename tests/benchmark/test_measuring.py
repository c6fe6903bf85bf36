"""What is measured is measured rightly, with bugs planted where a wrong figure would look like a good one."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rewrite.benchmark import benchmark_run, benchmark_tables, chart, contenders, ladder, token_parity
from rewrite.benchmark.benchmark_models import build, load, sharing
from rewrite.benchmark.benchmark_plan import Cell, Plan, cells, write_json
from rewrite.benchmark.rungs import prepare
from rewrite.errors import OriginalNotFound, VerificationError
from rewrite.measure import limits, presets, timing
from rewrite.source.resolve import resolve
from rewrite.transforms import select

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import decode_page  # noqa: E402

FIXTURE = ROOT / "fixtures" / "models" / "modeling_tiny_llama.py"
LLAMA = presets.config_for(LlamaConfig, "tiny")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ladder of the fixture model, whose last package is a whole one."""
    root = tmp_path_factory.mktemp("ladder")
    (root / "modeling_tiny.py").write_bytes(FIXTURE.read_bytes())
    prepare(resolve(str(root / "modeling_tiny.py")), select(), root / "rungs")
    return root


@pytest.fixture(scope="module")
def plan(prepared: Path) -> Plan:
    package = sorted((prepared / "rungs").glob("rung_*"))[-1]
    return Plan(
        package,
        str(prepared / "modeling_tiny.py"),
        shape="tiny",
        device="cpu",
        dtype="float32",
        cells=(Cell(1, 16), Cell(2, 16)),
        prefill=(16,),
        new_tokens=8,
        rounds=(3, 3),
        seconds=0.0,
        parity_tokens=8,
    )


@pytest.fixture(scope="module")
def record(plan: Plan) -> dict[str, Any]:
    return benchmark_run.measure(plan)


def model(config: Any = LLAMA, model_class: Any = LlamaForCausalLM) -> Any:
    return build(model_class, config, "float32", "cpu")


def prompts(rows: int, length: int = 12) -> torch.Tensor:
    return torch.randint(4, 128, (rows, length), generator=torch.Generator().manual_seed(0))


class Altered:
    """A side that writes the original's text with changes."""

    name, short, steps = "ours", 2, 4

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor], theirs: Any):
        self.change, self.theirs = change, contenders.original(theirs, 16)

    def generate(self, prompt: torch.Tensor, new: int, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.change(self.theirs.generate(prompt, new, mask))


def judged(change: Callable[[torch.Tensor], torch.Tensor]) -> token_parity.Parity:
    theirs = model()
    truth = token_parity.truth(theirs, prompts(3), 16)
    return token_parity.compare(theirs, truth, token_parity.generated(Altered(change, theirs), truth.prompts, 16, 2))


def test_equal_texts_pass() -> None:
    found = judged(lambda tokens: tokens)
    assert found.passed
    assert found.first == (-1, -1, -1)
    assert found.beyond == found.different == 0


@pytest.mark.parametrize("step", [0, 9, 15])
def test_one_wrong_token_fails(step: int) -> None:
    def change(tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.clone()
        tokens[-1, step] = (tokens[-1, step] + 1) % 128
        return tokens

    found = judged(change)
    assert not found.passed
    assert found.beyond >= 1
    assert step in found.first


def test_a_missing_token_fails() -> None:
    assert not judged(lambda tokens: tokens[:, :-1]).passed


def test_a_token_that_ties_with_the_best_passes_and_many_more_than_the_original_takes_fail() -> None:
    theirs = model()
    truth = replace(token_parity.truth(theirs, prompts(4), 32), noise=1e9)  # every difference is within the noise
    assert truth.different == 0
    few, many = truth.tokens.clone(), truth.tokens.clone()
    few[0, -1] ^= 1
    many[:, -8:] ^= 1
    assert token_parity.compare(theirs, truth, few).passed
    found = token_parity.compare(theirs, truth, many)
    assert found.beyond == 0
    assert not found.passed


def test_padded_prompts_are_compared_with_unpadded_ones() -> None:
    theirs = model()
    ids, mask = prompts(3), torch.ones(3, 12, dtype=torch.long)
    mask[0, :5] = 0
    truth = token_parity.truth(theirs, ids, 16, mask)
    given = token_parity.generated(contenders.original(theirs, 16), ids, 16, 3, mask)
    assert token_parity.compare(theirs, truth, given).passed
    unmasked = token_parity.generated(contenders.original(theirs, 16), ids, 16, 3)
    assert not token_parity.compare(theirs, truth, unmasked).passed


def test_shared_weights_are_the_same_memory() -> None:
    donor = model()
    other = sharing(LlamaForCausalLM, donor)
    assert all(a is b for a, b in zip(donor.parameters(), other.parameters(), strict=True))
    assert torch.equal(donor(prompts(1)).logits, other(prompts(1)).logits)
    with pytest.raises(VerificationError, match="score"):
        sharing(LlamaForSequenceClassification, donor)


def test_weights_that_a_token_reads() -> None:
    untied, tied = model(), model(presets.config_for(LlamaConfig, "tiny", tie_word_embeddings=True))
    total = sum(p.numel() for p in untied.parameters()) * 4
    assert limits.weight_bytes(untied) == total - untied.model.embed_tokens.weight.numel() * 4
    assert limits.weight_bytes(tied) == sum(p.numel() for p in tied.parameters()) * 4


def test_experts_that_a_token_reads() -> None:
    routed = model(presets.config_for(Qwen3MoeConfig, "tiny"), Qwen3MoeForCausalLM)
    experts = sum(p.numel() for n, p in routed.named_parameters() if ".experts." in n) * 4
    rest = limits.weight_bytes(routed) - experts / 2
    assert limits.experts(routed.config) == (4, 2)
    assert limits.weight_bytes(routed, 2) == pytest.approx(rest + experts * 0.75)
    assert limits.cache_bytes(routed.config, 3, 10, 2) == 2 * 2 * 3 * 10 * 2 * 16 * 2


def test_shapes_are_those_of_the_models_they_are_named_after() -> None:
    with torch.device("meta"):
        sizes = {
            shape: sum(p.numel() for p in cls._from_config(presets.config_for(config, shape)).parameters()) / 1e9
            for shape, config, cls in (
                ("1b", LlamaConfig, LlamaForCausalLM),
                ("8b", LlamaConfig, LlamaForCausalLM),
                ("30b-a3b", Qwen3MoeConfig, Qwen3MoeForCausalLM),
            )
        }
    assert sizes == pytest.approx({"1b": 1.236, "8b": 8.03, "30b-a3b": 30.53}, rel=2e-3)
    with pytest.raises(presets.ShapeDoesNotFit, match="experts"):
        presets.config_for(LlamaConfig, "30b-a3b")


def test_a_ratio_is_claimed_only_without_1_in_its_interval_and_with_equal_tokens() -> None:
    wide, narrow = timing.ratio([1, 3, 1, 3], [2, 2, 2, 2]), timing.ratio([3.0, 3.1, 3.0], [1.0, 1.0, 1.1])
    assert wide["low"] < 1 < wide["high"]
    assert benchmark_run.claim(wide["low"], wide["high"], True, True) == "no difference shown"
    assert benchmark_run.claim(narrow["low"], narrow["high"], True, True) == "faster"
    assert benchmark_run.claim(narrow["low"], narrow["high"], False, True) == "not claimed: the tokens differ"
    assert benchmark_run.claim(0.5, 0.6, False, True) == "slower"
    assert benchmark_run.claim(2, 3, True, False) == "not claimed on a CPU"


def test_sides_take_turns_in_changing_order() -> None:
    seen: list[str] = []
    calls = {name: lambda number, name=name: float(seen.append(name) or number) for name in "abc"}
    values = timing.interleaved(calls, (3, 9), 0.0)  # type: ignore[arg-type]
    assert "".join(seen) == "abcbcacab"
    assert values["a"] == [0.0, 1.0, 2.0]


def test_a_measurement_is_complete(record: dict[str, Any]) -> None:
    assert record["complete"] is True
    assert [(cell["batch"], cell["context"]) for cell in record["cells"]] == [(1, 16), (2, 16)]
    for cell in record["cells"]:
        assert cell["parity"]["passed"], cell["parity"]["summary"]
        assert cell["sides"]["original"]["ours"]["low"] > 0
        assert cell["sides"]["original"]["claim"] == "not claimed on a CPU"
    assert {"first_token_s", "second_token_s"} <= record["cold"]["ours"].keys()
    assert benchmark_tables.exit_code(record) == 0


def test_tables_fit_80_columns(record: dict[str, Any]) -> None:
    assert max(map(len, benchmark_tables.text(record).splitlines())) <= 80
    assert "rewritten" in decode_page.decoding([record])
    slow = json.loads(json.dumps(record))
    for figures in slow["cells"][0]["sides"].values():
        figures["decode_ms"] *= 1e4
        if "ours" in figures:
            figures["ours"] = {name: value * 1e3 for name, value in figures["ours"].items()}
    assert max(map(len, benchmark_tables.text(slow).splitlines())) <= 80


def test_wrong_tokens_are_no_success(record: dict[str, Any]) -> None:
    spoilt = json.loads(json.dumps(record))
    spoilt["cells"][1]["parity"]["passed"] = False
    benchmark_run.judge(spoilt["cells"][1], gpu=True)
    assert benchmark_tables.exit_code(spoilt) == 1
    assert "DO NOT AGREE" in benchmark_tables.text(spoilt)
    assert benchmark_tables.said(
        {"ours": {"value": 2.0, "low": 1.9, "high": 2.1}, "claim": benchmark_run.claim(1.9, 2.1, False, True)}
    ) == ("tokens differ")


class Failing:
    """A side that cannot run."""

    name, short, steps = "original", 2, 4

    def generate(self, prompt: torch.Tensor, new: int, mask: torch.Tensor | None = None) -> torch.Tensor:
        raise RuntimeError("planted")


def test_a_side_that_fails_takes_nothing_with_it(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "original", lambda model, new: Failing())
    kept: list[str] = []
    found = benchmark_run.measure(
        replace(plan, cold=False, prefill=()), lambda record: kept.append(json.dumps(record))
    )
    for cell in found["cells"]:
        assert cell["sides"]["original"]["error"] == "RuntimeError: planted"
        assert cell["sides"]["ours"]["decode_ms"] > 0
    assert "planted" in benchmark_tables.text(found)
    assert len(kept) > 4


def test_every_rung_is_measured(prepared: Path, plan: Plan) -> None:
    kept: list[int] = []
    found = ladder.measure(prepared / "rungs", plan, lambda record: kept.append(len(record["rungs"])))
    names = [rung["name"] for rung in ladder.rungs(prepared / "rungs")]
    assert [rung["name"] for rung in found["rungs"]] == ["original, eager", *names]
    assert kept == list(range(2, len(names) + 2))
    assert ladder.exit_code(found) == 0
    for rung in found["rungs"][1:]:
        rung |= {"decode_ms": rung["decode_ms"] * 1e3, "claim": "no difference shown"}
        rung["ratio"] = {name: value * 1e2 for name, value in rung["ratio"].items()}
    assert max(map(len, ladder.text(found).splitlines())) <= 80


def test_rungs_are_prefixes_of_the_registry(prepared: Path) -> None:
    rungs = ladder.rungs(prepared / "rungs")
    for lower, higher in itertools.pairwise(rungs):
        assert set(lower["transforms"]) < set(higher["transforms"])
    order = [transform.name for transform in select()]
    assert all(rung["transforms"] == [name for name in order if name in rung["transforms"]] for rung in rungs)


def test_no_ladder(tmp_path: Path) -> None:
    with pytest.raises(ladder.NoLadder, match="--ladder-prepare"):
        ladder.rungs(tmp_path)


def test_the_original_of_a_moved_package_has_to_be_named(prepared: Path, plan: Plan, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("rewrite.lock", "__init__.py"):
        (moved / name).write_bytes((plan.package / name).read_bytes())
    with pytest.raises(OriginalNotFound):
        load(moved)


def test_a_chart_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(chart.MatplotlibMissing, match=r"hf-rewrite\[bench\]"):
        chart.require_matplotlib()


def test_a_chart(record: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    chart.draw(record, tmp_path / "chart.png")
    pictures = [(tmp_path / name).read_bytes() for name in ("chart.png", "chart-dark.png")]
    assert all(one.startswith(b"\x89PNG") for one in pictures)
    assert pictures[0] != pictures[1]


def test_a_chart_shows_each_ratio_with_its_interval() -> None:
    pytest.importorskip("matplotlib")
    record = json.loads((ROOT / "bench" / "results" / "decode-1b-h100.json").read_text("utf-8"))
    figure = chart.figure(record, "#000000")
    words = [text.get_text() for axes in figure.axes for text in axes.texts]
    sides = [side for cell in record["cells"] for side in cell["sides"].values() if "ours" in side]
    assert len(sides) > 5
    assert [side for side in sides if not any(benchmark_tables.said(side) in word for word in words)] == []


def test_results_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "results" / "x.json"
    write_json(path, {"a": float("inf"), "b": 1 / 3})
    assert json.loads(path.read_text()) == {"a": None, "b": 0.333333}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text())["b"] == 0.333333


def test_cells_vary_one_thing_at_a_time() -> None:
    assert cells((1, 8), (512, 8192)) == (Cell(1, 512), Cell(8, 512), Cell(1, 8192))


def test_measuring_needs_neither_libcst_nor_click_nor_rich(plan: Plan, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('libcst', 'click', 'rich'), None))\n"
        f"sys.path.insert(0, {str(ROOT / 'bench')!r})\n"
        "from decode_run import main\n"
        "sys.exit(main())"
    )
    arguments = [plan.package, "--original", plan.original, "--shape", "tiny", "--device", "cpu", "--dtype", "float32"]
    arguments += ["--context", "16", "--new-tokens", "8", "--rounds", "3,3", "--seconds", "0", "--no-cold"]
    arguments += ["--parity-tokens", "8", "--json", tmp_path / "out.json"]
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["complete"] is True


def test_a_small_model_that_keeps_latents_runs() -> None:
    """Its heads have parts of their own sizes and share none, and its experts are chosen by group."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = presets.config_for(DeepseekV3Config, "tiny", num_experts=8)
    assert config.first_k_dense_replace < config.num_hidden_layers
    with torch.no_grad():
        logits = DeepseekV3ForCausalLM._from_config(config)(torch.arange(4, 13)[None]).logits
    assert bool(logits.isfinite().all())


def test_sides_that_ran_one_after_the_other_need_not_have_as_many_figures() -> None:
    apart = timing.ratio([4.0, 4.1, 3.9], [2.0, 2.0], in_turn=False)
    assert apart["low"] <= apart["value"] == 2.0 <= apart["high"]
    with pytest.raises(ValueError, match=r"shorter|longer"):
        timing.ratio([4.0, 4.1, 3.9], [2.0, 2.0])
