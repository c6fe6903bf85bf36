"""The rotary embeddings that the runtime computes, recognised by what the pair (apply, rotate) returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

from rewrite.analysis.patterns.halves import in_chunks
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
_BACK = {
    "half": """
def rotate(x):
    first = x[..., : x.shape[-1] // 2]
    second = x[..., x.shape[-1] // 2 :]
    return torch.cat((second, -first), dim=-1)
""",
    "chunks": """
def rotate(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, -first), dim=-1)
""",
    "interleaved": """
def rotate(x):
    first = x[..., 0::2]
    second = x[..., 1::2]
    return torch.stack((second, -first), dim=-1).flatten(-2)
""",
}
"""The quarter turns the other way: the rotation by the negative angle, of which the sine alone is another."""

_TABLE = {
    "full": "table.unsqueeze(DIM)",
    "bare": "table",
    "fp32": "table.unsqueeze(DIM).float()",
    "sliced": "first_half(table.unsqueeze(DIM)).repeat_interleave(2, dim=-1)",
    "sliced_first": "first_half(table).repeat_interleave(2, dim=-1).unsqueeze(DIM)",
    "half_of_four": "table.unsqueeze(DIM).repeat_interleave(2, dim=3)",
}
"""How a table becomes the factor; `bare` ones are broadcast as they come, `half_of_four` counts the last of four
dimensions from the front, as GPT-J does."""

_TURNED = {
    "plain": "part * cos + rotate(part) * sin",
    "keep": "(part * cos + rotate(part) * sin).to(x.dtype)",
    "fp32": "(part.float() * cos + rotate(part.float()) * sin).to(x.dtype)",
    "plain_less": "part * cos - rotate(part) * sin",
    "keep_less": "(part * cos - rotate(part) * sin).to(x.dtype)",
    "fp32_less": "(part.float() * cos - rotate(part.float()) * sin).to(x.dtype)",
    "fp32_other": "(part.float() * cos + rotate(part.float()) * sin).to(other.dtype)",
    "fp32_after": "(part.float() * cos + rotate(part).float() * sin).to(x.dtype)",
    "fp32_after_other": "(part.float() * cos + rotate(part).float() * sin).to(other.dtype)",
}
"""Where the result is rounded; `less` turns by the negative angle; `other` is the other tensor, where both are rounded
to the dtype of one."""

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

_ELSEWHERE = tuple(
    (rotate, turned, "bare", partial)
    for rotate in ("half", "interleaved")
    for turned, partial in (("plain", False), ("plain", True), ("keep", False), ("fp32", False))
) + tuple(("interleaved", turned, "sliced_first", False) for turned in ("plain", "keep", "fp32"))
"""Computations of other files: their tables have a dimension for the heads already, or none for the batch, or are cut
before they get one."""

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
    {table}
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
    """`None` where the tables are broadcast as they come."""
    other: str
    """The tensor whose dtype the result has, if that is not its own."""
    keywords: Mapping[str, bool]
    sliced: bool
    """Whether only the first half of each table is read."""
    back: bool
    """Whether it turns by the negative angle."""

    @property
    def tables(self) -> list[str]:
        """The source of the two tables."""
        suffix = "[..., : {0}.shape[-1] // 2]" if self.sliced else ""
        cos, sin = (f"{name}{suffix.format(name)}" for name in (self.cos, self.sin))
        return [cos, f"-{sin}" if self.back else sin]

    @property
    def options(self) -> list[str]:
        """The source of the arguments after the tables."""
        place = [] if self.unsqueeze_dim == "1" else [f"unsqueeze_dim={self.unsqueeze_dim}"]
        return [*place, *(f"{name}=True" for name in self.keywords)]


def rotations(term: Term) -> list[Rotation] | None:
    """Return the rotations of the tensors that `term` consists of, or None if one of them is another computation."""
    term = in_chunks(term)
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
        getattr(first, name) == getattr(second, name)
        for name in ("cos", "sin", "unsqueeze_dim", "keywords", "sliced", "back")
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
        unsqueeze_dim=bound["DIM"].value if "DIM" in bound else "None",
        other=bound["other"].value if "other" in bound else "",
        keywords={name: True for name, given in marks.items() if given and name not in ("sliced", "back")},
        sliced=bool(marks["sliced"]),
        back=bool(marks["back"]),
    )


@cache
def patterns() -> tuple[Pattern, ...]:
    """Return every computation that `rotary` offers, the most frequent ones first."""
    return (*_with_rotation(), *_by_halves())


def _with_rotation() -> Iterator[Pattern]:
    forms = [(_ROTATE, *form) for form in (*_MET, *_by_chunks(_MET))]
    forms += [(_ROTATE, *form) for form in (*_ELSEWHERE, *_by_chunks(_ELSEWHERE))]
    plain = [form for form in (*_MET, *_ELSEWHERE) if form[2] in ("full", "bare") and form[1] in _ROUNDINGS]
    plain += _by_chunks(plain)
    forms += [(_BACK, *form) for form in plain]
    forms += [(_ROTATE, rotate, f"{turned}_less", table, partial) for rotate, turned, table, partial in plain]
    for quarter, rotate, turned, table, partial in forms:
        interleaved, in_fp32 = rotate.startswith("interleaved"), turned.startswith("fp32")
        source = _WITH_ROTATION.format(
            rotate=quarter[rotate],
            table=_TABLE[table],
            part="part, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]" if partial else "part = x",
            turned=_TURNED[turned],
            result="torch.cat((turned, rest), dim=-1)" if partial else "turned",
        )
        marks = {
            "interleaved": interleaved,
            "half_table": table in ("sliced", "sliced_first", "half_of_four"),
            "in_fp32": in_fp32,
            "keep_dtype": turned.startswith("keep"),
            "partial": partial,
            "chunked": rotate == "chunks",
            "sliced": table.startswith("sliced"),
            "back": quarter is _BACK or turned.endswith("less"),
        }
        yield Pattern(source, marks)


_Form = tuple[str, str, str, bool]
_ROUNDINGS = ("plain", "keep", "fp32")


def _by_chunks(forms: Iterable[_Form]) -> list[_Form]:
    """Return the forms of halves with `chunk` in the place of slices."""
    return [("chunks", turned, table, partial) for rotate, turned, table, partial in forms if rotate == "half"]


_WHOLE = "cos, sin = cos.unsqueeze(DIM), sin.unsqueeze(DIM)"
_SLICED = "cos, sin = cos[..., : cos.shape[-1] // 2].unsqueeze(DIM), sin[..., : sin.shape[-1] // 2].unsqueeze(DIM)"
_BARE = "cos, sin = cos, sin"
_CHUNKS = "{0}.chunk(2, dim=-1)"
_SLICES = "{0}[..., : {0}.shape[-1] // 2], {0}[..., {0}.shape[-1] // 2 :]"
_NEIGHBOURS = "{0}[..., 0::2], {0}[..., 1::2]"
_SLICES_OF_FOUR = "{0}[..., : {0}.shape[3] // 2], {0}[..., {0}.shape[3] // 2 :]"
_ROUNDED: dict[tuple[str, str], dict[str, bool]] = {
    ("x", "{0}"): {},
    ("x", "{0}.to(x.dtype)"): {"keep_dtype": True},
    ("x.float()", "{0}.to(x.dtype)"): {"in_fp32": True},
}
_FORWARD = "(first * cos - second * sin, second * cos + first * sin)"
_BACKWARD = "(first * cos + second * sin, second * cos - first * sin)"


def _by_halves() -> Iterator[Pattern]:
    form = {"interleaved": True, "half_table": True, "deinterleave": False, "sliced": False, "back": False}
    beside, woven = "torch.cat({0}, dim=-1)", "torch.stack({0}, dim=-1).flatten(-2)"
    ways = ((_CHUNKS, beside), (_SLICES, beside), (_NEIGHBOURS, woven), (_SLICES_OF_FOUR, "torch.cat({0}, dim=3)"))
    for table, (turned, back) in product((_WHOLE, _BARE, _SLICED), ((_FORWARD, False), (_BACKWARD, True))):
        for halves, joined in ways:
            for (of, result), rounded in _ROUNDED.items():
                whole = result.format(joined.format(turned))
                source = _BY_HALVES.format(table=table, halves=halves.format(of), result=whole)
                marks = {"interleaved": joined == woven, "back": back, "sliced": table == _SLICED}
                yield Pattern(source, form | marks | rounded)
    apart = _BY_HALVES.format(table=_SLICED, halves=_NEIGHBOURS.format("x"), result=beside.format(_FORWARD))
    yield Pattern(apart, form | {"deinterleave": True, "sliced": True})
