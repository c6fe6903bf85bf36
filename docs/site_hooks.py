"""What the site needs beyond the pages of this folder: README as its first page, and a search without a network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files of the repository's root by their names on the site."""
_CODE = re.compile(r"(?<!!)\[([^\[\]]*)\]\((?!docs/|#|[a-z]+://|README|CONTRIBUTING|CHANGELOG)[^)\s]+\)")
_TARGET = re.compile(r"\]\(([^)\s#]+)")
_INLINE = re.compile(r"(<code>)([^<\n]*)(</code>)")
_OPTION = re.compile(r"(?<!\S)--[a-z][a-z-]*")
_FETCHED = re.compile(r"<(?:script|img|iframe)\b[^>]*\bsrc=\"?https?:|<link\b[^>]*rel=\"?stylesheet\"?[^>]*https?:")
_SHIM = "https://unpkg.com/iframe-worker/shim"
"""What the theme loads for the search of a page from a disk."""


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


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Keep the dashes of an option with its name at the end of a line."""
    kept = r'<span class="option">\g<0></span>'
    return _INLINE.sub(lambda code: code[1] + _OPTION.sub(kept, code[2]) + code[3], html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Take the search's worker from the site, and see that a page fetches nothing from elsewhere.

    Raises:
        PluginError: if one does.
    """
    output = output.replace(_SHIM, "search-worker.js")
    if found := _FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri} fetches from elsewhere: {found[0]}")
    return output
