"""The files of `runtime/` taken apart: top-level definitions, and what each of them reads of the others.

A package gets the definitions that it uses (`closure.py`), one file a room (`bundle.py`).
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from rewrite.operators import files, offers, own_text, without_declarations

FUTURE = "__future__"
_GLOBAL = re.compile(r"\s+global (.*)")
_WORD = re.compile(r"\w+")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LOOPS_INSIDE = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


SWITCHES = (
    "ROCM", "RANKS", "FORMATS", "TRAINING", "LAYER_NORM", "RMS_NORM", "CONV1D", "INDEXER", "CARRIED", "GROWS",
    "CHANGES", "CHAINS", "READS", "RAGGED", "ATTENTION", "EAGER", "LOADS", "UPLOAD", "INPUTS", "SPECULATION",
    "FP8_CACHE", "STATES", "CONSTANTS", "DRAWS",
    "CODEBOOKS", "ENCODES",
)  # fmt: skip
"""The names of `core/target`: what stands under `if ROCM` or `if ROCM and …` is for packages that have it. An `elif`
may follow, which is the `if` where the first goes, or an `else`, whose statements take its place."""
KERNEL_SWITCHES = {"CENTRED": "LAYER_NORM", "SHIFT": "LAYER_NORM"}
"""The same for `if CENTRED` in a kernel, by its constants: without the name nobody launches a variant that has it."""
SWITCHES_FILE = "core/target"


class NotFollowed(ValueError):
    """The runtime is written in a way that cannot be followed: a mistake in `runtime/`, which a test finds."""


@dataclass(frozen=True, order=True)
class Own:
    """A top-level name of a file of the runtime."""

    file: str
    name: str


@dataclass(frozen=True, order=True)
class Outside:
    """Something imported from outside the runtime, by the statement that binds it."""

    statement: str
    name: str


@dataclass(frozen=True)
class Use:
    """A place in a file that reads or binds a top-level name."""

    line: int
    start: int
    """Column in bytes, as `ast` counts."""
    end: int
    written: str
    """`backend.register`, as it stands there."""
    target: Own | Outside
    inner: frozenset[str] = frozenset()
    """The names of the functions around it: what they bind would hide a name of the same spelling."""
    quoted: bool = False
    """Whether it is inside a formatted string, of which `ast` gives no positions before Python 3.12."""
    switch: str = ""
    """The name in `core/target` without which the statement is left out that it stands in."""


@dataclass(frozen=True)
class Part:
    """A top-level statement with the comments above it and the docstring below it."""

    file: str
    names: tuple[str, ...]
    """What it binds; nothing where it is a call that changes something."""
    first: int
    last: int
    guard: int
    """Line of the `if` that it stands under, 0 where there is none."""
    uses: tuple[Use, ...]
    switched: tuple[tuple[int, int, str], ...] = ()
    """Lines, first and last, that are left out without a name of `core/target`, and that name."""
    moved: tuple[tuple[int, int, str], ...] = ()
    """Lines below an `else` that take the place of such."""


@dataclass(frozen=True)
class File:
    """A file of the runtime, taken apart."""

    name: str
    lines: tuple[str, ...]
    parts: tuple[Part, ...]
    guards: dict[int, Part]
    """The condition of each `if` around definitions, by its line."""
    outside: dict[str, tuple[Outside, int]]
    """What is imported from outside, by the name that it has here, and the guard that it is imported under."""
    imported: frozenset[str]
    """The files of the runtime that it imports while it is imported itself."""
    globals: frozenset[str] = frozenset()
    """Its names that functions assign."""
    by_name: dict[str, list[Part]] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return (ast.get_docstring(_parsed(self.name)[1]) or "").split("\n")[0]


@cache
def modules() -> frozenset[str]:
    """Return the files of the runtime that are no `__init__`, `norms/rms_norm`."""
    return frozenset(name for name in files() if not name.endswith("__init__"))


@cache
def file(name: str) -> File:
    """Return a file of the runtime, without what it declares to the tool.

    Raises:
        NotFollowed: if it has a statement whose meaning depends on more than its names.
    """
    return _Reader(name).read()


def is_left_out(part: Part, without: frozenset[str]) -> bool:
    """Return whether a part stands under an `if` of a name of `core/target` that a package does not have."""
    return part.guard > 0 and any(name in without for *_, name in file(part.file).guards[part.guard].switched)


def uses(part: Part, without: frozenset[str]) -> list[Use]:
    """Return what a part and the `if` around it read in a package without some names of `core/target`."""
    around = file(part.file).guards[part.guard].uses if part.guard else ()
    return [use for use in (*part.uses, *around) if use.switch not in without]


def owner(target: Own) -> Own:
    """Return the definition behind a name that a file only imports.

    Raises:
        NotFollowed: if the file has no such name.
    """
    bound = _bindings(target.file)
    if isinstance(found := bound.get(target.name), Own) and found != target:
        return owner(found)
    if target.name not in bound:
        raise NotFollowed(f"runtime/{target.file}.py has no {target.name}")
    return target


@cache
def _parsed(name: str) -> tuple[str, ast.Module]:
    text = without_declarations(own_text(name))
    return text, ast.parse(text)


@cache
def _bindings(name: str) -> dict[str, object]:
    """Return what the top-level names of a file stand for: its own, others', a file (a string), something outside."""
    found: dict[str, object] = {}
    for statement, _ in _statements(_parsed(name)[1].body):
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            found |= dict(_imports(name, statement))
        else:
            found |= {bound: Own(name, bound) for bound in _bound_by(statement)}
    return found


