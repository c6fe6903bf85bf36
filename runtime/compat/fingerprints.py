"""Fingerprints of what a file takes from transformers: cheap enough to be compared at every import.

A definition is found in the text of its file and read alone: parsing the files whole would take seconds. Of a function
count its parameters and its code; of a class the parameters of the methods that are used, its fields, and its code
where that is short. What only looks different (`digests`) is no difference.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from .digests import of_nodes

SHORT = 150
"""Lines up to which the code of a class counts: large ones change with every release, mostly in what is not used."""
OTHER_PARAMETERS, OTHER_CODE, GONE = "other parameters of", "other code in", "there is no"
_DIGITS = 8
_NO_CODE = "-"
_END = re.compile(r"\n[^\s#)\]}]")
"""Where the next statement begins."""
_METHOD = re.compile(r"\n    (?:async )?def (\w+)")
_LONGEST_HEAD = 4000
_CLASS = re.compile(r"^class ", re.MULTILINE)


class Files:
    """The texts of transformers' files, each read once."""

    def __init__(self, root: Path):
        self.root = root
        self._texts: dict[str, str] = {}

    def definition(self, file: str, name: str) -> str | None:
        """Return the text of a function or class at the top of a file, decorators included; None if there is none."""
        if file not in self._texts:
            path = self.root / file
            self._texts[file] = path.read_text("utf-8", "replace") if path.is_file() else ""
        text = self._texts[file]
        starts = [text.find(f"\n{kind} {name}{mark}") + 1 for kind in ("class", "def") for mark in "(:"]
        if not (start := max(starts)):
            return None
        end = _END.search(text, start)
        body = text[start : end.start() if end else len(text)].rstrip()
        return "\n".join([*reversed(list(_decorators(text[max(0, start - 4000) : start]))), body])


def _decorators(before: str) -> Iterator[str]:
    """Yield the lines that stand right above a definition, the last first."""
    for line in reversed(before.split("\n")[:-1]):
        if not line.strip() or not (line.startswith(("@", " ", ")"))):
            return
        yield line


def fingerprint(text: str, used: Collection[str]) -> str:
    """Return digests of a definition's text, of its parameters and of its code, and the methods of `used` it has."""
    methods = sorted({"__init__", *used} & {*_METHOD.findall(text)}) if _is_class(text) else []
    parameters, code = _parts(text, methods)
    return " ".join([_digest(text), parameters, code or _NO_CODE, *methods])


def changes(files: Files, taken: Mapping[str, str], elsewhere: Callable[[Files, str], str | None]) -> dict[str, str]:
    """Return what became of each of `taken` that is not as it was, in words.

    Args:
        files: of the transformers that it is compared with.
        taken: file, name there and `fingerprint`, by the module and name that a package imports.
        elsewhere: returns the text of a definition that moved to another file; None if it is gone.
    """
    found = {}
    for name, fingerprint in taken.items():
        file, inner, whole, parameters, code, *methods = fingerprint.split()
        text = files.definition(file, inner) or elsewhere(files, name)
        if text is None:
            found[name] = GONE
        elif _digest(text) != whole:
            now = _parts(text, methods)
            if now != (parameters, code if code != _NO_CODE else ""):
                found[name] = OTHER_PARAMETERS if now[0] != parameters else OTHER_CODE
    return found


def misfits(files: Files, taken: Mapping[str, str], called: Mapping[str, Sequence[str]]) -> list[str]:
    """Return in words which of the functions `called` take no such keyword any more."""
    found = []
    for name, given in called.items():
        file, inner = taken[name].split()[:2] if name in taken else ("", "")
        text = files.definition(file, inner) if file else None
        node = _parsed(text) if text is not None else None
        if not isinstance(node, ast.FunctionDef) or node.decorator_list or node.args.kwarg is not None:
            continue  # gone, or what it takes is not written here
        missing = sorted({*given} - {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)})
        if missing:
            found.append(f"{name.replace(':', '.')} takes no {', '.join(missing)}")
    return found


def _is_class(text: str) -> bool:
    return _CLASS.search(text) is not None


def _parsed(text: str) -> ast.stmt | None:
    try:
        return ast.parse(text).body[0]
    except (SyntaxError, IndexError):
        return None  # a text that was not cut where the definition ends


def _parts(text: str, methods: Sequence[str]) -> tuple[str, str]:
    """Return the digests of the parameters and of the code of a definition; a long class is not parsed."""
    is_class = _is_class(text)
    short = not is_class or text.count("\n") < SHORT
    node = _parsed(text) if short else None
    code = of_nodes([node])[:_DIGITS] if node is not None else "" if is_class else _digest(text)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return _digest(_signature(node)), code
    annotated = [line.target for line in getattr(node, "body", ()) if isinstance(line, ast.AnnAssign)]
    fields = [target.id for target in annotated if isinstance(target, ast.Name)]
    starts = {found[1]: found.start() for found in _METHOD.finditer(text)} if methods else {}
    heads = [_head(text[starts[name] : starts[name] + _LONGEST_HEAD]) if name in starts else "" for name in methods]
    return _digest("\n".join([*heads, *fields])), code


def _head(text: str) -> str:
    """Return the signature of the function that a text begins with, whose end is not known."""
    lines: list[str] = []
    for line in text.strip().split("\n"):
        lines.append(line)
        ends = line.partition("#")[0].rstrip().endswith(":")
        head = _parsed("\n".join([*lines[:-1], f"{line.partition('#')[0]} pass"]).strip()) if ends else None
        if isinstance(head, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return _signature(head)
    return ""


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the parameters of a function, without annotations, each default as `=`."""
    given = node.args
    positional = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    first = len(positional) - len(given.defaults)
    parts = [f"{name}=" if number >= first else name for number, name in enumerate(positional)]
    parts += [f"*{given.vararg.arg}" if given.vararg else "*"]
    keywords = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    parts += [argument.arg if default is None else f"{argument.arg}=" for argument, default in keywords]
    return f"{node.name}({', '.join([*parts, *([f'**{given.kwarg.arg}'] if given.kwarg else [])])})"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
