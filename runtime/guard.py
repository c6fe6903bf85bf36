"""Refuses to import a rewritten package under a transformers that it was not made from.

A stale copy of a modeling file may still run and compute something else: upstream fixes bugs, and the helpers that a
file calls move with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import transformers

ENVIRONMENT_VARIABLE = "REWRITE_IGNORE_TRANSFORMERS_VERSION"


class TransformersMoved(ImportError):
    """The installed transformers is not the one that the package was made from."""

    def __init__(self, package: str, what: str, command: str):
        super().__init__(
            f"{package} does not fit the installed transformers {transformers.__version__}: {what}. "
            f"Make it anew: {command}   (or set {ENVIRONMENT_VARIABLE}=1 to import it as it is)"
        )


@contextlib.contextmanager
def made_from(*, package: str, module: str | None, sha256: str, version: str, command: str) -> Iterator[None]:
    """Check the installed transformers, then turn a failing import inside the block into one clear error.

    Args:
        package: name of the rewritten package.
        module: dotted name of the original modeling file inside transformers; None for a file from elsewhere.
        sha256: of the bytes of that file when the package was made.
        version: of transformers at that time.
        command: makes the package anew.

    Raises:
        TransformersMoved: if that file is gone or different, or a name imported in the block is gone.
    """
    ignored = os.environ.get(ENVIRONMENT_VARIABLE) == "1"
    if module is not None and not ignored:
        _check(package, module, sha256, version, command)
    try:
        yield
    except ImportError as error:
        if not (error.name or "").startswith("transformers"):
            raise
        raise TransformersMoved(package, str(error), command) from error


def _check(package: str, module: str, sha256: str, version: str, command: str) -> None:
    root = Path(transformers.__file__).parent
    path = root.joinpath(*module.split(".")[1:]).with_suffix(".py")
    if not path.is_file():
        raise TransformersMoved(package, f"it has no {module}, which the package was made from", command)
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        what = f"its {module} is not the one of {version} that the package was made from"
        raise TransformersMoved(package, what, command)
    if transformers.__version__.split(".")[:2] != version.split(".")[:2]:
        warnings.warn(
            f"{package} was made from transformers {version} and {transformers.__version__} is installed; "
            f"{module} is the same in both, what it imports may not be. To be sure: {command}",
            stacklevel=4,
        )
