"""What the site needs beyond the pages of this folder: README as its first page, and CONTRIBUTING."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files of the repository's root by their names on the site."""
_CODE = re.compile(r"(?<!!)\[([^\[\]]*)\]\((?!docs/|#|[a-z]+://|README|CONTRIBUTING|CHANGELOG)[^)\s]+\)")
_TARGET = re.compile(r"\]\(([^)\s#]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie in the repository's root."""
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = _CODE.sub(r"`\1`", text)  # the site does not hold the code: it is named only
        files.append(File.generated(config, name, content=_TARGET.sub(_moved, text)))
    return files


def _moved(target: re.Match[str]) -> str:
    """Return the target of a link as it is from the site's first page."""
    return f"]({PAGES.get(target[1], target[1].removeprefix('docs/'))}"
