"""What a step changes of its model, and what it reads of a prompt: seen, and put back."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from hf_rewrite_runtime.decode.side_effects import Before, Kept


class Part(nn.Module):
    """Has an attribute of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.table = nn.Buffer(torch.zeros(3))
        self.memory: Any = None
        self.states: dict[str, Any] = {}
        self.tokens: list[int] = [1]
        self.calls = 0


def model() -> Any:
    return nn.Sequential(Part(), Part()).eval()


def test_what_is_left_alone_is_no_change() -> None:
    own = model()
    assert Before(own, []).changes() is None
    own[0].calls = 3
    before = Before(own, [])
    own[0].calls = 3
    own[1].memory = None
    assert before.changes() is None


def test_every_kind_of_change_is_seen_and_put_back() -> None:
    own = model()
    start = Before(own, [], keeps=True)
    own[1].memory = made = torch.ones(3)  # by the prompt
    before = Before(own, [])
    first, second = own
    first.calls += 1
    first.memory = torch.ones(2)
    first.states["a"] = torch.ones(1)
    first.tokens.append(2)
    first.table.add_(1)
    first.added = 5
    second.memory.add_(1)
    changes = before.changes()
    assert changes is not None
    named = {name for _, name in changes.names}
    assert named == {"calls", "memory", "states", "tokens", "table", "added"}
    assert {id(tensor) for tensor in changes.tensors} == {id(first.table), id(made)}
    start.put_back(changes)
    assert (first.calls, first.memory, first.states, first.tokens) == (0, None, {}, [1])
    assert first.table.tolist() == [0, 0, 0]
    assert not hasattr(first, "added")
    assert second.memory is None


def test_what_a_step_may_write_is_no_change() -> None:
    own = model()
    own[0].memory = torch.ones(3)
    before = Before(own, [own[0].memory])
    own[0].memory.add_(1)
    assert before.changes() is None
    with torch.no_grad():
        own[0].weight.add_(1)
    changes = before.changes()
    assert changes is not None
    assert [name for _, name in changes.names] == ["weight"]


def test_what_a_prompt_leaves_matters_where_a_step_reads_it() -> None:
    own = model()
    kept = Kept(own)
    steps = []

    def step() -> None:
        steps.append(own[0].calls)

    assert not kept.is_read(step)
    own[1].memory, own[1].calls = torch.ones(1), 4
    assert not kept.is_read(step)
    assert steps == [0]
    own[1].memory, own[1].calls = torch.ones(1), 5
    assert not kept.is_read(step)
    assert steps == [0], "what no step reads is looked for once"
    own[0].calls = 7
    assert type(own[0]) is Part
    assert kept.is_read(step)
    assert type(own[0]) is Part
    own = model()
    kept = Kept(own)
    own[0].later = 1
    assert kept.is_read(lambda: own[0].later)
    own[1].dump_patches = nn.Module.dump_patches  # as before, from its class
    assert not kept.is_read(lambda: own[1].dump_patches)


def test_tensors_that_a_step_leaves_unread_are_looked_for_at_its_proof() -> None:
    own = model()
    own[0].memory, own[1].memory = torch.ones(1), torch.ones(1)
    steps = []

    def step() -> None:
        steps.append(own[0].memory)

    kept = Kept(own)
    kept.watch(step)
    assert type(own[0]) is Part
    own[1].memory = torch.ones(1)  # as each prompt leaves it
    assert not kept.is_read(step)
    assert len(steps) == 1
    own[0].memory = torch.ones(1)
    assert kept.is_read(step)


def test_a_model_is_not_kept_alive() -> None:
    own = model()
    own[0].parents = [own]  # a circle of its own
    kept, gone = Kept(own), weakref.ref(own[1])
    own[0].parents.clear()
    del own
    assert gone() is None
    assert not kept.is_read(lambda: None)
