"""Prompts that layers read by the operators of a step: packages against the originals, on a CPU without graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from hf_rewrite_runtime.attention.attend_step import attend_step
from hf_rewrite_runtime.cache.cache_argument import argument_of, passed_on
from hf_rewrite_runtime.cache.preallocated import PreallocatedCache, is_decode_step, skips_mask
from hf_rewrite_runtime.core.prefill_context import NoPromptForm, Reading, current, of, refuse
from hf_rewrite_runtime.decode import prompt_graph
from hf_rewrite_runtime.decode.step_graph import DecodeGraph
from hf_rewrite_runtime.device.fastest import choose

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 99, "max_position_embeddings": 512,
    "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip
FORMS = {
    "llama": "LAST",
    "qwen3": "LAST",  # norms of queries and keys
    "granite": "STEP",  # scales what it adds, so that the sum is of all tokens
    "gpt_neox": "STEP",  # adds two blocks
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VIEWS = {"slice", "select", "view", "unsqueeze", "expand", "transpose", "alias", "_local_scalar_dense"}


@pytest.fixture(scope="module")
def pair(rewritten: Callable[[str], Any]) -> Callable[[str], tuple[Any, Any]]:
    """Return the original, and ours with the same weights."""

    def made(model: str) -> tuple[Any, Any]:
        module = rewritten(model)
        config = transformers.AutoConfig.for_model(model, **SMALL)
        kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
        torch.manual_seed(0)
        theirs, ours = (cls(config).to(DEVICE).eval() for cls in (kind, getattr(module, kind.__name__)))
        ours.load_state_dict(theirs.state_dict())
        return theirs, ours

    return made


def prompt(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(1, 99, (rows, tokens), generator=torch.Generator().manual_seed(tokens)).to(DEVICE)


@pytest.mark.parametrize("model", FORMS)
def test_logits_keys_and_the_next_step(pair: Callable[[str], tuple[Any, Any]], model: str) -> None:
    theirs, ours = pair(model)
    for rows in (1, 2):
        graph = DecodeGraph(ours, batch_size=rows, capacity=256)
        for tokens in (37, 128, 1, 129, 37):
            ids, cache = prompt(rows, tokens), transformers.DynamicCache(config=theirs.config)
            with torch.no_grad():
                expected = theirs(ids, **{argument_of(theirs): cache}).logits[:, -1]
                torch.testing.assert_close(graph.prefill(ids), expected, rtol=1e-4, atol=1e-4)
                for mine, other in zip(graph.cache.layers, cache.layers, strict=True):
                    torch.testing.assert_close(mine.keys[:, :, :tokens], other.keys, rtol=1e-4, atol=1e-4)
                    torch.testing.assert_close(mine.values[:, :, :tokens], other.values, rtol=1e-4, atol=1e-4)
                following = expected.argmax(-1)
                longer = theirs(torch.cat([ids, following[:, None]], 1)).logits[:, -1]
                torch.testing.assert_close(graph.step(following), longer, rtol=1e-4, atol=1e-4)
        assert graph.prompts.refusal is None
        assert graph.prompts.lengths == [128, 256]
        assert graph.prompts._forms[0].name == FORMS[model]


class Counted(TorchDispatchMode):
    """Writes down the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def replay(self) -> None:
        """Stand for a graph that replays a forward."""
        self.names.append("replay")


@pytest.mark.parametrize(("tokens", "before"), [(128, ["_foreach_zero_", "copy_"]), (37, None)])
def test_what_a_prompt_launches_beside_its_graph(
    pair: Callable[[str], tuple[Any, Any]], tokens: int, before: list[str] | None
) -> None:
    _, ours = pair("llama")
    graph = DecodeGraph(ours, batch_size=1, capacity=256)
    ids = prompt(1, tokens)
    for _ in range(2):
        graph.prefill(ids)
    (read,) = graph.prompts._graphs.values()
    read._graph = counted = Counted()
    with counted:
        graph.prefill(ids)
    assert counted.names == [
        *(before or ["_foreach_zero_", "copy_", "copy_"]), "replay", "clone", "fill_", "fill_", "zero_",
    ]  # fmt: skip


def test_a_row_of_padding_is_forgotten_by_the_next_prompt(pair: Callable[[str], tuple[Any, Any]]) -> None:
    theirs, ours = pair("llama")
    graph = DecodeGraph(ours, batch_size=2, capacity=256)
    mask = torch.ones(2, 7, dtype=torch.int64, device=DEVICE)
    mask[1, :3] = 0
    for given in (mask, None, mask):
        ids = prompt(2, 7)
        with torch.no_grad():
            at = None if given is None else (given.cumsum(-1) - 1).clamp_min(0)
            expected = theirs(ids, attention_mask=given, position_ids=at).logits[:, -1]
            torch.testing.assert_close(graph.prefill(ids, given), expected, rtol=1e-4, atol=1e-4)
            following = expected.argmax(-1)[:, None]
            wide = None if given is None else torch.cat([given, torch.ones_like(following)], 1)
            places = None if wide is None else (wide.cumsum(-1) - 1).clamp_min(0)
            longer = torch.cat([ids, following], 1)
            expected = theirs(longer, attention_mask=wide, position_ids=places).logits[:, -1]
            torch.testing.assert_close(graph.step(following[:, 0]), expected, rtol=1e-4, atol=1e-4)
    graph.reset()
    assert not graph.cache.position.any()
    assert not graph.cache.starts.any()


