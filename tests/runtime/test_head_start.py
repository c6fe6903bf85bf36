"""The first tokens of a cold process are chosen without kernels, and are those of the original's loop."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from hf_rewrite_runtime.cache.cache_argument import given_back
from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.decode.graph_cache import GraphStore, describe, store_of
from hf_rewrite_runtime.decode.prompt_graph import ROUNDING
from hf_rewrite_runtime.device import compile_ahead
from hf_rewrite_runtime.device.compile_ahead import Compilation, taking_turns
from hf_rewrite_runtime.fp8.fp8_generation import Fp8GraphGeneration
from hf_rewrite_runtime.generate import call_graphs, decode_loop
from hf_rewrite_runtime.generate.generation import GraphGeneration
from hf_rewrite_runtime.launching import launch

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.2},
}
NEVER = 1_000


class Llama(GraphGeneration, LlamaForCausalLM):
    _step_without_graph = not GPU
    starts_plainly = True


def pair() -> tuple[Any, Any]:
    config = LlamaConfig(**SIZES)
    torch.manual_seed(0)
    ours = Llama(config).eval().to(DEVICE)
    other = LlamaForCausalLM(copy.deepcopy(config)).eval().to(DEVICE)
    other.load_state_dict(ours.state_dict())
    return ours, other


def prompt(padded: bool = False) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 99, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.to(DEVICE)}


def run(model: Any, inputs: dict[str, torch.Tensor], **arguments: Any) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(3)
    given = {"max_new_tokens": 12, "pad_token_id": 0, "return_dict_in_generate": True, **arguments}
    output = model.generate(**inputs, **given)
    return output, torch.cuda.get_rng_state() if GPU else torch.get_rng_state()


def reasons() -> list[str]:
    found = [reason for operator, reason in backend.fallbacks() if operator == "generate"]
    backend.reset_fallbacks()
    return found


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note every plain step and every replay."""
    steps: list[str] = []
    for kind, name in ((decode_loop.PlainStep, "plain"), (decode_loop.Program, "graph")):

        def noted(self: Any, replay: Any = kind.replay, name: str = name) -> None:
            steps.append(name)
            replay(self)

        monkeypatch.setattr(kind, "replay", noted)
    backend.reset_fallbacks()
    return steps


