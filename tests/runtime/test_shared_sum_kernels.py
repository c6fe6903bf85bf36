"""The kernel that sums over memory of all ranks, under Triton's interpreter: this process plays the other ranks."""

import multiprocessing
import os
import time

import pytest
import torch

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.tensor_parallel.shared_sum import BLOCK, PROGRAMS, launch_shared_sum, takes, words

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs under TRITON_INTERPRET=1")


class Others:
    """The memory of all ranks, in which the others have always arrived before this one."""

    def __init__(self, ranks: int, rank: int):
        self.ranks, self.rank = ranks, rank
        self.memory = [torch.zeros(words(ranks), dtype=torch.int32) for _ in range(ranks)]
        self.addresses = torch.tensor([memory.data_ptr() for memory in self.memory], dtype=torch.int64)
        self.rounds = torch.zeros(PROGRAMS, dtype=torch.int64)

    def cells(self, rank: int, turn: int, writer: int) -> torch.Tensor:
        """What a writer tells a rank in a round: `[PROGRAMS, BLOCK, 2]`, the words and the round's number."""
        return self.memory[rank].view(2, self.ranks, PROGRAMS, BLOCK, 2)[turn & 1, writer]

    def arrive(self, turn: int, parts: list[torch.Tensor]) -> None:
        """Write what each other rank has, with the number of the round."""
        for other, part in enumerate(parts):
            if other != self.rank:
                for program, block in enumerate(part.flatten().split(BLOCK)):
                    block_words = block.clone().view(torch.int32)
                    cells = self.cells(self.rank, turn, other)[program, : len(block_words)]
                    cells[:, 0], cells[:, 1] = block_words, turn


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("count", [8, BLOCK, 2 * BLOCK + 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_the_parts_of_all_ranks_and_the_residual(rank, count, dtype):
    ranks = Others(3, rank)
    for turn in (1, 2, 3):
        parts = [torch.randn(1, count).to(dtype) for _ in range(3)]
        residual = torch.randn(1, count).to(dtype)
        ranks.arrive(turn, parts)
        out = torch.full_like(residual, float("nan"))
        given = residual if turn != 2 else None
        launch_shared_sum(parts[rank], given, out, ranks.addresses, ranks.rounds, rank, 3)
        expected = parts[0].float() + parts[1].float() + parts[2].float()
        expected = expected if given is None else expected + residual.float()
        assert torch.equal(out, expected.to(dtype))
        programs = -(-count // BLOCK)
        assert ranks.rounds.tolist() == [turn] * programs + [0] * (PROGRAMS - programs)
        sent = parts[rank].flatten().view(torch.int32)
        told = ranks.cells(1, turn, rank)[:programs, : BLOCK * dtype.itemsize // 4].reshape(-1, 2)[: len(sent)]
        assert torch.equal(told[:, 0], sent)
        assert (told[:, 1] == turn).all()
        assert not ranks.cells(rank, turn, rank).any()  # a rank tells itself nothing


def test_rows_of_an_odd_number_of_halves_are_left_to_the_library(monkeypatch):
    monkeypatch.setattr(backend, "uses_triton", lambda tensor: True)
    assert not takes(torch.zeros(3, dtype=torch.float16), None)
    assert takes(torch.zeros(3), None)


def test_a_part_that_begins_between_words_is_summed():
    ranks = Others(2, 0)
    part = torch.arange(9, dtype=torch.float16)[1:]
    ranks.arrive(1, [part, part])
    out = torch.empty_like(part)
    launch_shared_sum(part, part, out, ranks.addresses, ranks.rounds, 0, 2)
    assert torch.equal(out, 3 * part)


def test_a_number_of_a_round_that_has_overflown_is_waited_for():
    ranks = Others(2, 0)
    ranks.rounds.fill_(2**31 - 1)
    part = torch.ones(8)
    ranks.arrive(-(2**31), [part, part])
    out = torch.empty(8)
    launch_shared_sum(part, None, out, ranks.addresses, ranks.rounds, 0, 2)
    assert out.tolist() == [2.0] * 8
    assert ranks.rounds[0] == -(2**31)


def rank_sums(rank, addresses, parts, residuals, outs, rounds):
    """One rank's sums, which wait for the other's; now and then it is late."""
    torch.set_num_threads(1)
    for turn, (part, residual, out) in enumerate(zip(parts[rank], residuals, outs[rank], strict=True)):
        if turn % 5 == 2 * rank:
            time.sleep(0.01)
        launch_shared_sum(part, residual, out, addresses, rounds[rank], rank, 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_two_processes_wait_for_each_other():
    turns, count = 30, BLOCK + 40
    memory = [torch.zeros(words(2), dtype=torch.int32).share_memory_() for _ in range(2)]
    addresses = torch.tensor([part.data_ptr() for part in memory], dtype=torch.int64)
    parts = torch.randn(2, turns, count, dtype=torch.float16)
    residuals = torch.randn(turns, count, dtype=torch.float16)
    outs = torch.full_like(parts, float("nan")).share_memory_()
    rounds = torch.zeros(2, PROGRAMS, dtype=torch.int64).share_memory_()
    context = multiprocessing.get_context("fork")
    given = (addresses, parts, residuals, outs, rounds)
    ranks = [context.Process(target=rank_sums, args=(rank, *given), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    wanted = (parts[0].float() + parts[1].float() + residuals.float()).half()
    assert torch.equal(outs[0], wanted)
    assert torch.equal(outs[1], wanted)
