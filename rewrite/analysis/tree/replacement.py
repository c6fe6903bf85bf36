"""Replacing a function's body by one runtime call."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from rewrite.analysis.tree.module import Module, walk
from rewrite.analysis.tree.nodes import LINE_LENGTH, bound_names, parameters
from rewrite.offers import is_of_runtime


def returning(function: cst.FunctionDef, *new: cst.BaseStatement) -> cst.FunctionDef:
    """Return `function` with its docstring kept, and everything else replaced by `new`."""
    block = function.body
    if not isinstance(block, cst.IndentedBlock):
        return function.with_changes(body=cst.IndentedBlock(new))
    return function.with_changes(body=ending(block, new))


def ending(
    block: cst.IndentedBlock,
    new: Sequence[cst.BaseStatement],
    staying: Sequence[tuple[cst.BaseStatement, cst.BaseStatement]] = (),
) -> cst.IndentedBlock:
    """Return a block with its docstring kept, what is `staying` as it reads then, and the rest replaced by `new`.

    The comments of the old statements stand before `new`: they belong to the reader of the file, not to the rewriter.
    """
    statements = list(block.body)
    kept = [statements.pop(0)] if statements and is_docstring(statements[0]) else []
    stays = {id(old) for old, _ in staying}
    statements = [statement for statement in statements if id(statement) not in stays]
    lines = [cst.EmptyLine(comment=comment) for comment in _comments(statements, block)]
    first = new[0].with_changes(leading_lines=lines)
    return block.with_changes(body=[*kept, *(reads for _, reads in staying), first, *new[1:]], footer=[])


def is_docstring(statement: cst.CSTNode) -> bool:
    """Whether `statement` is a string that stands alone."""
    if not isinstance(statement, cst.SimpleStatementLine) or not isinstance(statement.body[0], cst.Expr):
        return False
    return isinstance(statement.body[0].value, (cst.SimpleString, cst.ConcatenatedString))


def name_is_free(name: str, module: Module, *functions: cst.FunctionDef) -> bool:
    """Whether `name` can mean the runtime's function in `functions`: nothing else in the file is called that."""
    imported = module.imports.get(name)
    if imported is not None and not (is_of_runtime(imported) and imported.endswith(f".{name}")):
        return False
    if name in module.functions or name in module.classes:
        return False
    return not any(name in parameters(function) or name in bound_names(function) for function in functions)


def call_statement(
    target: str, function: str, arguments: Sequence[str], module: Module, *, indent: int = 8, suffix: str = ""
) -> cst.SimpleStatementLine:
    """Parse `<target><function>(<arguments>)<suffix>`, laid out as the file's formatter lays out a long call.

    `indent` counts for the length only: the lines of a statement are printed relative to the block that it is put in.
    """
    text = f"{target}{function}({', '.join(arguments)}){suffix}"
    if "\n" in text or indent + len(text) > LINE_LENGTH:
        inner = f"    {', '.join(arguments)}"
        if "\n" in text or indent + len(inner) > LINE_LENGTH:
            inner = "\n".join(f"    {argument}," for argument in arguments)
        text = f"{target}{function}(\n{inner}\n){suffix}"
    return line(text, module)


def with_call(
    node: cst.BaseExpression, function: str, arguments: Sequence[str], module: Module, suffix: str = ""
) -> tuple[cst.CSTNode, cst.CSTNode]:
    """Return what to replace, and by what, so that `<function>(<arguments>)<suffix>` stands in the place of `node`.

    Where `node` is all that a statement assigns or returns, that is the statement, laid out by its length.
    """
    small = module.parent(node)
    statement = module.parent(small)
    if isinstance(small, (cst.Assign, cst.Return)) and isinstance(statement, cst.SimpleStatementLine):
        if len(statement.body) == 1:
            targets = small.targets if isinstance(small, cst.Assign) else ()
            start = "".join(f"{module.code(target.target)} = " for target in targets) or "return "
            indent = module.indentation(node)
            new = call_statement(start, function, arguments, module, indent=indent, suffix=suffix)
            kept = {"leading_lines": statement.leading_lines, "trailing_whitespace": statement.trailing_whitespace}
            return statement, new.with_changes(**kept)
    text = f"{function}({', '.join(arguments)}){suffix}"
    return node, cst.parse_expression(f"({text})" if suffix else text)


def line(text: str, module: Module) -> cst.SimpleStatementLine:
    """Parse a statement that is no compound one."""
    parsed = cst.parse_statement(text, config=module.tree.config_for_parsing)
    if not isinstance(parsed, cst.SimpleStatementLine):
        raise TypeError(f"not a simple statement: {text}")
    return parsed


def _comments(statements: Sequence[cst.CSTNode], block: cst.BaseSuite) -> list[cst.Comment]:
    footer = block.footer if isinstance(block, cst.IndentedBlock) else ()
    return [node for top in (*statements, *footer) for node in walk(top) if isinstance(node, cst.Comment)]
