"""Norms, activations and products by aiter: as its release wants them, rounded as the modeling file, or not at all."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import fake_aiter
import pytest
import record_aiter
import torch
from aiter_cases import DTYPES, QUIET, both, reasons, states
from torch import Tensor, nn

from hf_rewrite_runtime.aiter import aiter_calls, aiter_gemm
from hf_rewrite_runtime.core import aiter_probe, backend
from hf_rewrite_runtime.linear.gated_activation import gated_activation
from hf_rewrite_runtime.norms.add_rms_norm import add_rms_norm
from hf_rewrite_runtime.norms.layer_norm import layer_norm
from hf_rewrite_runtime.norms.rms_norm import rms_norm

pytestmark = [pytest.mark.filterwarnings(QUIET), pytest.mark.usefixtures("machine")]


NORMS = {
    "llama": {},
    "gemma": {"offset": 1.0, "weight_in_fp32": True},
    "olmo2": {"weight_in_fp32": True},
}


def has_gemma(tag: str) -> bool:
    return record_aiter.number(tag) >= record_aiter.number("v0.1.17")


@pytest.mark.parametrize("tag", fake_aiter.RELEASES)
def test_rms_norm_rounds_as_the_modeling_file(install: fake_aiter.Install, tag: str) -> None:
    install(tag)
    for dtype, (name, options) in itertools.product(DTYPES, NORMS.items()):
        x, weight = states(dtype=dtype)
        fake_aiter.calls.clear()
        got, wanted = both(lambda: rms_norm(x, weight, 1e-6, **options))  # noqa: B023
        taken = fake_aiter.calls["rmsnorm" if name == "gemma" else "rms_norm"]
        assert taken == (2 if name != "gemma" or has_gemma(tag) else 0), "one proof, one call"
        assert got.shape == x.shape
        assert got.is_contiguous()
        assert (got != wanted).double().mean() <= 0.01, (name, dtype)


@pytest.mark.parametrize("tag", fake_aiter.RELEASES)
def test_add_rms_norm_normalises_the_rounded_sum(install: fake_aiter.Install, tag: str) -> None:
    """Or another form runs: what the older kernels' mode 1 sums up is not known, so it is compared."""
    install(tag)
    for dtype, (name, options) in itertools.product(DTYPES, NORMS.items()):
        x, weight = states(dtype=dtype)
        other = torch.randn_like(x)
        got, wanted = both(lambda: add_rms_norm(x, other, weight, 1e-6, **options))  # noqa: B023
        assert torch.equal(got[1], wanted[1])
        assert (got[0] != wanted[0]).double().mean() <= 0.01, (name, dtype)
    exact = record_aiter.number(tag) >= record_aiter.number("v0.1.18")
    assert reasons("add_rms_norm") == {"no_equal_mode": 4} | ({} if exact else {"differs": 2})
    assert list(aiter_calls.states().values()) == [None if exact else "differs"] * 2


@pytest.mark.parametrize(
    ("x", "weight", "reason"),
    [
        (torch.randn(4, 64), torch.ones(64), "dtype"),
        (torch.randn(4, 64).bfloat16(), torch.ones(64), "dtype"),
        (torch.randn(4, 60).bfloat16(), torch.ones(60).bfloat16(), "hidden_size"),
        (torch.randn(4, 64).bfloat16(), torch.ones(128).bfloat16()[::2], "layout"),
        (torch.randn(4, 64).bfloat16(), torch.ones(65).bfloat16()[1:], "layout"),
        (torch.randn(0, 64).bfloat16(), torch.ones(64).bfloat16(), "empty"),
    ],
)
def test_norm_gates(install: fake_aiter.Install, x: Tensor, weight: Tensor, reason: str) -> None:
    install()
    for call in (
        lambda: rms_norm(x, weight, 1e-6),
        lambda: add_rms_norm(x, x, weight, 1e-6)[0],
        lambda: layer_norm(x, weight, None, 1e-6),
    ):
        got, wanted = both(call)
        assert torch.equal(got, wanted)
    for operator in ("rms_norm", "add_rms_norm", "layer_norm"):
        assert reasons(operator) == {reason: 1}
    assert not fake_aiter.calls


def test_norms_that_have_no_equal(install: fake_aiter.Install) -> None:
    install()
    x, weight = states()
    both(lambda: rms_norm(x, None, 1e-6))
    both(lambda: rms_norm(x, weight, 1e-6, offset=1.0))
    both(lambda: layer_norm(x, torch.randn(5, 64).bfloat16(), None, 1e-6))
    both(lambda: add_rms_norm(x, x.float(), weight, 1e-6))
    assert reasons("rms_norm") == {"weight": 1, "no_equal_mode": 1}
    assert reasons("layer_norm") == {"weight": 1}
    assert reasons("add_rms_norm") == {"dtype": 1}


