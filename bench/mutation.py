"""The rules by which `bench/mutants.py` makes small bugs, and the sample that it takes of them."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import CodeType

OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Lt: "<=", ast.LtE: "<",
    ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is", ast.In: "not in",
    ast.NotIn: "in", ast.And: "or", ast.Or: "and", ast.Pow: "*", ast.MatMult: "+", ast.Mod: "*",
}  # fmt: skip
SIGNS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Lt: "<", ast.LtE: "<=",
    ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is", ast.IsNot: "is not", ast.In: "in",
    ast.NotIn: "not in", ast.And: "and", ast.Or: "or", ast.Pow: "**", ast.MatMult: "@", ast.Mod: "%",
}  # fmt: skip
DTYPES = {
    "float32": "bfloat16", "float64": "float32", "bfloat16": "float16", "int64": "int32", "long": "int32",
    "bool": "int32",
}  # fmt: skip
TOLD = ("raise", "assert", "logger", "warnings", "__all__", "backend_count_fallback")
"""What begins code that says something and computes nothing."""

SYMMETRIC = ("transpose", "swapaxes", "swapdims", "maximum", "minimum", "max", "min", "equal", "allclose")
"""Functions whose first two arguments may be swapped."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file: the bytes from `start` to `end` become `text`.

    It can only show where `line` runs; a condition that is always false, where the branch to the line `taken` is; one
    that is always true, where another than that to `skipped` is. A `kernel` is compiled, and no line of it is counted.
    """

    file: str
    where: str
    line: int
    rule: str
    change: str
    start: int
    end: int
    text: str
    kernel: bool = False
    taken: int | None = None
    skipped: int | None = None

    @property
    def place(self) -> str:
        """Whether it is in the modeling file and what stands beside it, or in the runtime."""
        return "runtime" if "/" in self.file else "generated"


class Mutator(ast.NodeVisitor):
    """Collects the mutants of one file."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line.encode()))
        self.bytes = text.encode()
        self.scope: list[str] = []
        self.bound: list[set[str]] = [set()]
        self.line = 1
        self.kernel = False
        self.found: list[Mutant] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node.name, node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self.kernel = self.kernel, self.kernel or any("jit" in ast.unparse(d) for d in node.decorator_list)
        self.bound.append({argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)})
        self.line = _undocumented(node.body)[0].lineno
        self.scope.append(node.name)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if isinstance(default, ast.Constant):
                self._constant(default, "default")
        self.scope.pop()
        self._inside(node.name, node.body)
        self.bound.pop()
        self.kernel = outer

    def _inside(self, name: str, body: list[ast.stmt]) -> None:
        self.scope.append(name)
        for statement in _undocumented(body):
            self.visit(statement)
        self.scope.pop()

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self.line = node.lineno
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            source = self._source(node)
            if isinstance(node, (ast.Import, ast.ImportFrom, ast.Assert)) or source.startswith(TOLD):
                return
            self._statement(node)
        super().visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        self._constant(node, "constant")

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in DTYPES:
            self._add(node, "dtype", f"{node.attr} → {DTYPES[node.attr]}", f"torch.{DTYPES[node.attr]}")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = any(isinstance(n, (ast.JoinedStr, ast.Constant)) and not _number(n) for n in (node.left, node.right))
        if not texts and not isinstance(node.op, ast.BitOr):
            self._operator(node.op, node.left, node.right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._operator(node.op, node.values[0], node.values[1])
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        self._operator(node.ops[0], node.left, node.comparators[0])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.Not, ast.USub)) and not isinstance(node.operand, ast.Constant):
            sign = "not" if isinstance(node.op, ast.Not) else "-"
            self._add(node, "operator", f"{sign} dropped", f"({self._source(node.operand)})")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in self._source(node.test):
            first = node.body[0].lineno
            self._add(node.test, "condition", "always True", "True", skipped=first)
            self._add(node.test, "condition", "always False", "False", taken=first)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        for value in ("True", "False"):
            self._add(node.test, "condition", f"always {value}", value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func).split(".")[0] in TOLD or ast.unparse(node.func).endswith("Error"):
            return
        symmetric = ast.unparse(node.func).rpartition(".")[2] in SYMMETRIC
        starred = any(isinstance(argument, ast.Starred) for argument in node.args[:2])
        if len(node.args) > 1 and not symmetric and not starred:
            first, second = (self._source(argument) for argument in node.args[:2])
            if first != second:
                start, end = self._place(node.args[0])[0], self._place(node.args[1])[1]
                between = self.bytes[self._place(node.args[0])[1] : self._place(node.args[1])[0]].decode()
                self._add_at(start, end, "arguments", "first two swapped", second + between + first)
        for keyword in node.keywords:
            if keyword.arg is not None and not isinstance(keyword.value, ast.Constant):
                start, end = self._place(keyword)
                if self.bytes[end : end + 1] == b",":
                    end += 1
                self._add_at(start, end, "keyword", f"{keyword.arg} dropped", "")
        self.generic_visit(node)

    def _statement(self, node: ast.stmt) -> None:
        """Leave out a statement after which every name still has a value."""
        names: set[str] = set()
        if isinstance(node, ast.Assign):
            targets = [n for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            names = {n.id for n in targets if isinstance(n.ctx, ast.Store)}
        droppable = isinstance(node, (ast.AugAssign, ast.Continue, ast.Break)) or (
            isinstance(node, ast.Expr) and not isinstance(node.value, (ast.Constant, ast.Yield))
        )
        if droppable or (isinstance(node, ast.Assign) and self.scope and names <= self.bound[-1]):
            what = ", ".join(sorted(names)) or type(node).__name__
            self._add(node, "statement", f"{what} left out", "pass")
        self.bound[-1] |= names

    def _constant(self, node: ast.Constant, rule: str) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add(node, rule, f"{value} → {not value}", str(not value))
        elif isinstance(value, int):
            self._add(node, rule, f"{value} → {value + 1}", str(value + 1))
        elif isinstance(value, float):
            self._add(node, rule, f"{value} → {value * 1.5 + 0.01}", str(value * 1.5 + 0.01))

    def _operator(self, operator: ast.AST, left: ast.AST, right: ast.AST) -> None:
        new = OPERATORS.get(type(operator))
        if new is None:
            return
        sign = SIGNS[type(operator)]
        start, end = self._place(left)[1], self._place(right)[0]
        between = self.bytes[start:end].decode()
        if between.count(sign) == 1:
            self._add_at(start, end, "operator", f"{sign} → {new}", between.replace(sign, new))

    def _place(self, node: ast.AST) -> tuple[int, int]:
        begins = self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return begins, self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def _source(self, node: ast.AST) -> str:
        start, end = self._place(node)
        return self.bytes[start:end].decode()

    def _add(self, node: ast.AST, rule: str, change: str, text: str, **branch: int) -> None:
        self._add_at(*self._place(node), rule, change, text, **branch)

    def _add_at(self, start: int, end: int, rule: str, change: str, text: str, **branch: int) -> None:
        where = ".".join(self.scope) or "the file"
        self.found.append(Mutant(self.file, where, self.line, rule, change, start, end, text, self.kernel, **branch))


def _undocumented(body: list[ast.stmt]) -> list[ast.stmt]:
    """A body without its docstring, unless that is all there is."""
    documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return body[1:] or body if documented else body


def _number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def mutants(package: Path) -> list[Mutant]:
    """Return every mutant of a package, those that are no Python or the same program among them."""
    found: list[Mutant] = []
    for file in sorted(package.rglob("*.py")):
        name, text = file.relative_to(package).as_posix(), file.read_text("utf-8")
        if not name.startswith("."):
            mutator = Mutator(name, text)
            mutator.visit(ast.parse(text))
            found += mutator.found
    return list(dict.fromkeys(found))


def changed(text: str, mutant: Mutant) -> str:
    """Return a file with a mutant in it."""
    whole = text.encode()
    return (whole[: mutant.start] + mutant.text.encode() + whole[mutant.end :]).decode()


def another_program(text: str, mutant: Mutant) -> bool | None:
    """Whether Python compiles the changed file to other code; `None` if it compiles to nothing."""
    try:
        return shape(compile(changed(text, mutant), "", "exec")) != shape(compile(text, "", "exec"))
    except SyntaxError:
        return None


def shape(code: object) -> object:
    """What code does, without the lines where it stands."""
    if not isinstance(code, CodeType):
        return type(code), repr(code)
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags
    return code.co_code, names, code.co_argcount, code.co_kwonlyargcount, tuple(map(shape, code.co_consts))


def in_turn(found: list[Mutant], seed: str) -> Iterator[Mutant]:
    """Yield mutants in an order drawn with `seed` in which every rule has its turn, so that rare ones come early."""
    generator = random.Random(seed)
    kinds: dict[str, list[Mutant]] = {}
    for mutant in found:
        kinds.setdefault(mutant.rule, []).append(mutant)
    drawn = [generator.sample(kinds[rule], len(kinds[rule])) for rule in sorted(kinds)]
    for turn in zip_longest(*drawn):
        yield from (mutant for mutant in turn if mutant is not None)
