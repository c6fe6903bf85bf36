"""aiter is called as its release wants it, or not at all; no AMD hardware takes part.

The chip is a function that is put in place of the real one, and aiter a package of recorded signatures (`fake_aiter`).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_aiter
import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rewrite.runtime import aiter_attention, aiter_calls, aiter_gemm, aiter_norms, aiter_probe, backend
from rewrite.runtime.add_rms_norm import add_rms_norm
from rewrite.runtime.attention import native_gqa
from rewrite.runtime.explain import explain
from rewrite.runtime.gated_activation import gated_activation
from rewrite.runtime.layer_norm import layer_norm
from rewrite.runtime.rms_norm import rms_norm

Install = Callable[..., fake_aiter.Release]
NEWEST = fake_aiter.RELEASES[-1]
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with an MI300X and no aiter."""
    monkeypatch.setattr(aiter_probe, "chip", lambda device=None: "gfx942")
    monkeypatch.setenv("AITER_LOG_LEVEL", "WARNING")
    for name in (aiter_calls.SWITCH, aiter_gemm.TABLE, backend.ENVIRONMENT_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    fake_aiter.calls.clear()
    aiter_calls.forget()
    backend.warn_once.cache_clear()
    yield monkeypatch
    aiter_calls.forget()


@pytest.fixture
def install(machine: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Install]:
    """A function that installs a release."""
    installed = []

    def install(tag: str = NEWEST, **bodies: Callable[..., Any]) -> fake_aiter.Release:
        release = fake_aiter.Release(tag, bodies)
        fake_aiter.install(tmp_path, release)
        machine.syspath_prepend(tmp_path)
        installed.append(release)
        return release

    yield install
    for release in installed:
        release.take_back()


pytestmark = [
    pytest.mark.filterwarnings("ignore:aiter"),
    pytest.mark.usefixtures("machine"),
]


def reasons(operator: str) -> dict[str, int]:
    counted = backend.fallbacks().items()
    return {reason: times for (name, reason), times in counted if name == f"aiter.{operator}"}


def both(call: Callable[[], Any]) -> tuple[Any, Any]:
    """What the operator gives by aiter, and by its reference."""
    with backend.use_backend("aiter"):
        got = call()
    with backend.use_backend("reference"):
        return got, call()


def states(hidden_size: int = 64, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Rows as a slice of something wider, and a weight."""
    return torch.randn(3, 5, hidden_size + 16, dtype=dtype)[..., :hidden_size], torch.rand(hidden_size).to(dtype) + 0.5


NORMS = {
    "llama": {},
    "gemma": {"offset": 1.0, "weight_in_fp32": True},
    "olmo2": {"weight_in_fp32": True},
}


def has_gemma(tag: str) -> bool:
    return fake_aiter.number(tag) >= fake_aiter.number("v0.1.17")


@pytest.mark.parametrize("tag", fake_aiter.RELEASES)
def test_rms_norm_rounds_as_the_modeling_file(install: Install, tag: str) -> None:
    install(tag)
    for dtype, (name, options) in itertools.product(DTYPES, NORMS.items()):
        x, weight = states(dtype=dtype)
        version = weight._version
        fake_aiter.calls.clear()
        got, wanted = both(lambda: rms_norm(x, weight, 1e-6, **options))  # noqa: B023
        taken = fake_aiter.calls["rmsnorm" if name == "gemma" else "rms_norm"]
        assert bool(taken) == (name != "gemma" or has_gemma(tag)), (name, dtype)
        assert got.shape == x.shape
        assert got.is_contiguous()
        assert (got != wanted).double().mean() <= 0.01, (name, dtype)
        assert weight._version == version


@pytest.mark.parametrize("tag", fake_aiter.RELEASES)
def test_add_rms_norm_normalises_the_rounded_sum(install: Install, tag: str) -> None:
    """Or another form runs: what the older kernels' mode 1 sums up is not known, so it is compared."""
    install(tag)
    for dtype, (name, options) in itertools.product(DTYPES, NORMS.items()):
        x, weight = states(dtype=dtype)
        other = torch.randn_like(x)
        got, wanted = both(lambda: add_rms_norm(x, other, weight, 1e-6, **options))  # noqa: B023
        assert torch.equal(got[1], wanted[1])
        assert (got[0] != wanted[0]).double().mean() <= 0.01, (name, dtype)
    exact = tag == "v0.1.20"
    assert reasons("add_rms_norm") == {"no_equal_mode": 4} | ({} if exact else {"differs": 2})
    assert list(aiter_calls.states().values()) == [None if exact else "differs"] * 2


@pytest.mark.parametrize("tag", fake_aiter.RELEASES)
def test_layer_norm(install: Install, tag: str) -> None:
    install(tag)
    for bias in (None, torch.randn(64).bfloat16()):
        x, weight = states()
        got, wanted = both(lambda: layer_norm(x, weight, bias, 1e-5))  # noqa: B023
        assert (got != wanted).double().mean() <= 0.01
    assert fake_aiter.calls["layernorm2d_fwd"] == 3  # one proof, two calls
    assert reasons("layer_norm") == {}


@pytest.mark.parametrize("tag", fake_aiter.RELEASES)
@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.ReLU()])
def test_gated_activation(install: Install, tag: str, activation: nn.Module) -> None:
    install(tag)
    gate, up = torch.randn(2, 7, 96, dtype=torch.bfloat16).chunk(2, -1)
    got, wanted = both(lambda: gated_activation(gate, up, activation))
    torch.testing.assert_close(got, wanted, rtol=2**-6, atol=2**-9)
    assert got.is_contiguous()
    assert reasons("gated_activation") == ({"activation": 1} if isinstance(activation, nn.ReLU) else {})
    assert sum(fake_aiter.calls.values()) == (0 if isinstance(activation, nn.ReLU) else 2)