@pytest.mark.parametrize("mode", [0, 1])
def test_the_proof_tells_the_rounding_modes_apart(mode: int, install: fake_aiter.Install) -> None:
    """An aiter whose modes are one: the other one is off, and the result is right all the same."""

    def one_mode(release: fake_aiter.Release, use_model_sensitive_rmsnorm: int = 0, **others: Any) -> Tensor:
        return fake_aiter.rms_norm(release, use_model_sensitive_rmsnorm=mode, **others)

    install(rms_norm=one_mode)
    for hidden_size, dtype in itertools.product([8, 64, 1024], DTYPES):
        x, weight = states(hidden_size, dtype)
        for options in ({}, {"weight_in_fp32": True}):
            got, wanted = both(lambda: rms_norm(x, weight, 1e-6, **options))  # noqa: B023
            assert (got != wanted).double().mean() <= 0.01
    assert sorted(map(str, aiter_calls.states().values())) == ["None"] * 6 + ["differs"] * 6


@pytest.mark.parametrize("tag", fake_aiter.RELEASES)
def test_layer_norm(install: fake_aiter.Install, tag: str) -> None:
    install(tag)
    for bias in (None, torch.randn(64).bfloat16()):
        x, weight = states()
        got, wanted = both(lambda: layer_norm(x, weight, bias, 1e-5))  # noqa: B023
        assert (got != wanted).double().mean() <= 0.01
    assert fake_aiter.calls["layernorm2d_fwd"] == 3  # one proof, two calls
    assert reasons("layer_norm") == {}


@pytest.mark.parametrize("tag", fake_aiter.RELEASES)
@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.ReLU()])
def test_gated_activation(install: fake_aiter.Install, tag: str, activation: nn.Module) -> None:
    install(tag)
    gate, up = torch.randn(2, 7, 96, dtype=torch.bfloat16).chunk(2, -1)
    got, wanted = both(lambda: gated_activation(gate, up, activation))
    torch.testing.assert_close(got, wanted, rtol=2**-6, atol=2**-9)
    assert got.is_contiguous()
    assert reasons("gated_activation") == ({"activation": 1} if isinstance(activation, nn.ReLU) else {})
    assert sum(fake_aiter.calls.values()) == (0 if isinstance(activation, nn.ReLU) else 2)


def test_only_halves_of_one_product_are_activated(install: fake_aiter.Install) -> None:
    install()
    packed = torch.randn(2, 7, 96, dtype=torch.bfloat16)
    gate, up = packed.chunk(2, -1)
    swapped, apart, wider = (up, gate), (gate.clone(), up.clone()), (packed[..., :32], packed[..., 32:64])
    for pair in (swapped, apart, wider):
        got, wanted = both(lambda: gated_activation(*pair, nn.SiLU()))  # noqa: B023
        torch.testing.assert_close(got, wanted)
    assert reasons("gated_activation") == {"layout": 3}
    assert not fake_aiter.calls


def gemm_states(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 3, 64).to(dtype), torch.randn(48, 64).to(dtype), torch.randn(48).to(dtype)


@pytest.mark.parametrize("tag", fake_aiter.RELEASES)
def test_gemm_with_a_table(install: fake_aiter.Install, machine: pytest.MonkeyPatch, tag: str) -> None:
    install(tag)
    machine.setenv(aiter_gemm.TABLE, "tuned.csv")
    for dtype, biased in itertools.product(DTYPES, [False, True]):
        x, weight, bias = gemm_states(dtype)
        with backend.use_backend("auto"):
            got = aiter_gemm.mm(x, weight, bias if biased else None)
        assert got is not None
        wanted = nn.functional.linear(x, weight, bias if biased else None)
        torch.testing.assert_close(got, wanted, rtol=2**-7, atol=0.1)
    assert reasons("gemm") == {}


def test_gemm_without_a_table_is_torchs(install: fake_aiter.Install, machine: pytest.MonkeyPatch) -> None:
    install()
    with backend.use_backend("auto"):
        assert aiter_gemm.mm(*gemm_states()) is None
        assert reasons("gemm") == {"untuned": 1}
        assert "aiter" not in sys.modules
        machine.setattr(aiter_probe, "chip", lambda device=None: "gfx950")
        assert aiter_gemm.mm(*gemm_states()) is not None


def test_gemm_gates(install: fake_aiter.Install, machine: pytest.MonkeyPatch) -> None:
    install()
    machine.setenv(aiter_gemm.TABLE, "tuned.csv")
    x, weight, bias = gemm_states()
    with backend.use_backend("auto"):
        for arguments in ((x, weight.float(), bias), (x.float(), weight.float(), None), (x, weight, bias.float())):
            assert aiter_gemm.mm(*arguments) is None
        assert reasons("gemm") == {"dtype": 3}
        for arguments in ((x, weight.T.contiguous().T, None), (x[..., :60], weight[:, :60].contiguous(), None)):
            assert aiter_gemm.mm(*arguments) is None
        assert aiter_gemm.mm(x[:0], weight, bias) is None
    assert reasons("gemm") == {"dtype": 3, "layout": 2, "empty": 1}
    assert not fake_aiter.calls
