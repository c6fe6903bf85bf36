"""The statements that replace a residual add, the copies of its sum and the norm that reads it."""

from __future__ import annotations

import libcst as cst

from rewrite.analysis.sites.residual import Pair, is_read_after, names_read
from rewrite.analysis.syntax.module import Module, walk
from rewrite.analysis.syntax.nodes import bound_names, fresh_name, local_names, replace_nodes
from rewrite.analysis.syntax.replacement import call_statement, line


def fused_statements(pair: Pair, module: Module) -> tuple[cst.BaseStatement, ...]:
    """Return what stands in the place of the add, everything up to the norm's statement included."""
    copies, line = pair.copies, pair.line
    normed = _assigned_name(pair)
    taken = local_names(pair.function, module)
    read_later = is_read_after(pair.total, line, pair.function, module) and pair.total not in bound_names(line)
    if normed is None and _is_returned(pair) and not copies:
        new = [_call(pair, module, "return ", "[0]")]
    elif normed is not None:
        total, rest = _names(pair, copies, read_later, taken)
        new = [_call(pair, module, f"{normed}, {total} = "), *_copies(rest, total, module)]
    else:
        read_later = read_later or _reads_total(pair)
        total, rest = _names(pair, copies, read_later, taken)
        normed = fresh_name("normed", taken)
        rewritten = replace_nodes(line, {id(pair.call): (cst.Name(normed),)})
        if not isinstance(rewritten, cst.SimpleStatementLine):
            raise TypeError("the norm's statement is no simple line")
        new = [_call(pair, module, f"{normed}, {total} = "), *_copies(rest, total, module), rewritten]
    return _with_comments(pair, new)


def _names(pair: Pair, copies: list[str], read_later: bool, taken: set[str]) -> tuple[str, list[str]]:
    """Return the name that the sum gets, and those that become copies of it."""
    if read_later:
        return pair.total, copies
    if copies:
        return copies[0], copies[1:]
    if "_" not in names_read(pair.function.body):
        return "_", []
    return (fresh_name("summed", taken) if _assigned_name(pair) == pair.total else pair.total), []


def _assigned_name(pair: Pair) -> str | None:
    """Return `x` where the norm's statement is `x = self.norm(…)`."""
    small = _small(pair)
    if not isinstance(small, cst.Assign) or small.value is not pair.call or len(small.targets) != 1:
        return None
    target = small.targets[0].target
    return target.value if isinstance(target, cst.Name) and target.value not in pair.copies else None


def _is_returned(pair: Pair) -> bool:
    small = _small(pair)
    return isinstance(small, cst.Return) and small.value is pair.call


def _small(pair: Pair) -> cst.BaseSmallStatement | None:
    return pair.line.body[0] if isinstance(pair.line, cst.SimpleStatementLine) else None


def _reads_total(pair: Pair) -> bool:
    """Whether the norm's statement reads the sum besides the norm's argument."""
    own = {id(node) for node in walk(pair.call)}
    small = _small(pair)
    targets = {id(t.target) for t in small.targets} if isinstance(small, cst.Assign) else set()
    names = (node for node in walk(pair.line) if isinstance(node, cst.Name) and node.value == pair.total)
    return any(id(node) not in own and id(node) not in targets for node in names)


def _call(pair: Pair, module: Module, target: str, suffix: str = "") -> cst.SimpleStatementLine:
    left, right = (side.with_changes(lpar=[], rpar=[]) for side in (pair.add.left, pair.add.right))
    sides = [module.code(right), module.code(left)] if _may_swap(pair) else [module.code(left), module.code(right)]
    indent = 4 * sum(isinstance(above, cst.IndentedBlock) for above in module.ancestors(pair.line))
    return call_statement(target, "add_norm", [*sides, f"self.{pair.norm}"], module, indent=indent, suffix=suffix)


def _may_swap(pair: Pair) -> bool:
    """Whether the left side is the residual: the order of evaluation is kept where both sides are computed."""
    left, right = pair.add.left, pair.add.right
    if isinstance(left, cst.Name) and isinstance(right, cst.Name):
        return right.value not in pair.copies
    return isinstance(left, cst.Name)


def _copies(names: list[str], total: str, module: Module) -> list[cst.SimpleStatementLine]:
    return [line(f"{name} = {total}", module) for name in names]


def _with_comments(pair: Pair, new: list[cst.SimpleStatementLine]) -> tuple[cst.BaseStatement, ...]:
    """Put the comments of the replaced statements before the first new one, less doubled blank lines."""
    replaces_line = _assigned_name(pair) is not None or len(new) == 1
    old = (*pair.before_line, *([pair.line] if replaces_line else []))
    lines: list[cst.EmptyLine] = []
    for replaced in old:
        for empty in getattr(replaced, "leading_lines", ()):
            if empty.comment is not None or not lines or lines[-1].comment is not None:
                lines.append(empty)
        trailing = getattr(replaced, "trailing_whitespace", None)
        if replaced is not pair.line and trailing is not None and trailing.comment is not None:
            lines.append(cst.EmptyLine(comment=trailing.comment))
    first = new[0].with_changes(leading_lines=lines)
    if replaces_line and isinstance(pair.line, cst.SimpleStatementLine):
        first = first.with_changes(trailing_whitespace=pair.line.trailing_whitespace)
    return (first, *new[1:])
