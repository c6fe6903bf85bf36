"""A named or measured attention kernel runs where it takes a call; where it does not, that is said."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_rewrite_runtime.attention import backends
from hf_rewrite_runtime.attention.grouped_query import grouped_attention, native_gqa
from hf_rewrite_runtime.attention.named_backends import (
    get_attention_backend,
    set_attention_backend,
    use_attention_backend,
)
from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.core.process import settings
from hf_rewrite_runtime.launching import card_tables, precompiled

HEADS, KV_HEADS, DIM = 6, 2, 16
MODULE: Any = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, is_causal=True)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv(card_tables.VARIABLE, str(tmp_path))
    monkeypatch.setattr(backends, "_runs", set())
    monkeypatch.setitem(backend.named_besides, "attention", None)
    backends._counts.clear()
    card_tables.forget()
    backend.reset_fallbacks()
    yield
    set_attention_backend(None)
    card_tables.forget()


def states(rows: int = 2, queries: int = 5, keys: int | None = None) -> tuple[torch.Tensor, ...]:
    query = torch.randn(rows, queries, HEADS, DIM, dtype=torch.float64).transpose(1, 2)
    key, value = torch.randn(2, rows, KV_HEADS, keys or queries, DIM, dtype=torch.float64)
    return query, key, value


def attend(*given: Any, **named: Any) -> torch.Tensor:
    return native_gqa(sdpa_attention_forward)(MODULE, *given, **named)[0]


def table(tmp_path: Path, size: str, name: str) -> None:
    (tmp_path / "attention.json").write_text(json.dumps({"cpu": {size: {"backend": name, "us": {name: 1.0}}}}))
    card_tables.forget()


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (card_tables.VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # of a user that no list has
    card_tables.forget()
    assert attend(*states(), None).isfinite().all()


def test_a_home_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stat = os.stat

    def refused(path: Any, *given: Any, **named: Any) -> os.stat_result:
        if str(path).startswith(str(tmp_path)):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *given, **named)

    monkeypatch.setattr("os.stat", refused)
    assert attend(*states(), None).isfinite().all()
    assert precompiled.use("sm_90") == ""


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("keys", [5, 9])
def test_by_name_is_the_same_attention(masked: bool, keys: int) -> None:
    given = states(keys=keys)
    mask = torch.rand(2, 1, 5, keys) > 0.3 if masked else None
    if mask is not None:
        mask[..., 0] = True
    wanted = attend(*given, mask, scaling=0.3)
    with use_attention_backend("math"):
        got = attend(*given, mask, scaling=0.3)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    assert got.is_contiguous()
    assert backends._counts == {"math": 1}
    assert backends.describe_process() == ["attention outside decode steps: 1 by math"]


def test_attention_that_a_file_writes_itself_is_named_too() -> None:
    query, key, value = states()
    wanted = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    with use_attention_backend("math"):
        got = grouped_attention(query, key, value, is_causal=True, key_groups=3, value_groups=3)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    assert backends._counts == {"math": 1}


def test_gradients_are_those_of_the_named_kernel() -> None:
    given = [tensor.requires_grad_() for tensor in states()]
    wanted = torch.autograd.grad(attend(*given, None).square().sum(), given)
    with use_attention_backend("math"):
        got = torch.autograd.grad(attend(*given, None).square().sum(), given)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert backends._counts == {"math": 1}


def test_under_a_compiler_a_named_one_is_one_operator() -> None:
    given = states()
    wanted = attend(*given, None)
    with use_attention_backend("math"):
        compiled = torch.compile(lambda *tensors: attend(*tensors, None), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*given), wanted, rtol=1e-12, atol=1e-12)
    assert backends._counts == {"math": 1}


def test_what_cannot_run_here_is_one_error() -> None:
    for name in ("flash", "cudnn", "ck"):
        if torch.cuda.is_available() and name != "ck":
            continue
        with pytest.raises(backends.AttentionBackendUnavailable, match=f"'{name}' was asked for and cannot run here"):
            set_attention_backend(name)
    with pytest.raises(ValueError, match="unknown attention backend 'fast'"):
        set_attention_backend("fast")
    assert get_attention_backend() is None


def test_a_name_from_the_environment_raises_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backend.named_besides, "attention", "ck")
    with pytest.raises(backends.AttentionBackendUnavailable, match="REWRITE_ATTENTION"):
        attend(*states(), None)


def test_a_table_chooses_for_prompts(tmp_path: Path) -> None:
    given = states()
    wanted = attend(*given, None)
    size = backends.size_of(*given, None, True)
    assert str(size) == "float64 2x6/2x16 8:8 causal"
    table(tmp_path, str(size), "math")
    torch.testing.assert_close(attend(*given, None), wanted, rtol=1e-12, atol=1e-12)
    assert backends._counts == {"math": 1}
    attend(*states(rows=3), None)  # of another size
    attend(*states(queries=1, keys=5), None)  # not a prompt
    with use_attention_backend(backend.OWN_ATTENTION):  # the table is not asked
        attend(*given, None)
    attend(*[tensor.requires_grad_() for tensor in given], None)  # not what was measured
    assert backends._counts == {"math": 1}


def test_masks_are_sizes_of_their_own() -> None:
    given = states(queries=5, keys=9)
    kinds = [
        (None, True, "8:8 causal"),  # what is behind the prompt in an empty cache is not read
        (None, False, "8:16 full"),
        (torch.ones(2, 1, 5, 9, dtype=torch.bool), True, "8:16 bool"),
        (torch.zeros(2, HEADS, 5, 9), True, "8:16 number heads"),
    ]
    for mask, causal, wanted in kinds:
        assert str(backends.size_of(*given, mask, causal)).endswith(wanted)


@pytest.mark.parametrize("name", ["ck", "nonsense"])
def test_a_table_of_another_machine_is_said_and_not_taken(tmp_path: Path, name: str) -> None:
    given = states()
    table(tmp_path, str(backends.size_of(*given, None, True)), name)
    with pytest.warns(RuntimeWarning, match=f"attention.json says '{name}'"):
        attend(*given, None)
    assert backend.fallbacks() == {("attention_backend", f"{name}_unavailable"): 1}
    backend.warn_once.cache_clear()


@pytest.mark.parametrize(("more", "reason"), [({"dropout": 0.5}, "dropout"), ({"s_aux": torch.zeros(6)}, "s_aux")])
def test_what_no_backend_is_asked_for(more: dict[str, Any], reason: str) -> None:
    with use_attention_backend("math"), contextlib.suppress(TypeError):
        attend(*states(), None, **more)
    assert ("attention_backend", reason) in backend.fallbacks()
    assert not backends._counts


def test_a_graph_with_another_backend_is_not_replayed() -> None:
    before = settings()
    with use_attention_backend("math"):
        assert settings() != before
    assert settings() == before


class Torch:
    """A GPU that is not there: torch's questions and kernels, strictly; each call names the enabled kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes: set[str], built: tuple[str, ...] = (), hip: str = ""):
        self.takes, self.built = takes, built
        self.enabled: list[SDPBackend] = []
        self.library = "default"
        self.ran: list[tuple[str, str, bool]] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.version, "hip", hip or None)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        monkeypatch.setattr(torch.backends.cuda, "preferred_rocm_fa_library", self.prefer)
        monkeypatch.setattr(backends, "sdpa_kernel", self.kernel)
        monkeypatch.setattr(backends, "_takes", self.asked)
        monkeypatch.setattr(F, "scaled_dot_product_attention", self.attend)

    def prefer(self, library: str | None = None) -> str:
        """As torch's: a name sets, None asks, what is not built raises."""
        if library is not None:
            assert library in ("default", "aotriton", "ck")
            if library not in ("default", *self.built):
                raise RuntimeError("Cannot set preferred SDPA backend to CK since it was not built\nmore")
            self.library = library
        return self.library

    @contextlib.contextmanager
    def kernel(self, enabled: list[SDPBackend]) -> Iterator[None]:
        self.enabled = enabled
        yield
        self.enabled = []

    def asked(self, name: str, *given: Any) -> bool:
        assert self.enabled == [backends.BACKENDS[name]]
        shared = given[-1]
        return name in self.takes and not (shared and name == "efficient")

    def attend(self, query: Any, key: Any, value: Any, **named: Any) -> Any:
        (kind,) = self.enabled or [None]
        self.ran.append((getattr(kind, "name", "own"), self.library, bool(named.get("enable_gqa"))))
        return query.new_zeros(*query.shape[:3], value.shape[3])


