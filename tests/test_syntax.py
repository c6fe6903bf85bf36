"""The order in which the parts of a node are read is that of the source, for every kind of node there is."""

from __future__ import annotations

import inspect

import libcst as cst

from rewrite.analysis.tree.module import parts

SOURCE = '''\
#!/usr/bin/env python
"""Of every kind of statement and expression at least one."""

import a.b as c, d
from . import e
from .f import *
from .g import (h as i, j,)

type Alias[T: int = str, *Ts, **P] = list[T]


@decorated
class K[T](Base, metaclass=M):
    x: int = 3; pass


async def f[T](a, /, b: int = 1, *, c=2, **kw) -> None:
    global g1, g2
    async with a as b, c: await d
    async for x in y:
        continue
    return


def g(*args, l=lambda x, *y: x):
    nonlocal_ = 1
    def inner():
        nonlocal nonlocal_
        yield
        yield 1
        yield from z
        raise E from e
    del a, b
    assert a, b
    return (yield)


if (a and b) or not c: x = y = 1
elif a < b <= c > d >= e == f != g is h is not i in j not in k:
    pass
else:
    a + b - c * d / e // f % g ** h @ i & j | k ^ l << m >> n
    +a; -a; ~a
while True:
    break
else:
    pass
for x, *y in z:
    pass
else:
    pass
with (a as b, c):
    pass
try:
    pass
except E as e:
    pass
else:
    pass
finally:
    pass
try:
    pass
except* (A, B) as e:
    pass
a += 1; a -= 1; a *= 1; a /= 1; a //= 1; a %= 1; a **= 1; a @= 1
a &= 1; a |= 1; a ^= 1; a <<= 1; a >>= 1
x: int
f(a, *b, k=c, **d)
a[1], a[1:2:3], a[..., :], a.b
(a, b), [a, *b], {a, b}, {a: b, **c}, {}, ()
[x async for x in y if z for u in v], {x for x in y}, {x: y for x in y}, (x for x in y)
1, 1.0, 1j, ..., "a" "b", f"{x!r:>{w}}{y=}"
a if b else c
(n := 1)
(
    a,  # a comment

    b
)
match a, *b:
    case 1 | None | "x" | -1 if b:
        pass
    case [x, *y]:
        pass
    case (x, *_):
        pass
    case {"k": v, **rest}:
        pass
    case C(x, y=z) as w:
        pass
    case _:
        pass
'''
NEWER = {
    "LazyImport": "lazy import a",
    "LazyImportFrom": "lazy from a import b",
    "StarredDictComp": "{**x for x in y}",
    "TemplatedString": 't"a{x!r:>{w}}"',
}
"""What only a newer libcst knows, by a class that it has then."""


def _everything(node: cst.CSTNode) -> list[cst.CSTNode]:
    return [node, *(below for child in node.children for below in _everything(child))]


SOURCES = [SOURCE, *(f"{text}\n" for name, text in NEWER.items() if hasattr(cst, name))]
NODES = [node for source in SOURCES for node in _everything(cst.parse_module(source))]


def _kinds() -> set[type[cst.CSTNode]]:
    def below(kind: type[cst.CSTNode]) -> set[type[cst.CSTNode]]:
        return {kind}.union(*(below(inner) for inner in kind.__subclasses__()))

    public = {kind for kind in vars(cst).values() if isinstance(kind, type) and issubclass(kind, cst.CSTNode)}
    return {kind for kind in public & below(cst.CSTNode) if not inspect.isabstract(kind)}


def test_the_parts_of_a_node_are_its_children_in_source_order() -> None:
    for node in NODES:
        found, expected = parts(node), node.children
        assert [id(part) for part in found] == [id(child) for child in expected], type(node).__name__


def test_every_kind_of_node_was_compared() -> None:
    missing = {kind.__name__ for kind in _kinds()} - {type(node).__name__ for node in NODES}
    assert not missing
