"""What the files of `runtime/` say of themselves: what they offer to generated code, and their launches.

A file declares both in literals of its own, which are for this tool and stay out of packages:

    OFFERS: dict[str, dict[str, str]] = {
        "add_norm": {
            "shapes": "[N, H], [N, H] -> ([N, H], [N, H])",
            "computes": "def add_norm(hidden_states, residual, norm): …",
            "step": "attention.qkv_step",
            "fp8": "fp8.fp8_add_norm",
        },
    }
    CASES = \"""
    case("Llama 8B", rms_norm, tensor(1, 4096), tensor(4096), EPS)
    \"""

`OFFERS` are the names that a generated file may import; every field of one may be left out. A literal begins and ends
in the first column, so that it is read without an import of torch.
"""

from __future__ import annotations

import ast
import importlib.resources
import re
from dataclasses import dataclass
from functools import cache

_OFFERS = re.compile(r"\n+^OFFERS: dict\[str, dict\[str, str\]\] = (\{.*?^\})\n", re.DOTALL | re.MULTILINE)
_CASES = re.compile(r'\n+^CASES = (""".*?^""")\n', re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Offer:
    """A name that generated files may import."""

    name: str
    file: str
    """`norms/add_norm`."""
    shapes: str = ""
    """Of its tensors and of what it returns; of operators only."""
    computes: str = ""
    """A Python function, for which the analysis takes a call; empty where the operator is an operation of its own."""
    step: str = ""
    """The `room.function` that does its work in a decode step."""
    fp8: str = ""
    """The `room.function` that takes its place, and reads the weights of its projections in 8 bits."""
    fp8_rows: str = ""
    """The `room.function` that takes its place, and writes rows in 8 bits for those that do."""
    fp8_class: str = ""
    """The `room.Class` that takes its place as a base of a class whose projections do."""

    @property
    def room(self) -> str:
        """`norms`."""
        return self.file.split("/")[0]

    @property
    def use(self) -> str:
        """`norms.add_norm`, as in `Found.uses`."""
        return f"{self.room}.{self.name}"


def own_text(file: str) -> str:
    """Return the text of a file of the runtime, `norms/rms_norm`, its declarations included.

    Raises:
        FileNotFoundError: if this version has none of that name.
    """
    return importlib.resources.files("rewrite.runtime").joinpath(f"{file}.py").read_text(encoding="utf-8")


def without_declarations(text: str) -> str:
    """Return the text of a file of the runtime as it goes into a package."""
    return _CASES.sub("\n", _OFFERS.sub("\n", text))


@cache
def files() -> tuple[str, ...]:
    """Return every file of the runtime, `norms/rms_norm`, sorted."""
    rooms = (room for room in importlib.resources.files("rewrite.runtime").iterdir() if room.is_dir())
    found = (f"{room.name}/{file.name[:-3]}" for room in rooms for file in room.iterdir() if file.name.endswith(".py"))
    return tuple(sorted(found))


@cache
def offers() -> tuple[Offer, ...]:
    """Return everything that the files of the runtime offer, file by file."""
    found: list[Offer] = []
    for file in files():
        if (literal := _OFFERS.search(own_text(file))) is not None:
            declared: dict[str, dict[str, str]] = ast.literal_eval(literal[1])
            found += [Offer(name, file, **fields) for name, fields in declared.items()]
    return tuple(found)


def offered(room: str) -> dict[str, str]:
    """Return the files of what a room offers, by its names."""
    return {offer.name: offer.file.split("/")[1] for offer in offers() if offer.room == room}


def cases() -> dict[str, str]:
    """Return the code that makes the launches of each file's kernels, by its file."""
    found = ((file, _CASES.search(own_text(file))) for file in files())
    return {file: ast.literal_eval(literal[1]) for file, literal in found if literal is not None}


@cache
def computations() -> dict[str, str]:
    """Return what operators compute, by their names, of those that are no operation of their own."""
    return {offer.name: offer.computes for offer in offers() if offer.computes}


@cache
def offer(name: str) -> Offer:
    """Return what is offered under a name.

    Raises:
        KeyError: if nothing is.
    """
    return {found.name: found for found in offers()}[name]
