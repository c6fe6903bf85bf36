"""Unmodified copies pass, the verdict says what was done, and the parts that judge numbers judge them rightly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.cache_utils import CacheLayerMixin

from rewrite.cli import run
from rewrite.errors import SideNotFound
from rewrite.measure.timing import ratio
from rewrite.verify import Check, Gate, Options, Verdict, clean_import, render, summary, verify
from rewrite.verify.generation.latency import Samples, outcome
from rewrite.verify.generation.teacher_forcing import Scores, judged
from rewrite.verify.generation.texts import Generated, near_tie
from rewrite.verify.judging.compare import Mismatch, NotRun, near_exact
from rewrite.verify.judging.low_precision_bound import compare
from rewrite.verify.judging.tolerances import TABLE
from rewrite.verify.models.configs import small_variants
from rewrite.verify.models.loaded_sides import load, locate

from .copies import source_of, upstream, write_package

MODELS = (
    "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "starcoder2", "cohere2",
    "glm4", "stablelm", "gpt_neox", "mixtral", "qwen3_moe", "gpt2", "bert",
)  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_package(tmp_path_factory.mktemp("llama") / "llama_copy", "llama", source_of("llama"))


@pytest.fixture(scope="module")
def full(llama: Path) -> Verdict:
    return verify(upstream("llama"), llama, Options())


def test_a_copy_passes_every_gate(full: Verdict) -> None:
    assert full.passed, full.reason
    assert [gate.name for gate in full.gates] == ["structure", "parity", "generation", "latency"]
    left_out = [check.name for gate in full.gates for check in gate.checks if check.status == "not run"]
    assert left_out == [  # for which a copy has no lock, and no runtime
        "sites equal the lock",
        "operators step aside for a cause alone",
        "nothing is kept of a model that is gone",
        "operators give what their fakes say",
        "operators are called directly",
        "methods that were added run",
        "keys and values are not repeated",
    ]


def test_a_loose_file_may_be_the_first_to_import_what_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "modeling_x.py"
    path.write_text("from transformers.generation import GenerationMixin\n")
    patching = tmp_path / "modeling_y.py"
    patching.write_text("from transformers import modeling_utils\n\nmodeling_utils.PreTrainedModel.eval = print\n")
    changed = []
    for file in (path, patching):
        command = [sys.executable, clean_import.__file__, str(file), "transformers.modeling_utils"]
        changed.append(
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["changed"]
        )
    assert changed[0] == []
    assert changed[1] != []


LAYER = """
from transformers.cache_utils import DynamicLayer


class Tracks(DynamicLayer):
    _layer_type = "tracks"

    def first(self):
        return self.keys{}
