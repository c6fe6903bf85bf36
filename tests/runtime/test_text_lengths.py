"""Texts of many lengths share graphs, where a padded text is proved to give what it gives by itself.

On a CPU the forward is run again in place of a replay; on a GPU (`-m gpu`) it is a graph.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tolerances import WHOLE_FORWARD_IN_FP32
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import ModelOutput

from hf_rewrite_runtime.core.explanation import explain
from hf_rewrite_runtime.forward import (
    agreement,
    bucket_check,
    captured,
    forward_cache,
    forward_eligibility,
    forward_settings,
    length_buckets,
)
from hf_rewrite_runtime.forward.bounds import Bounds
from hf_rewrite_runtime.forward.captured import CapturedForward

VOCABULARY, POSITIONS, WIDTH, HEADS = 50, 80, 16, 2


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the models are; on a CPU they take the way of a graph without one."""
    name: str = request.param
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    monkeypatch.setattr(CapturedForward, "_forward_without_graph", name == "cpu")
    with forward_settings.use_forward_graphs("always"), torch.no_grad():
        yield name


class Settings:
    """A configuration."""

    def __init__(self) -> None:
        self._attn_implementation = "sdpa"
        self.pad_token_id = 1
        self.eos_token_id = 2
        self.max_position_embeddings = POSITIONS


@dataclass
class Output(ModelOutput):
    """What an encoder returns."""

    last_hidden_state: Tensor | None = None
    pooled: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


Act = Callable[["Encoder", dict[str, Any]], Any]


