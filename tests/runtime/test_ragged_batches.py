"""Batches whose layers run on the tokens alone that a mask shows, on request and where that is proved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_text_lengths import HEADS, VOCABULARY, WIDTH, Output, Settings, plain
from tolerances import WHOLE_FORWARD_IN_FP32
from torch import Tensor, nn
from torch.nn import functional as F

from hf_rewrite_runtime.core.explanation import explain
from hf_rewrite_runtime.forward import (
    bucket_check,
    forward_cache,
    forward_eligibility,
    forward_settings,
    length_buckets,
    unpad,
)
from hf_rewrite_runtime.forward.captured import CapturedForward


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the models are; on a CPU they take the way of a graph without one."""
    name: str = request.param
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    monkeypatch.setattr(CapturedForward, "_forward_without_graph", name == "cpu")
    with forward_settings.use_forward_graphs("always"), forward_settings.use_ragged_batches(), torch.no_grad():
        yield name


Act = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    """Attention with a rotation, and a perceptron."""

    def __init__(self, act: Act | None):
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.act = act

    def forward(self, x: Tensor, mask: Tensor | None, tables: tuple[Tensor, Tensor]) -> tuple[Tensor]:
        """Return the hidden states [B, S, D], in a tuple as some layers do."""
        q, k, v = self.project(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        cos, sin = (table[:, None] for table in tables)
        q, k = (one * cos + one.roll(1, -1) * sin for one in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + F.gelu(self.norm(x))
        return (x if self.act is None else self.act(x),)


class Encoder(CapturedForward, nn.Module):
    """Layers between an embedding and a norm; `window`: how far attention sees."""

    def __init__(self, act: Act | None = None, window: int | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.pools = True
        self.config = Settings()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(act) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.window = window
        self.widths: list[int] = []

    def get_input_embeddings(self) -> nn.Module:
        """The table of the words."""
        return self.words

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, states: bool = False) -> Any:
        """Return hidden states [B, S, D], and what is pooled of the first [B, D]."""
        x = self.words(input_ids)
        places = torch.arange(x.shape[1], device=x.device)
        angles = places[None, :, None] / torch.arange(1, WIDTH // HEADS + 1, device=x.device)
        mask = None if attention_mask is None else attention_mask[:, None, None] != 0
        if self.window is not None and mask is not None:
            mask = mask & ((places[:, None] - places).abs() <= self.window)
        found = [x]
        for layer in self.layers:
            x = layer(x, mask, (angles.cos(), angles.sin()))[0]
            found.append(x)
        x = self.norm(x)
        pooled = torch.tanh(self.head(x[:, 0])) if self.pools else None
        return Output(x, pooled, tuple(found) if states else None)


def made(device: str, act: Act | None = None, window: int | None = None) -> Encoder:
    return Encoder(act, window).to(device).eval().requires_grad_(False)


def batch(device: str, *shown: int, left: bool = False, length: int = 40, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (len(shown), length), generator=generator)
    mask = (torch.arange(length) < torch.tensor(shown)[:, None]).long()
    mask = mask.flip(1) if left else mask
    return {"input_ids": torch.where(mask.bool(), ids, 1).to(device), "attention_mask": mask.to(device)}


def check(model: Encoder, *calls: dict[str, Any]) -> forward_cache.ForwardStore:
    """Make calls, each of which has to give what the model gives where the mask shows a token."""
    for given in calls:
        found, wanted = model(**given), plain(model, **given)
        assert found.keys() == wanted.keys()
        shown = given["attention_mask"] != 0
        for one, other in zip(bucket_check.tensors_in(found), bucket_check.tensors_in(wanted), strict=True):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
            if one.shape[:2] == shown.shape:
                one, other = one[shown], other[shown]
            torch.testing.assert_close(one, other, rtol=WHOLE_FORWARD_IN_FP32, atol=WHOLE_FORWARD_IN_FP32)
    return forward_cache.store_of(model)


def packed(kept: forward_cache.ForwardStore) -> list[int]:
    return sorted(graph.cut.tokens for graph in kept.graphs.values() if graph.cut is not None and graph.cut.tokens)


@pytest.mark.parametrize("window", [None, 5])
def test_layers_run_on_what_the_mask_shows(device: str, window: int | None) -> None:
    widths: set[int] = set()

    def seen(x: Tensor) -> Tensor:
        widths.add(x.shape[0] * x.shape[1])
        return x

    model = made(device, seen, window)
    calls = [batch(device, 40, 3, 17, 9, seed=1), batch(device, 35, 10, 10, 10, seed=2)]
    kept = check(model, *calls, batch(device, 11, 5, 40, 20, length=43))
    assert (packed(kept), kept.replays) == ([96], 2), "3/8 of 4 × 64 places"
    assert 96 in widths
    kept = check(model, batch(device, 11, 5, 40, 20))
    assert "packed into 96" in str(explain(model))
    kept = check(model, batch(device, 7, 3, 3, 1), batch(device, 40, 40, 20, 30))
    assert packed(kept) == [32, 96, 160]
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers)


def test_texts_that_are_padded_on_the_left(device: str) -> None:
    model = made(device)
    model.pools = False  # the first token, which is hidden
    calls = [batch(device, 12, 20, 37, 1, left=True, length=length, seed=length) for length in (39, 41, 40)]
    kept = check(model, *calls)
    assert (packed(kept), kept.replays) == ([96], 2)


def test_hidden_positions_are_zeros_behind_the_layers(device: str) -> None:
    model = made(device)
    model.norm = nn.Identity().eval()  # type: ignore[assignment]
    given = batch(device, 40, 3, 17, 9)
    check(model, given)
    found = model(**given).last_hidden_state
    assert not found[given["attention_mask"] == 0].any()


@pytest.mark.parametrize("shown", [(40,), (64, 64, 40, 50), (0, 0)])
def test_what_is_not_packed(device: str, shown: tuple[int, ...]) -> None:
    """One text, too little that is hidden, nothing that is shown."""
    model = made(device)
    given = batch(device, *shown, length=64)
    text = length_buckets.text_of(model, ((), given), ())
    assert text is not None
    assert unpad.packed_text(text) is None
    model(**given)
    assert not packed(forward_cache.store_of(model))


def test_it_is_on_request(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(device)
    with forward_settings.use_ragged_batches(False):
        check(model, batch(device, 40, 3, 17, 9), batch(device, 30, 3, 17, 9))
    assert not packed(forward_cache.store_of(model))
    kept = check(model, batch(device, 40, 3, 17, 9), batch(device, 37, 3, 17, 9))
    assert packed(kept) == [96], "before the graph of the exact shape"
    with monkeypatch.context() as patch:  # undone before the fixture puts back what was there
        patch.setattr(forward_settings, "_ragged", None)
        assert not forward_settings.get_ragged_batches()
        patch.setenv(forward_settings.RAGGED_VARIABLE, "1")
        assert forward_settings.get_ragged_batches()


def test_packed_batches_are_not_mistaken_for_texts() -> None:
    """1/8 of 8 × 64 places are as many as one text has."""
    model = made("cpu")
    text = length_buckets.text_of(model, ((), batch("cpu", *[8] * 8, length=64)), ())
    assert text is not None
    found = unpad.packed_text(text)
    assert found is not None
    assert found.tokens == 65


def _neighbours(x: Tensor) -> Tensor:
    return x + x.roll(1, 1)


def _means(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


@pytest.mark.parametrize("act", [_neighbours, _means])
def test_layers_whose_tokens_know_each_other(device: str, act: Act) -> None:
    model = made(device, act)
    kept = check(model, *[batch(device, 40, 3, 17, 9, seed=seed) for seed in range(3)])
    assert not packed(kept)
    assert "packed_differ" in {refusal.reason for refusal in kept.unpadded.values()}
    assert f"batches are not packed: {forward_eligibility.REASONS['packed_differ']}" in str(explain(model))


def test_states_of_every_layer_are_not_packed(device: str) -> None:
    model = made(device)
    kept = check(model, *[{**batch(device, 40, 3, 17, 9, seed=seed), "states": True} for seed in range(3)])
    assert not packed(kept)


def test_a_model_without_layers(device: str) -> None:
    model = made(device)
    model.layers = nn.Sequential(*model.layers).eval()  # type: ignore[assignment]
    kept = check(model, *[batch(device, 40, 3, 17, 9, seed=seed) for seed in range(3)])
    assert {refusal.reason for refusal in kept.unpadded.values()} == {"packed_layers"}


BUGS: dict[str, tuple[str, Callable[..., Any]]] = {
    "attention across texts": ("_attention", lambda step, *args, **named: F.scaled_dot_product_attention(*args[:3])),
    "tables of other places": ("_pack", lambda step, x: x if x.shape[0] == 1 else _pack(step, x)),
    "texts unpacked in another order": ("_unpack", lambda step, x: _unpack(step, x).flip(0)),
}
_pack, _unpack = unpad.Packing._pack, unpad.Packing._unpack


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_refused(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpad.Packing, *BUGS[name])
    model = made(device)
    kept = check(model, *[batch(device, 40, 3, 17, 9, seed=seed) for seed in range(3)])
    assert not packed(kept)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers)
