"""Runs transforms over a modeling file: candidates → match → edits, again until nothing matches.

The engine is the only place that changes a tree. It accounts for every candidate, refuses an edit that would drop a
comment or call a name that the file has for something else, puts imports in once at the end, and takes out what the
rewriting left unused.

Reading on: `rewrite/codemod/build.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import libcst as cst

from rewrite import gc_paused
from rewrite.analysis.patterns.as_written import is_runtime_name
from rewrite.analysis.tree.module import Module, walk
from rewrite.analysis.tree.nodes import replace_nodes
from rewrite.codemod import dead_code, imports
from rewrite.codemod.decode_loops import with_loops
from rewrite.errors import RewriteError, TransformError
from rewrite.operators import module_of
from rewrite.transform import (
    COMMON_REASONS,
    Candidate,
    Edit,
    Found,
    Rewritten,
    Skip,
    SkippedSite,
    Transform,
    TransformReport,
    order,
)

MAX_PASSES = 12


@dataclass
class _Pass:
    """The edits accepted in one pass and the places they cover."""

    module: Module
    edits: dict[int, tuple[cst.CSTNode, ...]] = field(default_factory=dict)
    covered: set[int] = field(default_factory=set)
    sites: list[str] = field(default_factory=list)
    skipped: list[SkippedSite] = field(default_factory=list)
    uses: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)

    def accept(self, site: str, found: Found) -> None:
        """Take over the edits of one site, or leave it to the next pass where it touches another site's edit."""
        olds = [edit.old for edit in found.edits]
        if any(self._touched(old) for old in olds):
            return
        for edit in found.edits:
            self.edits[id(edit.old)] = tuple(node.deep_clone() for node in edit.new)  # no node stands in two places
            self.covered.add(id(edit.old))
            self.covered.update(id(above) for above in self.module.ancestors(edit.old))
        self.sites.append(site)
        self.uses.extend(found.uses)
        self.imports.extend(found.imports)

    def _touched(self, old: cst.CSTNode) -> bool:
        return id(old) in self.covered or any(id(above) in self.edits for above in self.module.ancestors(old))


@gc_paused.paused()
def rewrite_text(text: str, transforms: Sequence[Transform], already_used: Sequence[str] = ()) -> Rewritten:
    """Apply `transforms` to the text of a modeling file and report what happened at every candidate.

    `already_used` names what the text uses of the runtime without importing it yet, as `Found.uses` does.

    Raises:
        TransformError: if a transform keeps finding something to do.
        TransformError: if a transform fails at a site.
        libcst.ParserSyntaxError: if `text` does not parse.
    """
    before = Module(cst.parse_module(text))
    module, reports, uses, lines = before, [], set(already_used), set[str]()
    for transform in order(transforms):
        module, report, used, needed = _converge(transform, module)
        reports.append(report)
        uses |= used
        lines |= needed
    if not uses and not any(report.rewritten for report in reports):
        return Rewritten(text, tuple(reports))
    uses = {use for use in uses if module.references.get(use)}  # a later transform replaces some calls
    tree = dead_code.without_unused(module, before)
    called = Module(tree).references
    uses = {use for use in uses if called.get(use, 0)}  # a later transform may have replaced a call
    tree = imports.with_lines(tree, sorted(lines))
    tree = imports.with_runtime(tree, sorted(uses))
    rewritten = tree.code
    compile(rewritten, "<rewritten>", "exec", dont_inherit=True)
    return with_loops(Rewritten(rewritten, tuple(reports), tuple(sorted(uses))), transforms)


def _converge(transform: Transform, module: Module) -> tuple[Module, TransformReport, set[str], set[str]]:
    sites: list[str] = []
    uses, lines = set[str](), set[str]()
    for _ in range(MAX_PASSES):
        current = _one_pass(transform, module)
        sites += current.sites
        uses |= set(current.uses)
        lines |= set(current.imports)
        if not current.edits:
            return module, TransformReport(transform.name, tuple(sites), tuple(current.skipped)), uses, lines
        module = Module(_apply(module.tree, current))
    raise TransformError(transform.name, "the whole file", f"it still changes the file after {MAX_PASSES} passes")


def _one_pass(transform: Transform, module: Module) -> _Pass:
    current = _Pass(module)
    for candidate in transform.candidates(module):
        outcome = _outcome(transform, candidate, module)
        if isinstance(outcome, Found):
            current.accept(candidate.site, outcome)
        else:
            current.skipped.append(SkippedSite(candidate.site, outcome.reason, outcome.detail))
    return current


def _outcome(transform: Transform, candidate: Candidate, module: Module) -> Found | Skip:
    try:
        outcome = transform.match(candidate, module)
    except (RewriteError, RecursionError):  # a file that is nested too deeply is no fault of the rule
        raise
    except Exception as error:  # any failure inside a rule is a bug at a named site, never "unchanged"
        raise TransformError(transform.name, candidate.site, f"{type(error).__name__}: {error}") from error
    if isinstance(outcome, Skip):
        if outcome.reason not in {*transform.reasons, *COMMON_REASONS}:
            raise TransformError(transform.name, candidate.site, f"undeclared reason '{outcome.reason}'")
        return outcome
    for use in outcome.uses:
        module_of(
            use
        )  # raises where the runtime has no such thing: a later pass would take it for a call that is gone
    if (taken := _taken(outcome, module)) is not None:
        return Skip("name_taken", taken)
    if (lost := _lost_comments(outcome.edits)) is not None:
        return Skip("loses_comment", lost)
    return outcome


def _taken(found: Found, module: Module) -> str | None:
    """Return a name that the new code has of the runtime, and that means something else in the file or around it."""
    olds = [edit.old for edit in found.edits]
    around = [node for old in olds for node in (old, *module.ancestors(old)) if isinstance(node, cst.FunctionDef)]
    return next((name for name in found.uses if not is_runtime_name(name, module, *around)), None)


def _lost_comments(edits: Sequence[Edit]) -> str | None:
    before = Counter(_comments([edit.old for edit in edits]))
    after = Counter(_comments([node for edit in edits for node in edit.new]))
    missing = before - after
    return next(iter(sorted(missing)), None)


def _comments(nodes: Sequence[cst.CSTNode]) -> list[str]:
    return [node.value for top in nodes for node in walk(top) if isinstance(node, cst.Comment)]


def _apply(tree: cst.Module, current: _Pass) -> cst.Module:
    replaced = replace_nodes(tree, current.edits, current.covered)
    if not isinstance(replaced, cst.Module):
        raise TypeError("an edit replaced the module itself")
    return replaced