@pytest.fixture
def done_after(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let compilations last until they were asked so many times."""

    def last(times: int) -> None:
        asked: dict[int, int] = {}

        def is_done(self: Any) -> bool:
            asked[id(self)] = asked.get(id(self), 0) + 1
            return asked[id(self)] > times

        monkeypatch.setattr(Compilation, "is_done", is_done)

    return last


@pytest.mark.parametrize("times", [0, 3, NEVER])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_whenever_the_kernels_are_there_it_is_the_original_s_text(
    sampling: str, padded: bool, times: int, done_after: Any, counted: list[str]
) -> None:
    done_after(times)
    model, original = pair()
    arguments = dict(SAMPLINGS[sampling], output_logits=True)
    for number in range(2):
        (ours, our_state), (theirs, their_state) = (run(m, prompt(padded), **arguments) for m in (model, original))
        assert torch.equal(ours.sequences, theirs.sequences)
        assert torch.equal(our_state, their_state)
        for mine, other in zip(ours.logits, theirs.logits, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)
        for mine, other in zip(given_back(ours).layers, given_back(theirs).layers, strict=True):
            torch.testing.assert_close(mine.keys, other.keys, rtol=1e-3, atol=1e-3)
        plain = counted.count("plain")
        told = any(line.startswith("kernels being compiled: batch 2") for line in describe(model))
        assert told == (times == NEVER)
        if times == NEVER:
            assert counted == ["plain"] * 11 * (number + 1)
        else:
            assert counted[:plain] == ["plain"] * (times + 1)
            assert counted.count("graph") == 22 - plain if number else counted.count("graph") == 11 - plain
    assert reasons() == []


def test_the_second_call_has_a_prompt_in_a_graph(counted: list[str]) -> None:
    model, _ = pair()
    run(model, prompt())
    (graph,) = store_of(model).graphs.values()
    assert graph.prompts.lengths == [ROUNDING]
    counted.clear()
    run(model, prompt())
    assert counted == ["graph"] * 11


def test_a_call_that_ends_at_once_has_begun_the_compilation(counted: list[str]) -> None:
    model, original = pair()
    first = int(run(original, prompt())[0].sequences[0, 7])
    inputs = {name: tensor[:1] for name, tensor in prompt().items()}
    ended, state = run(model, inputs, eos_token_id=first, do_sample=True, top_k=1)
    assert ended.sequences.shape[1] == 8
    assert torch.equal(state, run(original, inputs, eos_token_id=first, do_sample=True, top_k=1)[1])
    assert counted == ["plain"]
    assert store_of(model).compilations[1].is_done()
    run(model, inputs)
    assert counted == ["plain", *["graph"] * 11]


def test_a_step_that_turns_out_unfit_leaves_the_rest_to_plain_ones(done_after: Any, counted: list[str]) -> None:
    done_after(3)
    model, original = pair()
    inner = type(model.model)

    class Counting(inner):  # type: ignore[misc,valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            past = next(value for value in kwargs.values() if hasattr(value, "get_seq_length"))
            if not isinstance(past.get_seq_length(), int):
                raise TypeError("an integer is required")
            return super().forward(*args, **kwargs)

    model.model.__class__ = Counting
    (ours, _), (theirs, _) = (run(m, prompt()) for m in (model, original))
    assert torch.equal(ours.sequences, theirs.sequences)
    assert counted == ["plain"] * 11
    assert reasons() == ["step_fails"]
    assert torch.equal(run(model, prompt())[0].sequences, theirs.sequences)
    assert len(counted) == 11
    assert reasons() == ["step_fails"]


@pytest.mark.parametrize("times", [250, NEVER])
def test_a_full_cache_is_left_for_a_larger_one(
    times: int, done_after: Any, monkeypatch: pytest.MonkeyPatch, counted: list[str]
) -> None:
    done_after(times)
    monkeypatch.setattr(call_graphs, "FIRST_ROOM", 8)
    model, original = pair()
    (ours, _), (theirs, _) = (run(m, prompt(), max_new_tokens=300) for m in (model, original))
    assert torch.equal(ours.sequences, theirs.sequences)
    assert "graph" in counted


def test_what_has_no_head_start(counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair()
    run(model, {name: tensor[:1] for name, tensor in prompt().items()}, prompt_lookup_num_tokens=3)
    assert "plain" not in counted
    monkeypatch.setattr(Llama, "starts_plainly", None if not GPU else False)
    run(pair()[0], prompt())
    assert "plain" not in counted
    monkeypatch.setattr(Llama, "starts_plainly", True)
    monkeypatch.setattr(
        Llama, "graph_policy", Fp8GraphGeneration.graph_policy._replace(before_replay=lambda model: None)
    )
    run(pair()[0], prompt())
    assert "plain" not in counted
    mamba = type(
        "Mamba", (GraphGeneration, MambaForCausalLM), {"_step_without_graph": not GPU, "starts_plainly": True}
    )
    config = MambaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=2, state_size=4)
    states = mamba(config).eval().to(DEVICE)
    states.generate(prompt()["input_ids"], max_new_tokens=5)
    assert "plain" not in counted
    assert "graph" in counted


@pytest.mark.skipif(GPU, reason="the captures here run what they capture")
def test_tokens_come_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With captures that run what they capture: in what order forwards, tokens and compilations come."""
    events: list[str] = []
    model, _ = pair()

    def noted(module: Any, args: Any, kwargs: Any) -> None:
        kind = "plain" if backend.runs_plainly() else "collected" if launch.collects() else "run"
        events.append(f"{kind} {kwargs['input_ids'].shape[1]}")

    def captured(run: Any, rehearse: Any, device: Any, pool: Any) -> Any:
        rehearse()
        run()
        return SimpleNamespace(replay=run)

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            events.append("token" if value.numel() == 1 else "prompt")

        def end(self) -> None:
            events.append("end")

    for module in ("device.compile_ahead", "decode.step_graph", "decode.prompt_graph"):
        monkeypatch.setattr(f"hf_rewrite_runtime.{module}.capture", captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(compile_ahead.CompilerLoading, "__init__", lambda self, device: events.append("loading"))
    monkeypatch.setattr(
        call_graphs.CallGraphs, "captures", property(lambda self: True, lambda *given: None), raising=False
    )
    monkeypatch.setattr(GraphStore, "_remember_idle", lambda self: None)
    monkeypatch.setattr(
        "hf_rewrite_runtime.decode.kernels_ahead.Compilation",
        lambda *arguments: (events.append("compiling"), Compilation({}, DEVICE))[1],
    )
    model.register_forward_pre_hook(noted, with_kwargs=True)
    monkeypatch.setattr("hf_rewrite_runtime.decode.eligibility.backend.observed", lambda module: False)
    inputs = {name: tensor[:1] for name, tensor in prompt().items()}
    model.generate(**inputs, max_new_tokens=4, streamer=Streamer())
    first = ["prompt", "loading", "plain 7", "token", "plain 1", "token", "collected 1", f"collected {ROUNDING}"]
    assert events[: len(first) + 1] == [*first, "compiling"]
    assert events.count("end") == 1


def test_threads_take_short_turns_only_while_somebody_wants_it() -> None:
    before = sys.getswitchinterval()
    with taking_turns():
        assert sys.getswitchinterval() < before / 10
        with taking_turns():
            pass
        assert sys.getswitchinterval() < before / 10
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("kind", [KeyError, IndexError])
def test_what_no_compiler_fails_with_is_raised(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)

    def broken() -> None:
        raise kind("a bug")

    job: Any = type("Job", (), {"length": 1, "__call__": lambda self: broken()})()
    compilation = Compilation({0: job}, torch.device("cuda", 0))
    with pytest.raises(kind, match="a bug"):
        compilation.wait()
    assert compilation.is_done()


def test_a_process_that_ends_begins_no_further_compilation() -> None:
    text = """
import threading, time, torch
torch.cuda.set_device = lambda index: None
from hf_rewrite_runtime.device import compile_ahead
began = threading.Event()
class Job:
    length, run = 1, None
    def __call__(self):
        print("job", flush=True)
        began.set()
        time.sleep(0.3)
        return self
compile_ahead.THREADS = 1
compile_ahead.Compilation(dict.fromkeys(range(50), None) | {n: Job() for n in range(50)}, torch.device("cuda", 0))
began.wait()
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
    assert 1 <= done.stdout.count("job") <= 2
    assert threading.main_thread().is_alive()
