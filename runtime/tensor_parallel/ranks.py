"""The processes that share one model's tensors, and what they say to each other in a step.

n ranks. All of it is torch's: `torch.distributed` (NCCL, RCCL or gloo), and on NVIDIA cards its symmetric memory, over
which a kernel gets the other ranks' parts and adds them up in the order of the ranks: `shared_sum` for a few rows,
torch's own one-shot for more. All of them give every rank the same bits, so that ranks choose the same tokens without
asking each other. NVLink multicast is not used.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core import backend
from .liveness import Peers
from .shared_sum import BLOCK, NOT_HERE, PROGRAMS, launch_shared_sum, takes, words

ONE_SHOT_BYTES = 512 * 1024
"""Up to so many bytes of all others each rank reads all parts itself: 7.3 µs for 8 KiB and 11.6 for 512 in a graph,
NCCL 11.0 and 14.7 (two H200, torch 2.11)."""
KERNEL_RANKS = 2
"""Up to so many ranks few rows take `shared_sum`: a step of an 8B's 16 layers took 1.31 ms with its first form and
1.46 with torch's one-shot and an addition (two H200, torch 2.11, triton 3.6); more ranks have not been measured."""
_ONE_SHOT_DTYPES = (torch.bfloat16, torch.float32)

_known: weakref.WeakKeyDictionary[Any, Ranks] = weakref.WeakKeyDictionary()


class DifferentCalls(ValueError):
    """The ranks of one model were called with different arguments."""

    def __init__(self, name: str, values: Sequence[int]):
        super().__init__(
            f"the ranks of a tensor-parallel model were given calls that differ in {name}: "
            f"{', '.join(f'{value} on rank {rank}' for rank, value in enumerate(values))}. "
            "Every rank has to call generate() with the same tokens and settings."
        )


