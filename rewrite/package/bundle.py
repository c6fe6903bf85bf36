"""The runtime as a package has it: one file a room, with the definitions that are needed and the names of the room.

In `runtime/` a room is a folder. Here its files stand below each other in the order in which they import each other,
what they imported of each other is simply there, and what they read as `rows.order` is `rows_order`
(`parts.final_names`). A name of another room is imported from its file: `from .core import rows_order`.
"""

from __future__ import annotations

import ast
import re
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from rewrite.analysis.syntax.nodes import LINE_LENGTH
from rewrite.engine.layout import ruff_folder
from rewrite.operators import own_text
from rewrite.package import parts
from rewrite.package.closure import Closure
from rewrite.package.parts import File, NotFollowed, Outside, Own, Part
from rewrite.upstream.statements import statements

_LAYOUT = ("--isolated", "--no-cache", "--quiet", "--line-length", "119", "--target-version", "py310")
_COMMAS = "lint.isort.split-on-trailing-comma = false", "format.skip-magic-trailing-comma = true"
"""What was laid out in many lines for who changes the runtime takes as few as it needs."""
_SORTED = ("check", *_LAYOUT, "--config", _COMMAS[0], "--fix-only", "--select", "I,F401")
_FORMATTED = ("format", *_LAYOUT, "--config", _COMMAS[0], "--config", _COMMAS[1])
_AS_IT_IS = "from __future__", "# isort: skip_file\nfrom __future__"
"""What keeps sorters of imports, which know one layout, from filled lists; formatters are told at each."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LISTING = (*_FUNCTIONS, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)
"""Statements that end, or whose head ends, with a list in brackets."""
_DEFINED = re.compile(r"(?P<before>\b(?:def|class)\s+)(?P<name>\w+)")


def rooms(taken: Closure) -> dict[str, str]:
    """Return the text of the file of each room of a package, by the room's name.

    Raises:
        NotFollowed: if a name would mean something else where it comes to stand.
        MissingLibrary: if ruff is not installed.
    """
    return dict(zip(taken.rooms, _laid_out(tuple(_room(room, taken) for room in taken.rooms)), strict=True))


@cache
def _laid_out(texts: tuple[str, ...]) -> list[str]:
    """Lay out several texts at once: starting ruff for each takes longer than its work."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"room_{number}.py" for number in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text, encoding="utf-8", newline="\n")
        for arguments in (_SORTED, _FORMATTED):
            assert ruff_folder(arguments, folder), "ruff cannot read what was generated"
        return [_with_filled_lines(path.read_text(encoding="utf-8")).replace(*_AS_IT_IS, 1) for path in paths]


def _room(room: str, taken: Closure) -> str:
    by_file: dict[str, list[Part]] = {}
    for part in sorted(taken.parts, key=lambda part: (part.file, part.first)):
        if part.file.split("/")[0] == room:
            by_file.setdefault(part.file, []).append(part)
    ordered = _in_order(by_file)
    outside, inside = _imports(room, [part for name in ordered for part in by_file[name]], taken.without)
    docstring = ast.get_docstring(ast.parse(own_text(f"{room}/__init__")), clean=False)
    lines = [f'"""{docstring}"""', "", "from __future__ import annotations", ""]
    lines += [*outside.pop("", []), *inside.pop("", []), ""]
    guarded = {test: [*outside.get(test, []), *inside.get(test, [])] for test in {*outside, *inside}}
    for name in ordered:
        here = parts.file(name)
        said = f"{name.partition('/')[2]}.py: {here.summary}"
        lines += ["", *textwrap.wrap(said, 117, initial_indent="# ", subsequent_indent="# ")]
        lines += _file(here, by_file[name], guarded, taken.without)
    for test, body in guarded.items():
        lines += [f"if {test}:", *(f"    {statement}" for statement in body)]
    return _with_summaries("\n".join(lines) + "\n")


def _with_summaries(text: str) -> str:
    """Return a text with the first sentence of each docstring alone; those of kernels, which say what is where, stay.

    The rest is for who changes the runtime, and that is done in this project.
    """
    lines = text.split("\n")
    tree = ast.parse(text)
    everything = [*statements(tree)]
    kernels = {node for kernel in everything if _is_kernel(kernel) for node in statements(kernel)}
    said_below = [
        node.value
        for node in everything
        if isinstance(node, ast.Expr) and node not in kernels and isinstance(node.value, ast.Constant)
    ]
    for said in sorted(said_below[1:], key=lambda said: said.lineno, reverse=True):  # the first is the room's own
        last = said.end_lineno or said.lineno
        indent, opening = lines[said.lineno - 1][: said.col_offset], lines[said.lineno - 1][said.col_offset :]
        one = f'{indent}{opening.rstrip()}"""'
        if last > said.lineno and one.endswith('."""') and opening.startswith('"""') and len(one) <= LINE_LENGTH:
            lines[said.lineno - 1 : last] = [one]
    return "\n".join(lines)


