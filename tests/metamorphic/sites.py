"""The sites of a file before and after a rewriting, and what became of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rewrite.codemod.passes import rewrite_text
from rewrite.codemod.relocate import relocate
from rewrite.source.resolve import Source
from rewrite.transform import Rewritten
from rewrite.transforms import select

REWRITTEN = "rewritten"
LOST = "lost"


@dataclass(frozen=True, order=True)
class Site:
    """One candidate of one transform."""

    transform: str
    where: str
    """Qualified name of the class or method."""
    label: str
    outcome: str
    """`rewritten`, or the reason of the skip."""
    detail: str = ""


@dataclass(frozen=True)
class Fate:
    """What became of a site of the file as it was."""

    site: Site
    after: str
    """`rewritten`, the reason of a skip, or `lost`."""
    detail: str = ""


def sites_of(source: Source, text: str) -> list[Site]:
    """Run the transforms on a text in the place of a source's own.

    Raises:
        RewriteError: if the engine fails.
    """
    moved = relocate(replace(source, text=text))
    return sorted(_sites(rewrite_text(moved.text, select(), moved.uses)))


def _sites(rewritten: Rewritten) -> Iterable[Site]:
    for report in rewritten.transforms:
        for site in report.rewritten:
            yield Site(report.name, *_split(site), REWRITTEN)
        for skip in report.skipped:
            yield Site(report.name, *_split(skip.site), skip.reason, skip.detail)


def _split(site: str) -> tuple[str, str]:
    where, _, label = site.partition(": ")
    return where, label


def fates(before: Iterable[Site], after: Iterable[Site]) -> list[Fate]:
    """Pair the sites of each transform and place: by label, which names of locals are part of, then in order.

    A rewritten site is paired with a rewritten one first, a skipped one with a skipped one.
    """
    left, right = _by_place(before), _by_place(after)
    found: list[Fate] = []
    for place, sites in sorted(left.items()):
        found += _paired(sites, right.get(place, []))
    return found


def _by_place(sites: Iterable[Site]) -> Mapping[tuple[str, str], list[Site]]:
    places: dict[tuple[str, str], list[Site]] = defaultdict(list)
    for site in sites:
        places[site.transform, site.where].append(site)
    return places


def _paired(before: list[Site], after: list[Site]) -> list[Fate]:
    waiting, free = list(before), list(after)
    found: list[Fate] = []
    for alike in (_same_label_and_outcome, _same_label, _same_outcome, lambda one, other: True):
        for site in list(waiting):
            partner = next((other for other in free if alike(site, other)), None)
            if partner is not None:
                waiting.remove(site)
                free.remove(partner)
                found.append(Fate(site, partner.outcome, partner.detail))
    return found + [Fate(site, LOST) for site in waiting]


def _same_label_and_outcome(one: Site, other: Site) -> bool:
    return _same_label(one, other) and _same_outcome(one, other)


def _same_label(one: Site, other: Site) -> bool:
    return one.label == other.label


def _same_outcome(one: Site, other: Site) -> bool:
    return (one.outcome == REWRITTEN) == (other.outcome == REWRITTEN)
