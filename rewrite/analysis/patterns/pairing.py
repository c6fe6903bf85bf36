"""What replaces a residual add, the copies of its sum and the norm that reads it."""

from __future__ import annotations

import libcst as cst

from rewrite.analysis.effects import effects_of, why_not_move
from rewrite.analysis.patterns.residual import Pair, is_read_after, names_read
from rewrite.analysis.patterns.sums import rebound
from rewrite.analysis.tree.module import Module, walk
from rewrite.analysis.tree.nodes import expression, fresh_name, local_names, replace_nodes
from rewrite.analysis.tree.proposal import Edit
from rewrite.analysis.tree.replacement import call_statement, line


def fused(pair: Pair, module: Module) -> list[Edit]:
    """Return the edits that merge the add and the norm into one call."""
    if pair.assignment is None:
        return [Edit(pair.call, (expression(f"add_norm({', '.join(_sides(pair, module))})[0]"),))]
    if not pair.only_copied:
        return _around(pair, pair.assignment, module)
    edits = [Edit(pair.assignment, _in_one_place(pair, module))]
    return edits + [Edit(statement, ()) for statement in (*pair.between, pair.line)]


def _around(pair: Pair, assignment: cst.BaseStatement, module: Module) -> list[Edit]:
    """Return the edits where statements between the two stay: they follow the norm, which takes the add's place."""
    normed = fresh_name("normed", local_names(pair.function, module))
    first = _call(pair, module, f"{normed}, {pair.total} = ")
    new = _with_comments([assignment], [first, *_copies(list(pair.others), pair.total, module)], replaces_line=None)
    rewritten = replace_nodes(pair.line, {id(pair.call): (cst.Name(normed),)})
    # What stays between is edited too, into itself: another pair that reaches in here waits for the next pass, where
    # the name of this norm is taken.
    return [Edit(assignment, new), *(Edit(s, (s,)) for s in pair.between), Edit(pair.line, (rewritten,))]


def _in_one_place(pair: Pair, module: Module) -> tuple[cst.BaseStatement, ...]:
    """Return what stands in the place of the add, everything up to the norm's statement included."""
    normed, live = _assigned_name(pair), _live(pair, module)
    taken = local_names(pair.function, module)
    if normed is None and _is_returned(pair) and not live:
        new = [_call(pair, module, "return ", "[0]")]
    elif normed is not None:
        total, *rest = live or [_unread(pair, taken)]
        new = [_call(pair, module, f"{normed}, {total} = "), *_copies(rest, total, module)]
    else:
        total, *rest = live or [_unread(pair, taken)]
        normed = fresh_name("normed", taken)
        rewritten = replace_nodes(pair.line, {id(pair.call): (cst.Name(normed),)})
        if not isinstance(rewritten, cst.SimpleStatementLine):
            raise TypeError("the norm's statement is no simple line")
        new = [_call(pair, module, f"{normed}, {total} = "), *_copies(rest, total, module), rewritten]
    replaces_line = pair.line if _assigned_name(pair) is not None or len(new) == 1 else None
    assert pair.assignment is not None
    return _with_comments([pair.assignment, *pair.between], new, replaces_line)


def _live(pair: Pair, module: Module) -> list[str]:
    """Return the names of the sum that something reads after the norm, or beside it."""
    names = dict.fromkeys((pair.total, *pair.others, *pair.copies))
    bound = rebound(pair.line)
    hidden = {"locals", "vars", "eval", "exec"} & names_read(pair.function.body)
    return [
        name
        for name in names
        if (name not in bound and is_read_after(name, pair.line, pair.function, module))
        or _is_read_beside(pair, name)
        or (name not in bound and (hidden or _is_captured(name, pair)))
    ]


def _is_captured(name: str, pair: Pair) -> bool:
    """Whether code that runs at another time may read a local."""
    inner = (node for node in walk(pair.function.body) if isinstance(node, (cst.Lambda, cst.FunctionDef)))
    return any(name in names_read(node.body) for node in inner)


