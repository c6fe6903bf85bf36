"""Edits that a user could make to a generated file, at random places, and what becomes of them in an upgrade."""

from __future__ import annotations

import ast
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator

from rewrite.sync.edits import problems_of
from rewrite.sync.merge import LABELS, three_way

Edit = Callable[[str, random.Random], str]
Function = ast.FunctionDef


def functions(text: str) -> list[Function]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, Function) and len(node.body) > 1]


def rename_local(text: str, choose: random.Random) -> str:
    """Rename a local variable of one function."""
    places = []
    for function in functions(text):
        own = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
        stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        places += [(function, name) for name in sorted(stored - own) if len(name) > 3]
    function, name = choose.choice(places)
    lines = text.split("\n")
    first, last = function.body[0].lineno - 1, function.end_lineno or function.lineno
    body = "\n".join(lines[first:last])
    lines[first:last] = re.sub(rf"(?<![\w.]){name}(?!\w|=[^=])", f"my_{name}", body).split("\n")
    return "\n".join(lines)


def add_method(text: str, choose: random.Random) -> str:
    """Add a method after another one."""
    methods = [node for node in functions(text) if node.col_offset == 4]
    after = choose.choice(methods)
    number = choose.randrange(10**6)
    method = f"\n    def my_method_{number}(self):\n        return {number}"
    return inserted(text, after.end_lineno or after.lineno, method)


def change_constant(text: str, choose: random.Random) -> str:
    """Change a number."""
    numbers = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and type(n.value) in (int, float)]
    node = choose.choice(numbers)
    lines = text.split("\n")
    line = lines[node.lineno - 1].encode()
    changed = line[: node.col_offset] + str(choose.randrange(10**6, 10**7)).encode() + line[node.end_col_offset :]
    lines[node.lineno - 1] = changed.decode()
    return "\n".join(lines)


def add_logging(text: str, choose: random.Random) -> str:
    """Log something inside a method that was rewritten."""
    lines = text.split("\n")
    calls = re.compile(r"packed_linear|rotary|rms_norm|gated_activation|native_gqa|add_|layer_norm")
    rewritten = [f for f in functions(text) if calls.search("\n".join(lines[f.lineno - 1 : f.end_lineno]))]
    function = choose.choice(rewritten or functions(text))
    before = choose.choice(function.body[1:])
    indent = " " * before.col_offset
    return inserted(text, before.lineno - 1, f'{indent}print("my log {choose.randrange(10**6)}")')


def delete_class(text: str, choose: random.Random) -> str:
    """Delete a whole class."""
    found = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    node = choose.choice(found)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    lines = text.split("\n")
    del lines[first : node.end_lineno]
    return "\n".join(lines)


def reformat(text: str, choose: random.Random) -> str:
    """Format the file with another line length and other quotes."""
    style = choose.choice(["single", "double"])
    command = [
        sys.executable,
        "-m",
        "ruff",
        "format",
        "--isolated",
        "-q",
        "--line-length",
        str(choose.choice([79, 100])),
    ]
    command += ["--config", f"format.quote-style='{style}'", "--stdin-filename", "x.py", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def comment(text: str, choose: random.Random) -> str:
    """Write a comment at the end of a line or on one of its own."""
    function = choose.choice(functions(text))
    statement = choose.choice(function.body)
    return inserted(text, statement.lineno - 1, f"{' ' * statement.col_offset}# mine {choose.randrange(10**6)}")


EDITS: dict[str, Edit] = {
    "rename a local": rename_local,
    "add a method": add_method,
    "change a constant": change_constant,
    "log in a rewritten method": add_logging,
    "delete a class": delete_class,
    "reformat": reformat,
    "comment": comment,
}


def inserted(text: str, line: int, new: str) -> str:
    lines = text.split("\n")
    lines[line:line] = new.split("\n")
    return "\n".join(lines)


def outcome(base: str, new: str, kinds: list[str], choose: random.Random) -> str:
    """Edit `base`, merge the edits with `new`, and say what happened; anything but three words is a lost edit.

    merged: every line that the edit added is there once more than in `new`, every one it took away is not.
    conflict: the text that is shown has the user's side whole.
    refused: merged, but what the edit reads is gone; the sync stops and says so.
    """
    yours = base
    for kind in kinds:
        yours = EDITS[kind](yours, choose)
        ast.parse(yours)
    merged = three_way(base, yours, new)
    lost = dropped(base, yours, new, merged.text)
    if lost:
        return f"{'conflict' if merged.conflicts else 'merge'} drops {lost}"
    if merged.conflicts:
        return "conflict"
    return "refused" if problems_of(merged.text, (new, yours), None) else "merged"


def dropped(base: str, yours: str, new: str, merged: str) -> list[str]:
    """Return the lines that are not as often in the user's side of `merged` as the user's and our changes make them.

    A merge is `base` with what the user changed and what we changed; where it shows a conflict, our change is on the
    other side of the marker. Lines that both changed in the same way count once, so they are left out.
    """
    theirs, before, ours = (Counter(side(merged, which)) for which in (0, 1, 2))
    b, y, n = (Counter(text.split("\n")) for text in (base, yours, new))
    lost = []
    for line in {*b, *y}:
        by_user, by_us = y[line] - b[line], n[line] - b[line]
        in_conflict = before[line] - ours[line]
        if by_user and not by_us and theirs[line] != y[line] + by_us + in_conflict:
            lost.append(line)
    return sorted(lost)


def side(text: str, which: int) -> list[str]:
    """Return the lines of a text with markers as one side has it: 0 yours, 1 generated last, 2 generated now."""
    return list(_side(text, which))


def _side(text: str, which: int) -> Iterator[str]:
    starts = [f"<<<<<<< {LABELS[0]}", f"||||||| {LABELS[1]}", "======="]
    state = None
    for line in text.split("\n"):
        if state is None and line == starts[0]:
            state = 0
        elif state is not None and line in starts[1:]:
            state = starts.index(line)
        elif state is not None and line == f">>>>>>> {LABELS[2]}":
            state = None
        elif state in (None, which):
            yield line
