"""Methods that a transform gives to a class."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.tree.module import Module
from rewrite.analysis.tree.nodes import LINE_LENGTH
from rewrite.analysis.tree.proposal import Edit

TENSOR, TABLES, MODULE = "torch.Tensor", "tuple[torch.Tensor, torch.Tensor]", "nn.Module"
"""Types of parameters and results, as files that import `torch` and `nn` write them."""
_MODULES = {"torch": "torch", "nn": "torch.nn"}


@dataclass(frozen=True)
class Method:
    """A method to be put behind another one, typed where that one is."""

    after: cst.FunctionDef
    name: str
    parameters: Mapping[str, str]
    """Names, `self` left out, and types."""
    returns: str
    """The type of what it returns."""
    docstring: str
    statements: tuple[cst.BaseStatement, ...]
    calls: tuple[str, ...]
    """What its statements call of the runtime, as `Found.uses`."""
    types: tuple[str, ...] = ()
    """What its types name of the runtime, likewise."""
    like: cst.FunctionDef | None = None
    """The method whose types, or lack of them, it follows; None for the one before it."""

    @property
    def is_typed(self) -> bool:
        """Whether the method that it follows is."""
        model = self.like or self.after
        params = model.params
        named = [*params.posonly_params, *params.params, *params.kwonly_params]
        return model.returns is not None or any(param.annotation is not None for param in named)

    @property
    def uses(self) -> tuple[str, ...]:
        """What it names of the runtime."""
        return (*self.calls, *(self.types if self.is_typed else ()))

    def edit(self, module: Module) -> Edit:
        """Return the edit that puts it there."""
        return Edit(self.after, (self.after, self.node(module)))

    def node(self, module: Module) -> cst.FunctionDef:
        """Return the method itself."""
        text = f'{self._head(module)}:\n    """{self.docstring}"""\n    pass\n'
        function = cst.parse_statement(text, config=module.tree.config_for_parsing)
        if not isinstance(function, cst.FunctionDef) or not isinstance(function.body, cst.IndentedBlock):
            raise TypeError("not a function")
        body = function.body.with_changes(body=[function.body.body[0], *self.statements])
        return function.with_changes(body=body, leading_lines=[cst.EmptyLine(indent=False)])

    def _head(self, module: Module) -> str:
        """Return the line, or lines, up to the colon."""
        given, result = ["self", *self.parameters], ""
        if self.is_typed:
            given = ["self", *(typed(name, kind, module) for name, kind in self.parameters.items())]
            result = f" -> {self.returns}" if _is_known(self.returns, module) else ""
        whole = f"def {self.name}({', '.join(given)}){result}"
        if 4 + len(whole) < LINE_LENGTH:
            return whole
        inner = f"    {', '.join(given)}"
        if 4 + len(inner) > LINE_LENGTH:
            inner = "\n".join(f"    {name}," for name in given)
        return f"def {self.name}(\n{inner}\n){result}"


def typed(name: str, kind: str, module: Module) -> str:
    """Return a parameter with its type, where the file can write that."""
    return f"{name}: {kind}" if _is_known(kind, module) else name


def _is_known(kind: str, module: Module) -> bool:
    """Whether the file gives the names in a type the meaning that they have in it."""
    names = {name for name in _MODULES if re.search(rf"\b{name}\.", kind)}
    return all(module.imports.get(name) == _MODULES[name] for name in names)
