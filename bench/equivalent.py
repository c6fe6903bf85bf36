"""Which mutants cannot be told from the program: by rule where it can be read off the code, else by review.

By rule, and then no part of a sample:

- *same on a CPU*: with what a CPU answers filled in (no tensor is on a GPU, no operator runs a kernel, and a tensor
  made without `device` lies where the others lie) the statement is the same. On a GPU these are tried.
- *default always given*: the default of a parameter that every call in the package gives, of a function that only the
  package calls.
- *read by nothing that runs*: data at the top of a file, where no line that reads it runs.

`equivalent.json` holds what was reviewed by hand: function, rule, change, the models that it is about where it is not
so in all, and `of`, a part of the changed line.
Such a mutant is tried all the same. An entry with `caught_by` names what is a bug and would be seen by that check.
"""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from mutation import Mutant, changed

REVIEWED = Path(__file__).with_name("equivalent.json")
MAKERS = ("zeros", "ones", "empty", "full", "arange", "tensor", "eye", "linspace", "rand", "randn", "scalar_tensor")
"""Functions of torch that make a tensor where `device` says, on a CPU by default."""


def _for_a_cpu(text: str) -> str:
    """A statement with what a CPU answers filled in."""
    return ast.dump(_OnCpu().visit(ast.parse(textwrap.dedent(text))))


class _OnCpu(ast.NodeTransformer):
    """Fills in what code that asks for the device is told on a CPU."""

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.expr) and not isinstance(node, ast.Constant):
            known = answer(node)
            if known is not None:
                return ast.copy_location(ast.Constant(known), node)
        return super().visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        test = self.visit(node.test)
        if isinstance(test, ast.Constant):
            return self.visit(node.body if test.value else node.orelse)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in MAKERS and ast.unparse(function.value) == "torch":
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "device"]
        return self.generic_visit(node)


def answer(node: ast.expr) -> bool | None:
    """What a condition about devices is on a CPU; `None` where that does not follow from the device."""
    if isinstance(node, ast.Attribute):
        return False if node.attr == "is_cuda" else None
    if isinstance(node, ast.Call):
        return False if ast.unparse(node.func).rpartition(".")[2].endswith("uses_triton") else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = answer(node.operand)
        return None if inner is None else not inner
    if isinstance(node, ast.BoolOp):
        decides = isinstance(node.op, ast.Or)  # one of this value is enough
        found = [answer(value) for value in node.values]
        if decides in found:
            return decides
        return None if None in found else not decides
    return _of_kind(node) if isinstance(node, ast.Compare) and len(node.ops) == 1 else None


def _of_kind(node: ast.Compare) -> bool | None:
    """Whether `x.device.type` is one of the kinds that it is compared with."""
    left, right, operator = node.left, node.comparators[0], node.ops[0]
    if not (isinstance(left, ast.Attribute) and left.attr == "type" and "device" in ast.unparse(left.value)):
        return None
    texts = [part.value for part in ast.walk(right) if isinstance(part, ast.Constant)]
    if not texts or not all(isinstance(text, str) for text in texts):
        return None
    if isinstance(operator, (ast.Eq, ast.In)):
        return "cpu" in texts
    return "cpu" not in texts if isinstance(operator, (ast.NotEq, ast.NotIn)) else None


