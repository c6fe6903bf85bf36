"""The texts of the runtime, and what `rewrite/offers.py` says of what they offer.

The tool carries the runtime's files as texts (`rewrite/runtime`): it reads, digests and vendors them where the runtime
itself, with torch, is not installed. What runs is imported from the distribution alone.
"""

from __future__ import annotations

import ast
import importlib.resources
import re
from functools import cache

from rewrite.errors import UsageError
from rewrite.offers import OFFERS, Offer

_CASES = re.compile(r'\n+^CASES = (""".*?^""")\n', re.DOTALL | re.MULTILINE)
"""Launches of a file's kernels at the shapes of real models, for `python -m rewrite.kernels`."""


def own_text(file: str) -> str:
    """Return the text of a file of the runtime, `norms/rms_norm`.

    Raises:
        FileNotFoundError: if this version has none of that name.
    """
    return importlib.resources.files("rewrite.runtime").joinpath(f"{file}.py").read_text(encoding="utf-8")


@cache
def files() -> tuple[str, ...]:
    """Return every file of the runtime, `norms/rms_norm`, sorted."""
    rooms = (room for room in importlib.resources.files("rewrite.runtime").iterdir() if room.is_dir())
    found = (f"{room.name}/{file.name[:-3]}" for room in rooms for file in room.iterdir() if file.name.endswith(".py"))
    return tuple(sorted(found))


def offers() -> tuple[Offer, ...]:
    """Return everything that generated files may import, file by file."""
    return OFFERS


def offered(room: str) -> dict[str, str]:
    """Return the files of what a room offers, by its names."""
    return {offer.name: offer.file.split("/")[1] for offer in OFFERS if offer.room == room}


def cases() -> dict[str, str]:
    """Return the code that makes the launches of each file's kernels, by its file."""
    found = ((file, _CASES.search(own_text(file))) for file in files())
    return {file: ast.literal_eval(literal[1]) for file, literal in found if literal is not None}


def without_cases(text: str) -> str:
    """Return the text of a file of the runtime without its launches for `python -m rewrite.kernels`."""
    return _CASES.sub("\n", text)


@cache
def computations() -> dict[str, str]:
    """Return what operators compute, by their names, of those that are no operation of their own."""
    return {offer.name: offer.computes for offer in OFFERS if offer.computes}


@cache
def _by_name() -> dict[str, Offer]:
    return {offer.name: offer for offer in OFFERS}


def offer(name: str) -> Offer:
    """Return what is offered under a name.

    Raises:
        KeyError: if nothing is.
    """
    return _by_name()[name]


def module_of(use: str) -> str:
    """Return the module that generated files import `rms_norm` from: `hf_rewrite_runtime.norms.rms_norm`.

    Raises:
        UsageError: if the runtime offers no such thing: a rule of the user's own asked for it.
    """
    found = _by_name().get(use)
    if found is None:
        raise UsageError(
            f"a transform uses '{use}', which the runtime does not offer: `Found.uses` names what it offers, as in "
            "'rms_norm'; a function of your own comes in by `Found.imports`"
        )
    return found.module
