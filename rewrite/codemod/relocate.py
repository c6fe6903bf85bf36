"""Makes a modeling file work outside the transformers package, before any transform touches it.

Relative imports of a file of an installed package become absolute. In a file of transformers, classes that it would
take for custom code say that they are not (it would otherwise skip the conversion of their checkpoints). Sub-models
that a file builds through an Auto class become its own; a header names the origin and keeps the licence notice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from rewrite import __version__
from rewrite.analysis.tree.module import Module, dotted
from rewrite.source.resolve import Source

HEADER_MARK = "# Rewritten by hf-rewrite "
HEADER_LOCK = (
    "# This file is yours: review it, edit it, ship it. rewrite.lock lists what was changed and what was skipped."
)


@dataclass(frozen=True)
class Relocated:
    """A modeling file that works in any folder."""

    text: str
    uses: tuple[str, ...]
    """What it refers to of the runtime, as `room.function`."""


def relocate(source: Source) -> Relocated:
    """Return the text of `source`, independent of the folder it came from.

    Raises:
        libcst.ParserSyntaxError: if the text does not parse.
    """
    tree = cst.parse_module(source.text)
    mover = _Mover(Module(tree), source)
    moved = tree.visit(mover)
    return Relocated(_header(source) + _without_banner(moved.code), tuple(sorted(mover.uses)))


def is_rewritten(text: str) -> bool:
    """Return whether `text` is an output of this tool."""
    return HEADER_MARK in text[:2000]


class _Mover(cst.CSTTransformer):
    def __init__(self, module: Module, source: Source):
        super().__init__()
        self.module = module
        self.source = source
        self.uses: set[str] = set()

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> cst.ImportFrom:
        level = len(updated_node.relative)
        name = self.source.imported_as
        if not level or name is None:  # the neighbours of a file that nothing installs come along
            return updated_node
        package = name.split(".")[:-level]
        if updated_node.module is not None:
            package += dotted(updated_node.module).split(".")
        absolute = cst.parse_expression(".".join(package))
        if not isinstance(absolute, (cst.Name, cst.Attribute)):
            raise TypeError(f"not a module name: {package}")
        spaced = updated_node.with_changes(relative=(), module=absolute)
        if spaced.whitespace_after_from.empty:
            spaced = spaced.with_changes(whitespace_after_from=cst.SimpleWhitespace(" "))
        return spaced

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.ClassDef:
        imported = [self.module.qualified(base.value) for base in original_node.bases]
        foreign = [name for name in imported if name.endswith("PreTrainedModel") and name not in self.module.classes]
        if self.source.module is None or not foreign:
            return updated_node
        self.uses.add("OriginalCheckpoint")
        own = cst.Arg(cst.Name("OriginalCheckpoint"))
        return updated_node.with_changes(bases=[own, *updated_node.bases])

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        function = original_node.func
        if not isinstance(function, cst.Attribute) or function.attr.value != "from_config":
            return updated_node
        if not self.module.qualified(function.value).rsplit(".", 1)[-1].startswith("AutoModel"):
            return updated_node
        self.uses.add("from_config")
        module = cst.parse_expression("f(module=__name__)")
        if not isinstance(module, cst.Call):
            raise TypeError("not a call")
        return updated_node.with_changes(
            func=cst.Name("from_config"), args=[cst.Arg(function.value), *updated_node.args, module.args[0]]
        )


def shown_name(path: Path) -> str:
    """Return the name of a file as it may stand in a comment and in a docstring."""
    return re.sub(r"[^\w .+-]", "_", path.name)


def _header(source: Source) -> str:
    origin = shown_name(source.path)
    if source.module is not None:
        origin = f"transformers {source.transformers_version}, {'/'.join(source.module.split('.')[1:])}.py"
    elif source.inside is not None:
        origin = f"{source.inside.replace('.', '/')}.py"
    lines = [
        f"{HEADER_MARK}{__version__} from {origin}",
        f"# (sha256 {source.sha256}).",
        HEADER_LOCK,
        "#",
    ]
    newline = "\r\n" if "\r\n" in source.text else "\n"
    return newline.join(lines) + newline


def _without_banner(text: str) -> str:
    """Drop what stands before the licence notice in a generated file: the warning that edits would be overwritten."""
    lines = text.splitlines(keepends=True)
    comments = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    licence = next((i for i, line in enumerate(lines[:comments]) if "copyright" in line.lower()), 0)
    return "".join(lines[licence:])
