"""The ways in which a package runs a model, and whether each says what the file's `forward` says.

B rows, n tokens of the prompt, V vocabulary.

What the file says is what transformers' own loop gives with the model's `forward` and with operators in plain torch
(backend `reference`). Every way answers two calls, the second with other tokens of the same shape: a graph is made in
the first one and serves both. On a CPU steps, prompts and forwards run as plain calls of what a graph would hold.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from transformers.generation import GenerationMixin

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.decode.graph_cache import store_of as graphs_of
from hf_rewrite_runtime.decode.policy import GraphPolicy
from hf_rewrite_runtime.forward import forward_settings
from hf_rewrite_runtime.forward.forward_cache import store_of as forwards_of

from .edited_package import Records, model_of
from .text_edits import EDITS

NEW_TOKENS = 8
LENGTH = 9
ROWS = 3
CALLS = 2
STEP_TOLERANCE = 1e-4
FORWARD_TOLERANCE = 2e-5
"""Of the largest logit: as `STEPS_IN_FP32` and `WHOLE_FORWARD_IN_FP32` of tests/tolerances.py have it."""
EFFECTIVE = 10
"""An edit acts that moves a logit by so many tolerances."""
LEFT = "the package leaves this way: "
NO_PROMPT_GRAPH = GraphPolicy(fewest_tokens=1 << 30)


@dataclass
class Said:
    """What one call gave."""

    logits: Tensor
    """`[B, steps, V]` of a text that is generated, `[B, n, V]` of a forward, zero where a row is padding."""
    tokens: Tensor | None = None
    """`[B, steps]`."""


@dataclass
class Answer:
    """What a way gave."""

    calls: list[Said] = field(default_factory=list)
    records: int = 0
    """That the file logged."""
    instead: str = ""
    """Why the way was not taken, and transformers' loop or the plain forward ran: as the package says it."""


Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Way:
    """One way in which a model runs.

    Args:
        name: in tables.
        rows: of a call; several are padded on the left.
        run: calls a model.
        tolerance: of the largest logit.
    """

    name: str
    rows: int
    run: Callable[[Any, list[Inputs]], Answer]
    tolerance: float = STEP_TOLERANCE


