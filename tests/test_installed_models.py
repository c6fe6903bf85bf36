"""The rewriter on the real files of the installed transformers: how many sites, deterministic, stable, importable.

`fixtures/sites.json` holds the counts for each version of transformers they were read from; a count that falls is a
failure. `pytest --refresh` writes those of the installed version anew.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import made_package
import pytest
from verify.copies import with_runtime

from rewrite.codemod.build import build
from rewrite.codemod.passes import rewrite_text
from rewrite.measure.runtime_part import runtime_part
from rewrite.source.resolve import resolve
from rewrite.transforms import select

SITES = Path(__file__).parent.parent / "fixtures" / "sites.json"
VERSION = version("transformers")
MODELS = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "granite", "smollm3", "starcoder2",
    "cohere2", "glm4", "stablelm", "gpt_neox", "mixtral", "qwen3_moe", "bert", "whisper", "t5", "vit", "clip",
)  # fmt: skip


def counts(built):
    found = {}
    for report in built.rewritten.transforms:
        skipped = Counter(skip.reason for skip in report.skipped)
        if report.rewritten or skipped:
            found[report.name] = {"rewritten": len(report.rewritten), "skipped": dict(sorted(skipped.items()))}
    return found


@pytest.mark.parametrize("model", MODELS)
def test_sites(model, refresh):
    transforms = select()
    built = build(resolve(model), transforms)
    assert build(resolve(model), transforms).rewritten.text == built.rewritten.text
    assert rewrite_text(built.rewritten.text, transforms).sites == 0, "the second run changes something"
    known = json.loads(SITES.read_text())
    if refresh:
        known.setdefault(VERSION, {})[model] = counts(built)
        SITES.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    if VERSION not in known:
        pytest.skip(f"no counts were recorded for transformers {VERSION}: run with --refresh")
    assert counts(built) == known[VERSION][model]


@pytest.fixture
def package(tmp_path, request, monkeypatch):
    """Write the package of a model and import it under a name of its own."""

    def written(model, vendored=False):
        name = f"rewritten_{model}_{abs(hash(request.node.nodeid))}"
        folder = made_package.write(model, tmp_path / name)
        if vendored:
            with_runtime(folder)
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module(name)

    yield written
    for name in [name for name in sys.modules if name.startswith("rewritten_")]:
        del sys.modules[name]


@pytest.mark.parametrize("leaves_its_own", [False, True])
def test_register_makes_the_auto_classes_build_ours(package, monkeypatch, leaves_its_own):
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    if leaves_its_own:  # as transformers 5.17: what is registered for a configuration of its own is dropped
        monkeypatch.setattr(type(MODEL_MAPPING), "register", lambda *args, **kwargs: None)
    ours = package("qwen3")
    before = transformers.AutoModelForCausalLM._model_mapping[transformers.Qwen3Config]
    assert before.__module__.startswith("transformers.")
    try:
        assert "AutoModelForCausalLM → Qwen3ForCausalLM" in ours.register()
        assert transformers.AutoModelForCausalLM._model_mapping[transformers.Qwen3Config] is ours.Qwen3ForCausalLM
    finally:
        for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING):
            mapping._extra_content.pop(transformers.Qwen3Config, None)


def test_a_sub_model_built_through_an_auto_class_is_ours(package):
    import torch
    from transformers import Gemma3Config, SiglipVisionConfig

    ours = package("gemma3")
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = SiglipVisionConfig(**small, image_size=28, patch_size=14)
    text = {**small, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64}
    config = Gemma3Config(text_config=text, vision_config=vision.to_dict(), mm_tokens_per_image=4)
    with torch.device("meta"):
        model = ours.Gemma3ForConditionalGeneration(config)
    assert type(model.model.language_model).__module__ == f"{ours.__name__}.modeling_gemma3"
    assert type(model.model.vision_tower).__module__.startswith("transformers.")


def test_two_packages_and_the_original_live_in_one_process(package):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(**small, num_key_value_heads=2, vocab_size=64)
    llama, qwen = package("llama"), package("qwen3", vendored=True)
    original, rewritten = LlamaForCausalLM(config).eval(), llama.LlamaForCausalLM(config).eval()
    rewritten.load_state_dict(original.state_dict())
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.allclose(original(ids).logits, rewritten(ids).logits, atol=1e-6)
    backend = runtime_part(llama.__name__, "core/backend")
    other = runtime_part(qwen.__name__, "core/backend")
    assert ("hf_rewrite", qwen.__name__) == (backend.NAMESPACE, other.NAMESPACE)
    assert LlamaForCausalLM.__module__.startswith("transformers.")


@pytest.mark.parametrize("model", ["mixtral", "gpt_neox"])
def test_checkpoints_that_transformers_converts_load_as_in_the_original(package, tmp_path, model):
    """A plain copy of these files loads other weights without an error."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    extra = {"num_key_value_heads": 2, "num_local_experts": 4} if model == "mixtral" else {}
    config = AutoConfig.for_model(model, **sizes, **extra, vocab_size=64)
    original = AutoModelForCausalLM.from_config(config).eval()
    original.save_pretrained(tmp_path / "saved")
    cls = getattr(package(model), type(original).__name__)
    loaded, info = cls.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs = original.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in loaded.state_dict().items())
    loaded.save_pretrained(tmp_path / "again")
    for path in (tmp_path / "saved").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
