"""A package without what nobody asked for: the original's numbers, and `explain` says what to ask for."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rewrite.package.features import ON_REQUEST

from rewrite.engine.build import build
from rewrite.measure.runtime_part import runtime_part
from rewrite.package.assemble import assemble
from rewrite.package.lock import Options
from rewrite.transforms import select
from rewrite.upstream.source import resolve

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
nn = torch.nn

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "initializer_range": 0.3,
}  # fmt: skip

TRAINS = """
import sys, torch
sys.path.insert(0, {folder!r})
from transformers import LlamaConfig, LlamaForCausalLM as Original
from small_llama import LlamaForCausalLM, explain
config = LlamaConfig(**{sizes})
torch.manual_seed(0)
theirs = Original(config)
ours = LlamaForCausalLM(config)
ours.load_state_dict(theirs.state_dict())
ids = torch.arange(12).view(2, 6)
for model in (ours, theirs):
    model(input_ids=ids, labels=ids).loss.backward()
for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
    assert torch.equal(one.grad, other.grad), name
print(explain(ours))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the package of Llama lies."""
    place = tmp_path_factory.mktemp("left_out")
    chosen = select()
    files = assemble(
        build(resolve("llama"), chosen),
        chosen,
        Options(without=(*ON_REQUEST, "speculation", "training")),
        place / "small_llama",
    ).files
    for path, content in files.items():
        (place / "small_llama" / path).parent.mkdir(parents=True, exist_ok=True)
        (place / "small_llama" / path).write_bytes(content)
    sys.path.insert(0, str(place))
    yield place
    sys.path.remove(str(place))
    for name in [name for name in sys.modules if name.startswith("small_llama")]:
        del sys.modules[name]


@pytest.mark.parametrize("kernels", [True, False])
def test_torch_differentiates_as_in_the_original(folder: Path, kernels: bool) -> None:
    environment = {"TRITON_INTERPRET": "1", "REWRITE_BACKEND": "triton"} if kernels else {}
    program = TRAINS.format(folder=str(folder), sizes=SIZES)
    ran = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    said = "training did not come along: rewrite sync small_llama --with training"
    assert (said in ran.stdout, "rms_norm: training_left_out" in ran.stdout) == (kernels, kernels)


def small(folder: Path) -> Any:
    """Return the package and a small model of it."""
    package = importlib.import_module("small_llama")
    runtime_part("small_llama", "core/backend").reset_fallbacks()
    return package, package.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def test_a_model_that_is_dealt_to_ranks_says_what_it_lacks(folder: Path) -> None:
    package, model = small(folder)
    model._tp_size = 2
    model._step_without_graph = True
    model.generate(torch.arange(6)[None], max_new_tokens=2, do_sample=False, pad_token_id=0)
    said = str(package.explain(model))
    assert "generate: ranks_left_out" in said
    assert "ranks did not come along: rewrite sync small_llama --with ranks" in said


def test_a_model_whose_layers_are_on_several_devices_says_what_it_lacks(folder: Path) -> None:
    package, model = small(folder)
    model.hf_device_map = {"model": 0, "lm_head": 1}
    model.generate(torch.arange(6)[None], max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert "ranks did not come along: rewrite sync small_llama --with ranks" in str(package.explain(model))


def test_a_cache_with_states_is_refused_where_no_layer_of_the_file_keeps_any(folder: Path) -> None:
    from transformers.cache_utils import DynamicCache, LinearAttentionLayer

    _, model = small(folder)
    cache = DynamicCache()
    cache.layers = [LinearAttentionLayer(1)]
    graph = runtime_part("small_llama", "decode/graph")
    assert not hasattr(importlib.import_module("small_llama.runtime.cache"), "StateLayer")
    with pytest.raises(graph.UnknownCache):
        graph.DecodeGraph(model, 1, 8, like=cache)


def test_a_layer_with_scales_for_blocks_says_what_it_lacks(folder: Path) -> None:
    class Scaled(nn.Module):
        """As transformers' `FP8Linear`, as far as a package without formats looks at it."""

        def __init__(self, linear: nn.Linear):
            super().__init__()
            self.weight, self.bias = linear.weight, None
            self.weight_scale_inv = nn.Parameter(torch.ones(1, 1))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(input, self.weight)

    package, model = small(folder)
    attention = model.model.layers[0].self_attn
    ids = torch.arange(6)[None]
    with torch.no_grad():
        expected = model(ids).logits
        attention.q_proj = Scaled(attention.q_proj)
        torch.testing.assert_close(model(ids).logits, expected)
    said = str(package.explain(model))
    assert "packed_linear: formats_left_out" in said
    assert "formats did not come along: rewrite sync small_llama --with formats" in said


