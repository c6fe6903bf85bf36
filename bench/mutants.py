"""Small bugs made by rule in what was generated, and how many of them `verify` catches.

    python bench/mutants.py [MODEL ...] [--each 60] [--jobs 2] [--seed 0] [--device cpu] [--quick] [--json FILE]

Each model is rewritten into a package. A mutant is the package with one change, in the modeling file or in the
runtime that it brings: a constant, an operator, a dtype, a condition, a statement left out, two arguments swapped, a
keyword argument or a default changed. Each is verified on its own until its first failed check; one that does not end
in `LIMIT` times what the package itself took is caught too.

What no check runs is told from what runs and is not seen: the package itself is verified first with the lines counted
that run, and a mutant elsewhere is *not reached*. On a CPU no kernel of Triton runs, so none is changed there.

The results name function, rule and change, never a line of a model's source.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from rewrite.verify import Options, verify

MODELS = ("llama", "qwen3_moe", "gemma2", "bert", "t5", "qwen3_next")
LIMIT = 5
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
TOLD = ("raise", "assert", "logger", "warnings", "__all__")
"""What begins code that says something and computes nothing."""

SYMMETRIC = ("transpose", "swapaxes", "swapdims", "maximum", "minimum", "max", "min", "equal", "allclose")
"""Functions whose first two arguments may be swapped."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file: the characters from `start` to `end` become `text`."""

    file: str
    where: str
    line: int
    rule: str
    change: str
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: `caught` by a check, `survived`, or `not reached` by any."""

    model: str
    mutant: Mutant
    status: str
    by: str = ""
    seconds: float = 0.0


class Mutator(ast.NodeVisitor):
    """Collects the mutants of one file."""

    def __init__(self, file: str, text: str, kernels: bool) -> None:
        self.file, self.text, self.kernels = file, text, kernels
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line.encode()))
        self.bytes = text.encode()
        self.scope: list[str] = []
        self.bound: list[set[str]] = [set()]
        self.line = 1
        self.found: list[Mutant] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node.name, node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not self.kernels and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            return
        self.bound.append({argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)})
        self.scope.append(node.name)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if isinstance(default, ast.Constant):
                self._constant(default, "default")
        self.scope.pop()
        self._inside(node.name, node.body)
        self.bound.pop()

    def _inside(self, name: str, body: list[ast.stmt]) -> None:
        self.scope.append(name)
        documented = body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        for statement in body[1:] if documented else body:
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
            for value in ("True", "False"):
                self._add(node.test, "condition", f"always {value}", value)
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

    def _add(self, node: ast.AST, rule: str, change: str, text: str) -> None:
        self._add_at(*self._place(node), rule, change, text)

    def _add_at(self, start: int, end: int, rule: str, change: str, text: str) -> None:
        where = ".".join(self.scope) or "the file"
        self.found.append(Mutant(self.file, where, self.line, rule, change, start, end, text))


def _number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def mutants(package: Path, kernels: bool) -> list[Mutant]:
    """Return every mutant of a package that is still Python, and another one."""
    found: list[Mutant] = []
    for file in sorted(package.rglob("*.py")):
        name, text = file.relative_to(package).as_posix(), file.read_text("utf-8")
        if name.startswith("."):
            continue
        mutator = Mutator(name, text, kernels)
        mutator.visit(ast.parse(text))
        tree = ast.dump(ast.parse(text))
        for mutant in mutator.found:
            try:
                if ast.dump(ast.parse(changed(text, mutant))) != tree:
                    found.append(mutant)
            except SyntaxError:
                continue
    return found


def changed(text: str, mutant: Mutant) -> str:
    """Return a file with a mutant in it."""
    whole = text.encode()
    return (whole[: mutant.start] + mutant.text.encode() + whole[mutant.end :]).decode()


def chosen(found: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return `count` of them: as many of each file's size, but half of the modeling file's."""
    generator = random.Random(seed)
    own = [mutant for mutant in found if "/" not in mutant.file]
    brought = [mutant for mutant in found if "/" in mutant.file]
    half = min(len(own), count // 2)
    picked = generator.sample(own, half) + generator.sample(brought, min(len(brought), count - half))
    return sorted(picked, key=lambda mutant: (mutant.file, mutant.start))


def lines_missed(model: str, package: Path, options: Options) -> tuple[dict[str, set[int]], float]:
    """Verify the package as it is. Return the lines that no check ran, by file, and how long it took.

    Raises:
        SystemExit: if the package itself does not pass.
    """
    start = time.perf_counter()
    verdict = verify(
        f"transformers.models.{model}.modeling_{model}", package, replace(options, reach=True, quick=False)
    )
    seconds = time.perf_counter() - start
    if not verdict.passed:
        sys.exit(f"{model}: the package itself does not pass: {verdict.reason}")
    missed = {}
    for file in verdict.reached:
        ranges = [part.split("-") for part in file.where.split(", ") if part]
        missed[file.file] = {
            line for first, *last in ranges for line in range(int(first), int((last or [first])[0]) + 1)
        }
    return missed, seconds


def examined(model: str, package: Path, mutant: Mutant, options: Options, limit: float) -> Outcome:
    """Verify a package with a mutant in it, in a process of its own."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / package.name
        shutil.copytree(package, copy)
        file = copy / mutant.file
        file.write_text(changed(file.read_text("utf-8"), mutant), "utf-8")
        ours, theirs = multiprocessing.get_context("fork").Pipe()
        process = multiprocessing.get_context("fork").Process(target=_verify, args=(model, copy, options, theirs))
        process.start()
        theirs.close()
        process.join(limit)
        if process.exitcode is None:
            process.kill()
            return Outcome(model, mutant, "caught", "does not end", time.perf_counter() - start)
        status, by = ours.recv() if ours.poll() else ("caught", f"ends the process ({process.exitcode})")
    return Outcome(model, mutant, status, by, time.perf_counter() - start)


def _verify(model: str, package: Path, options: Options, answer: object) -> None:
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    verdict = verify(f"transformers.models.{model}.modeling_{model}", package, options)
    failed = verdict.failed_gate
    by = f"{failed.name}: {failed.failures[0].name}" if failed is not None else verdict.reason
    answer.send(("survived" if verdict.passed else "caught", by))  # type: ignore[attr-defined]
    answer.close()  # type: ignore[attr-defined]


def survey(model: str, arguments: argparse.Namespace, folder: Path) -> Iterator[Outcome]:
    """Yield what became of the mutants of one model."""
    torch.set_num_threads(1)
    importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    package = folder / f"{model}_rewritten"
    command = [sys.executable, "-m", "rewrite.cli", model, "--out", str(package), "--no-verify", "--diff", "none"]
    subprocess.run(command, check=True, capture_output=True)
    options = Options(
        device=arguments.device, quick=arguments.quick, seed=arguments.seed, fail_fast=True, clean_process=False,
        reach=False, gates=("structure", "parity", "generation"),
    )  # fmt: skip
    picked = chosen(mutants(package, arguments.device != "cpu"), arguments.each, arguments.seed)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    first = context.Process(target=lambda: theirs.send(lines_missed(model, package, options)))
    first.start()
    theirs.close()
    try:
        missed, seconds = ours.recv()
    except EOFError:
        sys.exit(f"{model}: nothing to compare with")
    first.join()
    tried = []
    for mutant in picked:
        if mutant.line in missed.get(mutant.file, ()):
            yield Outcome(model, mutant, "not reached")
        else:
            tried.append(mutant)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        limit = LIMIT * seconds * max(1, arguments.jobs) + 60
        yield from pool.map(lambda mutant: examined(model, package, mutant, options, limit), tried)


def table(outcomes: list[Outcome]) -> str:
    """Return the counts by model and by rule."""
    lines = ["| | mutants | caught | survived | not reached |", "|---|---|---|---|---|"]
    for key in ("model", "rule"):
        names = [outcome.model if key == "model" else outcome.mutant.rule for outcome in outcomes]
        for name in dict.fromkeys(names):
            counts = Counter(o.status for o, its in zip(outcomes, names, strict=True) if its == name)
            row = [sum(counts.values()), counts["caught"], counts["survived"], counts["not reached"]]
            lines.append(f"| {name} | {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def main() -> None:
    """Make mutants, verify them, print and write what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--each", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            for outcome in survey(model, arguments, Path(folder)):
                outcomes.append(outcome)
                mutant = outcome.mutant
                place = f"{model} {mutant.file}:{mutant.line} {mutant.where}"
                said = f" · {outcome.by}" if outcome.by else ""
                print(f"{outcome.status:<11} {outcome.seconds:4.0f} s  {place} · {mutant.rule}: {mutant.change}{said}")
                sys.stdout.flush()
    print(table(outcomes))
    if arguments.json is not None:
        rows = [{**asdict(o), "mutant": {k: v for k, v in asdict(o.mutant).items() if k != "text"}} for o in outcomes]
        arguments.json.write_text(json.dumps({"seed": arguments.seed, "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
