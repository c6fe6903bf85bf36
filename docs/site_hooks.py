"""What the site needs beyond the pages of this folder: README as its first page, and CONTRIBUTING."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
"""Files of the repository's root by their names on the site."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie in the repository's root."""
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_LINK.sub(_moved, text)))
    return files


def _moved(link: re.Match[str]) -> str:
    """Return a link as it is from the site's first page: code, which the site does not hold, is named only."""
    image, label, target = link.groups()
    path, _, anchor = target.partition("#")
    if "://" in target or not path:
        return link[0]
    if path in PAGES or path.startswith("docs/"):
        name = PAGES.get(path, path.removeprefix("docs/"))
        return f"{image}[{label}]({name}{'#' * bool(anchor)}{anchor})"
    return label if label.startswith("`") else f"`{label}`"