def test_only_halves_of_one_product_are_activated(install: Install) -> None:
    install()
    packed = torch.randn(2, 7, 96, dtype=torch.bfloat16)
    gate, up = packed.chunk(2, -1)
    swapped, apart, wider = (up, gate), (gate.clone(), up.clone()), (packed[..., :32], packed[..., 32:64])
    for pair in (swapped, apart, wider):
        got, wanted = both(lambda: gated_activation(*pair, nn.SiLU()))  # noqa: B023
        torch.testing.assert_close(got, wanted)
    assert reasons("gated_activation") == {"layout": 3}
    assert not fake_aiter.calls


class Attention(nn.Module):
    is_causal = True

    def __init__(self, groups: int):
        super().__init__()
        self.num_key_value_groups = groups


def qkv(
    batch: int, queries: int, keys: int, groups: int, head_dim: int = 16, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """`[B, H, S, D]` views of `[B, S, H, D]`; the keys as a cache has them."""
    query = torch.randn(batch, queries, 2 * groups, head_dim, dtype=dtype).transpose(1, 2)
    return [query, *torch.randn(2, batch, 2, keys, head_dim, dtype=dtype)]


def attended(*states: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    groups = states[0].shape[1] // states[1].shape[1]
    return native_gqa(sdpa_attention_forward)(Attention(groups), *states, mask, scaling=0.2, **options)[0]


def assert_attends_as(wanted: Tensor, got: Tensor) -> None:
    assert got.shape == wanted.shape
    assert got.is_contiguous()
    torch.testing.assert_close(got.float(), wanted.float(), rtol=0, atol=0.02)


@pytest.mark.parametrize(("tag", "groups"), [*((tag, 3) for tag in fake_aiter.RELEASES), (NEWEST, 1)])
def test_attention_in_place_of_sdpa(install: Install, tag: str, groups: int) -> None:
    """Prefill, prefill into an empty static cache (more keys than queries), a step, and without causality."""
    install(tag)
    cases = [(9, 9, None), (9, 20, None), (9, 20, False), (1, 20, None), (130, 130, None)]
    for queries, keys, is_causal in cases:
        states = qkv(2, queries, keys, groups)
        got, wanted = both(lambda: attended(*states, is_causal=is_causal))  # noqa: B023
        assert_attends_as(wanted, got)
    assert reasons("attention") == {}
    # Each variant once on as many keys as queries and once on more, then the calls.
    assert fake_aiter.calls["flash_attn_func"] == len(cases) + 2 * 4
    assert list(aiter_calls.states().values()) == [None] * 4


@pytest.mark.parametrize("tag", [fake_aiter.RELEASES[0], NEWEST])
def test_attention_is_bottom_right_with_windows(install: Install, tag: str) -> None:
    install(tag)
    for (queries, keys), causal, window in itertools.product([(9, 9), (9, 20), (1, 20)], [True, False], [None, 1, 4, 50]):
        query, key, value = qkv(2, queries, keys, 2)
        seen = aiter_attention.visible(queries, keys, causal and queries > 1, window, query.device)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=0.2, enable_gqa=True
        )
        with backend.use_backend("aiter"):
            got = aiter_attention.attend(query, key, value, scaling=0.2, causal=causal, window=window)
        assert got is not None
        assert_attends_as(wanted.transpose(1, 2), got)


@pytest.mark.parametrize("window", [1, 4])
def test_what_a_query_sees(window: int) -> None:
    """Written out, since the proof of a variant and the fake would agree on a common mistake."""
    assert aiter_attention.visible(2, 4, True, None, torch.device("cpu")).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    seen = aiter_attention.visible(2, 6, True, window, torch.device("cpu")).int().tolist()
    assert seen == {1: [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]], 4: [[0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]}[window]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mask": torch.ones(2, 1, 9, 9, dtype=torch.bool)}, "mask"),
        ({"dropout": 0.5}, "dropout"),
        ({"position_bias": torch.zeros(1, 4, 9, 9, dtype=torch.bfloat16)}, "softcap"),
    ],
)
def test_attention_with_more_than_aiter_takes(install: Install, change: dict[str, Any], reason: str) -> None:
    install()
    states = qkv(2, 9, 9, 2)
    with backend.use_backend("aiter"):
        attended(*states, **change)
    assert reasons("attention") == {reason: 1}
    assert not fake_aiter.calls


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        (qkv(2, 9, 9, 2, dtype=torch.float32), "dtype"),
        (qkv(2, 9, 9, 2, head_dim=264), "head_dim"),
        (qkv(2, 9, 9, 2, head_dim=12), "head_dim"),
        (qkv(2, 9, 5, 2), "more_queries_than_keys"),
        ([x.transpose(2, 3).contiguous().transpose(2, 3) for x in qkv(2, 8, 8, 2)], "layout"),
        ([x.flatten()[1:-7].as_strided((2, 2, 8, 16), (256, 128, 16, 1)) for x in qkv(3, 9, 9, 1)], "layout"),
        ([x.requires_grad_() for x in qkv(2, 9, 9, 2)], "gradient_wanted"),
    ],
)
def test_states_that_aiter_does_not_get(install: Install, states: list[Tensor], reason: str) -> None:
    install()
    got, wanted = both(lambda: attended(*states))
    assert_attends_as(wanted, got)
    assert reasons("attention") == {reason: 1}
    assert not fake_aiter.calls
    assert got.requires_grad == states[0].requires_grad


