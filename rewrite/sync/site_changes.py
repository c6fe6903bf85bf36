"""What became of every place that a rule rewrote: still rewritten, newly, lost, or no longer there upstream."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rewrite.package.lock import Lock
from rewrite.transform import SkippedSite, TransformReport

NO_RULE = "this version of hf-rewrite has no such rule"
UNSEEN = "the place is there and is not recognised any more"
_SPLITS = {"chunk", "split", "unbind", "tensor_split"}
_UPSTREAM_CALLS = {"fuse_rms_norm": {"rms_norm", "RMSNorm"}, "fuse_layer_norm": {"layer_norm", "LayerNorm"}}
_PACKING = {"fuse_qkv": "projects queries, keys and values at once", "fuse_gate_up": "projects gate and up at once"}


@dataclass(frozen=True)
class Lost:
    """A place that was rewritten, is still there, and is rewritten no longer."""

    site: str
    why: str


@dataclass(frozen=True)
class RuleChange:
    """What one rule does now, against what it did when the package was made."""

    rule: str
    unchanged: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    lost: tuple[Lost, ...] = ()
    gone: tuple[str, ...] = ()
    """Places whose code upstream no longer has, so that there is nothing to rewrite."""
    adopted: tuple[Lost, ...] = ()
    """Places where upstream now does itself what the rule did; `why` says how."""

    @property
    def applied(self) -> int:
        """Number of places that are rewritten now."""
        return len(self.unchanged) + len(self.new)

    @property
    def moved(self) -> bool:
        """Whether anything is otherwise than before."""
        return bool(self.new or self.lost or self.gone or self.adopted)


def rule_changes(lock: Lock, reports: Sequence[TransformReport], before: str | None, after: str) -> list[RuleChange]:
    """Compare the sites of a lock with those of a new report, rule by rule, sorted by name.

    Args:
        lock: what the package was made with.
        reports: what the rules did now.
        before: text of the original that the package was made from; None where it was not kept.
        after: text of the original now.
    """
    now = {report.name: report for report in reports}
    then = {report.name: report for report in lock.transforms}
    file = _File(before, after)
    return [_compared(name, then.get(name), now.get(name), file) for name in sorted({*now, *lock.rewritten})]


def _compared(name: str, then: TransformReport | None, now: TransformReport | None, file: _File) -> RuleChange:
    old = {_key(site): site for site in (then.rewritten if then else ())}
    new = {_key(site): site for site in (now.rewritten if now else ())}
    skipped = {_key(skip.site): skip for skip in (now.skipped if now else ())}
    newly_skipped = {*skipped} - {*old} - {_key(skip.site) for skip in (then.skipped if then else ())}
    lost, gone, adopted = [], [], []
    for key, site in old.items():
        if key in new:
            continue
        why = NO_RULE if now is None else _why(site, skipped.get(key), file)
        if (how := file.adopted(name, site)) is not None:
            adopted.append(Lost(site, how))
        elif why is not None:
            lost.append(Lost(site, why))
        elif newly_skipped and not file.has_owner(site):
            skip = skipped[min(newly_skipped)]
            lost.append(Lost(site, f"it may be {skip.site} now, which is skipped: {skip.reason}"))
        else:
            gone.append(site)
    return RuleChange(
        name,
        unchanged=tuple(site for key, site in new.items() if key in old),
        new=tuple(site for key, site in new.items() if key not in old),
        lost=tuple(lost),
        gone=tuple(gone),
        adopted=tuple(adopted),
    )


def _why(site: str, skip: SkippedSite | None, file: _File) -> str | None:
    """Return why a place is not rewritten any more, None if it is no longer there."""
    if skip is not None:
        return f"{skip.reason} ({skip.detail})" if skip.detail else skip.reason
    return UNSEEN if file.has(site) else None


class _File:
    """The original then and now, asked for the places that sites name."""

    def __init__(self, before: str | None, after: str):
        self._before = dict(_definitions(before)) if before is not None else None
        self._after = dict(_definitions(after))

    def has_owner(self, site: str) -> bool:
        """Return whether the class or function of a site is there now."""
        return site.partition(": ")[0] in self._after

    def has(self, site: str) -> bool:
        """Return whether the code of a site is there now; where its label is no code, whether its owner is."""
        owner, _, label = site.partition(": ")
        if owner not in self._after:
            return False
        pieces = _pieces(label)
        if self._before is not None and not _holds(self._before.get(owner), pieces):
            return True
        return _holds(self._after[owner], pieces)

    def adopted(self, rule: str, site: str) -> str | None:
        """Return in words how upstream does itself what `rule` did at a site, None if it does not."""
        owner = site.partition(": ")[0]
        present = self._after.get(owner)
        fresh = [node for name, node in self._after.items() if self._before is None or name not in self._before]
        places = [present] if present is not None else fresh
        old = self._before.get(owner) if self._before is not None else None
        return next((how for node in places if (how := _adoption(rule, node, old)) is not None), None)


def _adoption(rule: str, now: ast.AST, then: ast.AST | None) -> str | None:
    added = _calls(now) - (_calls(then) if then is not None else set())
    if rule in _PACKING and added & _SPLITS:
        return f"upstream {_PACKING[rule]}"
    if used := added & _UPSTREAM_CALLS.get(rule, set()):
        return f"upstream calls {min(used)}"
    if rule == "native_gqa" and any(isinstance(n, ast.keyword) and n.arg == "enable_gqa" for n in ast.walk(now)):
        return "upstream asks for grouped-query attention"
    return None


def _calls(top: ast.AST) -> set[str]:
    functions = [node.func for node in ast.walk(top) if isinstance(node, ast.Call)]
    names = {function.attr for function in functions if isinstance(function, ast.Attribute)}
    return names | {function.id for function in functions if isinstance(function, ast.Name)}


def _definitions(text: str) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.parse(text.removeprefix("\ufeff")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{n.name}", n) for n in node.body if isinstance(n, ast.FunctionDef))


def _holds(node: ast.AST | None, pieces: Iterable[str]) -> bool:
    text = _plain(ast.unparse(node)) if node is not None else ""
    return all(piece in text for piece in pieces)


def _pieces(label: str) -> list[str]:
    """Return the pieces of code in a label: `q_proj, k_proj` are two, an expression is one."""
    label = re.sub(r" #\d+$", "", label)
    names = label.split(", ")
    return names if all(name.isidentifier() for name in names) else [_plain(label)]


def _key(site: str) -> str:
    """Return a site without what a formatter may change."""
    return _plain(site)


def _plain(code: str) -> str:
    return re.sub(r",(?=[)\]}])", "", re.sub(r"\s+", "", code)).replace('"', "'")