@dataclass
class Package:
    """The files of a package as trees, and which of their lines no check runs."""

    folder: Path
    missed: dict[str, Any]
    trees: dict[str, ast.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for file in sorted(self.folder.rglob("*.py")):
            name = file.relative_to(self.folder).as_posix()
            if not name.startswith("."):
                self.trees[name] = ast.parse(file.read_text("utf-8"))

    def same_on_a_cpu(self, mutant: Mutant) -> bool:
        """Whether the statement that a mutant changes is the same where every tensor is on a CPU."""
        text = (self.folder / mutant.file).read_text("utf-8")
        lines = text.encode()[: mutant.start].count(b"\n") + 1
        around = [s for s in _statements(self.trees[mutant.file]) if s.lineno <= lines <= (s.end_lineno or 0)]
        first, last = min(((s.lineno, s.end_lineno) for s in around), key=lambda place: place[1] - place[0])
        old, new = (_lines(one, first, last) for one in (text, changed(text, mutant)))
        return any(word in old for word in ("device", "is_cuda", "uses_triton")) and _for_a_cpu(old) == _for_a_cpu(new)

    def read_by_nothing(self, mutant: Mutant) -> bool:
        """Whether a mutant is in plain data at the top of a file, and no line that reads it runs."""
        statement = next((s for s in self.trees[mutant.file].body if s.lineno == mutant.line), None)
        if mutant.where != "the file" or not isinstance(statement, (ast.Assign, ast.AnnAssign)):
            return False
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if len(targets) != 1 or not isinstance(targets[0], ast.Name) or statement.value is None:
            return False
        if any(isinstance(part, (ast.Call, ast.Name, ast.Attribute)) for part in ast.walk(statement.value)):
            return False
        readers = self._readers.get(targets[0].id, set())
        return bool(readers) and all(line in self.missed.get(file, [[], []])[0] for file, line in readers)

    @cached_property
    def _readers(self) -> dict[str, set[tuple[str, int]]]:
        """The lines where a name is read, as a variable, an attribute, a text or the other name of an import."""
        found: dict[str, set[tuple[str, int]]] = {}
        for file, tree in self.trees.items():
            for statement in _statements(tree):
                for part in _own(statement):
                    named = [part.id] if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load) else []
                    named += [part.attr] if isinstance(part, ast.Attribute) else []
                    named += [part.value] if isinstance(part, ast.Constant) and isinstance(part.value, str) else []
                    named += [part.name] if isinstance(part, ast.alias) and part.asname else []
                    for name in named:
                        found.setdefault(name, set()).add((file, statement.lineno))
        return found

    def default_always_given(self, mutant: Mutant) -> bool:
        """Whether a mutant is the default of a parameter that every call gives, where only the package calls."""
        if mutant.rule != "default":
            return False
        scope = mutant.where.split(".")
        found = self._parameter(mutant, scope)
        own = "/" in mutant.file or (scope[-1].startswith("_") and not scope[-1].startswith("__"))
        if found is None or not own:
            return False
        name, position = found
        called = scope[-2] if scope[-1] == "__init__" and len(scope) > 1 else scope[-1]
        nodes = [node for tree in self.trees.values() for node in _evaluated(tree, methods=len(scope) > 1)]
        calls = [node for node in nodes if isinstance(node, ast.Call) and _names(node.func, called)]
        others = sum(_names(node, called) for node in nodes) - len(calls)
        return bool(calls) and not others and all(_gives(call, name, position) for call in calls)

    def _parameter(self, mutant: Mutant, scope: list[str]) -> tuple[str, int | None] | None:
        """The name of the parameter that a mutant is about, and its place in a call; no place if it has none."""
        source = (self.folder / mutant.file).read_text("utf-8")
        starts = [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line.encode()))
        for node in ast.walk(self.trees[mutant.file]):
            if not isinstance(node, ast.FunctionDef) or node.name != scope[-1]:
                continue
            plain = [*node.args.posonlyargs, *node.args.args]
            defaults = list(zip(plain[len(plain) - len(node.args.defaults) :], node.args.defaults, strict=True))
            named = list(zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True))
            for argument, default in [*defaults, *named]:
                if default is not None and starts[default.lineno - 1] + default.col_offset == mutant.start:
                    skipped = 1 if plain and plain[0].arg in ("self", "cls") else 0
                    return argument.arg, plain.index(argument) - skipped if argument in plain else None
        return None


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.stmt))


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """What stands in a statement, without the statements inside it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]


def _lines(text: str, first: int, last: int) -> str:
    return "\n".join(text.splitlines()[first - 1 : last])


def _evaluated(tree: ast.Module, methods: bool) -> Iterator[ast.AST]:
    """The nodes of a file without annotations; without `methods`, of attributes those of modules alone."""
    imported = {one.asname or one.name for node in ast.walk(tree) for one in getattr(node, "names", ())
                if isinstance(node, (ast.Import, ast.ImportFrom))}  # fmt: skip
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        of = node.value if isinstance(node, ast.Attribute) else None
        if of is None or methods or (isinstance(of, ast.Name) and of.id in imported):
            yield node
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns"):
                found = value if isinstance(value, list) else [value]
                waiting += [child for child in found if isinstance(child, ast.AST)]


def _names(node: ast.AST, name: str) -> bool:
    """Whether a node is a use of a name, be it as text or under another name."""
    if isinstance(node, ast.alias):
        return node.name == name and node.asname is not None
    if isinstance(node, ast.Constant):
        return node.value == name
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)


def _gives(call: ast.Call, name: str, position: int | None) -> bool:
    """Whether a call gives a parameter a value; not if that cannot be read."""
    if any(isinstance(argument, ast.Starred) for argument in call.args) or any(k.arg is None for k in call.keywords):
        return False
    return any(k.arg == name for k in call.keywords) or (position is not None and len(call.args) > position)


@dataclass(frozen=True)
class Review:
    """What was found by hand about the mutants that an entry describes."""

    where: str
    rule: str
    change: str
    why: str
    of: str = ""
    caught_by: str = ""
    models: tuple[str, ...] = ()
    """Those that it is about; all where there are none."""

    @property
    def equivalent(self) -> bool:
        """Whether it is no bug."""
        return not self.caught_by


def review(model: str, mutant: Mutant, text: str) -> Review | None:
    """Return what is known by hand of a mutant of a model's file."""
    line = text.splitlines()[text.encode()[: mutant.start].count(b"\n")]
    for one in _reviews():
        if one.models and model not in one.models:
            continue
        if (one.where, one.rule, one.change) == (mutant.where, mutant.rule, mutant.change) and one.of in line:
            return one
    return None


@cache
def _reviews() -> tuple[Review, ...]:
    return tuple(Review(**entry) for entry in json.loads(REVIEWED.read_text("utf-8")))
