"""What rounding explains, and no more: right steps are kept, and wrong ones seen where logits hardly tell."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hf_rewrite_runtime.core.rounding_noise import FEW, MOST, RoundingNoise, Yardstick, distance
from hf_rewrite_runtime.decode.step_graph import DecodeGraph
from hf_rewrite_runtime.decode.validation import StepDiffers
from hf_rewrite_runtime.forward import agreement
from hf_rewrite_runtime.forward.forward_graph import Unsuitable

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 199, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, Callable[[float], Any]] = {
    "llama": lambda init: LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=init)),
    "mixtral": lambda init: MixtralForCausalLM(
        MixtralConfig(**SIZES, initializer_range=init, num_local_experts=4, num_experts_per_tok=2)
    ),
}


@contextlib.contextmanager
def attributes(*values: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(module, name, getattr(module, name)) for module, name, _ in values]
    for module, name, value in values:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def scaled(weight: nn.Parameter, factor: float) -> Any:
    return attributes((weight, "data", weight.data * factor))


def swapped(weight: nn.Parameter) -> Any:
    half = len(weight) // 2
    return attributes((weight, "data", torch.cat([weight.data[half:], weight.data[:half]])))


@contextlib.contextmanager
def one_position_on(graph: DecodeGraph) -> Iterator[None]:
    graph.state.position_ids.add_(1)
    try:
        yield
    finally:
        graph.state.position_ids.sub_(1)


@contextlib.contextmanager
def without_the_first_slot(graph: DecodeGraph) -> Iterator[None]:
    graph.buffers.attention_mask[:, 0] = 0
    try:
        yield
    finally:
        graph.buffers.attention_mask[:, 0] = 1


def layers(graph: DecodeGraph) -> Any:
    return graph.model.model.layers


BUGS: dict[str, Callable[[DecodeGraph], Any]] = {
    "half of attention": lambda graph: scaled(layers(graph)[1].self_attn.o_proj.weight, 0.5),
    "half of attention, last layer": lambda graph: scaled(layers(graph)[2].self_attn.o_proj.weight, 0.5),
    "key/value heads swapped": lambda graph: swapped(layers(graph)[1].self_attn.v_proj.weight),
    "one position on": one_position_on,
    "the first slot hidden": without_the_first_slot,
    "another eps": lambda graph: attributes((layers(graph)[1].input_layernorm, "variance_epsilon", 1e-4)),
}
SMALL_BUGS: dict[str, Callable[[DecodeGraph], Any]] = {
    "scores scaled": lambda graph: attributes(
        *[(layer.self_attn, "scaling", layer.self_attn.scaling * 1.001) for layer in layers(graph)]
    ),
    "a norm's weight": lambda graph: scaled(layers(graph)[1].post_attention_layernorm.weight, 1.01),
}
"""Which 16 bits hide in what they round themselves."""


def proved(kind: str, init: float, dtype: torch.dtype, bug: Callable[[DecodeGraph], Any] | None) -> DecodeGraph:
    """Return a graph whose first step, with a bug in it, was compared with the model's ordinary one."""
    torch.manual_seed(0)
    model = MODELS[kind](init).eval().to(dtype)
    graph = DecodeGraph(model, batch_size=3, capacity=32)
    if bug is not None:
        right = graph.call.forward

        def wrong() -> Tensor:
            with bug(graph):
                return right()

        graph.call.forward = wrong  # type: ignore[method-assign]
    ids = torch.randint(3, 190, (3, 11), generator=torch.Generator().manual_seed(0))
    graph.prefill(ids)
    return graph