def test_rocm_has_two_libraries_of_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Torch(monkeypatch, {"ck", "aotriton", "flash"}, ("aotriton", "ck"), "6.4")
    for name, library in (("ck", "ck"), ("aotriton", "aotriton"), ("flash", "default")):
        with use_attention_backend(name):
            attend(*states(), None)
        assert fake.ran.pop() == ("FLASH_ATTENTION", library, True)
        assert fake.library == "default"  # as it was
    with pytest.raises(backends.AttentionBackendUnavailable, match="cuDNN is NVIDIA's"):
        set_attention_backend("cudnn")


def test_a_library_that_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Torch(monkeypatch, {"ck"}, ("aotriton",), "6.4")
    with pytest.raises(backends.AttentionBackendUnavailable, match="CK since it was not built"):
        set_attention_backend("ck")
    assert fake.library == "default"
    fake.prefer = lambda library=None: "default"  # type: ignore[method-assign]  # one that stays with its own
    monkeypatch.setattr(torch.backends.cuda, "preferred_rocm_fa_library", fake.prefer)
    with pytest.raises(backends.AttentionBackendUnavailable, match="torch stays with default"):
        set_attention_backend("aotriton")
    monkeypatch.delattr(torch.backends.cuda, "preferred_rocm_fa_library")
    with pytest.raises(backends.AttentionBackendUnavailable, match="no choice among ROCm's libraries"):
        set_attention_backend("aotriton")


def test_heads_are_repeated_for_a_kernel_that_shares_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Torch(monkeypatch, {"efficient"})
    with use_attention_backend("efficient"):
        attend(*states(), None)
    assert fake.ran == [("EFFICIENT_ATTENTION", "default", False)]


def test_what_a_kernel_does_not_take_goes_its_ordinary_way_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Torch(monkeypatch, set())
    with use_attention_backend("flash"):
        attend(*states(), None)
        said = backends.describe_process()
    assert [kind for kind, *_ in fake.ran] == ["own"]
    assert backend.fallbacks()[("attention_backend", "flash_refuses")] == 1
    assert said == ["attention: flash was asked for by name"]


def test_the_names_are_torchs() -> None:
    """The contract with torch: what is called by keyword or by name exists in the installed one."""
    assert set(backends.BACKENDS.values()) <= set(SDPBackend.__members__.values())
    for name in ("can_use_flash_attention", "can_use_efficient_attention", "can_use_cudnn_attention", "SDPAParams"):
        assert hasattr(torch.backends.cuda, name)
    assert set(torch.backends.cuda._ROCmFABackends) >= {"default", "aotriton", "ck"}