def _statements(body: Iterable[ast.stmt], guard: int = 0) -> Iterator[tuple[ast.stmt, int]]:
    """Yield the statements of a file, and those under a top-level `if` without `else` with its line."""
    for statement in body:
        if isinstance(statement, ast.If) and not statement.orelse and not guard:
            yield from _statements(statement.body, statement.lineno)
        else:
            yield statement, guard


def _imports(name: str, statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, object]]:
    room = name.split("/")[0]
    for alias in statement.names:
        bound = alias.asname or alias.name.split(".")[0]
        if isinstance(statement, ast.Import):
            said = f" as {alias.asname}" if alias.asname else ""
            yield bound, Outside(f"import {alias.name}{said}", bound)
        elif not statement.level:
            said = f" as {alias.asname}" if alias.asname else ""
            yield bound, Outside(f"from {statement.module} import {alias.name}{said}", bound)
        else:
            inner = [room] if statement.level == 1 else []
            path = "/".join([*inner, *(statement.module.split(".") if statement.module else [])])
            whole = f"{path}/{alias.name}"
            yield bound, whole if whole in modules() else Own(path, alias.name)


def _file_of(target: object) -> str:
    """Return the file of the runtime that an import goes to, "" outside of it."""
    return target.file if isinstance(target, Own) else target if isinstance(target, str) else ""