def inputs_of(rows: int, device: str) -> list[Inputs]:
    """Return what each call is given: a prompt `[B, n]`."""
    found = []
    for seed in range(CALLS):
        ids = torch.randint(3, 200, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(ids)
        for row in range(rows - 1):
            mask[row, : 4 - row] = 0
        ids[mask == 0] = 0
        found.append({"input_ids": ids.to(device), "attention_mask": mask.to(device)})
    return found


def _generate(model: Any, given: Inputs) -> Said:
    torch.manual_seed(0)
    outputs = model.generate(
        **given,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
        disable_compile=True,
    )
    return Said(torch.stack(outputs.logits, 1).float(), outputs.sequences[:, LENGTH:])


def _plain_loop(model: Any, inputs: list[Inputs]) -> Answer:
    """Take transformers' own loop, which the package's takes the place of."""
    kind = type(model)
    with mock.patch.object(kind, "_sample", GenerationMixin._sample), forward_settings.use_forward_graphs("never"):
        return Answer([_generate(model, given) for given in inputs])


def _own_loop(model: Any, inputs: list[Inputs]) -> Answer:
    model._step_without_graph = model.device.type == "cpu"
    model.starts_plainly = False
    found = Answer([_generate(model, given) for given in inputs])
    reasons = {reason for operator, reason in backend.fallbacks_of(model) if operator == "generate"}
    found.instead = ", ".join(sorted(reasons))
    return found


def _steps(model: Any, inputs: list[Inputs]) -> Answer:
    """Take the package's loop; prompts are read as transformers reads them."""
    with mock.patch.object(type(model), "graph_policy", NO_PROMPT_GRAPH):
        return _own_loop(model, inputs)


def _prompts(model: Any, inputs: list[Inputs]) -> Answer:
    """Take the package's loop; prompts are filled up and read as a graph reads them, in the fastest form."""
    found = _own_loop(model, inputs)
    if not found.instead and not any(graph.prompts.lengths for graph in graphs_of(model).graphs.values()):
        found.instead = "; ".join({str(graph.prompts.refusal) for graph in graphs_of(model).graphs.values()})
    return found


def _forward(model: Any, given: Inputs) -> Said:
    torch.manual_seed(0)
    with torch.no_grad():
        logits = model(**given, use_cache=False).logits
    return Said(logits.float() * given["attention_mask"][..., None])


def _plain_forwards(model: Any, inputs: list[Inputs]) -> Answer:
    with forward_settings.use_forward_graphs("never"):
        return Answer([_forward(model, given) for given in inputs])


def _captured_forwards(model: Any, inputs: list[Inputs]) -> Answer:
    model._forward_without_graph = model.device.type == "cpu"
    with forward_settings.use_forward_graphs("always"):
        found = Answer([_forward(model, given) for given in inputs])
    store = forwards_of(model)
    if not store.replays:
        refused = [*store.refused.values(), *([store.whole] if store.whole else [])]
        found.instead = ", ".join(sorted({one.reason for one in refused} | set(store.reasons)))
    return found


WAYS = {
    way.name: way
    for way in (
        Way("plain loop", 1, _plain_loop),
        Way("steps", 1, _steps),
        Way("prompts", 1, _prompts),
        Way("batch", ROWS, _own_loop),
        Way("forward", ROWS, _captured_forwards, FORWARD_TOLERANCE),
    )
}
"""By their names."""


def _answer(
    run: Callable[[Any, list[Inputs]], Answer], rows: int, family: str, edit: str | None, device: str
) -> Answer:
    model = model_of(family, edit, device)
    backend.reset_fallbacks()
    with quiet(), Records(model) as records:
        found = run(model, inputs_of(rows, device))
    found.records = records.count
    return found


@functools.cache
def reference(family: str, edit: str | None, way: str, device: str) -> Answer:
    """Return what the file of a package says of a way's inputs: its `forward`, run by torch alone."""
    run = _plain_forwards if way == "forward" else _plain_loop
    with backend.use_backend("reference"):
        return _answer(run, WAYS[way].rows, family, edit, device)


def answer(family: str, edit: str | None, way: str, device: str) -> Answer:
    """Return what a way gives."""
    return _answer(WAYS[way].run, WAYS[way].rows, family, edit, device)


def difference(wanted: Answer, found: Answer, tolerance: float) -> str:
    """Return what differs between two answers, the first of it; nothing if they are the same.

    Behind a token whose two best logits are nearer than rounding is, rows may go on with another text.
    """
    for number, (one, other) in enumerate(zip(wanted.calls, found.calls, strict=True)):
        limit = tolerance * float(one.logits.abs().max())
        for row in range(len(one.logits)):
            for place in range(one.logits.shape[1]):
                apart = float((one.logits[row, place] - other.logits[row, place]).abs().max())
                if not apart <= limit:  # NaN is not
                    share = apart / limit * tolerance
                    return f"call {number}, row {row}, token {place}: logits differ by {share:.1e} of the largest"
                if one.tokens is None or other.tokens is None or one.tokens[row, place] == other.tokens[row, place]:
                    continue
                best = one.logits[row, place].topk(2).values
                if float(best[0] - best[1]) > 2 * limit:
                    return f"call {number}, row {row}, token {place}: another token"
                break
    return ""


@dataclass
class Row:
    """One cell of the table: a family, an edit, a way, and what became of it."""

    family: str
    edit: str
    way: str
    device: str
    acts: bool | None = None
    """Whether the edit moves what the file says; None where it need not."""
    wrong: str = ""
    instead: str = ""
    """Why the way was not taken."""
    raised: bool = False
    seconds: float = 0.0

    @property
    def mark(self) -> str:
        """How it stands in the table."""
        kept = "~" if self.instead else "="
        return kept if not self.wrong else "!" if self.raised else "<" if self.wrong.startswith(LEFT) else "x"


def row_of(family: str, edit: str, way: str, device: str) -> Row:
    """Make an edit, run a way, and compare it with the file; an exception of the way is one result of many."""
    started, row = time.perf_counter(), Row(family, edit, way, device)
    given, tolerance = EDITS[edit], WAYS[way].tolerance
    said, before = reference(family, edit, way, device), reference(family, None, way, device)
    if given.logs:
        row.acts = said.records > 0
    elif given.acts == "always" or (given.acts == "with a mask" and WAYS[way].rows > 1):
        row.acts = bool(difference(before, said, EFFECTIVE * tolerance))
    if row.acts is False:
        row.wrong = "the edit moves nothing of what the file says"
    elif given.acts == "never":
        row.wrong = difference(before, said, tolerance) and "the file says something else"
    try:
        found = answer(family, edit, way, device)
    except Exception as error:  # judged by whoever reads the table
        row.wrong, row.raised = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", True
    else:
        row.instead = found.instead
        row.wrong = row.wrong or difference(said, found, tolerance)
        if given.logs and found.records < said.records:
            row.wrong = row.wrong or f"{found.records} records instead of {said.records}"
        if found.instead and not given.leaves:
            row.wrong = row.wrong or f"{LEFT}{found.instead}"
    row.seconds = round(time.perf_counter() - started, 2)
    return row


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out what transformers and torch warn of models like these."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before)
