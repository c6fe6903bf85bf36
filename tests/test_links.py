"""Links between the repository's pages lead to files and headings that are there, on GitHub and on the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
CODE = re.compile(r"^(`{3,}).*?^\1|`[^`\n]*`", re.S | re.M)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.M)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings; the site's are made alike (mkdocs.yml)."""
    found: set[str] = set()
    for heading in HEADING.findall(re.sub(r"^(`{3,}).*?^\1", "", text, flags=re.S | re.M)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(next(name for name in (slug, *(f"{slug}-{n}" for n in range(1, 99))) if name not in found))
    return found


def dead(page: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere."""
    found = []
    for target in LINK.findall(CODE.sub("", text)):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        there = path.exists()
        if there and anchor:
            there = anchor in anchors(text if path == page else path.read_text(encoding="utf-8"))
        if not there:
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    assert dead(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_to_a_page_has_its_title(page: Path) -> None:
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    pages = (ROOT / "docs").glob("*.md")
    titles = {path.name: HEADING.findall(path.read_text(encoding="utf-8"))[0] for path in pages}
    linked = re.findall(r"(?<!!)\[([^\[\]]+)\]\((?:docs/)?([\w.-]+\.md)\)", text)
    assert [said for said, name in linked if name in titles and said.lower() != titles[name].lower()] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](gone.md)", ["gone.md"]),
        ("[a](amd.md#gone)", ["amd.md#gone"]),
        ("[a](#gone)", ["#gone"]),
        ("[![a](gone.png)](amd.md)", ["gone.png"]),
        ("# Sums, of *several*\n[a](#sums-of-several) [b](amd.md) `[c](gone.md)` [d](https://example.com/x)", []),
        ("# A\n# A\n[a](#a-1)", []),
    ],
)
def test_a_dead_link_is_found(text: str, expected: list[str]) -> None:
    assert dead(ROOT / "docs" / "fp8.md", text) == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_says_what_it_leads_to(page: Path) -> None:
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    assert re.findall(r"\[[\w/-]+\.md\]\(docs/[^)]+\)|\[[\w-]+\.md\]\([^)]+\)(?<!CONTRIBUTING\.md\))", text) == []


NEXT = re.compile(r"^Reading on: `([\w./]+)`\.$", re.M)
PATHS = re.compile(r"`((?:rewrite|runtime|transforms)/[\w/]+(?:\.py)?)`")


def test_fifteen_files_explain_the_project() -> None:
    """Each names the next: README links to the architecture, which begins the chain."""
    assert "(docs/architecture.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    read, path = ["README.md"], "docs/architecture.md"
    while path:
        assert path not in read
        read.append(path)
        found = NEXT.search((ROOT / path).read_text(encoding="utf-8"))
        path = found[1] if found else ""
    assert len(read) == 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = PATHS.findall(page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists() and not (ROOT / f"{path}.py").exists()] == []
