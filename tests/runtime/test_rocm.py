"""The settings for ROCm: nothing without a call, nothing on another torch, everything put back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_rewrite_runtime.launching import card_tables
from hf_rewrite_runtime.rocm import settings as rocm

ON_ROCM = torch.version.hip is not None
STATE = """
import os, sys
import torch, torch._dynamo.config as dynamo, torch._inductor.config as inductor
state = lambda: (dict(os.environ), inductor.get_config_copy(), dynamo.get_config_copy(), torch.cuda.get_rng_state)
before = state()
import hf_rewrite_runtime.rocm.settings
assert state() == before
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*rocm.ENVIRONMENT, "PYTORCH_TUNABLEOP_ENABLED"):
        monkeypatch.delenv(name, raising=False)


def state() -> Any:
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    configs = inductor.get_config_copy(), dynamo.get_config_copy()
    return configs, dict(os.environ), torch.cuda.get_rng_state, torch.cuda.set_rng_state


def outcomes(made: rocm.Configuration) -> dict[str, str]:
    return {setting.name: setting.outcome for setting in made.settings}


def test_importing_changes_nothing() -> None:
    subprocess.run([sys.executable, "-c", STATE], check=True)


@pytest.mark.skipif(ON_ROCM, reason="this torch is built for ROCm")
def test_nothing_is_set_on_another_torch() -> None:
    before = state()
    made = rocm.configure()
    assert state() == before
    assert str(made) == "not ROCm: nothing set"
    assert str(rocm.tunable_op()) == "not ROCm: nothing set"


def test_everything_is_set_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    before = state()
    with rocm.configure(force=True, fine_tuning=True) as made:
        assert "not in this torch" not in outcomes(made).values()
        assert inductor.freezing
        assert inductor.max_autotune_gemm_backends == "ATEN"
        assert not inductor.triton.cudagraphs
        assert inductor.triton.multi_kernel == 1
        assert dynamo.recompile_limit == 256
        assert outcomes(made)["inductor freezing"] == "set"
        assert outcomes(made)["inductor memory_planning"] == "as it was"
        again = rocm.configure(force=True, fine_tuning=True)
        assert set(outcomes(again).values()) == {"as it was"}
        again.undo()
        assert inductor.freezing
        lines = str(made).splitlines()
        assert len(lines) == len(made.settings) == len(outcomes(made))
        assert max(map(len, lines)) <= 119
    assert state() == before
    made.undo()
    assert state() == before


def test_an_option_that_torch_lacks_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nothing_like_that", "triton.nothing_like_that", "nothing.like.that"):
        monkeypatch.setitem(rocm.INDUCTOR, name, (True, "for the test"))
    with rocm.configure(force=True) as made:
        missing = [setting.name for setting in made.settings if setting.outcome == "not in this torch"]
    assert len(missing) == 3


def test_the_environment_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIP_LAUNCH_BLOCKING", "1")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with rocm.configure(force=True) as made:
        assert outcomes(made)["HIP_LAUNCH_BLOCKING"] == "yours"
        assert outcomes(made)["AMD_LOG_LEVEL"] == "too late"
        assert os.environ["HIP_LAUNCH_BLOCKING"] == "1"
        assert "AMD_LOG_LEVEL" not in os.environ


