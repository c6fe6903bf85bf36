"""GPTQ, AWQ and compressed-tensors checkpoints: read, computed with and saved in their own bytes.

The tensors are made here integer by integer, as the formats are described; that they are what the libraries make of
them was tried with gptqmodel 7.7 and compressed-tensors 0.20.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import INTERPRETED
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.generate.generation import GraphGeneration
from hf_rewrite_runtime.integer.integer_checkpoints import AwqLoader, CompressedLoader, GptqLoader
from hf_rewrite_runtime.integer.integer_formats import Awq, Compressed, Format, Gptq
from hf_rewrite_runtime.integer.integer_layers import IntegerLinear
from hf_rewrite_runtime.linear.linear import gated_linear, linear
from hf_rewrite_runtime.linear.packed_gemv import packed_step
from hf_rewrite_runtime.loading.original_checkpoint import OriginalCheckpoint, _loader_of

HALF = torch.float16
FORMATS: dict[str, Format] = {
    "gptq": Gptq(4, 32, HALF, 1),
    "gptq, second version": Gptq(4, 32, HALF, 0),
    "gptq, columns in an order": Gptq(4, 32, HALF, 1),
    "gptq, 8 bits": Gptq(8, 32, HALF, 1),
    "awq": Awq(4, 32, HALF),
    "compressed": Compressed(4, 32, HALF),
    "compressed, zeros": Compressed(4, 32, HALF, True),
    "compressed, a scale a row": Compressed(4, 0, HALF),
    "compressed, in an order": Compressed(4, 32, HALF, True, True),
    "compressed, 8 bits": Compressed(8, 32, HALF),
}


def word(integers: list[int], bits: int) -> int:
    value = sum(integer << (bits * place) for place, integer in enumerate(integers))
    return value - 2**32 if value >= 2**31 else value


def words(integers: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """The last axis in words, each of which has its integers in the order of `places`."""
    many = 32 // bits
    rows = integers.flatten(0, -2).tolist()
    made = [
        [word([row[at + place] for place in places or range(many)], bits) for at in range(0, len(row), many)]
        for row in rows
    ]
    return torch.tensor(made, dtype=torch.int32).view(*integers.shape[:-1], -1)


def written(name: str, rows: int, cols: int) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a weight in a format, and the weight `[rows, cols]`, rounded once."""
    form = FORMATS[name]
    groups, columns = form.groups(cols), form.columns or cols
    integers = torch.randint(0, 1 << form.bits, (rows, cols))
    scale = (torch.rand(rows, groups) * 2.0 ** (1 - form.bits) + 2.0**-form.bits).half()
    zero = torch.randint(1, 1 << form.bits, (rows, groups))
    if isinstance(form, Compressed) and not form.zeros:
        zero[:] = 1 << (form.bits - 1)
    of_column = torch.arange(cols) // columns
    if "order" in name:
        of_column = of_column[torch.randperm(cols)]
    weight = ((integers - zero[:, of_column]) * scale.double()[:, of_column]).half()
    if isinstance(form, Gptq):
        return {
            "qweight": words(integers, form.bits).t().contiguous(),
            "qzeros": words(zero.t() - form.less, form.bits),
            "scales": scale.t().contiguous(),
            "g_idx": of_column.int(),
        }, weight
    if isinstance(form, Awq):
        places = (0, 2, 4, 6, 1, 3, 5, 7)
        packed = words(integers.t(), 4, places), words(zero.t(), 4, places)
        return {"qweight": packed[0], "qzeros": packed[1], "scales": scale.t().contiguous()}, weight
    tensors = {
        "weight_packed": words(integers, form.bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, cols]),
    }
    if form.zeros:  # type: ignore[attr-defined]
        tensors["weight_zero_point"] = words(zero.t(), form.bits).t().contiguous()
    if form.ordered:  # type: ignore[attr-defined]
        tensors["weight_g_idx"] = of_column.int()
    return tensors, weight


def layer_of(name: str, rows: int, cols: int, bias: bool = False) -> tuple[IntegerLinear, Tensor, dict[str, Tensor]]:
    tensors, weight = written(name, rows, cols)
    layer = IntegerLinear(nn.Linear(cols, rows, bias=bias, dtype=HALF), FORMATS[name])
    for key, tensor in tensors.items():
        layer._parameters[key] = nn.Parameter(tensor.clone(), requires_grad=False)
    layer.arrange()
    return layer, weight, tensors


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    alike = (torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in other)
    return one.keys() == other.keys() and all(alike)


@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_and_every_byte(name: str) -> None:
    torch.manual_seed(0)
    layer, weight, tensors = layer_of(name, 24, 96)
    assert torch.equal(layer.weight, weight)
    assert same(layer.state_dict(), tensors)
    other, _, _ = layer_of(name, 24, 96)
    assert not same(other.state_dict(), tensors)
    other.load_state_dict(tensors)
    assert torch.equal(other.weight, weight)
    assert same(other.state_dict(), tensors)
    assert (layer.parts().order is not None) == ("order" in name)