def _unread(pair: Pair, taken: set[str]) -> str:
    """Return a name for a sum that nobody reads."""
    if "_" not in names_read(pair.function.body):
        return "_"
    return fresh_name("summed", taken) if _assigned_name(pair) == pair.total else pair.total


def _assigned_name(pair: Pair) -> str | None:
    """Return `x` where the norm's statement is `x = self.norm(…)`."""
    small = _small(pair)
    if not isinstance(small, cst.Assign) or small.value is not pair.call or len(small.targets) != 1:
        return None
    target = small.targets[0].target
    return target.value if isinstance(target, cst.Name) else None


def _is_returned(pair: Pair) -> bool:
    small = _small(pair)
    return isinstance(small, cst.Return) and small.value is pair.call


def _small(pair: Pair) -> cst.BaseSmallStatement | None:
    return pair.line.body[0] if isinstance(pair.line, cst.SimpleStatementLine) else None


def _is_read_beside(pair: Pair, name: str) -> bool:
    """Whether the norm's statement reads a name of the sum besides the norm's argument."""
    own = {id(node) for node in walk(pair.call)}
    small = _small(pair)
    targets = {id(t.target) for t in small.targets} if isinstance(small, cst.Assign) else set()
    names = (node for node in walk(pair.line) if isinstance(node, cst.Name) and node.value == name)
    return any(id(node) not in own and id(node) not in targets for node in names)


def _call(pair: Pair, module: Module, target: str, suffix: str = "") -> cst.SimpleStatementLine:
    indent = 4 * sum(isinstance(above, cst.IndentedBlock) for above in module.ancestors(pair.line))
    return call_statement(target, "add_norm", _sides(pair, module), module, indent=indent, suffix=suffix)


def _sides(pair: Pair, module: Module) -> list[str]:
    """Return the arguments of the call: `add_norm(x, y, norm)` adds `y + x`, which decides strides of odd layouts.

    The right side may be evaluated first where one of the two is a name, or where it is proven; else keywords keep
    the order.
    """
    left, right = (side.with_changes(lpar=[], rpar=[]) for side in (pair.add.left, pair.add.right))
    norm = f"self.{pair.norm}"
    sides = (pair.add.left, pair.add.right)
    if any(isinstance(side, cst.Name) for side in sides) or _right_may_come_first(pair, module):
        return [module.code(right), module.code(left), norm]
    return [f"residual={module.code(left)}", f"hidden_states={module.code(right)}", f"norm={norm}"]


def _right_may_come_first(pair: Pair, module: Module) -> bool:
    owner = next((info for info, _, function in module.methods() if function is pair.function), None)
    scope = effects_of(module).scope(pair.function, owner)
    return why_not_move(scope, scope.of(pair.add.right), scope.of(pair.add.left)) is None


def _copies(names: list[str], total: str, module: Module) -> list[cst.SimpleStatementLine]:
    return [line(f"{name} = {total}", module) for name in names]


def _with_comments(
    old: list[cst.BaseStatement], new: list[cst.SimpleStatementLine], replaces_line: cst.BaseStatement | None
) -> tuple[cst.BaseStatement, ...]:
    """Put the comments of the replaced statements before the first new one, less doubled blank lines."""
    lines: list[cst.EmptyLine] = []
    for replaced in [*old, *([replaces_line] if replaces_line is not None else [])]:
        for empty in getattr(replaced, "leading_lines", ()):
            if empty.comment is not None or not lines or lines[-1].comment is not None:
                lines.append(empty)
        trailing = getattr(replaced, "trailing_whitespace", None)
        if replaced is not replaces_line and trailing is not None and trailing.comment is not None:
            lines.append(cst.EmptyLine(comment=trailing.comment))
    first = new[0].with_changes(leading_lines=lines)
    if isinstance(replaces_line, cst.SimpleStatementLine):
        first = first.with_changes(trailing_whitespace=replaces_line.trailing_whitespace)
    return (first, *new[1:])
