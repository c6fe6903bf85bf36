"""Weights in one memory, one behind the other, each with a storage of its own.

A part is imported by DLPack from a slice of the whole, so its storage has the slice's address and exactly its bytes,
and keeps the whole alive. What groups tensors by their storage (safetensors, accelerate, `torch.save`) therefore sees
separate tensors. The whole is kept by the addresses of its parts until the storage of one of them dies: a weight that
was replaced or moved to another device leaves no memory behind.

A weight that is written `[I, O]`, as GPT-2's `Conv1D`, may also lie column by column: the kernels of a step read it in
one go then, where the other way parts of sums have to meet (`conv1d_weight`).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.utils import dlpack

from ..core import backend

DEVICES = frozenset({"cpu", "cuda"})
"""Where memory passes through DLPack in every supported torch; HIP devices are `cuda` too."""

RETURNED_BYTES = 16 * 2**20
"""Weights of this size, once joined, leave their old memory to the device and not to torch's allocator."""


@dataclass(frozen=True)
class _Group:
    """Tensors that were joined."""

    tails: dict[int, Tensor]
    """The whole from each part on, by the part's address; that memory lives, so the address means nothing else."""
    storages: tuple[weakref.ref[torch.UntypedStorage], ...]


_lock = threading.Lock()
_groups: dict[int, _Group] = {}
"""By the address of every part."""


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors `[O_i, …]` as one `[ΣO_i, …]` in the same memory, None where they do not lie in that order.

    Nothing is remembered of the tensors themselves: what counts is where each of them points now.
    """
    first = tensors[0]
    if len(tensors) == 1:
        return first if first.is_contiguous() else None
    start, dtype, width = first.data_ptr(), first.dtype, first.stride(0)
    end, rows = start, 0
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.dtype != dtype:
            return None
        if tensor.stride(0) != width or not tensor.is_contiguous():
            return None
        end += tensor.nbytes
        rows += tensor.size(0)
    group = _groups.get(start)
    if group is not None:
        whole = group.tails[start]
        if whole.dtype == dtype and whole.stride(0) == width and end <= start + whole.nbytes:
            return whole if whole.size(0) == rows else whole.narrow(0, 0, rows)
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():
        return None
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def holds(tensor: Tensor) -> bool:
    """Return whether a tensor begins where one of those that were joined does: it is made of parameters."""
    return tensor.data_ptr() in _groups


def join(tensors: Sequence[Tensor]) -> Tensor | str:
    """Move tensors into one memory and return them as one; or return why that cannot be, a key of `packing.REASONS`.

    A tensor belongs to one group for as long as the storages of all of that group are alive: two layers that share a
    weight would else take it from each other at every call.
    """
    if (reason := _immovable(tensors)) is not None:
        return reason
    # Inference tensors could never take part in training again, so the whole is a normal one in any mode. The part
    # that a tensor of inference mode gets is of its own kind: torch multiplies by no mixture of both.
    with _lock, torch.inference_mode(False), torch.no_grad():
        whole = joined(tensors)
        if whole is not None:  # another thread was here first
            return whole
        if _belong_elsewhere(tensors):
            return "shared_weight"
        if any(_is_held(tensor) for tensor in tensors):
            return "shared_storage"
        return _joined_anew(tensors)


def turn(weight: Tensor) -> bool:
    """Lay a weight `[I, O]` out column by column, as `nn.Linear` has it; return whether it lies so.

    Its shape and values stay. What uses the same memory would not follow, so a weight that is held stays as it is.
    """
    if weight.t().is_contiguous():
        return True
    if _immovable([weight]) is not None:
        return False
    with _lock, torch.inference_mode(False), torch.no_grad():
        if _belong_elsewhere([weight]) or _is_held(weight):
            return False
        with torch.inference_mode(weight.is_inference()):
            weight.data = weight.detach().t().contiguous().t()
    return True


def _joined_anew(tensors: Sequence[Tensor]) -> Tensor:
    rows = [tensor.shape[0] for tensor in tensors]
    with torch._C.DisableTorchFunction():  # a weight is moved as it is, whoever watches or replaced `torch.cat`
        whole = torch.ops.aten.cat.default([tensor.detach() for tensor in tensors])
    parts = []
    for tensor, part in zip(tensors, whole.split(rows), strict=True):
        with torch.inference_mode(tensor.is_inference()):
            parts.append(_with_own_storage(part))
    addresses = tuple(part.data_ptr() for part in parts)
    tails = {
        address: whole[end - count :] for address, count, end in zip(addresses, rows, accumulate(rows), strict=True)
    }
    drop = functools.partial(_drop, addresses)
    group = _Group(tails, tuple(weakref.ref(part.untyped_storage(), drop) for part in parts))
    for tensor, part in zip(tensors, parts, strict=True):
        base = _base(tensor)
        tensor.data = part
        if base is not None:
            base.data = part  # which would keep the memory that the weight has left
    _groups.update(dict.fromkeys(addresses, group))
    if whole.is_cuda and whole.nbytes >= RETURNED_BYTES:
        # The allocator keeps what was freed for tensors of these sizes, and there will be none.
        torch.cuda.empty_cache()
    return tails[addresses[0]]


def _with_own_storage(part: Tensor) -> Tensor:
    """Return a tensor on the memory of a contiguous `part` whose storage is that part and no more.

    It passes as bytes, since not every torch exports 8-bit floats; flat, since DLPack changes strides of sizes 1; and
    as a capsule, which unlike `__dlpack__` asks for no current device.
    """
    capsule = dlpack.to_dlpack(part.view(-1).view(torch.uint8))  # type: ignore[attr-defined]
    return dlpack.from_dlpack(capsule).view(part.dtype).view(part.shape)


def _drop(addresses: tuple[int, ...], storage: weakref.ref[torch.UntypedStorage]) -> None:
    """Forget the group of a storage that died; its memory lives on for as long as another of its parts."""
    for address in addresses:
        group = _groups.get(address)
        if group is not None and any(own is storage for own in group.storages):
            del _groups[address]


def _immovable(tensors: Sequence[Tensor]) -> str | None:
    first = tensors[0]
    if first.is_meta or any(_kind(tensor) != _kind(first) or not tensor.numel() for tensor in tensors):
        return "different_weights"
    if backend.interposed():
        return "watched"
    if first.device.type not in DEVICES:
        return "device"
    if not all(tensor.is_contiguous() for tensor in tensors):
        return "strided"
    if not all(_fills_its_storage(tensor) for tensor in tensors):
        return "shared_storage"
    if len({tensor.data_ptr() for tensor in tensors}) < len(tensors):
        return "shared_weight"
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        return "capturing"
    return None


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    return tensor.dtype, tensor.device, tensor.shape[1:]


def _fills_its_storage(tensor: Tensor) -> bool:
    """Return whether the storage is this tensor's bytes and this process's alone.

    A rank's part of a weight may be what was kept of a larger tensor, of which nobody has the rest: `_is_held` asks.
    """
    storage = tensor.untyped_storage()
    fills = storage.nbytes() == tensor.nbytes or _base(tensor) is not None
    return fills and (tensor.is_cuda or not storage.is_shared())


def _base(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which a rank's part of a weight is a view; parameters are views of nothing."""
    base = tensor._base
    same = base is not None and base.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    return base if same else None


def _is_held(tensor: Tensor) -> bool:
    """Return whether another tensor or array uses the storage: moving the weight would cut that off from it.

    A torch that does not count the users of a storage leaves the question open, and the weight where it is.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return True
    storage, alone = tensor.untyped_storage(), torch.empty(0, device="cpu")
    other = alone.untyped_storage()
    own = count(other._cdata) + (_base(tensor) is not None)
    return bool(count(storage._cdata) > own)


def _belong_elsewhere(tensors: Sequence[Tensor]) -> bool:
    """Return whether a group that is not part of `tensors`, in its order, has one of them and still needs it."""
    own = [tensor.data_ptr() for tensor in tensors]
    for address in own:
        others = [*_groups[address].tails] if address in _groups else []
        if others and others not in (own[start : start + len(others)] for start in range(len(own))):
            return True
    return False
