"""The contract of a rewriting: a libcst transformer that respells a modeling file and keeps what it means."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Generic, TypeVar

import libcst as cst

from rewrite.analysis.tree.module import Module

from .tensors import Tensors

Node = TypeVar("Node", bound=cst.BaseExpression)


@dataclass(frozen=True)
class File:
    """A parsed modeling file and what is known about it."""

    module: Module

    @cached_property
    def tensors(self) -> Tensors:
        """Which expressions are certainly tensors."""
        return Tensors(self.module)

    def functions(self) -> Iterator[cst.FunctionDef]:
        """Yield every function of the module and every method of its classes; functions inside them are their part."""
        yield from self.module.functions.values()
        for _, _, method in self.module.methods():
            yield method


class Rewriting(cst.CSTTransformer):
    """One way to respell a file. `places` counts what was changed; with none the file is returned as it was."""

    name: ClassVar[str]
    """That of the class in snake case, unless it says another."""
    keeps_names: ClassVar[bool] = True
    """Whether the weights and arguments of modules keep their names: what fits the original fits this too."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in vars(cls):
            cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(self, file: File):
        super().__init__()
        self.file = file
        self.places = 0
        self.prepare()

    def prepare(self) -> None:
        """Look at the whole file before any node is visited."""

    @property
    def module(self) -> Module:
        """The file's index; its nodes are the `original_node`s of the visit."""
        return self.file.module


class Expressions(Rewriting, Generic[Node]):
    """A rewriting of expressions: `respelled` answers for one node, after those below it."""

    kinds: ClassVar[tuple[type[cst.BaseExpression], ...]] = (cst.Call,)

    @abstractmethod
    def respelled(self, original: Node, updated: Node) -> cst.BaseExpression | None:
        """Return what stands in the place of `updated`, None to leave it."""

    def on_leave(  # type: ignore[override]
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode:
        if not isinstance(original_node, self.kinds) or not isinstance(updated_node, self.kinds):
            return updated_node
        new = self.respelled(original_node, updated_node)  # type: ignore[arg-type]
        if new is None:
            return updated_node
        self.places += 1
        return parenthesised_as(updated_node, new)


class Blocks(Rewriting):
    """A rewriting of the statements of a block: `respelled` answers for the blocks of functions, innermost first."""

    @abstractmethod
    def respelled(
        self, body: list[cst.BaseStatement], original: cst.IndentedBlock, function: cst.FunctionDef
    ) -> list[cst.BaseStatement]:
        """Return the statements of a block. `original` is it, `function` the outermost one around it, as they were."""

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        above = [node for node in self.module.ancestors(original_node) if isinstance(node, cst.FunctionDef)]
        parent = self.module.parent(original_node)
        if not above or isinstance(parent, cst.ClassDef):
            return updated_node
        return updated_node.with_changes(body=self.respelled(list(updated_node.body), original_node, above[-1]))


@dataclass(frozen=True)
class Respelled:
    """A file after a rewriting."""

    text: str
    places: int


def respell(text: str, rewriting: type[Rewriting]) -> Respelled:
    """Apply a rewriting to the text of a modeling file."""
    tree = cst.parse_module(text)
    visitor = rewriting(File(Module(tree)))
    changed = tree.visit(visitor)
    if not visitor.places:
        return Respelled(text, 0)
    compile(changed.code, f"<{rewriting.name}>", "exec", dont_inherit=True)
    return Respelled(changed.code, visitor.places)


def parenthesised_as(old: cst.BaseExpression, new: cst.BaseExpression) -> cst.BaseExpression:
    """Return `new` with the parentheses of `old` where it has none of its own."""
    return new if new.lpar or not old.lpar else new.with_changes(lpar=old.lpar, rpar=old.rpar)


def bare(node: cst.BaseExpression) -> cst.BaseExpression:
    """Return an expression without parentheses around it, for a place between commas."""
    if isinstance(node, (cst.Tuple, cst.GeneratorExp, cst.NamedExpr, cst.Yield)) or not node.lpar:
        return node
    return node.with_changes(lpar=[], rpar=[]) if "\n" not in cst.Module([]).code_for_node(node) else node


def guarded(node: cst.BaseExpression) -> cst.BaseExpression:
    """Return an expression in parentheses unless it is one that binds tighter than every operator."""
    tight = (cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.List, cst.Dict, cst.SimpleString)
    tight += (cst.Integer, cst.Float)
    if isinstance(node, tight) or node.lpar:
        return node
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def call(function: str | cst.BaseExpression, *arguments: cst.BaseExpression | cst.Arg) -> cst.Call:
    """Return a call with the given arguments."""
    name = cst.parse_expression(function) if isinstance(function, str) else function
    made = [item if isinstance(item, cst.Arg) else cst.Arg(bare(item)) for item in arguments]
    return cst.Call(name, [argument.with_changes(comma=cst.MaybeSentinel.DEFAULT) for argument in made])


def method(receiver: cst.BaseExpression, name: str, *arguments: cst.BaseExpression | cst.Arg) -> cst.Call:
    """Return the call of a method."""
    return call(cst.Attribute(guarded(receiver), cst.Name(name)), *arguments)