def test_attention_hands_over_views_and_copies_nothing(install: Install) -> None:
    seen = []

    def flash(release: fake_aiter.Release, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Tensor:
        seen.append((q, k, v))
        return fake_aiter.flash_attn_func(release, q, k, v, **others)

    install(flash_attn_func=flash)
    packed = torch.randn(2, 9, 8 * 32, dtype=torch.bfloat16).split([4 * 32, 2 * 32, 2 * 32], dim=-1)
    states = [part.unflatten(-1, (-1, 32)).transpose(1, 2) for part in packed]
    with backend.use_backend("aiter"):
        attended(*states)
    assert [x.data_ptr() for x in seen[-1]] == [x.data_ptr() for x in states]
    assert [x.stride() for x in seen[-1]] == [x.transpose(1, 2).stride() for x in states]


def gemm_states(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 3, 64).to(dtype), torch.randn(48, 64).to(dtype), torch.randn(48).to(dtype)


@pytest.mark.parametrize("tag", fake_aiter.RELEASES)
def test_gemm_with_a_table(install: Install, machine: pytest.MonkeyPatch, tag: str) -> None:
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


def test_gemm_without_a_table_is_torchs(install: Install, machine: pytest.MonkeyPatch) -> None:
    install()
    with backend.use_backend("auto"):
        assert aiter_gemm.mm(*gemm_states()) is None
        assert reasons("gemm") == {"untuned": 1}
        assert "aiter" not in sys.modules
        machine.setattr(aiter_probe, "chip", lambda device=None: "gfx950")
        assert aiter_gemm.mm(*gemm_states()) is not None


def test_gemm_gates(install: Install, machine: pytest.MonkeyPatch) -> None:
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
def test_norm_gates(install: Install, x: Tensor, weight: Tensor, reason: str) -> None:
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


def test_norms_that_have_no_equal(install: Install) -> None:
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
def test_the_proof_tells_the_rounding_modes_apart(mode: int, install: Install) -> None:
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


def test_an_operator_with_wrong_numbers_is_off_with_one_word(install: Install) -> None:
    def wrong(release: fake_aiter.Release, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Tensor:
        top_left = [x[:, : q.shape[1]] for x in (k, v)] if others["causal"] else (k, v)
        return fake_aiter.flash_attn_func(release, q, *top_left, **others)

    install(flash_attn_func=wrong)
    with pytest.warns(RuntimeWarning, match="attention is off in this process") as said:
        for _ in range(3):
            got, wanted = both(lambda: attended(*qkv(2, 9, 9, 2)))  # noqa: B023
    assert sum("is off in this process" in str(warning.message) for warning in said) == 1
    assert reasons("attention") == {"differs": 3}
    assert fake_aiter.calls["flash_attn_func"] == 2
    assert got.shape == wanted.shape


@pytest.mark.parametrize("later", [False, True])
def test_an_operator_that_raises_is_off(install: Install, later: bool) -> None:
    def failing(release: fake_aiter.Release, **arguments: Any) -> Tensor:
        if not later or fake_aiter.calls["rms_norm"] > 2:
            raise KeyError("no kernel for gfx942")
        return fake_aiter.rms_norm(release, **arguments)

    install(rms_norm=failing)
    x, weight = states()
    for _ in range(4):
        got, wanted = both(lambda: rms_norm(x, weight, 1e-6))
        assert (got != wanted).double().mean() <= 0.01
    assert reasons("rms_norm") == {"raised": 3 if later else 4}
    assert fake_aiter.calls["rms_norm"] == (3 if later else 1)


@pytest.mark.parametrize("odd", [lambda out: None, lambda out: out.float(), lambda out: out[:, :1], lambda out: "out"])
def test_results_of_another_kind_are_not_taken(install: Install, odd: Callable[[Tensor], Any]) -> None:
    proved = []

    def flash(release: fake_aiter.Release, **arguments: Any) -> Any:
        out = fake_aiter.flash_attn_func(release, **arguments)
        proved.append(out)
        return odd(out) if len(proved) > 2 else out

    install(flash_attn_func=flash)
    got, wanted = both(lambda: attended(*qkv(2, 9, 9, 2)))
    assert got.shape == wanted.shape
    assert reasons("attention") == {"unexpected_result": 1}


def test_a_tuple_holds_the_result_first(install: Install) -> None:
    install(flash_attn_func=lambda release, **arguments: (fake_aiter.flash_attn_func(release, **arguments), None))
    states = qkv(2, 9, 9, 2)
    got, wanted = both(lambda: attended(*states))
    assert_attends_as(wanted, got)
    assert reasons("attention") == {}


def test_functions_that_are_gone_or_changed(install: Install, machine: pytest.MonkeyPatch) -> None:
    def rms_norm_of_tomorrow(input: Tensor, weight: Tensor, eps: float, use_model_sensitive_rmsnorm: int = 0) -> None:
        raise AssertionError

    def layer_norm_of_tomorrow(input: Tensor, weight: Tensor, bias: Tensor, group: int, epsilon: float = 0.0) -> None:
        raise AssertionError

    install()
    import aiter

    machine.setattr(aiter, "rms_norm", rms_norm_of_tomorrow)
    machine.setattr(aiter, "layernorm2d_fwd", layer_norm_of_tomorrow)
    machine.setattr(aiter, "rmsnorm2d_fwd_with_add", lambda *args: None)
    machine.delattr(aiter, "flash_attn_func")
    machine.delattr(torch.ops.aiter, "rmsnorm2d_fwd_with_add", raising=False)
    x, weight = states()
    both(lambda: rms_norm(x, weight, 1e-6))
    both(lambda: layer_norm(x, weight, None, 1e-6))
    both(lambda: attended(*qkv(2, 9, 9, 2)))
    assert reasons("rms_norm") == {"signature": 1}
    assert reasons("layer_norm") == {"signature": 1}
    assert reasons("attention") == {"missing": 1}


def test_a_function_that_nothing_describes(install: Install, machine: pytest.MonkeyPatch) -> None:
    install()
    import aiter

    machine.setattr(aiter, "undescribed", lambda *args, **kwargs: None, raising=False)
    assert aiter_probe.function("undescribed", ("input",), ()) == "signature_unknown"
    assert aiter_probe.function("rms_norm", ("x", "weight"), ("epsilon",)) == "signature"
    assert aiter_probe.function("rms_norm", ("input", "weight"), ("epsilon", "gemma_norm")) == "signature"
    assert callable(aiter_probe.function("rms_norm", ("input", "weight"), ("epsilon",)))


def test_nothing_is_compiled_or_compared_during_a_capture(install: Install, machine: pytest.MonkeyPatch) -> None:
    install()
    x, weight = states()
    with backend.use_backend("aiter"):
        machine.setattr(aiter_calls, "capturing", lambda: True)
        rms_norm(x, weight, 1e-6)
        assert reasons("rms_norm") == {"not_warm": 1}
        assert not fake_aiter.calls
        machine.setattr(aiter_calls, "capturing", lambda: False)
        rms_norm(x, weight, 1e-6)
        machine.setattr(aiter_calls, "capturing", lambda: True)
        rms_norm(x, weight, 1e-6)
        rms_norm(x, weight, 1e-6, weight_in_fp32=True)
    assert fake_aiter.calls["rms_norm"] == 3
    assert reasons("rms_norm") == {"not_warm": 2}


def test_auto_in_a_capture_does_not_even_import(install: Install, machine: pytest.MonkeyPatch) -> None:
    install()
    machine.setattr(aiter_calls, "capturing", lambda: True)
    with backend.use_backend("auto"):
        attended(*qkv(2, 9, 9, 2))
    assert reasons("attention") == {"not_warm": 1}
    assert "aiter" not in sys.modules


@pytest.mark.parametrize(("chip", "taken"), [("gfx942", True), ("gfx950", True), ("gfx90a", False), ("gfx1100", False)])
def test_auto_takes_attention_only(install: Install, machine: pytest.MonkeyPatch, chip: str, taken: bool) -> None:
    install()
    machine.setattr(aiter_probe, "chip", lambda device=None: chip)
    x, weight = states()
    with backend.use_backend("auto"):
        rms_norm(x, weight, 1e-6)
        attended(*qkv(2, 9, 9, 2))
    assert set(fake_aiter.calls) == ({"flash_attn_func"} if taken else set())
    assert backend.fallbacks() == {}


@pytest.mark.parametrize(("chip", "reason"), [("gfx90a", {}), ("gfx1100", {"chip": 1})])
def test_chips_when_asked_for_by_name(
    install: Install, machine: pytest.MonkeyPatch, chip: str, reason: dict[str, int]
) -> None:
    install()
    machine.setattr(aiter_probe, "chip", lambda device=None: chip)
    both(lambda: rms_norm(*states(), 1e-6))
    assert reasons("rms_norm") == reason


@pytest.mark.parametrize("listed", ["rms_norm", " rms_norm,layer_norm ", "all"])
def test_switched_off(install: Install, machine: pytest.MonkeyPatch, listed: str) -> None:
    install()
    machine.setenv(aiter_calls.SWITCH, listed)
    both(lambda: rms_norm(*states(), 1e-6))
    both(lambda: attended(*qkv(2, 9, 9, 2)))
    assert set(fake_aiter.calls) == (set() if listed == "all" else {"flash_attn_func"})


def test_an_unknown_switch_is_an_error(install: Install, machine: pytest.MonkeyPatch) -> None:
    install()
    machine.setenv(aiter_calls.SWITCH, "rmsnorm")
    with backend.use_backend("aiter"), pytest.raises(ValueError, match="rmsnorm"):
        rms_norm(*states(), 1e-6)


def asyncio_helper(folder: Path) -> None:
    for name in ("__init__.py", "server.py", "join_aiters.py", "gated_aiter.py"):
        (folder / "aiter").mkdir(exist_ok=True)
        (folder / "aiter" / name).write_text("raise AssertionError('imported')\n")


def broken(folder: Path) -> None:
    for name in fake_aiter.MARKERS:
        (folder / "aiter" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "aiter" / name).write_text("")
    (folder / "aiter" / "__init__.py").write_text("raise RuntimeError('ROCm version file not found')\n")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: None, "it is not installed"),
        (asyncio_helper, "another package of that name"),
        (broken, "RuntimeError: ROCm version file not found"),
    ],
)
def test_missing_when_asked_for_by_name(
    machine: pytest.MonkeyPatch, tmp_path: Path, make: Callable[[Path], None], said: str
) -> None:
    make(tmp_path)
    machine.syspath_prepend(tmp_path)
    with pytest.raises(backend.BackendUnavailable, match=said):
        backend.set_backend("aiter")
    machine.setenv(backend.ENVIRONMENT_VARIABLE, "aiter")
    with pytest.raises(backend.BackendUnavailable, match=said):
        backend.get_backend()


