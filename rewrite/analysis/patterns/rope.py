"""The rotary embeddings that the runtime computes, recognised by what the pair (apply, rotate) returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TypeAlias

from rewrite.analysis.patterns.halves import in_chunks
from rewrite.analysis.terms.as_source import source_of
from rewrite.analysis.terms.computation import Bindings, Pattern, subterms, unify
from rewrite.analysis.terms.spelling import Term, make

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
    "interleaved_from_three": """
def rotate(x):
    first = x[..., 0::2]
    second = x[..., 1::2]
    return torch.stack((-second, first), dim=-1).flatten(3)
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
    for rotate in ("half", "interleaved", "interleaved_from_three")
    for turned, partial in (("plain", False), ("plain", True), ("keep", False), ("fp32", False), ("fp32_after", False))
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
_WRITTEN = """
def apply(x, cos, sin):
    first, second = {halves}
    out = torch.empty_like({of})
    {parts} = {turned}
    return out.to(x.dtype)
"""
_COMPLEX = """
def apply(x, cos):
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * cos
    return torch.view_as_real(turned).{flat}.to(x.dtype)
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
    keywords: Mapping[str, str]
    sliced: bool
    """Whether only the first half of each table is read."""
    back: bool
    """Whether it turns by the negative angle."""

    @property
    def tables(self) -> list[str]:
        """The source of the two tables."""
        suffix = "[..., : {0}.shape[-1] // 2]" if self.sliced else ""
        cos, sin = (f"{name}{suffix.format(name)}" for name in (self.cos, self.sin))
        return [cos, f"-{sin}" if self.back and sin != "None" else sin]

    @property
    def options(self) -> list[str]:
        """The source of the arguments after the tables."""
        place = [] if self.unsqueeze_dim == "1" else [f"unsqueeze_dim={self.unsqueeze_dim}"]
        return [*place, *(f"{name}={value}" for name, value in self.keywords.items())]


@dataclass(frozen=True)
class Choice:
    """Rotations that a test chooses between."""

    test: str
    """Its source."""
    yes: Turning
    no: Turning

    @property
    def rotations(self) -> list[Rotation]:
        """All that it may choose."""
        ways = ([way] if isinstance(way, Choice) else way for way in (self.yes, self.no))
        return [r for way in ways for one in way for r in (one.rotations if isinstance(one, Choice) else [one])]


Turning: TypeAlias = "list[Rotation] | Choice"
_MOST_TESTS = 3


def turning(term: Term, tests: int = _MOST_TESTS) -> Turning | None:
    """Return the rotations of the tensors that `term` consists of, or None if one of them is another computation."""
    if (test := _test_in(term)) is not None and tests:
        text = source_of(test)
        yes, no = (turning(_decided(term, test, way), tests - 1) for way in (True, False))
        return Choice(text, yes, no) if text is not None and yes is not None and no is not None else None
    term = in_chunks(term)
    parts = term.args if term.op == "tuple" else (term,)
    found = [_rotation(part) for part in parts]
    if len(found) > 2 or any(rotation is None for rotation in found):
        return None
    return [rotation for rotation in found if rotation is not None]


def _test_in(term: Term) -> Term | None:
    """Return the first test that a term depends on."""
    if term.op == "select":
        return term.args[0]
    return next((test for inner in term.args if (test := _test_in(inner)) is not None), None)


def _decided(term: Term, test: Term, holds: bool) -> Term:
    """Return a term where a test is known."""
    if term.op == "select" and term.args[0] == test:
        return _decided(term.args[1 if holds else 2], test, holds)
    return _rebuilt(term, [_decided(argument, test, holds) for argument in term.args])


def _rebuilt(term: Term, inner: Sequence[Term]) -> Term:
    if tuple(inner) == term.args:
        return term
    return Term(term.op, tuple(inner), term.value) if term.value else make(term.op, *inner)


def other_part(term: Term) -> str:
    """Return the first result that is no rotation that the runtime has, shortened, for a report."""
    parts = term.args if term.op == "tuple" else (term,)
    other = next((part for part in parts if turning(part) is None), term)
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
    if (found := _matched(term, {})) is not None:
        return found
    params = dict.fromkeys(inner for inner in subterms(term) if inner.op == "parameter")
    for tensor in params:
        tables: dict[Term, Term] = {}
        given = _with_tables(term, tensor, tables)
        named = {new.value: source_of(old) for old, new in tables.items()}
        texts = {name: text for name, text in named.items() if text is not None}
        if tables and len(texts) == len(tables) and (found := _matched(given, texts)) is not None:
            return found if found.tensor == tensor.value and not found.sliced else None
    return None


def _with_tables(term: Term, tensor: Term, tables: dict[Term, Term]) -> Term:
    """Return a rotation whose tables are parameters, whatever they are made of; the tensor says sizes of them only."""
    if term.op == "mul" and len(term.args) == 2:
        for one, other in (term.args, term.args[::-1]):
            if other.op not in ("parameter", "constant") and not _reads(other, tensor) and _reads(one, tensor):
                table = tables.setdefault(other, Term("parameter", (), f"table {len(tables)}"))
                return make("mul", _with_tables(one, tensor, tables), table)
    return _rebuilt(term, [_with_tables(argument, tensor, tables) for argument in term.args])


def _reads(term: Term, tensor: Term) -> bool:
    """Whether a term reads the numbers of a tensor, not only their shape."""
    return term == tensor or (term.op not in _SAID and any(_reads(inner, tensor) for inner in term.args))


_SAID = ("shape", "dtype", "dim", ".ndim", ".device")


def _matched(term: Term, texts: Mapping[str, str]) -> Rotation | None:
    for pattern, marks in _canonical():
        if (bound := next(unify(pattern, term, {}), None)) is not None:
            return _read(bound, marks, texts)
    return None


@cache
def _canonical() -> tuple[tuple[Term, Mapping[str, object]], ...]:
    return tuple((in_chunks(pattern.term), pattern.marks) for pattern in patterns())


def _read(bound: Bindings, marks: Mapping[str, object], texts: Mapping[str, str]) -> Rotation:
    cos, sin = (bound[name].value if name in bound else "None" for name in ("cos", "sin"))
    return Rotation(
        tensor=bound["x"].value,
        cos=texts.get(cos, cos),
        sin=texts.get(sin, sin),
        unsqueeze_dim=bound["DIM"].value if "DIM" in bound else "None",
        other=bound["other"].value if "other" in bound else "",
        keywords={name: str(given) for name, given in marks.items() if given and name not in ("sliced", "back")},
        sliced=bool(marks["sliced"]),
        back=bool(marks["back"]),
    )


@cache
def patterns() -> tuple[Pattern, ...]:
    """Return every computation that `rotary` offers, the most frequent ones first."""
    return (*_with_rotation(), *_by_halves(), *_otherwise())


def _with_rotation() -> Iterator[Pattern]:
    forms = [(_ROTATE, *form) for form in (*_MET, *_by_chunks(_MET))]
    forms += [(_ROTATE, *form) for form in (*_ELSEWHERE, *_by_chunks(_ELSEWHERE))]
    plain = [f for f in (*_MET, *_ELSEWHERE) if f[0] in _BACK and f[1] in _ROUNDINGS and f[2] in ("full", "bare")]
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
            "flatten_from": 3 if rotate == "interleaved_from_three" else None,
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
    ways = [(halves, beside) for halves in (_CHUNKS, _SLICES, _SLICES_OF_FOUR)]
    ways += [(_NEIGHBOURS, woven), (_SLICES_OF_FOUR, "torch.cat({0}, dim=3)")]
    form["stacked"] = False
    for table, (turned, back) in product((_WHOLE, _BARE, _SLICED), ((_FORWARD, False), (_BACKWARD, True))):
        for halves, joined in ways:
            for (of, result), rounded in _ROUNDED.items():
                whole = result.format(joined.format(turned))
                source = _BY_HALVES.format(table=table, halves=halves.format(of), result=whole)
                stacked = joined == woven
                marks = {"interleaved": stacked, "stacked": stacked, "back": back, "sliced": table == _SLICED}
                yield Pattern(source, form | marks | rounded)
    apart = _BY_HALVES.format(table=_SLICED, halves=_NEIGHBOURS.format("x"), result=beside.format(_FORWARD))
    yield Pattern(apart, form | {"deinterleave": True, "sliced": True})


def _otherwise() -> Iterator[Pattern]:
    """Yield forms whose tables are broadcast as they come: pairs flattened otherwise, written, complex numbers."""
    form = {"interleaved": True, "half_table": True, "sliced": False, "back": False}
    flat = {"flatten(-2)": None, "flatten(3)": 3, "reshape(x.shape)": "None"}
    for (turned, back), (way, start) in product(((_FORWARD, False), (_BACKWARD, True)), flat.items()):
        for (of, result), rounded in _ROUNDED.items() if start is not None else ():
            whole = result.format(f"torch.stack({turned}, dim=-1).{way}")
            source = _BY_HALVES.format(table=_BARE, halves=_NEIGHBOURS.format(of), result=whole)
            yield Pattern(source, form | rounded | {"stacked": True, "flatten_from": start, "back": back})
    for way, start in flat.items():
        yield Pattern(_COMPLEX.format(flat=way), form | {"in_fp32": True, "flatten_from": start})
    for (turned, back), of in product(((_FORWARD, False), (_BACKWARD, True)), ("x", "x.float()")):
        rounded = {"in_fp32": True} if of != "x" else {"keep_dtype": True}
        parts = {
            _NEIGHBOURS: "out[..., 0::2], out[..., 1::2]",
            _SLICES: _SLICES.format("out"),
            _CHUNKS: _SLICES.format("out"),
        }
        for halves, written in parts.items():
            written = written.replace("out.shape", "x.shape")
            source = _WRITTEN.format(halves=halves.format(of), of=of, parts=written, turned=turned)
            marks = {"interleaved": halves == _NEIGHBOURS, "as_given": halves != _NEIGHBOURS, "back": back}
            yield Pattern(source, form | rounded | marks)
