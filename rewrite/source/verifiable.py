"""Whether a source can be verified here: a verification runs the original with the installed transformers."""

from __future__ import annotations

from dataclasses import replace

from rewrite.errors import NotInstalled
from rewrite.source.installed import find_transformers
from rewrite.source.resolve import Source, of_library


def as_installed(source: Source) -> Source:
    """Return `source` as the installed transformers has it, where it was read from a wheel or a folder.

    Raises:
        NotInstalled: if another version is installed, or the same with another text of the file.
    """
    installed, version = find_transformers(), source.transformers_version
    if installed is None or source.transformers_root is None or version is None:
        return source
    if source.transformers_root.resolve() == installed.root.resolve():
        return source
    if installed.version != version:
        raise NotInstalled(source.target, version, installed.version)
    if source.module is None:
        return source
    own = of_library("/".join(source.module.split(".")[1:]) + ".py", installed)
    if own is None or own.sha256 != source.sha256:
        raise NotInstalled(source.target, version, f"{installed.version} with another text of this file")
    return replace(own, target=source.target, model_type=source.model_type, checkpoint=source.checkpoint)