def _with_filled_lines(text: str) -> str:
    """Return a formatted text with several parameters, arguments or imported names in a line, where it has one each.

    A kernel has up to forty, a room takes as many names of another, and nobody reads them one by one.
    """
    lines = text.split("\n")
    for node in sorted(statements(ast.parse(text)), key=lambda node: node.lineno, reverse=True):
        first, indent = node.lineno, " " * node.col_offset
        if not isinstance(node, _LISTING) or not lines[first - 1].partition("  #")[0].endswith("("):
            continue
        last = next((number for number in range(first, len(lines)) if lines[number].startswith(f"{indent})")), first)
        whole = (isinstance(node, _FUNCTIONS) or last + 1 == node.end_lineno) and "fmt: skip" not in lines[last]
        alone = re.compile(rf"{indent}    [^ #][^#]*,(  # (noqa|type): .*)?")
        if whole and last - first > 1 and all(map(alone.fullmatch, lines[first:last])):
            lines[first : last + 1] = [*_filled(lines[first:last]), f"{lines[last]}  # fmt: skip"]
    return "\n".join(lines)


def _filled(inner: Sequence[str]) -> list[str]:
    """Return lines with as many of `inner` in each as there is room for; of their comments the first."""
    filled: list[tuple[str, str]] = []
    for line in inner:
        word, _, comment = line.partition("  # ")
        if filled and len(filled[-1][0]) + len(word.lstrip()) < LINE_LENGTH:
            filled[-1] = (f"{filled[-1][0]} {word.lstrip()}", filled[-1][1] or comment)
        else:
            filled.append((word, comment))
    return [f"{words}  # {comment}" if comment else words for words, comment in filled]


def _is_kernel(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(by) for by in node.decorator_list)


def _file(here: File, chosen: Sequence[Part], guarded: dict[str, list[str]], without: frozenset[str]) -> Iterator[str]:
    """Yield the lines of the parts of a file; those that stood under one `if` stand under one again.

    The first stands right below what says of the file what it is, and others have blank lines where they had them.
    """
    guard = 0
    for number, part in enumerate(chosen):
        spaced = number > 0 and not here.lines[part.first - 2].strip()
        if part.guard != guard and part.guard:
            condition = here.guards[part.guard]
            test = _condition(condition)
            yield from [*[""] * bool(number), f"if {test}:"]
            yield from (f"    {statement}" for statement in guarded.pop(test, []))
            spaced = True
        yield from [""] * (spaced or part.guard != guard)
        guard = part.guard
        yield from _text(part, without)


def _condition(condition: Part) -> str:
    """Return the condition of an `if` around definitions, with final names."""
    return " ".join(_text(condition, frozenset())).strip().removeprefix("if").rstrip(":").strip()


def _text(part: Part, without: frozenset[str]) -> list[str]:
    """Return the lines of a part with final names, less those that need a name of `core/target` that is not there."""
    here, names = parts.file(part.file), parts.final_names()
    lines = list(here.lines[part.first - 1 : part.last])
    changed = {name: new for name in part.names if (new := names[Own(part.file, name)]) != name}
    for use in sorted(part.uses, key=lambda use: (use.line, use.start), reverse=True):
        new = use.target.name if isinstance(use.target, Outside) else names[use.target]
        if new in use.inner:
            raise NotFollowed(f"runtime/{part.file}.py, line {use.line}: a local name hides {new}")
        if new == use.written or use.switch in without:
            continue
        number = use.line - part.first
        if use.quoted:
            for inner in range(number, use.end - part.first + 1):
                lines[inner] = _in_quotes(lines[inner], use.written, new)
            continue
        data = lines[number].encode()
        if data[use.start : use.end].decode() != use.written:
            raise NotFollowed(f"runtime/{part.file}.py, line {use.line}: {use.written} stands on several lines")
        lines[number] = (data[: use.start] + new.encode() + data[use.end :]).decode()
    for number, line in enumerate(lines):
        if (found := _DEFINED.search(line)) is not None and found["name"] in changed and _is_first(lines, number):
            lines[number] = f"{line[: found.start('name')]}{changed[found['name']]}{line[found.end('name') :]}"
    assigned = {name for name in here.globals if names[Own(part.file, name)] != name}
    if assigned:
        lines = [_in_global(line, {name: names[Own(part.file, name)] for name in assigned}) for line in lines]
    if part.file == parts.SWITCHES_FILE and without.intersection(part.names):
        lines[0] = lines[0].replace("= True", "= False")
    gone = [(first, last) for first, last, name in part.switched if name in without]
    left_out = {number for first, last in gone for number in range(first, last + 1)}
    for first, last in gone:
        if last < part.last and lines[first - part.first].lstrip().startswith("if "):
            following = lines[last + 1 - part.first]
            lines[last + 1 - part.first] = re.sub(r"^( *)elif ", r"\1if ", following)
    for first, last, name in part.moved:
        for number in range(first, last + 1) if name in without else ():
            lines[number - part.first] = lines[number - part.first].removeprefix("    ")
    return [line for number, line in enumerate(lines, part.first) if number not in left_out]


