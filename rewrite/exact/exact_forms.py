"""The launches that are compared: the catalogue's at sizes that an interpreter can run, in every form of the rules.

`CHOOSERS` are the runtime's functions that choose a tile or a split. What they choose for the models of the catalogue,
on every chip of the vendor, and over `SIZES`, is every form; each is then forced on the operators' launches at small
sizes. Import this after `launch.pretend`.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hf_rewrite_runtime.attention import decode_attention, latent_decode
from hf_rewrite_runtime.launching import launch, tiles
from rewrite import operators
from rewrite.kernels import catalogue, kernel_cases, model_sizes, step_launches
from rewrite.kernels.cards import CARDS
from rewrite.kernels.chips import CHIPS
from rewrite.kernels.kernel_cases import Entry
from rewrite.kernels.model_sizes import Mixture, Model

CHOOSERS = (
    "launching.tiles:tile",
    "launching.tiles:head_rule",
    "device.row_tiles:tile",
    "attention.decode_attention:choose",
    "attention.masked_attention:choose",
    "attention.latent_decode:divide",
    "fp8.fp8_gemv:rule",
    "linear.block_linear:rule",
    "linear.block_rows:rows_rule",
    "linear.conv1d_weight:_form",
    "moe.block_experts:rule",
    "moe.grouped:_tile_for",
)
SIZES = (576, 896, 1024, 1280, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 8192, 14336, 28672)
"""Rows and columns of weights for which `tiles.rule` is asked."""
KINDS = ("linear", "gated", "qkv", "skinny_linear", "skinny_linear_32")
SLOTS = 150
"""Of caches at small sizes: some tiles of slots, and more parts than have any."""

ROWS, CAPACITIES = (1, 2, 8, 32), (128, 512, 2048, 32768)
"""Of sequences, and slots of caches, for which attention is divided."""

MANY_SLOTS = 1100
"""Of long ones: more than 32 parts of one tile."""

Asked = tuple[str, str]
"""A chooser, and the kind that it was asked for where it has kinds."""


@dataclass
class _Choices:
    """Lets the choosers tell what they choose, or choose what they are told to."""

    asked: dict[Asked, list[Any]]
    forced: tuple[Asked, Any] | None = None
    taken: bool = False
    """Whether what is forced was for something that was asked."""

    def answer(self, name: str, chooser: Callable[..., Any], arguments: tuple[Any, ...], keywords: Any) -> Any:
        found = chooser(*arguments, **keywords)
        asked = name, arguments[0] if arguments and isinstance(arguments[0], str) else ""
        if self.forced is not None and self.forced[0] == asked and _fits(asked, found, self.forced[1]):
            self.taken = True
            return self.forced[1]
        if found not in self.asked.setdefault(asked, []):
            self.asked[asked].append(found)
        return found


def _fits(asked: Asked, natural: Any, form: Any) -> bool:
    """Return whether a form is for the same computation: heads that share keys, and those in a tile, are."""
    if natural is None or form is None:
        return False
    if asked[0] == "device.row_tiles:tile":  # no rule leaves a row to more blocks than it needs
        return bool(form[1] >= natural[1])
    return asked[0] not in _FIXED or natural[0] == form[0]


_FIXED = {"launching.tiles:head_rule", "attention.decode_attention:choose", "attention.masked_attention:choose"}


@contextlib.contextmanager
def _heard() -> Iterator[_Choices]:
    """Put something before every chooser, wherever a module of the runtime has it."""
    choices = _Choices({})
    undo: list[tuple[Any, str, Any]] = []
    for name in CHOOSERS:
        module, attribute = name.split(":")
        chooser = getattr(importlib.import_module(f"hf_rewrite_runtime.{module}"), attribute)

        def heard(*arguments: Any, _name: str = name, _chooser: Any = chooser, **keywords: Any) -> Any:
            return choices.answer(_name, _chooser, arguments, keywords)

        for one in [*sys.modules.values()]:
            if getattr(one, "__name__", "").startswith("hf_rewrite_runtime"):
                for key, value in [*vars(one).items()]:
                    if value is chooser:
                        undo.append((one, key, value))
                        setattr(one, key, heard)
    try:
        yield choices
    finally:
        for one, key, value in undo:
            setattr(one, key, value)


def forms(backend: str) -> dict[Asked, list[Any]]:
    """Return everything that the choosers choose on a vendor's chips."""
    pretended = launch._pretended
    with _heard() as choices:
        for chip in CHIPS.values():
            if chip.backend != backend:
                continue
            launch._pretended = launch.Target(backend, chip.arch, chip.processors, chip.shared_of_group)
            kernel_cases.entries(catalogue.cases())
            for step in model_sizes.STEPS.values():
                for rows in step.rows:
                    kernel_cases.entries(
                        [kernel_cases.Case("", part.call) for part in step_launches.parts(step, rows)]
                    )
            for kind, rows, cols in itertools.product(KINDS, SIZES, SIZES):
                tiles.tile(kind, rows, cols, 2, None)
            for rows, step, capacity in itertools.product(ROWS, model_sizes.STEPS.values(), CAPACITIES):
                model = step.model
                decode_attention.choose(rows, model.heads, model.kv_heads, capacity, model.head_dim)
                latent_decode.divide(rows, 16 * rows, capacity, 2)
            for card in CARDS.values():
                if card.arch == chip.arch:
                    _add_measured(choices, tiles.MEASURED.get(card.device, {}))
    launch._pretended = pretended
    return choices.asked