@pytest.mark.parametrize("init", [0.02, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_a_right_step_is_kept(kind: str, dtype: torch.dtype, init: float) -> None:
    graph = proved(kind, init, dtype, None)
    assert graph.validator.has_proved
    assert 0 < graph.validator.rounding < (1e-5 if dtype is torch.float32 else 0.15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_step_is_seen_at_the_weights_of_an_initialisation(bug: str, dtype: torch.dtype) -> None:
    """`TOLERANCE = 0.5` on logits let all of these through."""
    with pytest.raises(StepDiffers, match="where rounding explains"):
        proved("llama", 0.02, dtype, BUGS[bug])


@pytest.mark.parametrize("bug", SMALL_BUGS)
def test_what_16_bits_would_hide_is_seen_in_fp32(bug: str) -> None:
    with pytest.raises(StepDiffers):
        proved("llama", 0.1, torch.float32, SMALL_BUGS[bug])


def test_half_of_attention_is_seen_behind_a_router() -> None:
    with pytest.raises(StepDiffers):
        proved("mixtral", 0.02, torch.bfloat16, BUGS["half of attention"])


def test_the_layer_is_named() -> None:
    with pytest.raises(StepDiffers, match=r"layer 2, (keys|values)"):
        proved("llama", 0.02, torch.float32, BUGS["half of attention"])


def test_noise_leaves_choices_masks_views_and_the_generator_alone() -> None:
    weight = nn.Parameter(torch.randn(4, 8))
    x = torch.randn(3, 8)
    before = torch.get_rng_state()
    with torch.no_grad(), RoundingNoise(1) as noise:
        product = F.linear(x, weight)
        chosen = product.argmax(-1).float()  # as experts are counted
        mask = torch.zeros(3).masked_fill(torch.ones(3) > 0, torch.finfo(torch.float32).min)
        angles = torch.arange(3).float() * 0.1
        view = product[:2]
        view.mul_(2)
        masked = product + mask[:, None]
    exact = F.linear(x, weight)
    exact[:2] *= 2
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(product, exact)
    torch.testing.assert_close(product, exact, rtol=3e-7, atol=0)
    assert torch.equal(chosen, chosen.round())
    assert torch.equal(angles, torch.arange(3).float() * 0.1)
    assert masked.isfinite().all()
    assert noise.unit == torch.finfo(torch.float32).eps


def runs(made: Callable[[Tensor], Tensor], rows: int = 1, dtype: torch.dtype = torch.bfloat16) -> Yardstick:
    """Return the yardstick of a function of a weight times something."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 64, dtype=dtype) / 8)
    x = torch.randn(rows, 64, dtype=dtype)

    def again() -> dict[str, Tensor]:
        with torch.no_grad():
            return {"it": made(F.linear(x, weight))}

    return Yardstick(again(), again)


def test_a_choice_near_a_tie_explains_either_answer_and_nothing_between() -> None:
    """As of a router: half of the runs are of the other expert."""
    experts = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    tie: list[float] = []

    def routed(hidden: Tensor) -> Tensor:
        tie[:] = tie or [hidden[0, 0].item()]
        return hidden * 0.1 + experts[(hidden[:, 0] > tie[0]).long()]

    yardstick = runs(routed)
    plain = yardstick._runs[0]["it"]
    other = plain - experts[0] + experts[1]
    assert yardstick.judge({"it": plain}).holds
    assert yardstick.judge({"it": other}).holds
    assert not yardstick.judge({"it": (plain + other) / 2}).holds
    assert not yardstick.judge({"it": plain * 1.2}).holds


def test_a_stray_row_of_many_is_let_pass_only_where_runs_stray() -> None:
    steady = runs(lambda hidden: hidden, rows=FEW)
    wrong = steady._runs[0]["it"].clone()
    wrong[5] *= 2
    assert not steady.judge({"it": wrong}).holds
    torch.manual_seed(0)
    drawn = torch.Generator().manual_seed(0)

    def astray(hidden: Tensor) -> Tensor:
        hidden = hidden.clone()
        hidden[int(torch.randint(FEW, (), generator=drawn))] *= 3
        return hidden

    some = runs(astray, rows=FEW)
    wrong = some._runs[0]["it"].clone()
    wrong[5] *= 7
    assert some.judge({"it": wrong}).holds
    wrong[6] *= 7
    assert not some.judge({"it": wrong}).holds


def test_numbers_that_stand_for_infinity_hide_nothing() -> None:
    """Chameleon's logits of images are the least there is: their squares are infinite, and so was the norm."""
    least = torch.finfo(torch.float32).min
    wanted = torch.tensor([[1.0, 2.0, least, -torch.inf]])
    assert distance(wanted.clone(), wanted) == 0
    assert distance(torch.tensor([[1.0, 4.0, least, -torch.inf]]), wanted) > 0.5
    assert distance(torch.tensor([[1.0, 2.0, 0.0, -torch.inf]]), wanted) == torch.inf
    assert distance(torch.tensor([[1.0, torch.nan, least, -torch.inf]]), wanted) == torch.inf


def test_noise_explains_no_more_than_so_much_in_fp32() -> None:
    wild = runs(lambda hidden: torch.sin(1e7 * hidden), dtype=torch.float32)
    verdict = wild.judge({"it": -wild._runs[0]["it"]})
    assert (verdict.holds, verdict.bound) == (False, pytest.approx(MOST))


def test_a_forward_s_graph_in_16_bits_is_off_by_what_rounding_explains() -> None:
    """A bound of 0.1 alone let a wrong one through."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 64, dtype=torch.bfloat16) / 8)
    x = torch.randn(3, 64, dtype=torch.bfloat16)

    def forward() -> Tensor:
        return F.silu(F.linear(x, weight))

    with torch.no_grad():
        wanted, exact = forward(), F.silu(F.linear(x.float(), weight.float())).bfloat16()
    agreement.compare([wanted], [exact], forward)
    wrong = wanted * 1.06
    agreement.compare([wanted], [wrong])
    with pytest.raises(Unsuitable, match="rounding explains"):
        agreement.compare([wanted], [wrong], forward)
