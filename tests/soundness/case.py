"""What a case is: the text of a module, how to call it, and what must come of it; read from the texts in fixtures."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

FIXTURES = Path(__file__).parent.parent.parent / "fixtures" / "soundness"
_FIELDS = ("transforms", "inputs", "run", "must_rewrite", "must_not_rewrite", "layout", "raises", "fails_as")


@dataclass(frozen=True)
class Case:
    """One module that a user could own. Whatever is rewritten in it, it computes what it did."""

    name: str
    """Family, scaffold and name: `in_place_modules/projections.relu_between`."""
    text: str
    """A module with a class `Subject` that is built without arguments."""
    transforms: tuple[str, ...]
    """The transforms that it is aimed at; all of them run."""
    inputs: str
    """Expression of the arguments, over `b` (batch), `randn`, `integers` and `torch`."""
    run: str = "model(*inputs)"
    """Expression of what is done with them, over `model`, `inputs`, `module`, `torch`, `decode` and `talk`."""
    must_rewrite: str = ""
    """For harmless twins: the transforms that have to find a site, so that refusing everything is a failure."""
    must_not_rewrite: str = ""
    """The transforms that may find no site."""
    layout: bool = False
    """Whether the strides of the results are compared, because a caller relies on them."""
    raises: str = ""
    """The type that the original raises in its first call; other cases have to run."""
    fails_as: str = ""
    """The type that the rewritten module raises in its place: what fails does so, if not at the same operation."""

    def arguments(self, batch: int) -> tuple[Any, ...]:
        """Return the inputs of one call; the same batch gives both sides the same ones."""
        generator = torch.Generator().manual_seed(batch)
        names = {
            "b": batch,
            "torch": torch,
            "randn": lambda *sizes: torch.randn(*sizes, generator=generator),
            "integers": lambda high, *sizes: torch.randint(high, sizes, generator=generator),
        }
        given: tuple[Any, ...] = eval(f"({self.inputs})", names)
        return given


def _section(text: str) -> dict[str, str]:
    """Return what a case or scaffold gives, by name; `body` is the text that stands under no name."""
    head, *named = re.split(r"^-- (\w+)$\n", text, flags=re.MULTILINE)
    given = {name: part.strip("\n") for name, part in zip(named[::2], named[1::2], strict=True)}
    fields, _, body = head.strip("\n").partition("\n\n") if re.match(r"\w+: ", head) else ("", "", head)
    for line in fields.splitlines():
        name, _, value = line.partition(": ")
        given[name] = value.replace("\\n", "\n")
    return given | ({"body": body.strip("\n")} if body.strip() else {})


@cache
def scaffold(name: str) -> tuple[str, dict[str, str]]:
    """Return the text around what a case gives, and what holes and fields are where the case says nothing.

    A scaffold that is `like` another one has its text.
    """
    given = _section((FIXTURES / "scaffolds" / f"{name}.txt").read_text())
    if "like" in given:
        text, usual = scaffold(given.pop("like"))
        return text, usual | given
    text = given.pop("body")
    if "default_body" in given:
        given["body"] = given.pop("default_body")
    return text, given


def read_case(family: str, title: str, text: str) -> Case:
    """Return the case that `text` describes."""
    return case_of(f"{family}/{title}", title.split(".")[0], _section(text))


def case_of(name: str, around: str, own: Mapping[str, str]) -> Case:
    """Return the case that fills the scaffold `around` with what `own` gives.

    Raises:
        ValueError: if it fills a hole that its scaffold does not have.
    """
    text, given = scaffold(around)
    holes = {*re.findall(r"<(\w+)>", text + "".join(given.values()))}
    if unknown := {*own} - holes - {*_FIELDS}:
        raise ValueError(f"{name}: no hole {', '.join(sorted(unknown))}")
    given = {**dict.fromkeys(holes, ""), **given, **own}
    fields = {
        name: given[name]
        for name in ("inputs", "run", "must_rewrite", "must_not_rewrite", "raises", "fails_as")
        if name in given
    }
    return Case(
        name=name,
        text=fill(text, {name: given[name] for name in holes}),
        transforms=tuple(given["transforms"].split(", ")),
        layout=given.get("layout") == "yes",
        **fields,
    )


def fill(text: str, holes: dict[str, str]) -> str:
    """Replace each line `<<name>>` by the hole's text at that line's indentation, then `<name>` within lines.

    What fills a line may have such lines itself.
    """
    lines: list[str] = []
    for line in text.splitlines():
        alone = re.fullmatch(r"( *)<<(\w+)>>", line)
        within = fill(holes[alone[2]], holes) if alone is not None and holes[alone[2]] else ""
        lines += textwrap.indent(within, alone[1]).splitlines() if alone is not None else [line]
    return re.sub(r"<(\w+)>", lambda hole: holes.get(hole[1], hole[0]), "\n".join(lines)) + "\n"


def cases() -> Iterator[Case]:
    """Yield every case, family by family."""
    for path in sorted((FIXTURES / "cases").glob("*.txt")):
        _, *parts = re.split(r"^== (\S+)$\n", path.read_text(), flags=re.MULTILINE)
        for title, text in zip(parts[::2], parts[1::2], strict=True):
            yield read_case(path.stem, title, text)
