"""A sample of the walk, and that it sees what it should: bugs that are planted, replays, what is not undone."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from .calls import call, difference
from .change import Change, patched
from .families import FAMILIES, package_of, side
from .table import markdown, summary
from .walk import ABSENT, AFTER, BEFORE, DIFFERENT, REFUSED, NotUndone, Row, changes_of, quiet, row_of, rows_of, tasks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EACH = 8
"""Changes of each family in the sample."""
SEEN = (
    "class, method: LlamaMLP.forward",
    "class, method: LlamaAttention.forward",
    "class, method: LlamaDecoderLayer.forward",
    "class, method: LlamaRMSNorm.forward",
    "class, method: LlamaRotaryEmbedding.forward",
    "library class, forward: Linear",
    "library class, forward: SiLUActivation",
    "library class, forward: Module.__call__",
    "library class, forward: DynamicLayer.update",
    "function of the file, wrapped: apply_rotary_pos_emb",
    "function of the file, wrapped: eager_attention_forward",
    "function imported, bare: create_causal_mask",
    "torch function elsewhere: nn.functional.linear",
    "torch function elsewhere: nn.functional.scaled_dot_product_attention",
    "torch function elsewhere: nn.functional.silu",
    "torch function mode: linear elsewhere",
    "registry, entry: ALL_ATTENTION_FUNCTIONS['sdpa']",
    "registry, entry: ALL_MASK_ATTENTION_FUNCTIONS['sdpa']",
    "module, class: model.layers.*.mlp (",
    "module, class: model.layers.*.self_attn (",
    "module, class: model.layers.*.self_attn.o_proj (",
    "module, class: model.layers.*.input_layernorm (",
    "module, attribute: model.layers.*.self_attn (",
    "module, attribute: model.layers.*.input_layernorm (",
    "module, replaced: model.layers.*.mlp.up_proj (",
    "module, replaced by nothing: model.layers.*.mlp.act_fn (",
    "module, dtype: model.layers.* (",
    "module, forward on the instance: model.layers.*.self_attn (",
    "module, hook: model.layers.* (",
    "parameter, .data swapped: model.layers.*.self_attn.o_proj (",
    "parameter, replaced: model.norm (",
    "configuration, new field: is_causal = False",
    "configuration, field: num_hidden_layers = 1",
    "configuration, inner field: rope_parameters['rope_theta']",
    "generation method, instance: prepare_inputs_for_generation",
    "generation method, mixin: _update_model_kwargs_for_generation",
    "model, by hand: load_state_dict(assign=True)",
    "mode: default device cpu",
    "mode: default dtype float64",
)
"""Changes that are made in every run of the tests."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


def named(name: str, family: str = "llama") -> Change:
    return next(change for change in changes_of(side(family, False, DEVICE)) if name in str(change))


def row(name: str, when: str = AFTER, family: str = "llama") -> Row:
    return row_of(named(name, family), family, when, DEVICE, call(side(family, False, DEVICE)))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unchanged_package_replays_and_says_what_the_original_says(family: str) -> None:
    wanted, got = (call(side(family, rewritten, DEVICE)) for rewritten in (False, True))
    assert not wanted.error
    assert not difference(wanted, got)
    assert got.replays.get("forwards")
    assert got.replays.get("steps") or not FAMILIES[family].generates


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_of_changes_is_seen_or_refused(family: str) -> None:
    rows = [row for task in tasks([family], EACH, DEVICE) for row in rows_of(task)]
    assert not any(row.wrong for row in rows), markdown(rows)


@pytest.mark.parametrize("name", SEEN)
def test_a_change_is_in_the_next_call(name: str) -> None:
    found = row(name)
    assert not found.wrong, markdown([found])


def test_there_are_changes_of_every_kind_and_a_draw_is_spread_over_them() -> None:
    for family in FAMILIES:
        changes = changes_of(side(family, False, DEVICE))
        assert len({str(change) for change in changes}) == len(changes) > 300
        (task,) = tasks([family], 80, DEVICE)
        assert task == tasks([family], 80, DEVICE)[0]
        drawn = Counter(changes[number].kind for number in task.numbers)
        assert drawn.keys() == {change.kind for change in changes}


def test_a_weight_that_is_replaced_unseen_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: whether a model changed is not asked."""
    assert not row("parameter, replaced: model.norm").wrong
    package_of("llama")
    store = side("llama", True, DEVICE).part("decode/graph_cache").GraphStore
    real = store._forget_if_changed

    def once(self, model):  # type: ignore[no-untyped-def]
        if self._snapshot is None:
            real(self, model)

    monkeypatch.setattr(store, "_forget_if_changed", once)
    found = row("parameter, replaced: model.norm")
    assert found.outcomes["changed"] == DIFFERENT
    assert found.effective
    assert "changed" in found.looped


def test_a_refusal_is_told_from_a_replay() -> None:
    found = row("module, hook: model.layers.*.mlp (", BEFORE)
    assert (found.outcomes["changed"], found.outcomes["again"]) == (REFUSED, REFUSED)
    assert found.looped == ["undone"]
    assert "generate: observed" in found.reasons


def test_what_a_package_does_not_have_is_no_difference() -> None:
    assert set(row("function of the file, bare: rotate_half").outcomes.values()) == {ABSENT}


def test_a_change_that_is_not_undone_is_an_error() -> None:
    left = contextlib.ExitStack()

    def made(_: object) -> contextlib.ExitStack:
        left.enter_context(patched(torch.nn.functional, "silu", torch.nn.functional.relu))
        return contextlib.ExitStack()

    with left, pytest.raises(NotUndone, match="silu stays"):
        row_of(Change("torch", "silu stays", made), "llama", AFTER, DEVICE, call(side("llama", False, DEVICE)))


def test_the_table_counts_calls_and_names_what_went_wrong() -> None:
    right = Row("llama", "hook", "a", BEFORE, {"changed": REFUSED}, reasons=["generate: observed"], effective=True)
    wrong = Row("bert", "hook", "b", AFTER, {"changed": DIFFERENT}, {"changed": "tokens differ"}, looped=["changed"])
    text = markdown([right, wrong])
    assert "| hook | 2 | 1 | 1 | 0 | 0 | 1 | 0 | 0 | 0 | 0 | 1 | 1 |" in text
    assert "- **hook** b (1): bert after changed: tokens differ (changed)" in text
    assert summary([right, wrong]).startswith("2 cases of 2 changes, 2 families: 1 wrong (1 calls differ in silence")
