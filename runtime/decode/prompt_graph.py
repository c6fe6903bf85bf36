"""Reads a prompt in a graph: up to some 2,000 tokens the host takes longer to launch the kernels than they run.

B rows, n tokens of the prompt, N tokens of the graph, V vocabulary.

A graph holds the model's ordinary forward of N tokens into the empty cache. A prompt of n <= N tokens without padding
is filled up at its end, which causal attention lets no earlier token see; its logits are those of token n - 1, and the
slots behind are written anew by the tokens to come. The first prompt of a length is read both ways, and only a graph
that computes the same is kept. It serves that prompt too: the same call gives the same tokens the first and the
second time.

Where attention reads a preallocated cache by itself, the operators of a step read the prompt (`core.prefill_context`),
if the model asks nothing but whether it needs a mask and is told no. A form that fails, or that computes something
else than the model's forward, is left for the next one.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cache.cache_argument import argument_of
from ..cache.preallocated import PreallocatedCache
from ..core import backend
from ..core.position_count import position_count
from ..core.prefill_context import NoPromptForm, Reading
from ..core.rounding_noise import Trace, Yardstick
from ..device.graph_capture import NOT_FOR_A_STEP, capture
from ..guards.code_names import attends, code_of, names_in
from ..launching.launch import rehearsing
from ..norms.add_norm import add_norm
from .policy import policy_of
from .side_effects import Before
from .validation import trace

ROUNDING = 128
"""Lengths of graphs are multiples of this."""
MOST_TOKENS = 2048
"""Tokens of all rows together; with more of them the device is the slower one."""
SLOTS = 15
"""Of so many tokens, spread over a prompt, what is left in the cache is compared."""


class Form(enum.Enum):
    """Which functions read a prompt, the fastest first."""

    LAST = "a step's functions, the last layer for the last token alone"
    STEP = "a step's functions"
    FORWARD = "the model's own forward"


FORMS = (Form.LAST, Form.STEP, Form.FORWARD)
"""Those that are tried, in this order, until one gives what the model's own forward gives. `(Form.FORWARD,)` leaves
the others out."""


class PromptGraph:
    """The forward of `length` tokens a row.

    Args:
        model: a causal language model.
        cache: that it is read into.
        inputs: names that its forward takes.
        length: N.
        form: which functions read it.
    """

    def __init__(self, model: Any, cache: PreallocatedCache, inputs: set[str], length: int, form: Form):
        self._model = weakref.ref(model)
        self.cache = cache
        device = cache.position.device
        with torch.inference_mode(False):
            self._input_ids = torch.zeros(cache.batch_size, length, dtype=torch.int64, device=device)
            positions = torch.arange(length, device=device)
            self._last = torch.full((1,), length - 1, dtype=torch.int64, device=device)
        self._tokens = length
        """n, as `_last` has it."""
        self._reading: Any = None
        """`core.prefill_context.Reading`, where the functions of a step read it."""
        if form is not Form.FORWARD:
            self._reading = Reading(cache, length, self._last, form is Form.LAST, add_norm)
        # Where a single row is left in the end, two cannot be kept: `_by_steps` looks whether it is.
        given = {
            "position_ids": positions[None],
            "cache_position": positions,
            "logits_to_keep": 2 if form is Form.LAST else self._last,
        }
        self._inputs = {name: value for name, value in given.items() if name in inputs}
        self._logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self, pool: Any) -> None:
        """Read in a graph from here on, with memory of a pool."""
        self._graph = capture(self.run, self.rehearse, self._last.device, pool)

    def rehearse(self) -> None:
        """Run as a capture will: behind the first run it is known which norm reads which sum."""
        self.run()
        if self._reading is not None:
            self.run()

    def read(self, input_ids: Tensor) -> Tensor:
        """Read `[B, n]` into the empty cache and return the logits `[B, V]` that follow; the next read reuses them."""
        length = input_ids.shape[1]
        if length == self._input_ids.shape[1]:
            self._input_ids.copy_(input_ids)
        else:
            self._input_ids[:, :length] = input_ids
            self._input_ids[:, length:] = input_ids[:, -1:]
        if length != self._tokens:
            self._last.fill_(length - 1)
            self._tokens = length
        if self._graph is None:
            self.run()
        else:
            self._graph.replay()
        self.cache.grow(length)
        assert self._logits is not None
        return self._logits

    def run(self) -> None:
        """Read what is in the buffers, without a graph."""
        model = self._model()
        assert model is not None
        self.cache.rewind(0)
        self.cache.causal = is_causal(model, self._input_ids.shape[1])
        reading = self._reading
        try:
            given = {"input_ids": self._input_ids, argument_of(model): self.cache, **self._inputs}
            with contextlib.nullcontext() if reading is None else reading.running():
                logits = model(use_cache=True, return_dict=True, **given).logits
        finally:
            self.cache.causal = False
        self.cache.rewind(0)
        if reading is not None and (reading.needs_mask or logits.shape[1] != 1):
            raise NoPromptForm(
                type(model).__name__, "its layers read a mask, or more than the last token's row is left"
            )
        self._logits = logits[:, -1]


def is_causal(model: Any, length: int) -> bool:
    """Return whether attention over a prompt of `length` tokens is plainly causal, and torch's own, which knows that.

    transformers makes no mask then, except during a capture.
    """
    config = model.config.get_text_config(decoder=True)
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return config._attn_implementation == "sdpa" and all(window is None or length < window for window in windows)


class PromptGraphs:
    """The graphs of one cache, by their length; none where the model cannot be captured, or pads change its logits.

    Args:
        model: a causal language model.
        inputs: names that its forward takes.
        captures: whether forwards are captured; they run as plain calls otherwise.
    """

    def __init__(self, model: Any, inputs: set[str], captures: bool):
        self._model = weakref.ref(model)
        self._inputs = inputs
        self._captures = captures
        self._policy = policy_of(model)
        self._forms = [Form.FORWARD]
        """Those that are left: what did not do for one length is not tried for another."""
        if steps_read_prompts(model):
            self._forms = list(FORMS)
        self._positions = position_count(model.config.get_text_config(decoder=True))
        self.rehearses_every_form = False
        """Whether all forms are, and not the first that reads a prompt alone: for models that are not whole."""
        self._graphs: dict[int, PromptGraph] = {}
        self._addresses: tuple[int, ...] = ()
        """Of the weights that the graphs read."""
        self.refusal: str | None = None
        """Why prompts are read without graphs."""
        if "logits_to_keep" not in inputs:
            self.refusal = "the model returns the logits of all tokens"
        elif self._positions is None:
            self.refusal = "its configuration does not say how many positions it has"

    @property
    def lengths(self) -> list[int]:
        """The lengths that are captured."""
        return sorted(self._graphs)

    @property
    def form(self) -> Form:
        """The fastest form that is left."""
        return self._forms[0]

    def clear(self) -> None:
        """Give the graphs back."""
        self._graphs.clear()

    def clear_if_moved(self) -> None:
        """Give the graphs back if weights moved: latent attention packs in a first step what no prompt does."""
        if self._graphs and self._addresses != _addresses_of(self._model()):
            self.clear()

    def length_for(self, rows: int, tokens: int, capacity: int) -> int | None:
        """Return the length of the graph for a prompt; None if it is read without one."""
        length = -(-tokens // ROUNDING) * ROUNDING
        if self.refusal is not None or tokens < self._policy.fewest_tokens or rows * length > MOST_TOKENS:
            return None
        assert self._positions is not None
        return length if length <= min(capacity, self._positions) else None

    def read(
        self,
        cache: PreallocatedCache,
        input_ids: Tensor,
        length: int,
        pool: Callable[[], Any],
        ordinary: Callable[[], Tensor],
        warm_up: Callable[[Callable[[], None]], None],
    ) -> Tensor:
        """Read a prompt `[B, n]` without padding into the empty cache, in the graph of a length.

        Args:
            cache: empty.
            input_ids: the prompt.
            length: N.
            pool: returns that of the graphs' memory, a new one where none of its graphs is left.
            ordinary: reads it without a graph and returns the logits.
            warm_up: is given what a graph will hold before that runs for the first time.

        Returns:
            `[B, V]` logits of the next token; the next prompt may overwrite them.
        """
        graph = self._graphs.get(length)
        if graph is not None:
            return graph.read(input_ids)
        model, tokens = self._model(), input_ids.shape[1]
        assert model is not None
        if self._captures:
            warm_up(self.rehearsal(model, cache, length))
        slots = torch.arange(0, tokens, max(1, tokens // SLOTS), device=cache.position.device)
        with rehearsing():
            expected = trace(cache, slots, ordinary().float())

        def again() -> Trace:
            cache.rewind(0)
            with backend.plainly():
                return trace(cache, slots, ordinary().float())

        yardstick = Yardstick(expected, again)
        while self.refusal is None:
            cache.rewind(0)
            form = self._forms_for(length)[0]
            graph = None  # a pool ends with the last graph in it, before it is asked for
            graph = PromptGraph(model, cache, self._inputs, length, form)
            before: Any = None
            before = Before(model, [])
            try:
                if self._captures:
                    graph.capture(pool())
                verdict = yardstick.judge(trace(cache, slots, graph.read(input_ids).float()))
            except torch.OutOfMemoryError:
                raise
            except NOT_FOR_A_STEP as error:
                self._refuse(form, "fails", f"{type(error).__name__}: {error}")
            else:
                if before is not None and before.changes() is not None:
                    self._refuse(form, "changes", "a prompt leaves something on the model")
                elif verdict.holds:
                    self.clear_if_moved()
                    self._graphs[length], self._addresses = graph, _addresses_of(self._model())
                    cache.rewind(0)
                    return graph.read(input_ids)  # over what the yardstick left
                else:
                    self._refuse(form, "differs", f"tokens behind the prompt change {verdict}")
        cache.rewind(0)
        return ordinary()

    def rehearsal(self, model: Any, cache: PreallocatedCache, length: int) -> Callable[[], None]:
        """Return what launches the kernels of a prompt, in the first form that reads it."""
        graphs = [PromptGraph(model, cache, self._inputs, length, form) for form in self._forms_for(length)]

        def run() -> None:
            for graph in graphs:
                try:
                    graph.rehearse()
                except NOT_FOR_A_STEP:
                    if graph is graphs[-1]:
                        raise
                else:
                    if not self.rehearses_every_form:
                        return

        return run

    def _forms_for(self, length: int) -> list[Form]:
        """Return the forms that may read a prompt of a length: where a window is shorter, layers read a mask."""
        return self._forms if is_causal(self._model(), length) else [Form.FORWARD]

    def _refuse(self, form: Form, reason: str, detail: str) -> None:
        """Read no further prompt in a form; after the last one in no graph, and count why."""
        if form is not Form.FORWARD:
            self._forms.remove(form)
            return
        self.refusal = detail
        backend.count_fallback("prompt_graph", reason, self._model())


def steps_read_prompts(model: Any) -> bool:
    """Return whether attention reads a preallocated cache by itself, and no model asks `is_decode_step`: one that does
    so makes masks that a step has no need of, and a prompt may.
    """
    kinds = {type(module) for module in model.modules()}
    others = [kind for kind in kinds if not hasattr(kind, "decode")]
    codes = [code for kind in others if (code := code_of(kind.forward)) is not None]
    steps = len(others) < len(kinds) or any(map(attends, kinds))
    return steps and not any(names_in(code, "is_decode_step") for code in codes)


def _addresses_of(model: Any) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