@pytest.mark.parametrize(("make", "counted"), [(asyncio_helper, {}), (broken, {"import_failed": 2})])
@pytest.mark.filterwarnings("default:aiter")
def test_missing_under_auto(
    machine: pytest.MonkeyPatch, tmp_path: Path, make: Callable[[Path], None], counted: dict[str, int],
    recwarn: pytest.WarningsRecorder,
) -> None:  # fmt: skip
    make(tmp_path)
    machine.syspath_prepend(tmp_path)
    states = qkv(2, 9, 9, 2)
    for _ in range(2):
        with backend.use_backend("auto"):
            got = attended(*states)
        assert_attends_as(attended(*states), got) if not counted else None
    failed = [warning for warning in recwarn if "aiter is not used" in str(warning.message)]
    assert len(failed) == bool(counted)
    if counted:
        assert reasons("attention") == counted


def test_no_amd_gpu(machine: pytest.MonkeyPatch, install: Install) -> None:
    install()
    machine.undo()
    aiter_calls.forget()
    assert torch.version.hip is not None or aiter_probe.chip() is None
    if torch.version.hip is None:
        with pytest.raises(backend.BackendUnavailable, match="no AMD GPU"):
            backend.set_backend("aiter")
        rms_norm(*states(), 1e-6)
        assert "aiter" not in sys.modules


