"""aiter itself: its own Triton kernel out of a checkout (`AITER_SOURCE`), and an installed one on an AMD GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fake_aiter
import pytest
import record_aiter
import torch

from hf_rewrite_runtime.aiter import aiter_calls
from hf_rewrite_runtime.aiter import latent as aiter_latent
from hf_rewrite_runtime.aiter import unified as aiter_unified
from hf_rewrite_runtime.attention import decode_attention
from hf_rewrite_runtime.core import aiter_probe, backend

CHECKOUT = os.environ.get("AITER_SOURCE", "")
"""A folder with the sources of a release, or several, separated as in `PATH`."""


@pytest.mark.skipif(not CHECKOUT, reason="AITER_SOURCE names no checkout of ROCm/aiter")
@pytest.mark.parametrize("checkout", CHECKOUT.split(os.pathsep))
def test_its_unified_attention_reads_our_cache(checkout: str) -> None:
    """The proof of the adapter has to hold, and the result to be as near to fp64 as twice the reference's."""
    script = Path(__file__).with_name("aiter_sources.py")
    environment = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    run = subprocess.run(
        [sys.executable, str(script), checkout], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    for case in json.loads(run.stdout.splitlines()[-1]):
        assert case["error"] is not None, case
        assert case["error"] <= 2, case


@pytest.mark.skipif(not CHECKOUT, reason="AITER_SOURCE names no checkout of ROCm/aiter")
def test_the_record_is_what_the_sources_say() -> None:
    """Of each checkout, its functions have to be in the record, and the newest of them as some release had them."""
    for checkout in map(Path, CHECKOUT.split(os.pathsep)):
        for path, entries in fake_aiter.SIGNATURES.items():
            file, name = record_aiter.place(path)
            if (source := checkout / file).is_file():
                found = record_aiter.signature(source.read_text(), name)
                assert found in [{key: entry[key] for key in found or ()} for entry in entries], (path, found)


@pytest.mark.gpu
@pytest.mark.skipif(torch.version.hip is None, reason="needs an AMD GPU")
def test_an_installed_aiter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant has to be proven and used, where the release has the function."""
    if aiter_probe.failure() is not None:
        pytest.skip(str(aiter_probe.failure()))
    monkeypatch.setenv(aiter_calls.NAMED, "mla_decode")
    device = torch.device("cuda")
    position, starts = torch.tensor([700], device=device), torch.tensor([0, 5], device=device)
    with backend.use_backend("aiter"):
        k, v = (aiter_unified.allocate((2, 8, 1024, 128), torch.bfloat16, device).normal_() for _ in range(2))
        query = torch.randn(2, 32, 1, 128, device=device, dtype=torch.bfloat16)
        rule = decode_attention.ScoreRule(0.09)
        aiter_unified.unified_attention(
            query, k, v, position, starts, rule, lambda *given: decode_attention._reference(*given, rule=rule)
        )
        latents, keys = aiter_latent.allocate(2, 1024, device)
        pages = aiter_latent.joined(latents.normal_(), keys.normal_())
        assert pages is not None
        queries = [torch.randn(2, 16, size, device=device, dtype=torch.bfloat16) for size in (512, 64)]
        aiter_latent.attend((queries[0], queries[1]), pages, position, starts, 0.1)
    states = aiter_calls.states()
    assert states
    assert not any(states.values()), states
