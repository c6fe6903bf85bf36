"""What a class is timed and compared with at real sizes: widths that it takes, and prompts that leave positions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaModel

from rewrite.verify import Options, verify
from rewrite.verify.generation.latency import LONGEST, latency_checks, plan_for
from rewrite.verify.judging.checks import run_check
from rewrite.verify.judging.compare import NotRun
from rewrite.verify.models.configs import small_variants
from rewrite.verify.models.inputs import positions_of
from rewrite.verify.models.model_pair import Workbench, build
from rewrite.verify.models.real_shapes import shaped_variant, wide_variant
from rewrite.verify.models.subjects import Subject

from .copies import generated, upstream


def bench_of(name: str, device: str = "cpu") -> Workbench:
    kind = getattr(transformers, name)
    subject: Any = SimpleNamespace(config_class=kind.config_class, original=kind, rewritten=kind, name=name)
    return Workbench(subject, [], Options(device=device))


def parameters(bench: Workbench, variant: Any) -> int:
    with torch.device("meta"):
        model = build(bench.subject.original, variant, "eager", "bfloat16", "meta")
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("LlamaForCausalLM", "1b, 16 layers"),
        ("Mamba2ForCausalLM", "its own widths, 16 layers"),  # heads by its own expansion
        ("GptOssForCausalLM", "1b with few experts, 16 layers"),  # 104 billion parameters with all
        ("ViTModel", "1b, 16 layers"),
        ("Qwen2VLForConditionalGeneration", "1b, 16 layers"),  # its text's widths, layer types for each layer
        ("WhisperForCausalLM", "its own widths, 16 layers"),
    ],
)
def test_a_shape_that_the_class_takes(name: str, shape: str) -> None:
    bench = bench_of(name)
    variant = shaped_variant(bench, "1b")
    assert variant.name == shape
    assert parameters(bench, variant) < 12e9
    assert parameters(bench, wide_variant(bench)) < 1.5e9


def test_a_class_of_no_such_size_is_not_asked() -> None:
    with pytest.raises(NotRun, match="billion parameters"):
        shaped_variant(bench_of("LongcatFlashForCausalLM"), "1b")


def test_a_prompt_leaves_positions_for_what_is_generated() -> None:
    bert = SimpleNamespace(config=transformers.BertConfig())
    plan = plan_for("cuda", "1b")
    assert positions_of(bert, plan.prompt + LONGEST) == 512
    assert positions_of(SimpleNamespace(config=transformers.LlamaConfig()), plan.prompt + LONGEST) == 512 + LONGEST


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="fields of models on a GPU: needs one")
def test_fields_of_the_configuration_are_varied_on_a_gpu(tmp_path: Any) -> None:
    package = generated(tmp_path / "llama", "llama")
    options = Options(device="cuda", clean_process=False, gates=("parity",), keep_going=True)
    verdict = verify(upstream("llama"), package, options)
    assert verdict.passed
    varied = {field.name for field in verdict.config_fields if field.values}
    assert {"hidden_act", "attention_bias", "rms_norm_eps", "num_key_value_heads"} <= varied


class NoCache(LlamaModel):  # type: ignore[misc]
    """An encoder, as far as its arguments tell."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask)


class Fails(LlamaModel):  # type: ignore[misc]
    """A prompt of the length that is timed is too long for it."""

    def forward(self, input_ids: Any = None, use_cache: Any = None) -> Any:
        if input_ids.shape[1] > 30:
            raise IndexError("no position behind 30")
        return super().forward(input_ids=input_ids, use_cache=use_cache)


@pytest.mark.parametrize(("cls", "status"), [(NoCache, "passed"), (Fails, "not run")])
def test_a_prefill_is_timed_as_far_as_the_original_goes(cls: Any, status: str) -> None:
    bench = Workbench(Subject(cls, cls, False), small_variants(cls, False, {})[:1], Options(seeds=1))
    (check,) = latency_checks(bench)
    result = run_check(check)
    assert (result.status, "raises IndexError" in result.detail) == (status, cls is Fails)
