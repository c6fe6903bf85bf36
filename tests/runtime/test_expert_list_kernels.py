"""Experts that are a list of modules: the kernels add what the loop would, and where they do not run it does."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

import pytest
import torch
from conftest import INTERPRETED, KERNEL_DTYPES
from tolerances import assert_as_exact_as
from torch import Tensor, nn

from hf_rewrite_runtime.core import backend

expert_list = importlib.import_module("hf_rewrite_runtime.moe.expert_list")
add_experts = expert_list.add_experts

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
H, M, E, K = 48, 40, 5, 2


class Expert(nn.Module):
    def __init__(self, width: int = M, bias: bool = False):
        super().__init__()
        self.gate = nn.Linear(H, width, bias=bias)
        self.up = nn.Linear(H, width, bias=bias)
        self.down = nn.Linear(width, H, bias=bias)
        self.act: nn.Module = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return made

    def expert_parts(self) -> tuple[object, ...]:
        parts: tuple[object, ...] = expert_list.ExpertParts(self.gate, self.up, self.down, self.act)
        return parts


class Another(Expert):
    """A class whose `forward` is not the one that its parts were read of."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


Given = tuple[Tensor, nn.ModuleList, Tensor, Tensor]


def looped(states: Tensor, experts: nn.ModuleList, index: Tensor, weights: Tensor) -> Tensor:
    total = torch.zeros_like(states)
    for number, expert in enumerate(experts):
        token, place = torch.where(index == number)
        total.index_add_(0, token, (expert(states[token]) * weights[token, place, None]).to(total.dtype))
    return total


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def given(device: torch.device) -> Given:
    return made(device, torch.float32)


def made(device: torch.device, dtype: torch.dtype, tokens: int = 3) -> Given:
    experts = nn.ModuleList([Expert() for _ in range(E)]).to(device, dtype).eval()
    index = torch.rand(tokens, E, device=device).topk(K, dim=-1).indices
    weights = torch.rand(tokens, K, device=device).softmax(-1).to(dtype)
    return torch.randn(tokens, H, device=device).to(dtype), experts, index, weights


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_adds_what_the_loop_adds(device: torch.device, poisoned: None, dtype: torch.dtype) -> None:
    states, experts, index, weights = made(device, dtype)
    expected = looped(states.double(), experts.double(), index, weights.double())
    experts.to(dtype)
    before = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    there, here = looped(states, experts, index, weights), torch.zeros_like(states)
    assert add_experts(here, states, experts, index, weights, E)
    assert not backend.fallbacks(), "the kernels did not run"
    assert_as_exact_as(there, here, expected, torch.finfo(dtype).eps)
    assert all(torch.equal(tensor, before[name]) for name, tensor in experts.state_dict().items())
    assert torch.equal(looped(states, experts, index, weights), there)


def test_adds_to_what_is_there(given: Given) -> None:
    states, experts, index, weights = given
    total = states.clone()
    assert add_experts(total, states, experts, index, weights)
    torch.testing.assert_close(total, states + looped(*given))


def test_sees_weights_that_change(given: Given) -> None:
    states, experts, index, weights = given
    assert add_experts(torch.zeros_like(states), states, experts, index, weights)
    experts[1].up.weight.mul_(3)
    experts[2].gate.weight = nn.Parameter(torch.randn_like(experts[2].gate.weight))
    total = torch.zeros_like(states)
    assert add_experts(total, states, experts, index, weights)
    torch.testing.assert_close(total, looped(*given))


def test_a_choice_of_nobody_is_passed_over(given: Given) -> None:
    states, experts, index, weights = given
    index = torch.stack((index[:, 0], torch.tensor([E, -1, 99], device=index.device)), dim=-1)
    total = torch.zeros_like(states)
    assert add_experts(total, states, experts, index, weights, strays=True)
    torch.testing.assert_close(total, looped(states, experts, index, weights))


def test_weights_of_every_expert(given: Given) -> None:
    states, experts, index, _ = given
    every = torch.rand(states.shape[0], E, device=states.device)
    total = torch.zeros_like(states)
    assert add_experts(total, states, experts, index, every, strays=True, dense=True)
    torch.testing.assert_close(total, looped(states, experts, index, every.gather(-1, index)))


def test_several_dimensions(given: Given) -> None:
    states, experts, index, weights = given
    total = torch.zeros_like(states)
    assert add_experts(total[:, None], states[None], experts, index[None], weights[:, None])
    torch.testing.assert_close(total, looped(*given))


def plus_one(module: nn.Module, given: object, made: Tensor) -> Tensor:
    return made + 1


ODD: dict[str, Callable[[nn.ModuleList], object]] = {
    "form": lambda experts: experts.__setitem__(1, nn.Linear(H, H)),
    "form, another forward": lambda experts: experts.__setitem__(1, Another().to(experts[0].up.weight)),
    "observed": lambda experts: experts[1].register_forward_hook(plus_one),
    "observed, a projection": lambda experts: experts[1].up.register_forward_hook(plus_one),
    "biased": lambda experts: experts.__setitem__(1, Expert(bias=True).to(experts[0].up.weight)),
    "unknown_activation": lambda experts: setattr(experts[1], "act", nn.Hardtanh()),
    "unknown_activation, another": lambda experts: setattr(experts[1], "act", nn.GELU()),
    "different_sizes": lambda experts: experts.__setitem__(1, Expert(M + 1).to(experts[0].up.weight)),
    "shared_weight": lambda experts: setattr(experts[1].down, "weight", experts[0].down.weight),
    "not_linear": lambda experts: setattr(experts[1], "up", nn.Sequential(experts[1].up)),
    "gradient": lambda experts: torch.set_grad_enabled(True),
}


@pytest.mark.parametrize("why", ODD)
def test_leaves_it_to_the_loop(given: Given, why: str) -> None:
    states, experts, index, weights = given
    ODD[why](experts)
    total = torch.zeros_like(states)
    assert not add_experts(total, states, experts, index, weights)
    assert backend.fallbacks() == {("add_experts", why.split(",")[0]): 1}
    assert not total.any()


def test_leaves_other_tensors_to_the_loop(given: Given) -> None:
    states, experts, index, weights = given
    total = torch.zeros_like(states)
    assert not add_experts(total, states, experts, index, weights, E + 1)
    assert not add_experts(total, states, experts, index, weights[:, :1])
    assert not add_experts(total[:0], states[:0], experts, index[:0], weights[:0])
    assert not add_experts(total.mT.contiguous().mT, states, experts, index, weights)
    assert not add_experts(total, states, experts, index.int(), weights)
    assert not add_experts(total.double(), states, experts, index, weights)
    reasons = {reason: count for (_, reason), count in backend.fallbacks().items()}
    assert reasons == {"different_sizes": 1, "shapes": 3, "dtype": 2}


def test_many_tokens_run_the_loop_and_are_no_graph_s(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    states, experts, index, weights = made(device, torch.float32, 65)
    total = torch.zeros_like(states)
    assert not add_experts(total, states, experts, index, weights)
    assert backend.fallbacks() == {("add_experts", "many_tokens"): 1}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    with pytest.raises(RuntimeError, match="65 tokens"):
        add_experts(total, states, experts, index, weights)


def test_a_wrong_expert_is_seen(given: Given) -> None:
    """What the tests above compare with would differ, were gate and up of one expert exchanged."""
    states, experts, index, weights = given
    index[:, 0] = 0
    right = looped(*given)
    experts[0].gate, experts[0].up = experts[0].up, experts[0].gate
    total = torch.zeros_like(states)
    assert add_experts(total, states, experts, index, weights)
    assert not torch.allclose(total, right)