def test_groups_of_unlike_sizes_are_an_error() -> None:
    tensors, _ = written("gptq", 8, 64)
    tensors["g_idx"][0] = 1
    with pytest.raises(ValueError, match="not of 32 each"):
        FORMATS["gptq"].read(tensors)


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs kernels")
def test_products(name: str, count: int, device: torch.device) -> None:
    """Apart, packed, gated, with what stands before and after them."""
    torch.manual_seed(0)
    found = [layer_of(name, 32, 128, bias=True) for _ in range(2)]
    if "order" in name:  # as of two layers of one input
        found[1][0]._buffers["_order"] = found[0][0].parts().order
    layers = [layer.to(device) for layer, _, _ in found]
    x = torch.randn(count, 1, 128, dtype=HALF, device=device)
    residual = torch.randn(count, 1, 32, dtype=HALF, device=device)
    weights = [layer.dense(torch.float64) for layer in layers]
    wanted = [x.double() @ w.T + layer.bias.double() for w, layer in zip(weights, layers, strict=True)]  # type: ignore[union-attr]

    def near(got: Tensor, of: Tensor) -> None:
        assert (got.double() - of).norm() <= 1e-3 * of.norm()

    backend.reset_fallbacks()
    with torch.no_grad():
        near(layers[0](x), wanted[0])
        near(linear(x, layers[0], residual=residual), wanted[0] + residual.double())
        for got, of in zip(packed_step(x, *layers), wanted, strict=True):
            near(got, of)
        near(gated_linear(x, layers, nn.SiLU()), nn.functional.silu(wanted[0]) * wanted[1])
    assert count == 40 or not backend.fallbacks()


def test_gradients_of_the_input() -> None:
    layer, weight, _ = layer_of("gptq, columns in an order", 16, 64)
    x = torch.randn(2, 64, dtype=HALF, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.float().sum(0).expand(2, 64).half(), rtol=2e-3, atol=2e-3)


class Llama(OriginalCheckpoint, GraphGeneration, LlamaForCausalLM):
    """As a rewritten file has it."""


GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    "gptq, columns in an order": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP, "input_activations": None}},
    },
}


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for loader in (GptqLoader, AwqLoader, CompressedLoader):
        monkeypatch.setattr(loader, "wanted", loader.understands)
    monkeypatch.setenv("REWRITE_INTEGERS", "1")


def checkpoint(folder: Path, name: str) -> tuple[dict[str, Tensor], LlamaForCausalLM]:
    """A small checkpoint on disk: its tensors, and the model of its dequantised weights."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=128, eos_token_id=None, tie_word_embeddings=False, dtype="float16",
    )  # fmt: skip
    torch.manual_seed(1)
    dense = LlamaForCausalLM(config).half().eval()
    tensors = {}
    for key, parameter in dense.state_dict().items():
        module = key.removesuffix(".weight")
        if isinstance(dense.get_submodule(module), nn.Linear) and module != "lm_head":
            made, weight = written(name, *parameter.shape)
            parameter.data.copy_(weight * 0.1)
            made = {k: v * 0.1 if v.dtype == HALF else v for k, v in made.items()}
            tensors |= {f"{module}.{k}": v for k, v in made.items()}
        else:
            tensors[key] = parameter.clone()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": CONFIGURATIONS[name]}))
    return tensors, dense


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_checkpoint(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded without the library that made it, and saved with the same bytes under the same configuration."""
    as_on_a_gpu(monkeypatch)
    tensors, dense = checkpoint(tmp_path / "published", name)
    model, about = Llama.from_pretrained(tmp_path / "published", output_loading_info=True)
    assert not any(about.values())
    assert isinstance(model.model.layers[1].mlp.down_proj, IntegerLinear)
    assert type(model.lm_head) is nn.Linear
    ids = torch.arange(5, 12)[None]
    with torch.no_grad():
        got, wanted = model(ids).logits, dense(ids).logits
    assert (got - wanted).norm() <= 4e-3 * wanted.norm()  # scales of the checkpoint are rounded
    model.save_pretrained(tmp_path / "saved")
    assert same(load_file(tmp_path / "saved" / "model.safetensors"), tensors)
    said = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert said["quantization_config"] == CONFIGURATIONS[name]
    again = Llama.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.model.layers[0].self_attn.q_proj.weight, model.model.layers[0].self_attn.q_proj.weight)


CHANGED = {
    "bits": ("gptq", {"bits": 3}),
    "layers of their own": ("gptq", {"dynamic": {"-:.*down": {}}}),
    "marlin": ("gptq", {"checkpoint_format": "marlin"}),
    "gemv": ("awq", {"version": "gemv"}),
    "another format": ("compressed", {"format": "int-quantized"}),
    "not compressed": ("compressed", {"quantization_status": "frozen"}),
    "a cache in 8 bits": ("compressed", {"kv_cache_scheme": {"num_bits": 8}}),
    "inputs in 8 bits": (
        "compressed",
        {"config_groups": {"a": {"targets": ["Linear"], "weights": GROUP, "input_activations": {"num_bits": 8}}}},
    ),
    "floats": ("compressed", {"config_groups": {"a": {"targets": ["Linear"], "weights": GROUP | {"type": "float"}}}}),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_a_configuration_says_that_is_not_understood(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a checkpoint is for transformers' own way."""
    as_on_a_gpu(monkeypatch)
    of, changed = CHANGED[name]
    assert _loader_of(CONFIGURATIONS[of]) is not None
    assert _loader_of(CONFIGURATIONS[of] | changed) is None
    monkeypatch.delenv("REWRITE_INTEGERS")
    assert _loader_of(CONFIGURATIONS[of]) is None


def test_modules_that_gptq_names() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(64, 64), "down": nn.Linear(64, 64)})])
    model.head = nn.Linear(64, 64)
    how = CONFIGURATIONS["gptq"] | {"modules_in_block_to_quantize": [["up"]]}
    assert GptqLoader.prepare(model, how, HALF)
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if not list(module.children())}
    assert kinds == {"layers.0.up": "IntegerLinear", "layers.0.down": "Linear", "head": "Linear"}


def test_a_layer_that_does_not_fit_is_an_error() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(40, 64)})])
    with pytest.raises(ValueError, match=r"layers\.0\.up: 64 × 40"):
        GptqLoader.prepare(model, CONFIGURATIONS["gptq"], HALF)