def test_an_attention_kernel_that_is_named_says_what_it_lacks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, model = small(folder)
    attention = importlib.import_module("small_llama.runtime.attention")
    with pytest.raises(RuntimeError, match="attention did not come along: rewrite sync small_llama --with attention"):
        attention.set_attention_backend("flash")
    with attention.use_attention_backend("own"):
        model(torch.arange(6)[None])
    assert "attention_left_out" not in str(package.explain(model))
    named = runtime_part("small_llama", "core/backend").named_besides
    monkeypatch.setitem(named, "attention", "flash")  # as REWRITE_ATTENTION does
    model(torch.arange(6)[None])
    said = str(package.explain(model))
    assert "attention_backend: attention_left_out" in said
    assert "attention did not come along: rewrite sync small_llama --with attention" in said


def test_batches_whose_layers_would_be_packed_say_what_they_lack(folder: Path) -> None:
    package, model = small(folder)
    model._forward_without_graph = True
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 3:] = 0
    runtime = importlib.import_module("small_llama.runtime")
    with torch.no_grad(), runtime.use_ragged_batches(), runtime.use_forward_graphs("always"):
        model(torch.ones_like(mask), attention_mask=mask)
    said = str(package.explain(model))
    assert "forward: ragged_left_out" in said
    assert "ragged did not come along: rewrite sync small_llama --with ragged" in said


def test_attention_that_a_model_writes_out_says_what_it_lacks(folder: Path) -> None:
    package, model = small(folder)
    model.set_attn_implementation("eager")
    model._step_without_graph = True
    model.generate(torch.arange(6)[None], max_new_tokens=4, do_sample=False, pad_token_id=0)
    said = str(package.explain(model))
    assert "decode_step: eager_left_out" in said
    assert "eager did not come along: rewrite sync small_llama --with eager" in said


def test_saving_with_code_says_what_it_lacks(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = small(folder)
    model.save_pretrained(tmp_path / "plain")
    monkeypatch.setattr(type(model), "_auto_class", "AutoModelForCausalLM")
    with pytest.raises(RuntimeError, match="upload did not come along: rewrite sync small_llama --with upload"):
        model.save_pretrained(tmp_path / "with_code")
    assert not (tmp_path / "with_code").exists()


def test_a_step_that_is_given_more_says_what_it_lacks(folder: Path) -> None:
    package, model = small(folder)
    model._step_without_graph = True
    ids = torch.arange(6)[None]
    given = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, **given)
    found = model.generate(ids, inputs_embeds=model.get_input_embeddings()(ids).detach(), **given)
    assert torch.equal(found, wanted)
    said = str(package.explain(model))
    assert "generate: inputs_left_out" in said
    assert "inputs did not come along: rewrite sync small_llama --with inputs" in said


def test_drafted_tokens_say_what_they_lack(folder: Path) -> None:
    package, model = small(folder)
    model._step_without_graph = True
    ids = torch.arange(6).repeat(2)[None]
    given = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, **given)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=2, **given), wanted)
    said = str(package.explain(model))
    assert "generate: speculation_left_out" in said
    assert "speculation did not come along: rewrite sync small_llama --with speculation" in said
