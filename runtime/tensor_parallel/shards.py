"""A model that a tensor-parallel plan of transformers has dealt to ranks, as each rank's own plain modules.

`from_pretrained(..., tp_plan="auto")` makes DTensors of the parameters that the plan names, and wraps `forward` of its
modules: the wrapper takes the local tensors out, calls the module, and sums or gathers. Operators that read weights
themselves, or several modules' at once, have to leave such modules alone. For the length of one `generate()` the same
local tensors stand in the modules directly, and what is left of the wrappers is the communication (`forwards`). No
tensor is copied. Afterwards every module is as it was: `state_dict()` and `save_pretrained()` see the DTensors.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.sharded_models import is_dealt
from .forwards import ExpertsForward, Forward, GatheredForward, RowForward, SummedForward, VocabularyForward
from .ranks import Ranks, ranks_of

REASONS = {
    "parallel_style": "the plan, or this transformers, deals a module to the ranks in a way that is not known here",
    "parallel_mesh": "the tensors are dealt over more than one dimension of ranks (FSDP, pipelines, experts)",
}

_locals: weakref.WeakKeyDictionary[nn.Module, dict[str, Tensor]] = weakref.WeakKeyDictionary()
_described: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


class UnevenHeads(ValueError):
    """Heads of attention that the ranks would have to share."""

    def __init__(self, name: str, width: int, head_dim: int, ranks: int):
        super().__init__(
            f"{name} gives each of {ranks} ranks {width} columns, which is no whole number of heads of {head_dim}: "
            "the number of heads has to be divisible by the number of ranks. Use fewer ranks, or a plan that leaves "
            "this projection out."
        )


class Unknown(Exception):
    """A model is dealt in a way that is not known; the argument is a key of `REASONS`."""


@contextlib.contextmanager
def local(model: nn.Module) -> Iterator[Ranks | str | None]:
    """Let every module hold this rank's plain tensors for the length of a `with` block.

    Yields:
        The ranks; None for a model that is not dealt, or is local already; a key of `REASONS` where it stays as it is.

    Raises:
        UnevenHeads: if a rank has parts of heads.
    """
    if not is_dealt(model):
        yield None
        return
    try:
        changes = _Changes(model)
    except Unknown as unknown:
        reason = str(unknown)
        _described[model] = f"ranks: {REASONS[reason]}"
        yield reason
        return
    _described[model] = f"ranks: {changes.ranks}"
    with changes.made():
        yield changes.ranks


class _Changes:
    """What has to be changed in a model's modules, and back."""

    def __init__(self, model: nn.Module):
        self._forwards: list[tuple[nn.Module, Callable[..., Any], Forward | None]] = []
        self._parameters: list[tuple[nn.Module, str, Any, Tensor]] = []
        self._hooks: list[tuple[nn.Module, Any]] = []
        self._ranks: Ranks | None = None
        self._tokens_shared_by = getattr(model, "_tp_size", None)
        self._routers = 0
        """That tell each rank its own experts' numbers, which here are asked for all."""
        with torch.no_grad():
            for name, module in model.named_modules():
                self._add(name, module)
        for name, module in model.named_modules():
            self._check_heads(name, module)
        experts = sum(isinstance(instead, ExpertsForward) for _, _, instead in self._forwards)
        if self._ranks is None or (self._routers and self._routers != experts):
            raise Unknown("parallel_style")

    @property
    def ranks(self) -> Ranks:
        """Of all dealt tensors."""
        assert self._ranks is not None
        return self._ranks

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Change the modules for the length of a `with` block."""
        for module, _, forward in self._forwards:
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward
        for module, name, _, tensor in self._parameters:
            module._parameters[name] = tensor  # type: ignore[assignment]
        for module, _ in self._hooks:
            module._backward_hooks = OrderedDict()
        try:
            yield
        finally:
            for module, name, dealt, _ in self._parameters:
                module._parameters[name] = dealt
            for module, wrapper, _ in self._forwards:
                module.__dict__["forward"] = wrapper
            for module, hooks in self._hooks:
                module._backward_hooks = hooks

    def _add(self, name: str, module: nn.Module) -> None:
        placements = self._add_parameters(module)
        if module._backward_hooks and all(map(_sums_gradients, module._backward_hooks.values())):
            self._hooks.append((module, module._backward_hooks))
        wrapper = module.__dict__.get("forward")
        if wrapper is None:
            # Where a plan deals a parameter, the module that reads it is wrapped.
            if any(map(_is_split, placements.values())):
                raise Unknown("parallel_style")
            return
        if not getattr(wrapper, "__qualname__", "").endswith(_WRAPPERS):
            return  # someone else's: `observed` finds it
        inside = _inside(wrapper)
        own = getattr(inside.get("original_forward"), "__func__", None)
        if own is not type(module).forward or getattr(module, "_hf_quantized_needs_local_tp", False):
            raise Unknown("parallel_style")
        if _sums_gradients(wrapper):
            self._forwards.append((module, wrapper, None))
            return
        self._found(ranks_of(inside["ep_mesh" if "ep_mesh" in inside else "mesh"]))
        self._forwards.append((module, wrapper, self._instead(module, inside, placements)))

    def _add_parameters(self, module: nn.Module) -> dict[str, Any]:
        """Return how each dealt parameter is placed."""
        from torch.distributed.tensor import DTensor

        found: dict[str, Any] = {}
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                if parameter.device_mesh.ndim != 1:
                    raise Unknown("parallel_mesh")
                self._found(ranks_of(parameter.device_mesh))
                found[name] = parameter.placements[0]
                self._parameters.append((module, name, parameter, _local_of(module, name, parameter)))
        return found

    def _found(self, ranks: Ranks) -> None:
        if self._ranks is not None and self._ranks is not ranks:
            raise Unknown("parallel_mesh")
        self._ranks = ranks

    def _instead(self, module: nn.Module, inside: dict[str, Any], placed: dict[str, Any]) -> Forward | None:
        """Return what does the communication of a wrapper; None where there is none without gradients."""
        style, ranks = inside["self"], self.ranks
        kind = type(style).__name__ if type(style).__module__.startswith("transformers.") else ""
        if kind in ("LocalParamsParallel", "MlaKvAProjParallel", "TensorParallelLayer"):
            return None
        if kind == "EpRouterParallel":
            self._routers += 1
            return None
        if kind in ("MoeExpertsParallel", "EpDispatchExpertsParallel") and any(map(_is_split, placed.values())):
            whole = all(placement.is_shard(0) for placement in placed.values() if _is_split(placement))
            if kind == "MoeExpertsParallel" and not whole:
                return SummedForward(module, ranks)
            return self._experts(module, inside, whole)
        if kind == "AllReduceParallel":
            return SummedForward(module, ranks)
        weight = placed.get("weight")
        if weight is None or not _is_split(weight) or not getattr(style, "use_local_output", False):
            raise Unknown("parallel_style")
        dim = weight.dim % 2
        if isinstance(module, nn.Embedding) and kind in ("EmbeddingParallel", "RowwiseParallel", "ColwiseParallel"):
            return self._embedding(module, dim)
        if type(module) is not nn.Linear:
            raise Unknown("parallel_style")
        if kind == "PackedColwiseParallel" and dim == 0:
            return None
        if kind == "ColwiseParallel" and dim == 0 and style.input_layouts.is_replicate():
            if style.output_layouts.is_replicate():
                return GatheredForward(module, ranks, module.out_features)
            if style.output_layouts.is_shard() and style.output_layouts.dim == -1:
                return None  # this rank's columns are what is wanted
        if kind == "RowwiseParallel" and dim == 1 and style.output_layouts.is_replicate():
            return RowForward(module, ranks, splits=style.input_layouts.is_replicate())
        raise Unknown("parallel_style")

    def _experts(self, module: nn.Module, inside: dict[str, Any], whole: bool) -> Forward:
        """Return what sums over whole experts; the ranks have to hold the same tokens."""
        counts = {name: parameter.shape[0] for owner, name, _, parameter in self._parameters if owner is module}
        exchanges = type(inside.get("implementation")).__name__
        known = exchanges in ("NoneType", "AutoEP", "AllReduceEP", "AllToAllEP")
        alone = getattr(inside.get("implementation"), "megamoe", None) is None
        shared = self._tokens_shared_by == self.ranks.size
        if not (whole and known and alone and shared) or len(set(counts.values())) != 1:
            raise Unknown("parallel_style")
        return ExpertsForward(module, self.ranks, next(iter(counts.values())))

    def _embedding(self, module: nn.Embedding, dim: int) -> Forward:
        if (
            module.max_norm is not None
            or -(-module.num_embeddings // self.ranks.size) * (self.ranks.size - 1) >= module.num_embeddings
        ):
            raise Unknown("parallel_style")
        if dim == 0:
            return VocabularyForward(module, self.ranks, module.num_embeddings)
        return GatheredForward(module, self.ranks, module.embedding_dim)

    def _check_heads(self, name: str, module: nn.Module) -> None:
        """Raise where the columns of a projection that a rank has are no whole heads."""
        head_dim = getattr(module, "head_dim", None)
        if not isinstance(head_dim, int) or head_dim < 1:
            return
        dealt = {id(other): instead for other, _, instead in self._forwards}
        for child_name, child in module.named_children():
            weight = child._parameters.get("weight")
            if isinstance(child, nn.Linear) and weight is not None and dealt.get(id(child), self) is None:
                width = -(-child.out_features // self.ranks.size)
                whole = child.out_features % head_dim == 0
                if whole and (width % head_dim or child.out_features % self.ranks.size):
                    raise UnevenHeads(f"{name}.{child_name}", width, head_dim, self.ranks.size)


def _local_of(module: nn.Module, name: str, dealt: Any) -> Tensor:
    """Return this rank's tensor of a dealt one: the same object in each call, as what is captured compares them."""
    tensor: Tensor = dealt.to_local()
    held = _locals.setdefault(module, {})
    known = held.get(name)
    if known is None or _place_of(known) != _place_of(tensor):
        known = held[name] = tensor
    return known


def _place_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


_WRAPPERS = (".install_forward.<locals>.tp_forward", ".install_forward.<locals>.ep_forward")


def _inside(wrapper: Any) -> dict[str, Any]:
    """Return what transformers' wrapper of a `forward` refers to, the `original_forward` under that name."""
    cells = zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True)
    found = {name: cell.cell_contents for name, cell in cells}
    given = found.get("implementation", found)
    wrapped = getattr(given, "experts_forward", None) if given is not found else found.get("experts_forward")
    return found if wrapped is None else {"original_forward": wrapped, **found}


def _sums_gradients(function: Any) -> bool:
    """Return whether it is what a plan leaves at a module whose gradients have to be summed, and does nothing else."""
    return getattr(function, "__qualname__", "").startswith("ReplicatedWithGradAllReduce.install_forward.<locals>.")


def _is_split(placement: Any) -> bool:
    return not placement.is_replicate()


def describe(model: nn.Module) -> list[str]:
    """Return a line for `explain`."""
    return [_described[model]] if model in _described else []
