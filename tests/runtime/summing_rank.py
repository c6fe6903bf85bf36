"""One of two ranks that sum over each other's memory, inside a graph and now and then late; run by torchrun.

python -m torch.distributed.run … tests/runtime/summing_rank.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hf_rewrite_runtime.tensor_parallel.ranks import Ranks

TURNS, SUMS = 60, 12


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    ranks = Ranks(init_device_mesh("cuda", (size,)))
    assert ranks._memory is not None, str(ranks)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, hidden_size in ((1, 96), (1, 2048), (8, 4096), (8, 8192)):
            check(ranks, rank, torch.empty(rows, hidden_size, dtype=dtype, device=device))
    dist.barrier()
    dist.destroy_process_group()


def check(ranks: Ranks, rank: int, like: torch.Tensor) -> None:
    """Sum many parts in a graph; every replay has to find each rank's own round."""
    torch.manual_seed(1 + rank)
    parts = [torch.randn_like(like) for _ in range(SUMS)]
    torch.manual_seed(0)
    residual = torch.randn_like(like)
    wanted = []
    for part in parts:
        every = [torch.empty_like(part) for _ in range(ranks.size)]
        dist.all_gather(every, part)
        wanted.append((sum(given.float() for given in every) + residual.float()).to(like.dtype))
    ranks.sum(parts[0], residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outs = [ranks.sum(part, residual) for part in parts]
    for turn in range(TURNS):
        for out in outs:
            out.fill_(float("nan"))
        if turn % 3 == rank:
            torch.cuda._sleep(200_000 * (1 + turn % 4))  # type: ignore[no-untyped-call]
        graph.replay()
        assert all(torch.equal(out, expected) for out, expected in zip(outs, wanted, strict=True)), (turn, like.shape)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
