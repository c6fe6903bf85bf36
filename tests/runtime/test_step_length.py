"""The number of tokens so far, where a step's model needs it on the host."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hf_rewrite_runtime.decode.device_length import StepLength

CAPACITY = 8
TABLE = torch.arange(144.0).view(1, 1, 12, 12)


@pytest.fixture
def position():
    return torch.tensor([5])


def test_a_mask_as_long_as_the_keys_has_a_column_for_every_slot(position):
    with StepLength(position, CAPACITY):
        length = position[0]
        for mask in (torch.ones(2, length + 1), torch.ones((2, 1 + length), dtype=torch.int64), torch.ones(2, length)):
            assert mask.shape == (2, CAPACITY)
            assert mask.all()


def test_ones_of_another_number_are_as_they_are_asked_for(position):
    other = torch.tensor(5)
    with StepLength(position, CAPACITY):
        assert torch.ones(2, other).shape == torch.ones((2, 5)).shape == torch.ones(2, other + 0).shape == (2, 5)
        assert torch.ones(2, position[0] * 1).shape == torch.zeros(2, position[0]).shape == (2, 5)
        assert torch.ones(2, 5, 3).shape == (2, 5, 3)


def test_a_comparison_is_answered_if_no_position_changes_it(position):
    with StepLength(position, CAPACITY):
        longest = 2 + 1 + position[0] - 1
        assert not (longest > 2 + CAPACITY - 1 + 1)
        assert longest > 1
        position += 100  # as a graph that is replayed: nothing reads it
        assert not (longest > 2 + CAPACITY)


def test_a_comparison_that_a_position_changes_is_read(position):
    with StepLength(position, CAPACITY):
        assert position[0] > 4
        assert position[0] <= CAPACITY - 2
        position -= 5
        assert not (position[0] > 4)
        assert position[0].add(1, alpha=3) == 3


def test_a_length_forgotten_is_not_taken_for_another(position):
    with StepLength(position, CAPACITY):
        for _ in range(100):
            assert not (position[0] + 1 > 20)
            assert torch.tensor(50) > 20


def test_a_length_that_is_written_is_no_length(position):
    with StepLength(position, CAPACITY):
        length = position[0] + 0
        length += 20
        assert length > CAPACITY + 1
        torch.add(position[0], 30, out=length)
        assert length > CAPACITY + 1


def test_rows_that_a_table_is_cut_to_are_those_at_the_position(position):
    last = slice(CAPACITY - 1, CAPACITY)
    with StepLength(position, CAPACITY):
        for cut in (TABLE[:, :, last, :CAPACITY], TABLE[..., last, 0:CAPACITY], TABLE[0, 0][last, :CAPACITY]):
            assert torch.equal(cut.view(-1), TABLE[0, 0, 5, :CAPACITY])
        position += 2  # as a graph that is replayed
        assert torch.equal(TABLE[:, :, last, :CAPACITY][0, 0, 0], TABLE[0, 0, 7, :CAPACITY])
        across = TABLE.transpose(2, 3)[:, :, :CAPACITY, last]
        assert torch.equal(across[0, 0, :, 0], TABLE[0, 0, 7, :CAPACITY])


def test_a_step_of_several_tokens_takes_as_many_rows(position):
    with StepLength(position, CAPACITY, position + torch.arange(3)):
        cut = TABLE[:, :, CAPACITY - 3 : CAPACITY, :CAPACITY]
        assert torch.equal(cut, TABLE[:, :, 5:8, :CAPACITY])
        assert torch.equal(TABLE[:, :, CAPACITY - 1 : CAPACITY, :CAPACITY][0, 0, 0], TABLE[0, 0, 7, :CAPACITY])


def test_a_table_that_is_shorter_than_the_cache_has_nothing_beyond(position):
    table = torch.tril(torch.ones(6, 6, dtype=torch.bool))
    with StepLength(position, CAPACITY):
        cut = table[CAPACITY - 1 : CAPACITY, :CAPACITY]
    assert cut.tolist() == [[True] * 6 + [False] * 2]


def test_other_cuts_are_as_they_are_asked_for(position):
    last = slice(CAPACITY - 1, CAPACITY)
    cuts = [
        (slice(None), slice(None), last), (slice(None), slice(None), slice(-1, None), slice(None, CAPACITY)),
        (slice(None), slice(None), last, slice(None, CAPACITY - 1)), (0, 0, last, slice(None, CAPACITY)),
        (slice(None), slice(None), slice(CAPACITY - 2, CAPACITY), slice(None, CAPACITY)),
        (slice(None), slice(None), last, slice(1, CAPACITY)), (..., slice(None, CAPACITY), slice(None, CAPACITY)),
        (slice(0, 1), slice(None), last, slice(None, CAPACITY)), (..., last, slice(None, CAPACITY, 2)),
    ]  # fmt: skip
    expected = [TABLE[cut] for cut in cuts]
    with StepLength(position, CAPACITY):
        for cut, wanted in zip(cuts, expected, strict=True):
            assert torch.equal(TABLE[cut], wanted)


class _Watching(TorchFunctionMode):
    """Notes the names of what it is asked."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class _Shorter(torch.Tensor):
    """A tensor of a library's own, which says itself how long it is."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.size:
            return torch.Size([1])
        return super().__torch_function__(func, types, args, kwargs or {})


def test_the_shape_of_a_plain_tensor_is_no_call_for_the_modes_around(position):
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    with _Watching() as around, StepLength(position, CAPACITY):
        assert weight.shape == weight.size() == (3, 2)
        assert weight.is_contiguous()
        assert around.names == []
        weight.sum()
    assert "sum" in around.names


def test_a_tensor_of_another_class_answers_itself(position):
    with _Watching() as around, StepLength(position, CAPACITY):
        assert torch.zeros(3).as_subclass(_Shorter).size() == (1,)
    assert "size" in around.names
