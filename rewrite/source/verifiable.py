"""Whether a source can be verified here: a verification runs the original with the installed transformers."""

from __future__ import annotations

from dataclasses import replace

from rewrite.errors import UsageError
from rewrite.source.installed import find_transformers
from rewrite.source.resolve import Source, of_library


def as_installed(source: Source) -> Source:
    """Return `source` as the installed transformers has it, where it was read from a wheel or a folder.

    Raises:
        UsageError: if another version is installed, or the same with another text of the file.
    """
    installed, version = find_transformers(), source.transformers_version
    if installed is None or source.transformers_root is None or version is None:
        return source
    if source.transformers_root.resolve() == installed.root.resolve():
        return source
    found = installed.version
    if found == version:
        if source.module is None:
            return source
        own = of_library("/".join(source.module.split(".")[1:]) + ".py", installed)
        if own is not None and own.sha256 == source.sha256:
            return replace(own, target=source.target, model_type=source.model_type, checkpoint=source.checkpoint)
        found += " with another text of this file"
    raise UsageError(
        f"'{source.target}' of transformers {version} cannot be verified here, where transformers {found} is "
        f"installed: pip install transformers=={version} first, or write it with --no-verify, and `rewrite verify` "
        "it there."
    )