"""


@pytest.mark.skipif(not hasattr(CacheLayerMixin, "_layer_type"), reason="layers of this release register nowhere")
@pytest.mark.parametrize("same", [True, False])
def test_a_layer_that_puts_itself_in_the_place_of_the_original_is_the_same_one(same: bool, tmp_path: Path) -> None:
    (tmp_path / "first_there.py").write_text(LAYER.format(""))
    (tmp_path / "modeling_tracks.py").write_text(LAYER.format("" if same else "[:1]"))
    command = [sys.executable, clean_import.__file__, str(tmp_path / "modeling_tracks.py"), "first_there"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    changed = json.loads(done.stdout)["changed"]
    assert changed == ([] if same else ["transformers.cache_utils.DYNAMIC_LAYER_TYPE_MAPPING"])


def test_the_verdict_is_json_and_fits_80_columns(full: Verdict) -> None:
    data = json.loads(json.dumps(full.to_json(), allow_nan=False))
    assert data["passed"] is True
    assert data["gates"][1]["status"] == "passed"
    for verbose in (False, True):
        assert max(map(len, render(full, verbose).splitlines())) <= 80
    assert "\n" not in summary(full)


def test_a_cpu_latency_claims_nothing(full: Verdict) -> None:
    latency = next(gate for gate in full.gates if gate.name == "latency")
    assert {check.figures["outcome"] for check in latency.checks} == {"not claimed on a CPU"}


@pytest.mark.parametrize("model", MODELS)
def test_a_copy_of_other_families_passes(model: str, tmp_path: Path) -> None:
    package = write_package(tmp_path / f"{model}_copy", model, source_of(model))
    verdict = verify(upstream(model), package, Options(quick=True))
    assert verdict.passed, verdict.reason
    ran = [check for gate in verdict.gates for check in gate.checks if check.status == "passed"]
    assert len(ran) > 60


@pytest.mark.slow
def test_a_copy_passes_with_four_seeds(llama: Path) -> None:
    for seed in range(4):
        verdict = verify(upstream("llama"), llama, Options(quick=True, seed=seed))
        assert verdict.passed, f"seed {seed}: {verdict.reason}"


def test_importing_the_verifier_needs_no_torch() -> None:
    import subprocess

    code = "import sys, rewrite.verify; print('torch' in sys.modules or 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_command_reports_a_failure_with_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = source_of("llama").replace("gate_proj(x)) * self.up_proj(x)", "up_proj(x)) * self.gate_proj(x)")
    package = write_package(tmp_path / "llama_copy", "llama", text)
    assert run(["verify", upstream("llama"), str(package), "--quick", "--json", str(tmp_path / "v.json")]) == 1
    assert "first divergence: model.layers.0.mlp (LlamaMLP)" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "v.json").read_text())["divergence"]["module"] == "model.layers.0.mlp"


def test_a_side_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SideNotFound, match=r"one modeling_\*\.py"):
        verify(upstream("llama"), str(tmp_path / "nothing"))


def test_two_folders_of_one_name_live_side_by_side(tmp_path: Path) -> None:
    first, second = (write_package(tmp_path / side / "my-llama.v2", "llama", source_of("llama")) for side in "ab")
    modules = [load(locate(folder)) for folder in (first, second)]
    assert modules[0] is not modules[1]
    assert all(sys.modules[module.__name__] is module for module in modules)
    assert [Path(module.__file__ or "").parent for module in modules] == [first, second]


def test_a_folder_named_like_an_installed_package_does_not_shadow_it(tmp_path: Path) -> None:
    module = load(locate(write_package(tmp_path / "torch", "llama", source_of("llama"))))
    assert sys.modules["torch"] is torch
    assert module.__name__.startswith("torch_")


def test_what_the_original_cannot_do_is_not_run_and_never_passed(full: Verdict) -> None:
    gate = Gate(1, "structure", (Check("a", "not run", "no reason"),), 0.0)
    assert gate.status == "not run"
    assert "not run" in render(replace(full, gates=(gate,)))


def test_both_variants_differ_in_their_switches() -> None:
    from transformers import LlamaForCausalLM

    base, switched = (variant.config for variant in small_variants(LlamaForCausalLM, True, {}))
    assert base.attention_bias is False
    assert switched.attention_bias is True
    assert base.tie_word_embeddings is not switched.tie_word_embeddings
    assert base.rms_norm_eps == 1e-3
    assert base.num_key_value_heads < base.num_attention_heads


def test_every_tolerance_has_a_reason() -> None:
    assert all(len(entry.reason) > 20 for entry in TABLE.values())


def test_near_exact_sees_one_wrong_element_and_a_changed_dtype() -> None:
    expected = {"logits": torch.randn(4, 8, dtype=torch.float64)}
    found = {"logits": expected["logits"].clone()}
    near_exact(expected, found)
    found["logits"][2, 3] += 1e-4
    with pytest.raises(Mismatch, match=r"logits\[2, 3\]"):
        near_exact(expected, found)
    with pytest.raises(Mismatch, match="float32"):
        near_exact(expected, {"logits": expected["logits"].float()})
    with pytest.raises(Mismatch):
        near_exact(expected, {"logits": expected["logits"].clone().fill_(float("nan"))})
    with pytest.raises(NotRun):
        near_exact({}, {})


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.15, True), (1.6, False), (3.0, False)])
def test_the_yardstick_is_the_original_own_error(factor: float, passes: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(64, 128, generator=generator, dtype=torch.float64)
    errors = [torch.randn(64, 128, generator=generator, dtype=torch.float64) * 0.02 for _ in range(2)]
    original, rewritten = {"logits": truth + errors[0]}, {"logits": truth + factor * errors[1]}
    if passes:
        compare({"logits": truth}, original, rewritten, 2**-8, routed=False)
    else:
        with pytest.raises(Mismatch):
            compare({"logits": truth}, original, rewritten, 2**-8, routed=False)


def test_a_token_may_differ_at_a_near_tie_only() -> None:
    logits = torch.tensor([[[1.0, 1.0001, 0.0], [5.0, 1.0, 0.0]]])
    original = Generated(torch.tensor([[1, 0]]), logits)
    figures = near_tie(original, Generated(torch.tensor([[0, 2]]), logits), noise=1e-3)
    assert figures["rows that diverge"] == 1
    with pytest.raises(Mismatch, match="token 1"):
        near_tie(original, Generated(torch.tensor([[1, 1]]), logits), noise=1e-3)


def test_an_interval_that_includes_one_is_no_win() -> None:
    found = ratio([1.0, 1.1, 0.9, 1.2] * 10, [1.0, 0.9, 1.1, 1.15] * 10)
    assert found["low"] <= 1.0 <= found["high"]
    assert outcome(found["low"], found["high"], "cuda") == "no difference shown"
    found = ratio([2.0, 2.1] * 20, [1.0, 1.1] * 20)
    assert outcome(found["low"], found["high"], "cuda") == "faster"
    assert outcome(0.5, 0.9, "cuda") == "slower"
    assert outcome(1.5, 1.9, "cpu") == "not claimed on a CPU"
    assert Samples([1.0] * 20, [2.0] * 20).figures["speed-up"] == 0.5


def test_kl_gate_allows_what_low_precision_moved_already_and_no_more() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 32, generator=generator)
    targets = torch.randint(32, (400,), generator=generator)

    def moved(scale: float) -> Scores:
        return Scores((logits + scale * torch.randn(400, 32, generator=generator)).log_softmax(-1), targets)

    truth, own = moved(0.0), moved(1e-3)
    judged(truth, own, own)
    with pytest.raises(Mismatch, match="KL"):
        judged(truth, own, moved(0.1))