def test_dynamo_does_without_the_random_state_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Dynamo puts around each compilation, on a torch that is made to believe that it captures on a GPU."""
    from torch._dynamo import convert_frame, utils

    def raises(*arguments: object) -> None:
        raise RuntimeError("not while capturing")

    def compiled() -> bool:
        with utils.preserve_rng_state():
            return bool(convert_frame.preserve_global_state(lambda: True)())

    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "get_rng_state", raises)
        patched.setattr(torch.cuda, "set_rng_state", raises)
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="not while capturing"):
            compiled()
        with rocm.configure(force=True) as made:
            assert outcomes(made)[rocm.RNG_GUARD] == "set"
            assert compiled()
            with pytest.raises(RuntimeError, match="not while capturing"):
                torch.cuda.get_rng_state()
        with pytest.raises(RuntimeError, match="not while capturing"):
            compiled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_dynamo_compiles_during_a_capture() -> None:
    function = torch.compile(lambda x: x + 1, backend="eager")
    x = torch.zeros(2, device="cuda")
    with rocm.configure(force=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = function(x)
        x += 1
        graph.replay()
    assert y.tolist() == [2, 2]


class Tuner:
    """Stands for `torch.cuda.tunable`, which a torch without a GPU has no functions for."""

    def __init__(self) -> None:
        self.enabled, self.tuning, self.filename, self.read = False, True, "tunableop_results.csv", []
        self.recording = False

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        functions: dict[str, Callable[..., object]] = {
            "is_enabled": lambda: self.enabled,
            "tuning_is_enabled": lambda: self.tuning,
            "get_filename": lambda: self.filename,
            "enable": lambda value: setattr(self, "enabled", value),
            "tuning_enable": lambda value: setattr(self, "tuning", value),
            "set_filename": self.set_filename,
            "read_file": lambda file: self.read.append(file) or True,
            "record_untuned_is_enabled": lambda: self.recording,
            "record_untuned_enable": lambda value: setattr(self, "recording", value),
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda.tunable, name, function)
        monkeypatch.setattr(torch._C, "_cuda_tunableop_enable", None, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_record_untuned_enable", None, raising=False)

    def set_filename(self, name: str, insert_device_ordinal: bool = False) -> None:
        self.filename = name.replace(".csv", "0.csv") if insert_device_ordinal else name


def test_tunable_op_keeps_its_file_with_the_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tuner = Tuner()
    tuner.patch(monkeypatch)
    monkeypatch.setenv(card_tables.VARIABLE, str(tmp_path))
    with rocm.tunable_op(tune=True, force=True) as made:
        assert (tuner.enabled, tuner.tuning) == (True, True)
        assert tuner.filename == str(tmp_path / "tunableop0.csv")
        assert made.settings[-1].why == "not there yet"
    assert (tuner.enabled, tuner.tuning, tuner.filename) == (False, True, "tunableop_results.csv")
    (tmp_path / "tunableop0.csv").write_text("")
    rocm.tunable_op(force=True)
    assert (tuner.enabled, tuner.tuning) == (True, False)
    assert tuner.read == [str(tmp_path / "tunableop0.csv")]
    rocm.tunable_op(False, force=True)
    assert (tuner.enabled, tuner.tuning) == (False, False)
    monkeypatch.setenv("PYTORCH_TUNABLEOP_ENABLED", "0")
    assert "PYTORCH_TUNABLEOP_ENABLED=0 decides" in str(rocm.tunable_op(force=True))
    assert not tuner.enabled


def test_products_are_written_down_for_another_process_to_tune(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tuner = Tuner()
    tuner.patch(monkeypatch)
    monkeypatch.setenv(card_tables.VARIABLE, str(tmp_path))
    with rocm.tunable_op(tune=True, record=True, force=True) as made:
        assert (tuner.enabled, tuner.tuning, tuner.recording) == (True, False, True)
        assert outcomes(made)["TunableOp records"] == "set"
        rocm.tunable_op(force=True)
        assert not tuner.recording
    assert (tuner.enabled, tuner.tuning, tuner.recording) == (False, True, False)
    monkeypatch.setenv("PYTORCH_TUNABLEOP_RECORD_UNTUNED", "1")
    assert outcomes(rocm.tunable_op(record=True, force=True))["TunableOp records"] == "yours"
    assert not tuner.recording
    monkeypatch.delenv("PYTORCH_TUNABLEOP_RECORD_UNTUNED")
    monkeypatch.delattr(torch._C, "_cuda_record_untuned_enable")
    assert outcomes(rocm.tunable_op(record=True, force=True))["TunableOp records"] == "not in this torch"