def reading(tokens: int = 4, narrows: bool = True) -> tuple[PreallocatedCache, Reading]:
    cache = PreallocatedCache(2, 1, 8, "cpu")
    return cache, Reading(cache, tokens, torch.tensor([2]), narrows, add)


def test_layers_take_their_step_once_the_model_was_told_that_it_needs_no_mask() -> None:
    cache, prompt = reading()
    with prompt.running():
        assert of(cache) is current() is prompt
        assert of(PreallocatedCache(1, 1, 8, "cpu")) is None
        assert not skips_mask(cache)
        assert not is_decode_step(cache)
        cache.causal = True
        assert skips_mask(cache)
        assert is_decode_step(cache)
        cache.fused = False
        assert not is_decode_step(cache)
        with pytest.raises(NoPromptForm, match="latent"):
            refuse(cache, "latent_attention")
    assert current() is None
    refuse(cache, "latent_attention")
    with prompt.running():
        assert not is_decode_step(cache)


def test_attention_among_statements_of_a_file_reads_no_prompt() -> None:
    cache, prompt = reading()
    with prompt.running(), pytest.raises(NoPromptForm, match="attend_step"):
        attend_step(torch.zeros(1, 1, 4, 8), cache, 0, scaling=1.0)


def test_only_rows_that_are_there_are_taken() -> None:
    _cache, prompt = reading()
    tokens = torch.arange(4.0).view(1, 4, 1)
    assert prompt.of_last(tokens).item() == 2
    assert prompt.beside(torch.ones(1, 1, 3), tokens).shape == (1, 1, 1)
    assert prompt.beside(torch.ones(1, 4, 3), tokens) is tokens
    for other in (torch.ones(1, 1, 1), torch.ones(4)):
        with pytest.raises(NoPromptForm):
            prompt.of_last(other)
    assert [prompt.is_last(number) for number in (0, 1)] == [False, True]
    _cache, prompt = reading(narrows=False)
    assert not prompt.is_last(1)


def add(x: torch.Tensor, residual: torch.Tensor, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand for `add_norm`."""
    both: tuple[torch.Tensor, torch.Tensor] = norm.add_forward(x, residual)
    return both


class Norm(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return 2 * x

    def add_forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.added = getattr(self, "added", 0) + 1
        return 2 * (x + residual), x + residual


def test_a_sum_comes_with_the_norm_that_read_it_before() -> None:
    _cache, prompt = reading()
    first, other = Norm(), Norm()
    x, residual = torch.randn(1, 4, 3), torch.randn(1, 4, 3)

    def run(norm: Norm, changes: bool = False) -> torch.Tensor:
        with prompt.running():
            total = prompt.added(x, residual)
            if changes:
                total.mul_(3)
            return prompt.normed(total, norm)

    assert torch.equal(run(first), 2 * (x + residual))
    assert (first.calls, getattr(first, "added", 0)) == (1, 0)
    assert torch.equal(run(first), 2 * (x + residual))
    assert (first.calls, first.added) == (1, 1)
    assert torch.equal(run(other), 2 * (x + residual))  # another one reads it: its own call
    assert other.calls == 1
    assert torch.equal(run(other, changes=True), 6 * (x + residual))  # what was computed is of other numbers
    del first, other
    with prompt.running():
        assert torch.equal(prompt.added(x, residual), x + residual)


def test_a_way_is_taken_where_it_is_clearly_faster() -> None:
    assert choose({"usual": 1.0, "other": 1.0, "best": 0.9}, "usual") == "best"
    assert choose({"usual": 1.0, "other": 0.97, "worst": 1.2}, "usual") == "usual"


def test_a_form_that_is_refused_takes_its_memory_pool_with_it(
    pair: Callable[[str], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one was captured in the pool that had ended: `torch.cuda.empty_cache()` raised an internal error."""
    _, ours = pair("llama")
    pools, refused = list[object](), list[int]()

    def captured(run: Callable[[], None], rehearse: Callable[[], None], device: object, pool: object) -> Any:
        rehearse()
        pools.append(pool)

    def handle() -> object:
        return object()

    judge = prompt_graph.Yardstick.judge

    def far_at_first(yardstick: Any, found: dict[str, torch.Tensor]) -> Any:
        refused.append(1)
        verdict = judge(yardstick, found)
        return verdict._replace(distance=1.0) if len(refused) == 1 else verdict

    monkeypatch.setattr(prompt_graph, "capture", captured)
    monkeypatch.setattr(prompt_graph.Yardstick, "judge", far_at_first)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", handle)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    graph = DecodeGraph(ours, batch_size=1, capacity=384)
    graph.prompts._captures = graph.captures = True
    given = {passed_on(): graph.cache}
    for tokens in (37, 200):
        graph.prompts.read(
            graph.cache, prompt(1, tokens), -(-tokens // 128) * 128, graph._find_pool,
            lambda tokens=tokens: ours(prompt(1, tokens), **given).logits[:, -1], lambda run: None,
        )  # fmt: skip
    assert graph.prompts.lengths == [128, 256]
    assert pools[0] is not pools[1]
    assert all(pool is pools[1] for pool in pools[2:])
