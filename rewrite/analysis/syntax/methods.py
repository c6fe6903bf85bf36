"""Methods that a transform gives to a class."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.syntax.module import Module
from rewrite.analysis.syntax.proposal import Edit


@dataclass(frozen=True)
class Method:
    """A method to be put behind another one."""

    after: cst.FunctionDef
    name: str
    parameters: tuple[str, ...]
    """Their names, `self` left out."""
    docstring: str
    statements: tuple[cst.BaseStatement, ...]
    uses: tuple[str, ...]
    """What it calls of the runtime, as `Found.uses`."""

    def edit(self, module: Module) -> Edit:
        """Return the edit that puts it there."""
        return Edit(self.after, (self.after, self.node(module)))

    def node(self, module: Module) -> cst.FunctionDef:
        """Return the method itself."""
        text = f'def {self.name}({", ".join(("self", *self.parameters))}):\n    """{self.docstring}"""\n    pass\n'
        function = cst.parse_statement(text, config=module.tree.config_for_parsing)
        if not isinstance(function, cst.FunctionDef) or not isinstance(function.body, cst.IndentedBlock):
            raise TypeError("not a function")
        body = function.body.with_changes(body=[function.body.body[0], *self.statements])
        return function.with_changes(body=body, leading_lines=[cst.EmptyLine(indent=False)])