class Encoder(CapturedForward, nn.Module):
    """Two layers of attention in a hand of our own; `act` changes what it does."""

    def __init__(self, act: Act | None = None, *, causal: bool = False, counts_positions: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.config = Settings()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.types = nn.Embedding(2, WIDTH)
        self.places = nn.Embedding(POSITIONS, WIDTH)
        self.project = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WIDTH)
        self.act, self.causal, self.counts_positions = act, causal, counts_positions

    def get_input_embeddings(self) -> nn.Module:
        """The table of the words."""
        return self.words

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool = False,
        **others: Any,
    ) -> Any:
        """Return hidden states [B, S, D], what is pooled of the first [B, D], and weights [B, H, S, S] on request."""
        x = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        length = x.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length, device=x.device)[None]
            if self.counts_positions and input_ids is not None:
                real = (input_ids != self.config.pad_token_id).long()
                position_ids = real.cumsum(1) * real + self.config.pad_token_id
        x = x + self.places(position_ids)
        if token_type_ids is not None:
            x = x + self.types(token_type_ids)
        if self.act is not None:
            x = self.act(self, {"x": x, "ids": input_ids, "mask": attention_mask, **others})
            if not isinstance(x, Tensor) or x.shape[1:] != (length, WIDTH):
                return x
        bias = _bias(attention_mask, x)
        if self.causal:
            sees = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            bias = torch.where(sees, bias, torch.finfo(x.dtype).min)
        states, weights = [x], []
        for layer in self.project:
            q, k, v = layer(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            weight = (q @ k.transpose(-1, -2) + bias).softmax(-1)
            x = x + (weight @ v).transpose(1, 2).flatten(2)
            states.append(x)
            weights.append(weight)
        pooled = torch.tanh(self.head(x[:, 0]))
        return Output(x, pooled, tuple(states), tuple(weights) if output_attentions else None)


def _bias(mask: Tensor | None, x: Tensor) -> Tensor:
    if mask is None:
        return x.new_zeros(())
    if mask.dim() == 4 and mask.is_floating_point():
        return mask
    shown = mask[:, None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask
    return torch.zeros_like(shown, dtype=x.dtype).masked_fill_(shown == 0, torch.finfo(x.dtype).min)


def made(device: str, act: Act | None = None, **options: bool) -> Encoder:
    return Encoder(act, **options).to(device).eval().requires_grad_(False)


def ids(length: int, rows: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 100 * length)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def call(device: str, length: int, rows: int = 2, **more: Any) -> dict[str, Any]:
    found = {"input_ids": ids(length, rows), **more}
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in found.items()}


def plain(model: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    with forward_settings.use_forward_graphs("never"):
        return model(*arguments, **keywords)


def agree(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    for one, other in zip(bucket_check.tensors_in(found), bucket_check.tensors_in(wanted), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        torch.testing.assert_close(one, other, rtol=WHOLE_FORWARD_IN_FP32, atol=WHOLE_FORWARD_IN_FP32)


def check(model: Encoder, *calls: dict[str, Any]) -> forward_cache.ForwardStore:
    """Make calls, each of which has to give what the model gives without graphs; return the model's graphs."""
    for given in calls:
        agree(model(**given), plain(model, **given))
    return forward_cache.store_of(model)


def buckets(kept: forward_cache.ForwardStore) -> list[int]:
    """The lengths of texts in the graphs that serve several."""
    return sorted(graph.graph.inputs[0].shape[1] for graph in kept.graphs.values() if graph.cut is not None)


def refused(model: Encoder) -> set[str]:
    return {refusal.reason for refusal in forward_cache.store_of(model).unpadded.values()}


def test_lengths_share_the_graph_of_a_bucket(device: str) -> None:
    model = made(device)
    kept = check(model, *[call(device, length) for length in (40, 50, 33, 64, 57, 9, 32, 1, 70, 80)])
    assert (len(kept.graphs), buckets(kept), kept.replays) == (4, [32, 64, 80], 6)
    assert "in a graph for 2×64, 2×64 and texts from 1 × 1 tokens on" in str(explain(model))
    assert not refused(model)


def _left(length: int, rows: int = 2) -> Tensor:
    return (torch.arange(length) >= torch.arange(rows)[:, None] * 3).long()


def _right(length: int, rows: int = 2) -> Tensor:
    return _left(length, rows).flip(1)


def _square(length: int, rows: int = 2) -> Tensor:
    return _right(length, rows)[:, None] * torch.ones(length, 1, dtype=torch.long)


def _added(length: int, rows: int = 2) -> Tensor:
    return torch.zeros(rows, 1, length, length).masked_fill(_square(length, rows)[:, None] == 0, -1e30)


ARGUMENTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "padded on the right": lambda n: {"attention_mask": _right(n)},
    "padded on the left": lambda n: {"attention_mask": _left(n)},
    "bool mask": lambda n: {"attention_mask": _right(n).bool()},
    "float mask": lambda n: {"attention_mask": _right(n).float()},
    "mask of queries": lambda n: {"attention_mask": _square(n)},
    "added mask": lambda n: {"attention_mask": _added(n)},
    "added mask of keys": lambda n: {"attention_mask": _added(n)[:, :, :1]},
    "mask of four dimensions": lambda n: {"attention_mask": _square(n)[:, None].bool()},
    "types": lambda n: {"attention_mask": _right(n), "token_type_ids": (torch.arange(2 * n) % 2).view(2, n)},
    "positions": lambda n: {"attention_mask": _right(n), "position_ids": torch.arange(n).flip(0)[None]},
    "embeddings": lambda n: {"input_ids": None, "inputs_embeds": torch.randn(2, n, WIDTH)},
    "attentions": lambda n: {"output_attentions": True},
    "a slice": lambda n: {"input_ids": ids(2 * n)[:, ::2]},
    "ids of 32 bits": lambda n: {"input_ids": ids(n).int()},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_a_text_is_given(device: str, name: str) -> None:
    model = made(device)
    kept = check(model, *[call(device, length, **ARGUMENTS[name](length)) for length in (40, 50, 41, 64, 40)])
    assert not refused(model)
    assert (len(kept.graphs), buckets(kept), kept.replays) == (2, [64], 3), "the first length keeps its own"


def rows_of(kept: forward_cache.ForwardStore) -> set[tuple[int, ...]]:
    return {tuple(graph.graph.inputs[0].shape) for graph in kept.graphs.values() if graph.cut is not None}


@pytest.mark.parametrize("name", [None, *ARGUMENTS])
def test_batches_share_the_graph_of_a_bucket(device: str, name: str | None) -> None:
    model = made(device)

    def given(length: int, rows: int) -> dict[str, Any]:
        more = {} if name is None else ARGUMENTS[name](length)
        more = {key: value[:1].expand(rows, *value.shape[1:]) if isinstance(value, Tensor) and value.shape[0] == 2
                else value for key, value in more.items()}  # fmt: skip
        return call(device, length, rows, **more)

    kept = check(model, given(40, 2), *[given(length, rows) for length, rows in ((50, 6), (41, 5), (64, 5), (33, 6))])
    assert not refused(model)
    assert ({shape[:2] for shape in rows_of(kept)}, kept.replays) == ({(6, 64)}, 3)
    kept = check(model, given(50, 9), given(50, 1), given(51, 1))
    assert ({shape[:2] for shape in rows_of(kept)}, kept.replays) == ({(6, 64), (12, 64), (1, 64)}, 4)


def test_a_batch_that_is_not_padded_has_a_bucket_for_its_length(device: str) -> None:
    """As where the padded one is slower."""
    model = made(device)
    kept = check(model, call(device, 40, 5), call(device, 50, 2))
    text = length_buckets.text_of(model, ((), call(device, 50, 5)), captured.settings())
    assert text is not None
    kept.refuse(text.kind, "slower")
    kept = check(model, call(device, 50, 5), call(device, 60, 5))
    assert (rows_of(kept), kept.replays) == ({(2, 64), (5, 64)}, 1)


def _others(model: Encoder, given: dict[str, Any]) -> Any:
    return given["x"] - given["x"].mean(0, keepdim=True)


def test_texts_that_know_each_other_are_not_padded(device: str) -> None:
    model = made(device, _others)
    kept = check(model, call(device, 40), call(device, 50, 5), call(device, 52, 5))
    assert refused(model) == {"lengths_differ"}
    assert not buckets(kept)


@pytest.mark.parametrize("length", [40, 64])
def test_arguments_may_have_no_names(device: str, length: int) -> None:
    model = made(device)
    for tokens in (70, length, 50):
        agree(model(ids(tokens).to(device), None), plain(model, ids(tokens).to(device), None))
    assert buckets(forward_cache.store_of(model)) == [64]
    assert forward_cache.store_of(model).replays == 1


def test_positions_counted_from_the_mask(device: str) -> None:
    """As RoBERTa's: a padded token has the position of padding, and other tokens in its place must not end the run."""
    model = made(device, counts_positions=True)
    kept = check(model, *[call(device, length) for length in (40, 50, 41, 7, 12)])
    assert (buckets(kept), kept.replays) == ([32, 64], 2)
    kept = check(model, call(device, 65), call(device, 66))  # 80 other tokens would need position 81
    assert buckets(kept) == [32, 64]
    assert {refusal.reason for refusal in kept.refused.values()} == {"lengths_reach"}
    assert not refused(model), "other buckets stay"
    check(model, call(device, 67))
    assert f"in no graph 2 ×: {forward_eligibility.REASONS['lengths_reach']}" in str(explain(model))


def test_a_decoder_that_is_called_once(device: str) -> None:
    model = made(device, causal=True)
    given = [call(device, length, attention_mask=_right(length)) for length in (40, 50, 41)]
    assert not refused(model)
    check(model, *given)
    left = made(device, causal=True)
    check(left, *[call(device, length, attention_mask=_left(length)) for length in (40, 50, 41)])
    assert not refused(left)
    kept = forward_cache.store_of(left)
    assert {refusal.reason for refusal in kept.hidden.values()} == {"lengths_hidden"}, "who sees nothing takes a mean"
    assert not buckets(kept)
    replays = kept.replays
    check(left, *[call(device, length, attention_mask=torch.ones(2, length).long()) for length in (42, 51, 43)])
    assert buckets(kept) == [64]
    assert kept.replays > replays, "texts that hide nothing are served"
    replays = kept.replays
    check(left, call(device, 44, attention_mask=_left(44)))
    assert kept.replays == replays
    assert "where its mask hides a position" in str(explain(left))


def _mean(model: Encoder, given: dict[str, Any]) -> Any:
    return given["x"] + given["x"].mean(1, keepdim=True)


def _neighbours(model: Encoder, given: dict[str, Any]) -> Any:
    return given["x"] + F.pad(given["x"], (0, 0, 0, 1))[:, 1:]


def _from_the_end(model: Encoder, given: dict[str, Any]) -> Any:
    x = given["x"]
    return x + torch.arange(x.shape[1], device=x.device).flip(0)[:, None] / 10


def _by_length(model: Encoder, given: dict[str, Any]) -> Any:
    return given["x"] * given["x"].shape[1] ** 0.5


def _last(model: Encoder, given: dict[str, Any]) -> Any:
    return given["x"][:, -1] * 2


def _halves(model: Encoder, given: dict[str, Any]) -> Any:
    return F.max_pool1d(given["x"].transpose(1, 2), 2, ceil_mode=True)


def _less_one(model: Encoder, given: dict[str, Any]) -> Any:
    return given["x"][:, 1:] * 2


def _flat(model: Encoder, given: dict[str, Any]) -> Any:
    return (given["x"] * 2).flatten(0, 1)


def _views(model: Encoder, given: dict[str, Any]) -> Any:
    y = given["x"] * 2
    return y, y[:, 0]


def _ends(model: Encoder, given: dict[str, Any]) -> Any:
    """Pool at the end that a token shows, wherever that stands."""
    ends = (given["ids"] == model.config.eos_token_id).sum(1, keepdim=True)
    return given["x"] + ends[..., None]


def _hides_by_itself(model: Encoder, given: dict[str, Any]) -> Any:
    if given["mask"] is None:
        return given["x"] * (given["ids"] != model.config.pad_token_id)[..., None]
    return given["x"] * (given["mask"] != 0)[..., None]


REFUSED: list[tuple[Act, str]] = [
    (_mean, "lengths_differ"),
    (_neighbours, "lengths_differ"),
    (_from_the_end, "lengths_differ"),
    (_by_length, "lengths_differ"),
    (_last, "lengths_differ"),
    (_hides_by_itself, "lengths_differ"),
    (_halves, "lengths_outputs"),
    (_less_one, "lengths_outputs"),
    (_flat, "lengths_outputs"),
    (_views, "lengths_outputs"),
    (_ends, "lengths_read"),
]


@pytest.mark.parametrize(("act", "reason"), REFUSED)
def test_models_that_padding_changes(device: str, act: Act, reason: str) -> None:
    model = made(device, act)
    kept = check(model, *[call(device, length) for length in (40, 50, 41, 50, 12, 40)])
    assert refused(model) == {reason}
    assert not buckets(kept)
    assert kept.replays == 1, "exact shapes have their graphs"
    said = str(explain(model))
    assert said.count(f"do not share a graph: {forward_eligibility.REASONS[reason]}") == 1


class NoMask(Encoder):
    """A model that takes no mask."""

    def forward(self, input_ids: Tensor) -> Any:  # type: ignore[override]
        """The encoder's."""
        return super().forward(input_ids)


def test_arguments_that_are_not_padded(device: str) -> None:
    model: Encoder = NoMask().to(device).eval()
    check(model, *[call(device, length) for length in (40, 50, 41)])
    assert refused(model) == {"lengths_mask"}
    model = made(device)
    check(model, *[call(device, length, labels=torch.ones(2, dtype=torch.long)) for length in (40, 50, 41)])
    assert refused(model) == {"lengths_arguments"}
    model = made(device)
    check(model, *[call(device, length, attention_mask=torch.ones(2, 64)[:, :1]) for length in (40, 50, 41)])
    assert refused(model) == {"lengths_arguments"}
    model = made(device)
    check(model, *[call(device, length, position_ids=torch.arange(length)[None] % 20) for length in (40, 50, 41)])
    assert refused(model) == {"lengths_positions"}


def test_planted_bugs_are_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that hides nothing, a cut in the wrong place, a check of the padding that sees nothing."""
    calls = [call(device, length) for length in (40, 50, 41)]
    with monkeypatch.context() as patch:
        patch.setattr(length_buckets, "_fill", lambda *given: length_buckets.Fill(1, 1))
        model = made(device)
        check(model, *calls)
        assert refused(model) == {"lengths_differ"}
    with monkeypatch.context() as patch:
        inner = bucket_check._dims
        patch.setattr(bucket_check, "_dims", lambda *given: tuple(bucket_check.Dims((), ()) for _ in inner(*given)))
        model = made(device)
        check(model, *calls)
        assert not buckets(forward_cache.store_of(model))
    with monkeypatch.context() as patch:  # the graph is looked at once more
        seen: list[int] = []
        inner_same = bucket_check._same
        patch.setattr(bucket_check, "_same", lambda *given: inner_same(*given) if len(seen) > 1 else seen.append(1))
        model = made(device, _ends)
        check(model, *calls)
        assert refused(model) == {"lengths_read"}


def test_an_index_behind_a_table_is_seen_before_it_is_used() -> None:
    table, wrong = torch.zeros(4, 3), torch.tensor([[1, 4]])
    actions: list[Callable[[], Any]] = [
        lambda: F.embedding(wrong, table),
        lambda: table[wrong],
        lambda: table[:, wrong],
        lambda: table[None, ..., wrong],
        lambda: table.gather(1, wrong),
        lambda: torch.take_along_dim(table, wrong, 1),
        lambda: table.index_select(0, wrong[0]),
        lambda: nn.Embedding(4, 3)(wrong),
    ]
    for action in actions:
        with Bounds(), pytest.raises(LookupError, match=r"index 4 in a table of"):
            action()
    with Bounds():
        assert table[..., None, torch.tensor([-3, 2])].shape == (4, 1, 2)
        assert table[table > 0].numel() == 0
        assert F.embedding(torch.tensor([3]), table).shape == (1, 3)


def test_a_length_that_comes_again_and_again_gets_its_own(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_cache, "REPEATED", 4)
    model = made(device)
    kept = check(model, *[call(device, length) for length in (70, 40, 50, 50, 50)])
    assert (len(kept.graphs), kept.replays) == (2, 3)
    kept = check(model, call(device, 50), call(device, 50))
    assert (len(kept.graphs), kept.replays, buckets(kept)) == (3, 4, [64])
    kept = check(model, call(device, 40), call(device, 45), call(device, 50))
    assert (len(kept.graphs), kept.replays) == (3, 7)


def test_buckets_do_not_take_turns(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph makes room for another bucket's only where nobody used it for long."""
    monkeypatch.setattr(forward_cache, "GRAPHS_KEPT", 2)
    monkeypatch.setattr(forward_cache, "IDLE", 8)
    model = made(device)
    kept = check(model, *[call(device, length) for length in (70, 40, 80, 20, 41, 71, 21)])
    assert (buckets(kept), kept.replays) == ([64], 1)
    assert f"in no graph 4 ×: {forward_eligibility.REASONS['full']}" in str(explain(model))
    kept = check(model, *[call(device, 42)] * 5, call(device, 22), call(device, 20))
    assert buckets(kept) == [32, 64]


def test_switches(device: str) -> None:
    model = made(device)
    with forward_settings.use_forward_graphs("exact"):
        for length in (40, 50, 40, 50, 50, 40, 50):
            model(**call(device, length))
    kept = forward_cache.store_of(model)
    assert not buckets(kept)
    if device == "cpu":
        assert kept.replays == 2


def test_the_second_text_of_a_bucket_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed against the shortest text of the bucket, which gains the least; and else against the text itself."""
    monkeypatch.setattr(CapturedForward, "_forward_without_graph", True)
    model = made("cpu")
    kept = forward_cache.store_of(model)
    with forward_settings.use_forward_graphs("auto"), torch.no_grad():
        for length, graphs in ((40, 0), (50, 0), (41, 1), (60, 1), (20, 1), (21, 2)):
            agree(model(**call("cpu", length)), plain(model, **call("cpu", length)))
            assert len(kept.graphs) == graphs
    assert kept.replays == 1


def test_a_bucket_serves_texts_that_it_is_faster_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_rewrite_runtime.forward import capture_trial

    asked: list[int] = []

    def times(graph: Any, snapshot: Any, given: Any, run: Any) -> tuple[float, float]:
        asked.append(given.text.length)
        if given.text.length < 50:
            raise capture_trial.Unsuitable("slower")
        return 2.0, 1.0

    monkeypatch.setattr(capture_trial, "_times", times)
    model = made("cpu")
    text = length_buckets.text_of(model, ((), call("cpu", 50)), ())
    assert text is not None
    kept = forward_cache.Kept(None, None)  # type: ignore[arg-type]
    run: Any = None
    found = capture_trial._timed_texts(kept, bucket_check.Cut(()), run, text, run)
    assert (asked, found.cut, found.milliseconds) == ([33, 50], bucket_check.Cut((), 50, 2), (2.0, 1.0))
    with pytest.raises(capture_trial.Unsuitable):
        capture_trial._timed_texts(kept, bucket_check.Cut(()), run, text.shortened(49, 2), run)


def test_shorter_texts_than_that_run_as_they_are(device: str) -> None:
    model = made(device)
    kept = check(model, *[call(device, length) for length in (70, 50, 51)])
    (kind,) = [kind for kind, graph in kept.graphs.items() if graph.cut is not None]
    kept.graphs[kind] = kept.graphs[kind]._replace(cut=kept.graphs[kind].cut._replace(shortest=45))  # type: ignore[union-attr]
    before = kept.replays
    check(model, call(device, 44), call(device, 45))
    assert kept.replays == before + 1


def test_threads_get_their_own_texts(device: str) -> None:
    model = made(device)
    calls = [call(device, length) for length in range(30, 70)]
    wanted = [plain(model, **given) for given in calls]
    check(model, *calls[:2])
    wrong: list[int] = []

    def work(start: int) -> None:
        stream = contextlib.nullcontext() if device == "cpu" else torch.cuda.stream(torch.cuda.Stream())
        with torch.no_grad(), stream:
            for number in range(start, len(calls), 2):
                found = model(**calls[number]).last_hidden_state
                if not torch.allclose(found, wanted[number].last_hidden_state, atol=1e-4):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert forward_cache.store_of(model).replays > 60


def test_a_changed_model_is_noticed(device: str) -> None:
    model = made(device)
    check(model, *[call(device, length) for length in (40, 50, 41)])
    model.head = nn.Linear(WIDTH, WIDTH).to(device).requires_grad_(False).eval()
    kept = check(model, *[call(device, length) for length in (42, 43, 44)])
    assert kept.replays == 3
    model.words.weight.mul_(2)
    check(model, call(device, 45))


def test_a_call_that_does_more_is_not_tried(device: str) -> None:
    def draws(model: Encoder, given: dict[str, Any]) -> Any:
        return given["x"] + torch.rand_like(given["x"])

    model = made(device, draws)
    for length in (40, 50, 41):
        torch.manual_seed(0)
        found = model(**call(device, length))
        torch.manual_seed(0)
        agree(found, plain(model, **call(device, length)))
    assert not forward_cache.store_of(model).graphs


@pytest.mark.parametrize(
    ("length", "most", "bucket", "least"),
    [
        (1, None, 32, 1), (32, None, 32, 1), (33, None, 64, 33), (256, None, 256, 225), (257, None, 320, 257),
        (512, 512, 512, 449), (513, None, 640, 513), (70, 77, 77, 65), (78, 77, 96, 78), (5000, None, 5120, 4097),
    ],
)  # fmt: skip
def test_lengths_of_buckets(length: int, most: int | None, bucket: int, least: int) -> None:
    assert length_buckets.bucket_of(length, most) == bucket
    assert length_buckets.least_of(bucket, most) == least


def test_positions_are_compared_by_themselves() -> None:
    """One position of a thousand that is wrong is less than rounding takes the whole."""
    wanted = torch.randn(1, 1000, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = wanted.clone()
    agreement.compare([wanted], [found])
    found[0, 500] *= 1.5
    agreement.compare([wanted], [found])
    with pytest.raises(bucket_check.Unsuitable, match=r"at one position by 0\.[2-6]"):
        agreement.compare_positions(wanted, found, {0, 1})
    agreement.compare_positions(wanted, wanted + wanted * 0.01, {0, 1})


def test_numbers_of_texts_in_buckets() -> None:
    assert [length_buckets.rows_of(rows) for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 17, 24, 25)] == [
        1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 16, 24, 24, 32
    ]  # fmt: skip