def _add_measured(choices: _Choices, table: Mapping[str, tiles.Entry]) -> None:
    """Add what was measured on a card, which goes before the rules there."""
    for name, entry in table.items():
        kind = name.split()[0]
        asked, form = ("launching.tiles:tile", kind), entry
        if kind == "attention" and entry is not None:
            heads, splits, slots, dot, warps = entry
            asked, form = (
                ("attention.decode_attention:choose", ""),
                decode_attention.Split(heads, splits, slots, bool(dot), warps),
            )
        if form not in choices.asked[asked]:
            choices.asked[asked].append(form)


def _small(size: Any) -> Any:
    """Return a model of the catalogue with so few heads, rows and experts that an interpreter can run it."""
    if isinstance(size, Model):
        kv_heads = 2 if size.kv_heads > 1 else 1
        group = size.heads // size.kv_heads
        return replace(
            size, hidden_size=min(size.hidden_size, 2176), intermediate_size=128, heads=group * kv_heads,
            kv_heads=kv_heads, vocabulary=300,
        )  # fmt: skip
    if isinstance(size, Mixture):
        return replace(
            size,
            experts=6 if size.experts < 256 else 32,
            top_k=min(size.top_k, 4),
            hidden_size=384,
            intermediate_size=128,
        )
    return size


def _fewer(count: int) -> int:
    return count if count < 100 else min(count // 16, 200)


def small_cases() -> list[kernel_cases.Case]:
    """Return the catalogue at small sizes."""
    names = {name: _small(size) for name, size in vars(model_sizes).items() if not name.startswith("__")}
    names["LLAMAS"] = tuple(_small(size) for size in model_sizes.LLAMAS)
    names |= {"CONTEXT": SLOTS, "LONG_CONTEXT": MANY_SLOTS, "PROMPT": 5, "many": _fewer}
    return [case for file, code in operators.cases().items() for case in catalogue.cases_of(file, code, names)]


def launches(backend: str) -> list[Entry]:
    """Return every launch of the small catalogue, in every form that its choosers were heard to choose."""
    known = forms(backend)
    found: dict[object, Entry] = {}
    asking: dict[tuple[str, Asked], list[kernel_cases.Case]] = {}
    with _heard() as choices:
        for case in small_cases():
            choices.asked, choices.forced = {}, None
            kernels = _collect(case, found)
            for asked in choices.asked:
                for kernel in kernels:
                    asking.setdefault((kernel, asked), []).append(case)
        for (kernel, asked), cases in asking.items():
            for turn, form in enumerate(known[asked]):
                # the first of the cases, taken in turn, that the form is for
                for number in range(len(cases)):
                    choices.forced, choices.taken = (asked, form), False
                    _collect(cases[(turn + number) % len(cases)], found, kernel)
                    if choices.taken:
                        break
    return list(found.values())


def _collect(case: kernel_cases.Case, found: dict[object, Entry], only: str = "") -> list[str]:
    """Add the launches of a case, or of one kernel. Returns the kernels that it launches."""
    kernels = []
    for entry in kernel_cases.entries([case]):
        one = entry.launch
        kernels.append(entry.kernel)
        shapes = [(x.shape, x.stride(), x.dtype) if hasattr(x, "stride") else x for x in one.arguments]
        if only in ("", entry.kernel):
            found.setdefault((entry.kernel, one.grid, str(shapes)), entry)
    return kernels
