"""No aiter, another package of the name, and functions that fail: the bundled form runs, and the record says why.

The chip is a function that is put in place of the real one, and aiter a package of recorded signatures (`fake_aiter`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_aiter
import pytest
import torch
from aiter_cases import QUIET, Attention, assert_attends_as, attended, both, qkv, reasons, states
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_rewrite_runtime.aiter import aiter_calls
from hf_rewrite_runtime.attention.grouped_query import native_gqa
from hf_rewrite_runtime.core import aiter_probe, backend
from hf_rewrite_runtime.core.explanation import explain
from hf_rewrite_runtime.linear.gated_activation import gated_activation
from hf_rewrite_runtime.norms.add_rms_norm import add_rms_norm
from hf_rewrite_runtime.norms.layer_norm import layer_norm
from hf_rewrite_runtime.norms.rms_norm import rms_norm

pytestmark = [pytest.mark.filterwarnings(QUIET), pytest.mark.usefixtures("machine")]


def test_an_operator_with_wrong_numbers_is_off_with_one_word(install: fake_aiter.Install) -> None:
    def wrong(release: fake_aiter.Release, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Tensor:
        top_left = [x[:, : q.shape[1]] for x in (k, v)] if others["causal"] else (k, v)
        return fake_aiter.flash_attn_func(release, q, *top_left, **others)

    install(flash_attn_func=wrong)
    states = qkv(2, 9, 9, 2)
    with pytest.warns(RuntimeWarning, match="attention is off in this process") as said:
        got, wanted = [both(lambda: attended(*states)) for _ in range(3)][-1]
    assert sum("is off in this process" in str(warning.message) for warning in said) == 1
    assert reasons("attention") == {"differs": 3}
    assert fake_aiter.calls["flash_attn_func"] == 2
    assert got.shape == wanted.shape


@pytest.mark.parametrize("later", [False, True])
def test_an_operator_that_raises_is_off(install: fake_aiter.Install, later: bool) -> None:
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
def test_results_of_another_kind_are_not_taken(install: fake_aiter.Install, odd: Callable[[Tensor], Any]) -> None:
    proved = []

    def flash(release: fake_aiter.Release, **arguments: Any) -> Any:
        out = fake_aiter.flash_attn_func(release, **arguments)
        proved.append(out)
        return odd(out) if len(proved) > 2 else out

    install(flash_attn_func=flash)
    got, wanted = both(lambda: attended(*qkv(2, 9, 9, 2)))
    assert got.shape == wanted.shape
    assert reasons("attention") == {"unexpected_result": 1}


def test_a_tuple_holds_the_result_first(install: fake_aiter.Install) -> None:
    install(flash_attn_func=lambda release, **arguments: (fake_aiter.flash_attn_func(release, **arguments), None))
    states = qkv(2, 9, 9, 2)
    got, wanted = both(lambda: attended(*states))
    assert_attends_as(wanted, got)
    assert reasons("attention") == {}


def test_functions_that_are_gone_or_changed(install: fake_aiter.Install, machine: pytest.MonkeyPatch) -> None:
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


def test_a_function_that_nothing_describes(install: fake_aiter.Install, machine: pytest.MonkeyPatch) -> None:
    install()
    import aiter

    machine.setattr(aiter, "undescribed", lambda *args, **kwargs: None, raising=False)
    assert aiter_probe.function("undescribed", ("input",), ()) == "signature_unknown"
    assert aiter_probe.function("rms_norm", ("x", "weight"), ("epsilon",)) == "signature"
    assert aiter_probe.function("rms_norm", ("weight", "input"), ("epsilon",)) == "signature"
    assert aiter_probe.function("rms_norm", ("input", "weight"), ("epsilon", "gemma_norm")) == "signature"
    assert callable(aiter_probe.function("rms_norm", ("input", "weight"), ("epsilon",)))


def test_nothing_is_compiled_or_compared_during_a_capture(
    install: fake_aiter.Install, machine: pytest.MonkeyPatch
) -> None:
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


def test_auto_in_a_capture_does_not_even_import(install: fake_aiter.Install, machine: pytest.MonkeyPatch) -> None:
    install()
    machine.setattr(aiter_calls, "capturing", lambda: True)
    with backend.use_backend("auto"):
        attended(*qkv(2, 9, 9, 2))
    assert reasons("attention") == {"not_warm": 1}
    assert "aiter" not in sys.modules


@pytest.mark.parametrize(
    ("chip", "taken"), [("gfx942", True), ("gfx950", True), ("gfx90a", False), ("gfx1100", False)]
)
def test_auto_takes_attention_only(
    install: fake_aiter.Install, machine: pytest.MonkeyPatch, chip: str, taken: bool
) -> None:
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
    install: fake_aiter.Install, machine: pytest.MonkeyPatch, chip: str, reason: dict[str, int]
) -> None:
    install()
    machine.setattr(aiter_probe, "chip", lambda device=None: chip)
    both(lambda: rms_norm(*states(), 1e-6))
    assert reasons("rms_norm") == reason


@pytest.mark.parametrize("listed", ["rms_norm", " rms_norm,layer_norm ", "all"])
def test_switched_off(install: fake_aiter.Install, machine: pytest.MonkeyPatch, listed: str) -> None:
    install()
    machine.setenv(aiter_calls.SWITCH, listed)
    both(lambda: rms_norm(*states(), 1e-6))
    both(lambda: attended(*qkv(2, 9, 9, 2)))
    assert set(fake_aiter.calls) == (set() if listed == "all" else {"flash_attn_func"})


def test_an_unknown_switch_is_an_error(install: fake_aiter.Install, machine: pytest.MonkeyPatch) -> None:
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


def test_no_amd_gpu(machine: pytest.MonkeyPatch, install: fake_aiter.Install) -> None:
    install()
    machine.undo()
    aiter_calls.forget()
    assert torch.version.hip is not None or aiter_probe.chip() is None
    if torch.version.hip is None:
        with pytest.raises(backend.BackendUnavailable, match="no AMD GPU"):
            backend.set_backend("aiter")
        rms_norm(*states(), 1e-6)
        assert "aiter" not in sys.modules


@pytest.mark.parametrize("tag", [fake_aiter.RELEASES[0], fake_aiter.NEWEST])
def test_compiles_in_one_graph(install: fake_aiter.Install, tag: str) -> None:
    install(tag)
    x, weight = states()
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


def test_explain_says_what_runs(install: fake_aiter.Install) -> None:
    install("v0.1.17")
    x, weight = states()
    both(lambda: rms_norm(x, weight, 1e-6))
    both(lambda: add_rms_norm(x, x, weight, 1e-6))
    said = str(explain(nn.Module()))
    assert "rms_norm in 1 variants" in said
    assert "add_rms_norm in 0 variants, 1 off (differs)" in said
    assert "1 × aiter.add_rms_norm: differs" in said


def test_every_reason_is_given_somewhere_and_explained() -> None:
    texts = [path.read_text() for path in Path(aiter_calls.__file__).parents[1].rglob("*.py")]
    given = [re.findall(r"[\"']([a-z_]+)[\"']", text) for text in texts if "aiter" in text]
    times = [name for names in given for name in names]
    assert all(times.count(reason) > 1 for reason in aiter_calls.REASONS), "one is the list itself"
    with pytest.raises(KeyError):
        aiter_calls.refuse("attention", "unheard_of")
