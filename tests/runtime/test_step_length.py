"""The number of tokens so far, where a step's model needs it on the host."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

from rewrite.runtime.decode.step_length import StepLength

CAPACITY = 8


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