def _bound_by(statement: ast.stmt) -> tuple[str, ...]:
    if isinstance(statement, _DEFINITIONS):
        return (statement.name,)
    return tuple(
        dict.fromkeys(n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    )


class _Reader:
    """Takes one file apart."""

    def __init__(self, name: str):
        self.name = name
        self.text, self.tree = _parsed(name)
        self.lines = self.text.split("\n")
        self.bindings = _bindings(name)
        self.switched: list[tuple[int, int, str]] = []
        self.moved: list[tuple[int, int, str]] = []

    def read(self) -> File:
        """Return the file."""
        outside: dict[str, tuple[Outside, int]] = {}
        guards: dict[int, Part] = {
            node.lineno: self._condition(node)
            for node in self.tree.body
            if isinstance(node, ast.If) and not node.orelse
        }
        found: list[Part] = []
        end = 0
        imported: set[str] = set()
        for statement, guard in _statements(self.tree.body):
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                if not guard or "TYPE_CHECKING" not in self.lines[guard - 1]:
                    imported |= {_file_of(target) for _, target in _imports(self.name, statement)}
                new = {n: t for n, t in _imports(self.name, statement) if isinstance(t, Outside)}
                outside |= {n: (target, guard) for n, target in new.items() if FUTURE not in target.statement}
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                if found and found[-1].last == end:
                    found[-1] = _longer(found[-1], statement)  # the docstring of an assignment
            else:
                found.append(self._part(statement, guard, end))
            end = statement.end_lineno or 0
        by_name: dict[str, list[Part]] = {}
        for part in found:
            for name in part.names:
                by_name.setdefault(name, []).append(part)
        assigned = {name for line in self.lines if (said := _GLOBAL.match(line)) for name in _WORD.findall(said[1])}
        return File(
            self.name,
            tuple(self.lines),
            tuple(found),
            guards,
            outside,
            frozenset(imported - {""}),
            frozenset(assigned),
            by_name,
        )

    def _condition(self, node: ast.If) -> Part:
        last = node.test.end_lineno or node.lineno
        switch = _switch(node, frozenset())
        switched = ((node.lineno, last, switch),) if switch else ()
        return Part(self.name, (), node.lineno, last, 0, self._uses(node.test)[0], switched)

    def _part(self, statement: ast.stmt, guard: int, end: int) -> Part:
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(node.lineno for node in decorators)])
        indent = " " * statement.col_offset
        while first - 1 > end and self.lines[first - 2].startswith(f"{indent}#"):
            first -= 1
        uses, switched = self._uses(statement)
        last = statement.end_lineno or first
        return Part(self.name, _bound_by(statement), first, last, guard, uses, switched, tuple(self.moved))

    def _uses(self, node: ast.AST) -> tuple[tuple[Use, ...], tuple[tuple[int, int, str], ...]]:
        found: list[Use] = []
        self.switched, self.moved = [], []
        self._add_uses(node, frozenset(), None, found)
        switched = tuple(self.switched)
        for first, last, name in switched:
            found = [replace(use, switch=name) if first <= use.line <= last else use for use in found]
        return tuple(found), switched

    def _add_uses(self, node: ast.AST, hidden: frozenset[str], quoted: ast.AST | None, found: list[Use]) -> None:
        """Add the top-level names that `node` reads or binds; `hidden` are the names of the functions around it."""
        kind = type(node)
        if kind is ast.Constant:
            return
        if isinstance(node, ast.If) and (switch := _switch(node, hidden)):
            last = node.end_lineno or node.lineno
            if node.orelse and not _is_elif(node):
                if self.lines[node.lineno - 1].lstrip().startswith("elif"):
                    raise NotFollowed(f"runtime/{self.name}.py, line {node.lineno}: else behind elif {switch}")
                self.moved.append((node.orelse[0].lineno, last, switch))
            self.switched.append((node.lineno, node.orelse[0].lineno - 1 if node.orelse else last, switch))
        if kind is ast.JoinedStr:
            quoted = quoted or node
        read = node.value if isinstance(node, ast.Attribute) else node
        if isinstance(read, ast.Name):
            target = None if read.id in hidden else self.bindings.get(read.id)
            if target is None:
                return
            written = read.id
            if isinstance(target, str):
                if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
                    line = f"runtime/{self.name}.py, line {read.lineno}"
                    raise NotFollowed(f"{line}: {read.id} is a file, whose names can be read and nothing else")
                target, written, read = owner(Own(target, node.attr)), f"{read.id}.{node.attr}", node
            elif isinstance(target, Own):
                target = owner(target)
            assert isinstance(target, (Own, Outside))
            found.append(_use(quoted or read, written, target, hidden, quoted is not None))
        elif isinstance(node, _FUNCTIONS):
            self._add_function(node, hidden, found)
        elif isinstance(node, ast.ClassDef):
            for inner in (*node.decorator_list, *node.bases, *node.keywords):
                self._add_uses(inner, hidden, quoted, found)
            own = hidden | _bound_in(node.body)
            for statement in node.body:
                inner = statement.body[0] if isinstance(statement, ast.If) else statement
                self._add_uses(statement, hidden if isinstance(inner, _FUNCTIONS) else own, quoted, found)
        else:
            if isinstance(node, _LOOPS_INSIDE):
                hidden |= {name for generator in node.generators for name in _stored(generator.target)}
            for inner in _children(node):
                self._add_uses(inner, hidden, quoted, found)

    def _add_function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, hidden: frozenset[str], found: list[Use]
    ) -> None:
        given = node.args
        arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        outer: list[ast.AST | None] = [*given.defaults, *given.kw_defaults]
        outer += [argument.annotation for argument in arguments if argument is not None]
        body: Sequence[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else node.body
        own = hidden | {argument.arg for argument in arguments if argument is not None}
        if not isinstance(node, ast.Lambda):
            outer += [*node.decorator_list, node.returns]
            own |= _bound_in(node.body)
        for inner in outer:
            if inner is not None:
                self._add_uses(inner, hidden, None, found)
        for inner in body:
            self._add_uses(inner, own, None, found)


def _children(node: ast.AST) -> list[ast.AST]:
    """Return what stands directly inside a node, less what says only how it is read: every second node of a tree."""
    found: list[ast.AST] = []
    for field_name in node._fields:
        if field_name == "ctx":
            continue
        value = getattr(node, field_name, None)
        if isinstance(value, list):
            found += [item for item in value if isinstance(item, ast.AST)]
        elif isinstance(value, ast.AST):
            found.append(value)
    return found


def _use(node: ast.AST, written: str, target: Own | Outside, hidden: frozenset[str], quoted: bool) -> Use:
    assert isinstance(node, ast.expr)
    end = (node.end_lineno or node.lineno) if quoted else node.lineno
    return Use(
        node.lineno, node.col_offset, end if quoted else node.end_col_offset or 0, written, target, hidden, quoted
    )


def _bound_in(body: Iterable[ast.AST]) -> set[str]:
    """Return the names that statements bind in their own scope, less those that they declare global."""
    found: set[str] = set()
    given_up: set[str] = set()
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Constant, ast.Attribute)):
            waiting += [node.value] if isinstance(node, ast.Attribute) else []
            continue
        if isinstance(node, _DEFINITIONS):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Global):
            given_up.update(node.names)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if not isinstance(node, (*_DEFINITIONS, ast.Lambda, *_LOOPS_INSIDE)):
            waiting += _children(node)
        elif isinstance(node, _LOOPS_INSIDE):
            waiting += [n for n in ast.walk(node) if isinstance(n, ast.NamedExpr)]
    return found - given_up