@pytest.mark.parametrize("tag", [fake_aiter.RELEASES[0], NEWEST])
def test_compiles_in_one_graph(install: Install, tag: str) -> None:
    install(tag)
    x, weight = states()
    gate, up = torch.randn(2, 7, 96, dtype=torch.bfloat16).chunk(2, -1)
    module, interface = Attention(2), native_gqa(sdpa_attention_forward)

    def step(x: Tensor, both: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        normed = rms_norm(x, weight, 1e-6)
        gate, up = both.chunk(2, -1)
        activated = gated_activation(gate, up, nn.functional.silu)
        return normed, *add_rms_norm(normed, x, weight, 1e-6), activated, interface(module, *states, None)[0]

    states_ = qkv(2, 9, 9, 2)
    packed = torch.randn(2, 7, 96, dtype=torch.bfloat16)
    torch._dynamo.reset()
    with backend.use_backend("aiter"), torch.no_grad():
        wanted = step(x, packed, *states_)
        fake_aiter.calls.clear()
        got = torch.compile(step, fullgraph=True, backend="aot_eager")(x, packed, *states_)
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
    assert {"rms_norm", "silu_and_mul", "flash_attn_func"} <= set(fake_aiter.calls)
    torch._dynamo.reset()


def test_explain_says_what_runs(install: Install) -> None:
    install("v0.1.17")
    x, weight = states()
    both(lambda: rms_norm(x, weight, 1e-6))
    both(lambda: add_rms_norm(x, x, weight, 1e-6))
    said = str(explain(nn.Module()))
    assert "rms_norm in 1 variants" in said
    assert "add_rms_norm in 0 variants, 1 off (differs)" in said
    assert "1 × aiter.add_rms_norm: differs" in said


def test_every_reason_is_in_the_list() -> None:
    assert all(aiter_calls.REASONS.values())
    assert aiter_norms.DTYPES == {torch.float16, torch.bfloat16}
