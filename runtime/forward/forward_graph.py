"""One forward in a graph: inputs are copied in, outputs are copied out.

    graph = ForwardGraph(run, ((), {"input_ids": input_ids}), weights, device, pool)
    graph.launch([other_ids])
    outputs = graph.results([other_ids])

Every tensor that comes out is the caller's own: the next replay writes to other memory. What the forward hands through
(an argument, a weight) comes out as the same object, as it does without a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core import output_layout
from ..device.graph_capture import capture
from .call_structure import form_of, is_rebuilt, with_tensors
from .functions import functions
from .host_copies import HostCopies
from .length_buckets import Fill

Run = Callable[[Any], Any]
"""Runs the model's forward on `(arguments, keywords)`."""


Part = tuple[tuple[int, int], ...]
"""Of a tensor: how many of the first places of which dimensions; all of the others."""


class Replays(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Run it."""


class Unsuitable(RuntimeError):
    """A forward cannot be replayed; `reason` is a key of `REASONS`."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(detail or reason)
        self.reason, self.detail = reason, detail


class Outputs:
    """What a forward returns, and how a copy of it is made.

    Args:
        value: as it was returned.
        inputs: the tensors that the forward was given.
        weights: tensors of the model, by address of their storage.
        device: of the model.

    Raises:
        Unsuitable: if it has something that cannot be copied.
        NotUnderstood: if it has something of an unknown class.
    """

    def __init__(self, value: Any, inputs: list[Tensor], weights: list[Tensor], device: torch.device):
        tensors: list[Tensor] = []
        self.form: Hashable = form_of(value, tensors)
        self._tensors = tensors
        if not is_rebuilt(value):
            raise Unsuitable("outputs", f"a {type(value).__name__} with attributes of its own")
        self._value = value
        self._given = {id(tensor): number for number, tensor in enumerate(inputs)}
        self._weights = {id(tensor) for tensor in weights}
        others = {_storage(tensor) for tensor in (*inputs, *weights)}
        self._groups: dict[int, list[Tensor]] = {}
        """The tensors that the forward made, by the storage that they share."""
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            if id(tensor) in self._given or id(tensor) in self._weights:
                continue
            if tensor.device != device:
                raise Unsuitable("outputs", f"a tensor on {tensor.device}")
            if tensor.requires_grad:
                raise Unsuitable("outputs", "a tensor that wants a gradient")
            if tensor.numel() and _storage(tensor) in others:
                raise Unsuitable("outputs", "a view of an argument or of a weight")
            self._groups.setdefault(_storage(tensor) if tensor.numel() else id(tensor), []).append(tensor)
        self.made = [tensor for group in self._groups.values() for tensor in group]

    def copied(self, inputs: Sequence[Tensor | None], parts: Sequence[Part] = ()) -> Any:
        """Return a copy in memory of its own, arguments in it those of `inputs`.

        Args:
            inputs: what the forward was given.
            parts: of each tensor in their order, where a text was padded.

        Raises:
            Unsuitable: if tensors that are cut share memory.
        """
        copies: dict[int, Tensor] = {}
        cuts = {id(tensor): cut for tensor, cut in zip(self._tensors, parts, strict=True)} if parts else {}
        for group in self._groups.values():
            if len(group) == 1:
                cut = cuts.get(id(group[0]))
                copies[id(group[0])] = _copied_part(group[0], cut) if cut else group[0].clone()
            elif any(cuts.get(id(tensor)) for tensor in group):
                raise Unsuitable("lengths_outputs", "outputs share memory")
            else:
                copies.update(_copied_together(group))

        def instead(tensor: Tensor) -> Tensor:
            number = self._given.get(id(tensor))
            if number is None:
                return copies.get(id(tensor), tensor)
            if (given := inputs[number]) is None:
                raise Unsuitable("lengths_outputs", "the mask, which is made")
            return given

        return with_tensors(self._value, instead)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _copied_part(tensor: Tensor, part: Part) -> Tensor:
    """Return a copy of a part, laid out in the same order without gaps."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    for dim, size in part:
        tensor = tensor.narrow(dim, 0, size)
    return torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _copied_together(group: list[Tensor]) -> dict[int, Tensor]:
    """Return copies of tensors that share memory, which share theirs in the same way."""
    if len({tensor.dtype for tensor in group}) > 1:
        raise Unsuitable("outputs", "views of the same memory in several dtypes")
    start = min(tensor.storage_offset() for tensor in group)
    end = max(tensor.storage_offset() + _extent(tensor) for tensor in group)
    memory = group[0].as_strided((end - start,), (1,), start).clone()
    return {id(t): memory.as_strided(t.shape, t.stride(), t.storage_offset() - start) for t in group}


def _extent(tensor: Tensor) -> int:
    """Return how many elements lie from the first to the last of a tensor, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class ForwardGraph:
    """A forward with fixed shapes.

    Args:
        run: the model's forward.
        call: `(arguments, keywords)` of the first call, which have a form.
        weights: tensors of the model.
        device: of the model.
        pool: of the graphs' memory; None to run the forward again at each replay, for tests where there is no GPU.
        free_layout: whether operators lay out their results as suits them (`core.output_layout`).
        chained: whether functions of torch are put off (`forward.functions`).
        rehearsed: whether that has been run for such tensors, so that nothing is left to be compiled or packed.
        copies: what the forward was seen to copy from the host, which the graph keeps; None for nothing.
    """

    def __init__(
        self, run: Run, call: Any, weights: list[Tensor], device: torch.device, pool: Any,
        *, free_layout: bool = False, chained: bool = False, rehearsed: bool = False,
        copies: HostCopies | None = None,
    ):  # fmt: skip
        self.nbytes = 0
        """Bytes of device memory that came with it."""
        self.inputs: list[Tensor] = []
        with torch.inference_mode(False), torch.no_grad():
            self._call = with_tensors(call, self._own)
        self._outputs: Outputs | None = None
        self._graph: Replays | None = None
        self._weights, self._device = weights, device
        self.pool, self._copies = pool, copies

        def its_way(call: Any) -> Any:
            with output_layout.free(free_layout), functions(chained), copies or contextlib.nullcontext():
                return run(call)

        if pool is None:
            self._run = its_way
            self._again()
            return
        before = torch.cuda.memory_reserved(device)

        def captured() -> None:
            self._keep(its_way(self._call))

        def rehearse() -> None:
            if not rehearsed:
                its_way(self._call)

        self._graph = capture(captured, rehearse, device, pool)
        self.nbytes = max(0, torch.cuda.memory_reserved(device) - before)

    def _own(self, tensor: Tensor) -> Tensor:
        own = torch.empty_like(tensor, requires_grad=False)
        own.copy_(tensor)
        self.inputs.append(own)
        return own

    def _keep(self, value: Any) -> None:
        self._outputs = Outputs(value, self.inputs, self._weights, self._device)

    def _again(self) -> None:
        """Do what a replay does: write to the memory of the first outputs."""
        before = self._outputs
        self._keep(self._run(self._call))
        if before is not None:
            for kept, new in zip(before.made, self.made, strict=True):
                kept.copy_(new)
            self._outputs = before

    @property
    def form(self) -> Hashable:
        """The form of what it returns."""
        assert self._outputs is not None
        return self._outputs.form

    @property
    def made(self) -> list[Tensor]:
        """The tensors that the last replay wrote; the next one overwrites them."""
        assert self._outputs is not None
        return self._outputs.made

    def launch(self, tensors: Sequence[Tensor | None], fills: Sequence[Fill] = (), length: int = 0) -> None:
        """Run the forward on tensors of the form that it was captured with, or on those of a text, which are padded.

        Args:
            tensors: of the call, None for a mask that is made.
            fills: what each is padded with.
            length: of the text.
        """
        if fills:
            for own, given, fill in zip(self.inputs, tensors, fills, strict=True):
                fill.write(own, given, length)
        else:
            for own, given in zip(self.inputs, tensors, strict=True):
                assert given is not None
                own.copy_(given)
        if self._graph is None:
            self._again()
        else:
            self._graph.replay()

    def results(self, tensors: Sequence[Tensor | None], parts: Sequence[Part] = ()) -> Any:
        """Return what the last launch computed, which the caller may keep; of a text without its padding.

        Args:
            tensors: of the call.
            parts: of each output that belong to the text.
        """
        assert self._outputs is not None
        return self._outputs.copied(tensors, parts)


class Given(Protocol):
    """A call, and how a graph serves it."""

    @property
    def call(self) -> Any:
        """Its `(arguments, keywords)`."""

    def launch(self, graph: ForwardGraph) -> None:
        """Run a graph on its tensors."""

    def results(self, graph: ForwardGraph) -> Any:
        """Return what that computed."""


class AsItIs(NamedTuple):
    """A call with the shapes that a graph was captured with."""

    call: Any
    tensors: list[Tensor]

    def launch(self, graph: ForwardGraph) -> None:
        """Run a graph on its tensors."""
        graph.launch(self.tensors)

    def results(self, graph: ForwardGraph) -> Any:
        """Return what that computed."""
        return graph.results(self.tensors)