def _is_first(lines: Sequence[str], number: int) -> bool:
    """Return whether a line is the `def` or `class` of the part itself: none above it is as little indented."""
    indent = len(lines[number]) - len(lines[number].lstrip())
    above = (line.strip() for line in lines[:number] if len(line) - len(line.lstrip()) <= indent)
    return all(not re.match(r"(async )?(def|class)\b", line) for line in above)


def _in_quotes(line: str, written: str, new: str) -> str:
    """Replace a name between the braces of a formatted string."""
    name = re.compile(rf"(?<![\w.]){re.escape(written)}\b")
    return re.sub(r"\{[^{}]*\}", lambda found: name.sub(new, found[0]), line)


def _in_global(line: str, names: Mapping[str, str]) -> str:
    if not line.lstrip().startswith("global "):
        return line
    return re.sub(r"\w+", lambda found: names.get(found[0], found[0]), line)


def _imports(
    room: str, chosen: Sequence[Part], without: frozenset[str]
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the imports from outside and those from other rooms, by the condition that they stand under, "" for none.

    Raises:
        NotFollowed: if two things would have one name in the room.
    """
    names = parts.final_names()
    outside: dict[str, dict[str, str]] = {}
    inside: dict[str, dict[str, set[str]]] = {}
    own = {names[Own(part.file, name)]: (part.file, name) for part in chosen for name in part.names}
    bound: dict[str, object] = {}
    for part in chosen:
        here = parts.file(part.file)
        for use in parts.uses(part, without):
            test = ""
            if isinstance(use.target, Outside):
                name = use.target.name
                guard = here.outside[name][1]
                test = _condition(here.guards[guard]) if guard else ""
                outside.setdefault(test, {})[name] = use.target.statement
            else:
                name, home = names[use.target], use.target.file.split("/")[0]
                if home == room:
                    continue
                test = _needed_under(use.target)
                inside.setdefault(test, {}).setdefault(home, set()).add(name)
            if bound.setdefault(name, use.target) != use.target or name in own:
                raise NotFollowed(f"runtime/{room}: two things are called {name}: {use.target}, {own.get(name)}")
    return (
        {test: sorted(set(statements.values())) for test, statements in outside.items()},
        {
            test: [f"from .{home} import {', '.join(sorted(found))}" for home, found in sorted(by_home.items())]
            for test, by_home in inside.items()
        },
    )


def _needed_under(target: Own) -> str:
    """Return the condition under which another room has a name, "" if always."""
    here = parts.file(target.file)
    guards = {part.guard for part in here.by_name[target.name]}
    return _condition(here.guards[guard]) if 0 not in guards and (guard := min(guards)) else ""


def _in_order(by_file: Mapping[str, Sequence[Part]]) -> list[str]:
    """Return the files of a room such that each stands behind those that it reads while it is imported."""
    return list(TopologicalSorter({name: sorted(_before(name, by_file)) for name in sorted(by_file)}).static_order())


def _before(name: str, by_file: Mapping[str, Sequence[Part]]) -> set[str]:
    """Return the files of a room that a file imports, also by way of files that nothing is taken of."""
    found: set[str] = set()
    waiting = list(parts.file(name).imported)
    seen: set[str] = set()
    while waiting:
        other = waiting.pop()
        if other in seen or other.split("/")[0] != name.split("/")[0]:
            continue
        seen.add(other)
        if other in by_file:
            found.add(other)
        else:
            waiting += parts.file(other).imported
    return found
