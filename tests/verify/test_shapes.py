"""What a class is timed and compared with at real sizes: widths that it takes, and prompts that leave positions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from rewrite.verify import Options, verify
from rewrite.verify.generation.latency import LONGEST, plan_for
from rewrite.verify.judging.compare import NotRun
from rewrite.verify.models.inputs import positions_of
from rewrite.verify.models.model_pair import Workbench, build
from rewrite.verify.models.real_shapes import shaped_variant, wide_variant

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