class Ranks:
    """The ranks of a device mesh of one dimension.

    Args:
        mesh: of torch's, over which tensors are dealt.
    """

    def __init__(self, mesh: Any):
        self.group: Any = mesh.get_group()
        self.size: int = mesh.size()
        self.rank: int = mesh.get_local_rank()
        self.device = torch.device(mesh.device_type)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.peers = Peers(self._gathered(Peers.own()))
        self._shared: dict[torch.dtype, Tensor] = {}
        self._memory: Tensor | None = None
        """`[n]`, where the memory of every rank begins, for `shared_sum`."""
        self._rounds = torch.zeros(PROGRAMS, dtype=torch.int64, device=self.device)
        self._kept: list[Tensor] = []
        self.refusal: str | None = None
        """Why small sums take the library's all-reduce."""
        self._find_shared_memory()

    def sum(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of every rank's `part`, plus a residual that all have; the part may be overwritten."""
        part.data_ptr()  # a step computes here what it has put off
        part = part.contiguous()
        if self._memory is not None and takes(part, residual):
            if residual is not None:
                residual.data_ptr()
            out = torch.empty_like(part)
            launch_shared_sum(part, residual, out, self._memory, self._rounds, self.rank, self.size)
            return out
        total = self._summed(part)
        return total if residual is None else residual + total

    def _summed(self, part: Tensor) -> Tensor:
        shared = self._shared.get(part.dtype)
        if shared is None or part.numel() > shared.numel() or (part.data_ptr() | part.nbytes) % 16:
            dist.all_reduce(part, group=self.group)
            return part
        place = shared[: part.numel()].view(part.shape)
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(place, part, "sum", self.group.group_name)
        return total

    def gather(self, part: Tensor, size: int) -> Tensor:
        """Return what the ranks' parts `[..., k]` are one behind the other, `[..., size]`; the last may be shorter."""
        part.data_ptr()
        width = math.ceil(size / self.size)
        if part.shape[-1] < width:
            part = torch.nn.functional.pad(part, (0, width - part.shape[-1]))
        parts = part.new_empty((self.size, *part.shape))
        dist.all_gather_into_tensor(parts, part.contiguous()[None], group=self.group)
        whole = parts.movedim(0, -2).reshape(*part.shape[:-1], self.size * width)
        return whole if whole.shape[-1] == size else whole[..., :size]

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's columns of `[..., size]`."""
        width = math.ceil(whole.shape[-1] / self.size)
        start = min(self.rank * width, whole.shape[-1])
        return whole.narrow(-1, start, min(width, whole.shape[-1] - start))

    def agree(self, values: dict[str, int], same: Sequence[str]) -> dict[str, list[int]]:
        """Return every rank's values, in the order of the ranks; the host waits for it.

        Args:
            values: the same names on every rank.
            same: names of those that must not differ.

        Raises:
            DifferentCalls: on every rank, if one does.
        """
        gathered = self._gathered([*values.values()])
        found = {name: [given[at] for given in gathered] for at, name in enumerate(values)}
        for name in same:
            if len(set(found[name])) > 1:
                raise DifferentCalls(name, found[name])
        return found

    def share_randomness(self) -> None:
        """Let every rank draw what the first will: its generator's state is copied."""
        on_gpu = self.device.type == "cuda"
        state = torch.cuda.get_rng_state(self.device) if on_gpu else torch.get_rng_state()
        sent = state.to(self.device, copy=True)
        dist.broadcast(sent, group_src=0, group=self.group)
        if self.rank and on_gpu:
            torch.cuda.set_rng_state(sent.cpu(), self.device)
        elif self.rank:
            torch.set_rng_state(sent)

    def _gathered(self, values: list[int]) -> list[list[int]]:
        own = torch.tensor([values], dtype=torch.int64, device=self.device)
        found = own.new_empty((self.size, len(values)))
        dist.all_gather_into_tensor(found, own, group=self.group)
        lists: list[list[int]] = found.tolist()
        return lists

    def _find_shared_memory(self) -> None:
        """Get memory that the ranks read of each other, and try it: all ranks use it, or none."""
        self.refusal = _no_shared_memory(self.device, self.peers.on_one_host)
        if self.refusal is None:
            try:
                self._shared = self._tried()
            except (RuntimeError, ImportError, AttributeError, NotImplementedError) as error:
                self.refusal = f"{type(error).__name__}: {error}"
        without = self._gathered([int(self.refusal is not None)])
        if any(flag for (flag,) in without):
            self._shared, self._memory = {}, None
            self.refusal = self.refusal or "another rank cannot"

    def _tried(self) -> dict[torch.dtype, Tensor]:
        # Read where memory is first shared: nothing here needs multicast, which not every host survives.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symmetric

        found: dict[torch.dtype, Tensor] = {}
        with torch.inference_mode(False):
            for dtype in _ONE_SHOT_DTYPES:
                count = ONE_SHOT_BYTES // (self.size - 1) // dtype.itemsize
                found[dtype] = symmetric.empty(count, dtype=dtype, device=self.device)
                symmetric.rendezvous(found[dtype], group=self.group.group_name)
        for dtype, shared in found.items():
            part = torch.arange(64, device=self.device).to(dtype) * (self.rank + 1)
            total = torch.ops.symm_mem.one_shot_all_reduce_copy(shared[:64], part, "sum", self.group.group_name)
            dist.all_reduce(part, group=self.group)
            if not torch.equal(total, part):
                raise RuntimeError(f"sums in {dtype} over symmetric memory are wrong")
        if backend.triton_installed() and self.size <= KERNEL_RANKS:
            self._memory = self._tried_kernel(symmetric)
        return found

    def _tried_kernel(self, symmetric: Any) -> Tensor:
        """Return the addresses of memory for `shared_sum`, which is tried."""
        with torch.inference_mode(False):
            own = symmetric.empty(words(self.size), dtype=torch.int32, device=self.device).zero_()
            self._kept.append(own)
            handle = symmetric.rendezvous(own, group=self.group.group_name)
            parts = [handle.get_buffer(rank, (own.numel(),), torch.int32) for rank in range(self.size)]
            self._kept += parts
            memory = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=self.device)
        self._gathered([0])  # all memory is zero
        for dtype in (torch.bfloat16, torch.float32):
            for count in (96, 3 * BLOCK + 8, 96):
                part = (torch.arange(count, device=self.device) % 64).to(dtype) * (self.rank + 1)
                out = torch.empty_like(part)
                launch_shared_sum(part, part, out, memory, self._rounds, self.rank, self.size)
                total = part.clone()
                dist.all_reduce(total, group=self.group)
                if not torch.equal(out, total + part):
                    raise RuntimeError(f"sums of {count} {dtype} in one kernel are wrong")
        return memory

    def __str__(self) -> str:
        small = "small ones by one kernel over symmetric memory" if self._shared else None
        sums = small or f"one way for all sizes ({self.refusal})"
        return f"{self.size} ranks, sums by {dist.get_backend(self.group)}, {sums}"


def _no_shared_memory(device: torch.device, on_one_host: bool) -> str | None:
    if device.type != "cuda":
        return "the ranks are on no GPU"
    if NOT_HERE:
        return "not tried on AMD cards"
    return None if on_one_host else "the ranks are on several hosts"


def ranks_of(mesh: Any) -> Ranks:
    """Return the ranks of a mesh, found once, also where experts have a group of the same; every rank has to ask."""
    group = mesh.get_group()
    found = _known.get(group)
    if found is None:
        members = _members(group)
        same = (ranks for other, ranks in [*_known.items()] if _members(other) == members)
        found = _known[group] = next(same, None) or Ranks(mesh)
    return found


def _members(group: Any) -> list[int] | None:
    """Return the processes of a group; None for one that was destroyed."""
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        return None
