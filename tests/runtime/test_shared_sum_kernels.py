"""The kernel that sums over memory of all ranks, under Triton's interpreter: this process plays the other ranks."""

import os

import pytest
import torch

from rewrite.runtime.parallel.shared_sum import BLOCK, PROGRAMS, WORDS, launch_shared_sum, words

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs under TRITON_INTERPRET=1")


class Others:
    """The memory of all ranks, in which the others have always arrived before this one."""

    def __init__(self, ranks: int, rank: int):
        self.ranks, self.rank = ranks, rank
        self.memory = [torch.zeros(words(ranks), dtype=torch.int32) for _ in range(ranks)]
        self.addresses = torch.tensor([memory.data_ptr() for memory in self.memory], dtype=torch.int64)
        self.rounds = torch.zeros(PROGRAMS, dtype=torch.int64)

    def arrive(self, turn: int, parts: list[torch.Tensor]) -> None:
        """Write what each other rank has, and tell of the round."""
        for other, part in enumerate(parts):
            for program, block in enumerate(part.flatten().split(BLOCK)):
                start = ((turn & 1) * PROGRAMS + program) * BLOCK
                if other != self.rank:
                    self.memory[other][start : start + BLOCK].view(part.dtype)[: len(block)] = block
                    self.memory[self.rank][WORDS + program * self.ranks + other] = turn


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("count", [8, BLOCK, 2 * BLOCK + 24])
def test_sums_the_parts_of_all_ranks_and_the_residual(rank, count):
    ranks = Others(3, rank)
    for turn in (1, 2, 3):
        parts = [torch.randn(1, count) for _ in range(3)]
        residual = torch.randn(1, count)
        ranks.arrive(turn, parts)
        out = torch.full_like(residual, float("nan"))
        given = residual if turn != 2 else None
        launch_shared_sum(parts[rank], given, out, ranks.addresses, ranks.rounds, rank, 3)
        expected = parts[0] + parts[1] + parts[2]
        torch.testing.assert_close(out, expected if given is None else expected + residual)
        programs = -(-count // BLOCK)
        assert ranks.rounds.tolist() == [turn] * programs + [0] * (PROGRAMS - programs)
        told = ranks.memory[1][WORDS:].view(PROGRAMS, 3)[:programs, rank]
        assert told.tolist() == [turn] * programs


def test_a_number_of_a_round_that_has_overflown_is_waited_for():
    ranks = Others(2, 0)
    ranks.rounds.fill_(2**31 - 1)
    part = torch.ones(8)
    ranks.arrive(-(2**31), [part, part])
    out = torch.empty(8)
    launch_shared_sum(part, None, out, ranks.addresses, ranks.rounds, 0, 2)
    assert out.tolist() == [2.0] * 8
    assert ranks.rounds[0] == -(2**31)