def _stored(target: ast.AST) -> Iterator[str]:
    yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def _switch(node: ast.If, hidden: frozenset[str]) -> str:
    """Return the name of `core/target` that an `if` asks for first, "" where it does not."""
    test = node.test
    first = test.values[0] if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else test
    if not isinstance(first, ast.Name):
        return ""
    if first.id in SWITCHES:
        return first.id
    return KERNEL_SWITCHES.get(first.id, "") if first.id in hidden else ""


def _is_elif(node: ast.If) -> bool:
    """Return whether `elif` follows: an `if` below `else` is indented."""
    other = node.orelse[0]
    return isinstance(other, ast.If) and other.col_offset == node.col_offset


def _longer(part: Part, statement: ast.stmt) -> Part:
    return replace(part, last=statement.end_lineno or part.last)


BUILTINS = frozenset(dir(builtins))
VARIANTS = ("aiter", "fp8")
"""Rooms whose files are called as those that they stand in for."""


@cache
def final_names() -> dict[Own, str]:
    """Return the name that each definition has in a package, where a room is one file.

    A name that another file reads as `rows.order`, or under an alias, becomes `rows_order`, and so does one that a
    file of the same room has too or that Python has; what modeling files import keeps its name.
    """
    kept = {Own(offer.file, offer.name) for offer in offers()}
    owned: list[Own] = []
    spaced: set[Own] = set()
    places: dict[tuple[str, str], set[str]] = {}
    for file_name in sorted(modules()):
        room, bound = file_name.split("/")[0], _bindings(file_name)
        through = set(_through_files(file_name))
        owned += (target for name, target in bound.items() if target == Own(file_name, name))
        spaced |= through | {own for name, own in bound.items() if isinstance(own, Own) and own.name != name}
        for name, target in [*bound.items(), *((own.name, own) for own in through)]:
            own_name = target.name if isinstance(target, Own) else name
            places.setdefault((room, own_name), set()).add(_file_of(target))
    shared = {Own(name, bound) for (_, bound), names in places.items() if len(names) > 1 for name in names}
    found = {}
    for own in owned:
        room, stem = own.file.split("/")
        reads_badly = own in spaced and not own.name.startswith(stem) and not own.name.endswith(stem)
        changes = own not in kept and (own in shared or own.name in BUILTINS or reads_badly)
        found[own] = prefixed(f"{room}_{stem}" if room in VARIANTS else stem, own.name) if changes else own.name
    return found


def _through_files(name: str) -> Iterator[Own]:
    """Yield what a file reads through the name of another, `backend.register`."""
    text = _parsed(name)[0]
    for bound, target in _bindings(name).items():
        if isinstance(target, str):
            read = {Own(target, found) for found in re.findall(rf"(?<![\w.]){bound}\.(\w+)", text)}
            yield from (own for own in read if own.name in _bindings(target))


def prefixed(stem: str, name: str) -> str:
    """Return a name with its file's in front: `_launch` of `rotary` is `_rotary_launch`, `ROWS` is `ROTARY_ROWS`."""
    under = "_" * (len(name) - len(bare := name.lstrip("_")))
    if bare.isupper():
        return f"{under}{stem.upper()}_{bare}"
    if bare[:1].isupper():
        return f"{under}{''.join(word.title() for word in stem.split('_'))}{bare}"
    return f"{under}{stem}_{bare}"
