"""Decoder layers with cross-attention, as transformers has them: eight kernels a token, and the original's logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from conftest import INTERPRETED

from hf_rewrite_runtime.attention import masked_attention
from hf_rewrite_runtime.core.explanation import explain
from hf_rewrite_runtime.decode import eligibility
from hf_rewrite_runtime.generate.generation import GraphGeneration
from hf_rewrite_runtime.launching import launch
from hf_rewrite_runtime.lazy.step_products import StepProducts

pytestmark = [
    pytest.mark.skipif(not eligibility.can_watch(), reason="a loop that cannot be watched"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]

VOCABULARY, NEW = 61, 2
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "decoder_start_token_id": 2, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
BART: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "init_std": 0.3, **COMMON,
}  # fmt: skip
POSITIONS = {"max_position_embeddings": 40}
MODELS: dict[str, Callable[[], Any]] = {
    "BartForConditionalGeneration": lambda: transformers.BartConfig(**BART, **POSITIONS, forced_eos_token_id=None),
    "WhisperForConditionalGeneration": lambda: transformers.WhisperConfig(
        **BART, num_mel_bins=8, max_source_positions=12, max_target_positions=40, suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
    "T5ForConditionalGeneration": lambda: transformers.T5Config(
        d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, initializer_factor=3.0, **COMMON
    ),
}  # fmt: skip


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of the kernels of each run of a step."""
    found: list[list[str]] = []
    run, enter, leave = launch.Kernel.launch, StepProducts.__enter__, StepProducts.__exit__
    inside = False

    def launched(kernel: launch.Kernel, *arguments: Any, **options: Any) -> None:
        run(kernel, *arguments, **options)
        if inside:
            found[-1].append(kernel.jit_function.__name__.strip("_").removesuffix("_kernel"))

    def entered(step: StepProducts) -> Any:
        nonlocal inside
        inside = True
        found.append([])
        return enter(step)

    def left(step: StepProducts, *given: Any) -> None:
        nonlocal inside
        leave(step, *given)
        inside = False

    monkeypatch.setattr(launch.Kernel, "launch", launched)
    monkeypatch.setattr(StepProducts, "__enter__", entered)
    monkeypatch.setattr(StepProducts, "__exit__", left)
    return found


def generated(name: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return logits of every step, of a class in front of which the loop stands and of transformers' own, and what
    `explain` says.
    """
    original = getattr(transformers, name)
    graphed = type(name, (GraphGeneration, original), {"_step_without_graph": device.type == "cpu"})
    config = MODELS[name]()
    torch.manual_seed(0)
    ours, theirs = (kind(copy.deepcopy(config)).eval().to(device) for kind in (graphed, original))
    for parameter in ours.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    theirs.load_state_dict(ours.state_dict())
    generator = torch.Generator().manual_seed(1)
    if "Whisper" in name:
        given = {"input_features": torch.randn(1, 8, 24, generator=generator).to(device)}
    else:
        given = {"input_ids": torch.randint(4, VOCABULARY, (1, 7), generator=generator).to(device)}
    loop = super(original, theirs).generate if "Whisper" in name else theirs.generate  # Whisper's cuts a text in parts
    own = super(original, ours).generate if "Whisper" in name else ours.generate
    settings = {
        "max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True,
        "output_logits": True,
    }  # fmt: skip
    with torch.no_grad():
        results = [call(**given, **settings) for call in (own, loop)]
    assert torch.equal(results[0].sequences, results[1].sequences)
    one, other = (torch.cat(result.logits) for result in results)
    return one, other, str(explain(ours))


@pytest.mark.parametrize("name", MODELS)
def test_eight_kernels_a_layer(name: str, device: torch.device, steps: list[list[str]]) -> None:
    ours, theirs, said = generated(name, device)
    assert "step_" not in said
    assert (ours - theirs).norm() < 1e-4 * theirs.norm()
    last = steps[-1]
    assert last.count("masked_attention") == 2 * 2
    first = last.index("masked_attention")
    layer = [kernel for kernel in last[first + 1 :] if kernel not in ("chain", "layer_norm", "rms_norm")]
    assert len(layer) == 6 + 8 + 1, last  # what is behind the first attention, the second layer, the head
    norms = [kernel for kernel in last[first:] if kernel in ("layer_norm", "rms_norm")]
    assert len(norms) <= 1, last


def test_one_slot_too_many_is_seen(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug planted in the kernel's masks: a slot that nothing has written counts as one that has been."""
    takes = masked_attention._launch

    def planted(query: Any, key: Any, value: Any, mask: Any, *given: Any) -> None:
        if mask is not None:
            mask = mask | mask.roll(1, -1) if mask.dtype == torch.bool else torch.maximum(mask, mask.roll(1, -1))
        takes(query, key, value, mask, *given)

    monkeypatch.setattr(masked_attention, "_launch", planted)
    *_, said = generated("BartForConditionalGeneration", device)
    assert "step_differs" in said
