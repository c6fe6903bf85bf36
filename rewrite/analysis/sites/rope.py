"""The rotary embeddings that the runtime computes, recognised by what the pair (apply, rotate) returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from rewrite.analysis.terms.computation import Bindings, Pattern
from rewrite.analysis.terms.spelling import Term

_ROTATE = {
    "half": """
def rotate(x):
    first = x[..., : x.shape[-1] // 2]
    second = x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)
""",
    "chunks": """
def rotate(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
""",
    "interleaved": """
def rotate(x):
    first = x[..., 0::2]
    second = x[..., 1::2]
    return torch.stack((-second, first), dim=-1).flatten(-2)
""",
    "interleaved_of_four": """
def rotate(x):
    first = x[:, :, :, ::2]
    second = x[:, :, :, 1::2]
    return torch.stack((-second, first), dim=-1).flatten(-2)
""",
}
_TABLE = {
    "full": "table.unsqueeze(DIM)",
    "fp32": "table.unsqueeze(DIM).float()",
    "sliced": "first_half(table.unsqueeze(DIM)).repeat_interleave(2, dim=-1)",
    "half_of_four": "table.unsqueeze(DIM).repeat_interleave(2, dim=3)",
}
"""How a table becomes the factor; `half_of_four` counts the last of four dimensions from the front, as GPT-J does."""

_TURNED = {
    "plain": "part * cos + rotate(part) * sin",
    "keep": "(part * cos + rotate(part) * sin).to(x.dtype)",
    "fp32": "(part.float() * cos + rotate(part.float()) * sin).to(x.dtype)",
    "fp32_other": "(part.float() * cos + rotate(part.float()) * sin).to(other.dtype)",
    "fp32_after": "(part.float() * cos + rotate(part).float() * sin).to(x.dtype)",
    "fp32_after_other": "(part.float() * cos + rotate(part).float() * sin).to(other.dtype)",
}
"""Where the result is rounded; `other` is the other tensor, where both are rounded to the dtype of one."""

_MET = (
    ("half", "plain", "full", False),
    ("half", "plain", "full", True),
    ("half", "keep", "full", False),
    ("half", "fp32", "full", False),
    ("half", "fp32", "fp32", False),
    ("half", "fp32_other", "full", False),
    ("half", "fp32_other", "fp32", False),
    ("interleaved", "plain", "full", False),
    ("interleaved", "plain", "full", True),
    ("interleaved", "plain", "sliced", False),
    ("interleaved", "plain", "sliced", True),
    ("interleaved", "fp32", "full", False),
    ("interleaved", "fp32_other", "full", False),
    ("interleaved", "fp32_after", "full", False),
    ("interleaved", "fp32_after", "sliced", False),
    ("interleaved", "fp32_after_other", "full", False),
    ("interleaved", "fp32_after_other", "sliced", False),
    ("interleaved_of_four", "plain", "half_of_four", False),
)
"""Rotation, rounding, table and whether only the first columns are turned: the computations of transformers 5.

There halves are slices; files from elsewhere often have `chunk`, which parts an odd number of columns elsewhere.
"""

_WITH_ROTATION = """
{rotate}
def first_half(table):
    return table[..., : table.shape[-1] // 2]

def factor(table, DIM):
    return {table}

def apply(x, other, cos, sin, DIM):
    cos, sin = factor(cos, DIM), factor(sin, DIM)
    {part}
    turned = {turned}
    return {result}
"""
_BY_HALVES = """
def apply(x, cos, sin, DIM):
    cos, sin = {table}
    first, second = {halves}
    return {result}
"""


@dataclass(frozen=True)
class Rotation:
    """One tensor's rotary embedding: which parameters it reads and the keywords of `rotary` that mean it."""

    tensor: str
    cos: str
    sin: str
    unsqueeze_dim: str
    other: str
    """The tensor whose dtype the result has, if that is not its own."""
    keywords: Mapping[str, bool]
    sliced: bool
    """Whether only the first half of each table is read."""

    @property
    def tables(self) -> list[str]:
        """The source of the two tables."""
        suffix = "[..., : {0}.shape[-1] // 2]" if self.sliced else ""
        return [f"{name}{suffix.format(name)}" for name in (self.cos, self.sin)]

    @property
    def options(self) -> list[str]:
        """The source of the arguments after the tables."""
        place = [] if self.unsqueeze_dim == "1" else [f"unsqueeze_dim={self.unsqueeze_dim}"]
        return [*place, *(f"{name}=True" for name in self.keywords)]


def rotations(term: Term) -> list[Rotation] | None:
    """Return the rotations of the tensors that `term` consists of, or None if one of them is another computation."""
    parts = term.args if term.op == "tuple" else (term,)
    found = [_rotation(part) for part in parts]
    if len(found) > 2 or any(rotation is None for rotation in found):
        return None
    return [rotation for rotation in found if rotation is not None]


def other_part(term: Term) -> str:
    """Return the first result that is no rotation that the runtime has, shortened, for a report."""
    parts = term.args if term.op == "tuple" else (term,)
    other = next((part for part in parts if _rotation(part) is None), term)
    return str(other)[:_SHOWN]


_SHOWN = 120


def same_rotation(first: Rotation, second: Rotation) -> bool:
    """Whether both tensors are turned the same way, by the same tables."""
    if first.other or second.other not in ("", first.tensor):
        return False
    return first.tensor != second.tensor and all(
        getattr(first, name) == getattr(second, name) for name in ("cos", "sin", "unsqueeze_dim", "keywords", "sliced")
    )


def _rotation(term: Term) -> Rotation | None:
    for pattern in patterns():
        if (bound := pattern.match(term)) is not None:
            return _read(bound, pattern.marks)
    return None


def _read(bound: Bindings, marks: Mapping[str, object]) -> Rotation:
    return Rotation(
        tensor=bound["x"].value,
        cos=bound["cos"].value,
        sin=bound["sin"].value,
        unsqueeze_dim=bound["DIM"].value,
        other=bound["other"].value if "other" in bound else "",
        keywords={name: True for name, given in marks.items() if given and name != "sliced"},
        sliced=bool(marks["sliced"]),
    )


@cache
def patterns() -> tuple[Pattern, ...]:
    """Return every computation that `rotary` offers, the most frequent ones first."""
    return (*_with_rotation(), *_by_halves())


def _with_rotation() -> Iterator[Pattern]:
    by_chunks = (("chunks", turned, table, partial) for rotate, turned, table, partial in _MET if rotate == "half")
    for rotate, turned, table, partial in (*_MET, *by_chunks):
        interleaved, in_fp32 = rotate.startswith("interleaved"), turned.startswith("fp32")
        source = _WITH_ROTATION.format(
            rotate=_ROTATE[rotate],
            table=_TABLE[table],
            part="part, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]" if partial else "part = x",
            turned=_TURNED[turned],
            result="torch.cat((turned, rest), dim=-1)" if partial else "turned",
        )
        marks = {
            "interleaved": interleaved,
            "half_table": table in ("sliced", "half_of_four"),
            "in_fp32": in_fp32,
            "keep_dtype": turned.startswith("keep"),
            "partial": partial,
            "chunked": rotate == "chunks",
            "sliced": table == "sliced",
        }
        yield Pattern(source, marks)


def _by_halves() -> Iterator[Pattern]:
    whole = "cos.unsqueeze(DIM), sin.unsqueeze(DIM)"
    sliced = "cos[..., : cos.shape[-1] // 2].unsqueeze(DIM), sin[..., : sin.shape[-1] // 2].unsqueeze(DIM)"
    neighbours = "x[..., 0::2], x[..., 1::2]"
    turned = "(first * cos - second * sin, second * cos + first * sin)"
    beside, woven = f"torch.cat({turned}, dim=-1)", f"torch.stack({turned}, dim=-1).flatten(-2)"
    form = {"interleaved": True, "half_table": True, "deinterleave": False, "sliced": False}
    halves = _BY_HALVES.format(table=whole, halves="x.chunk(2, dim=-1)", result=beside)
    yield Pattern(halves, form | {"interleaved": False})
    yield Pattern(_BY_HALVES.format(table=whole, halves=neighbours, result=woven), form)
    apart = _BY_HALVES.format(table=sliced, halves=neighbours, result=beside)
    yield Pattern(apart, form | {"deinterleave": True, "sliced": True})
