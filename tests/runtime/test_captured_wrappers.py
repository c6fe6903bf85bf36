"""A rewritten BERT whose forward is captured, under what people wrap around a model; and what they do to it.

Each step compares with the model's own forward, on inputs and masks of their own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_rewrite_runtime.forward import forward_cache
from hf_rewrite_runtime.forward.forward_settings import use_forward_graphs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICE = "cuda"
ROWS, TOKENS = 2, 24


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("packages")
    command = [sys.executable, "-c", "from rewrite.cli import main; main()", "bert", "--out", "captured_bert"]
    subprocess.run([*command, "--no-verify"], check=True, capture_output=True, cwd=folder)
    sys.path.insert(0, str(folder))
    try:
        import captured_bert
    finally:
        sys.path.remove(str(folder))
    return captured_bert


def built(bert: Any, implementation: str = "sdpa") -> Any:
    from transformers import BertConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 512}
    config = BertConfig(num_hidden_layers=2, attn_implementation=implementation, **sizes)
    return bert.BertForMaskedLM(config).to(DEVICE).eval()


def replays(bert: Any, model: Any) -> int:
    return sum(forward_cache._stores[module].replays for module in model.modules() if module in forward_cache._stores)


def compare(bert: Any, model: Any, close: float = 2e-3, **keywords: Any) -> int:
    """Call a model, compare each output with its own forward's, and return how many calls replayed a graph."""
    before = replays(bert, model)
    kept: list[tuple[Any, Any]] = []
    with torch.no_grad(), use_forward_graphs("always"):
        for number in range(4):
            ids = torch.randint(5, 500, (ROWS, TOKENS), device=DEVICE)
            mask = torch.ones_like(ids)
            mask[1, TOKENS - 1 - number :] = 0
            found = leaves(model(input_ids=ids, attention_mask=mask, **keywords))
            with use_forward_graphs("never"):
                expected = leaves(model(input_ids=ids, attention_mask=mask, **keywords))
            torch.testing.assert_close(found, expected, rtol=close, atol=close)
            kept += [(tensor, tensor.clone()) for tensor in found]
    assert all(torch.equal(tensor, copy) for tensor, copy in kept)
    return replays(bert, model) - before


def leaves(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return [leaf for part in (output.to_tuple() if hasattr(output, "to_tuple") else output) for leaf in leaves(part)]


@pytest.mark.parametrize("asked", [{}, {"output_hidden_states": True}, {"return_dict": False}])
def test_what_is_asked_for(bert: Any, asked: dict[str, bool]) -> None:
    assert compare(bert, built(bert), **asked) >= 2  # what records hidden states is installed by the first call


def test_attentions(bert: Any) -> None:
    assert compare(bert, built(bert, "eager"), output_attentions=True) >= 2


def test_adapters(bert: Any) -> None:
    peft = pytest.importorskip("peft")
    given = peft.LoraConfig(target_modules=["query", "value"], init_lora_weights=False)
    model = peft.get_peft_model(built(bert), given).eval()
    assert compare(bert, model)
    with model.disable_adapter():
        assert compare(bert, model)
    assert compare(bert, model)
    assert compare(bert, model.merge_and_unload())


def _halved(model: Any) -> Any:
    return model.to(torch.bfloat16)


def _eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


def _moved(model: Any) -> Any:
    return model.cpu().to(DEVICE)


def _loaded(model: Any) -> Any:
    model.load_state_dict({name: value * 1.1 for name, value in model.state_dict().items()}, assign=True)
    return model


@pytest.mark.parametrize("change", [_halved, _eager, _moved, _loaded])
def test_a_model_that_was_changed(bert: Any, change: Callable[[Any], Any]) -> None:
    model = built(bert)
    assert compare(bert, model) == 3
    assert compare(bert, change(model), close=0.1 if change is _halved else 2e-3) >= 2


def test_accelerate(bert: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.Accelerator(mixed_precision="bf16").prepare(built(bert))
    assert compare(bert, model) == 0  # autocast, and a wrapped forward
    model = built(bert).cpu()
    accelerate.cpu_offload(model, DEVICE)
    assert compare(bert, model) == 0


def test_torch_compile(bert: Any) -> None:
    model = built(bert)
    assert compare(bert, torch.compile(model, backend="eager", fullgraph=True)) == 0
    model.compile(backend="eager")
    assert compare(bert, model) == 0


def test_a_graph_of_the_users_own(bert: Any) -> None:
    model, graph = built(bert), torch.cuda.CUDAGraph()
    ids = torch.randint(5, 500, (ROWS, TOKENS), device=DEVICE)
    with torch.no_grad():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(2):
                model(input_ids=ids)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            logits = model(input_ids=ids).logits
        ids.copy_(torch.randint(5, 500, (ROWS, TOKENS), device=DEVICE))
        graph.replay()
        with use_forward_graphs("never"):
            torch.testing.assert_close(logits, model(input_ids=ids).logits, rtol=2e-3, atol=2e-3)
