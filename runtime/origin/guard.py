"""Refuses to import a rewritten package under a transformers that it was not made from.

A stale copy of a modeling file may still run and compute something else: upstream fixes bugs, and the helpers that a
file calls move with it. What only looks different (comments, docstrings, annotations) is no difference.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import transformers

from . import definitions

ENVIRONMENT_VARIABLE = "REWRITE_IGNORE_TRANSFORMERS_VERSION"


class TransformersMoved(ImportError):
    """The installed transformers is not the one that the package was made from."""

    def __init__(self, package: str, what: str, command: str):
        super().__init__(
            f"{package} does not fit the installed transformers {transformers.__version__}: {what}. "
            f"Make it anew: {command}   (or set {ENVIRONMENT_VARIABLE}=1 to import it as it is)"
        )


@dataclass(frozen=True)
class _Made:
    """What a package was made from."""

    package: str
    module: str | None
    sha256: str
    version: str
    command: str
    code: str = ""
    called: Mapping[str, Sequence[str]] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)

    def moved(self, what: str) -> TransformersMoved:
        """Return the error."""
        return TransformersMoved(self.package, what, self.command)


@contextlib.contextmanager
def made_from(
    *,
    package: str,
    module: str | None,
    sha256: str,
    version: str,
    command: str,
    code: str = "",
    called: Mapping[str, Sequence[str]] | None = None,
    replaced: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Check the installed transformers, then turn a failing import inside the block into one clear error.

    Args:
        package: name of the rewritten package.
        module: dotted name of the original modeling file inside transformers; None for a file from elsewhere.
        sha256: of the bytes of that file when the package was made.
        version: of transformers at that time.
        command: makes the package anew.
        code: digest of that file's code (`definitions.of_module`).
        called: functions of transformers that the file calls, with the keywords that it gives.
        replaced: digests of the functions of transformers whose work the package does itself.

    Raises:
        TransformersMoved: if that file is gone or computes something else, a function no longer takes what it is
            given, or a name imported in the block is gone.
    """
    made = _Made(package, module, sha256, version, command, code, called or {}, replaced or {})
    if os.environ.get(ENVIRONMENT_VARIABLE) != "1":
        _check(made)
    try:
        yield
    except ImportError as error:
        if not (error.name or "").startswith("transformers"):
            raise
        raise made.moved(str(error)) from error


def _check(made: _Made) -> None:
    root = Path(transformers.__file__).parent
    if made.module is not None:
        _check_original(made, made.module, root)
    if transformers.__version__ == made.version or not made.version:
        return
    try:
        for problem in definitions.misfits(root, made.called):
            raise made.moved(problem)
        now = definitions.of_functions(root, made.replaced)
    finally:
        definitions.forget()
    other = sorted(name.replace(":", ".") for name, digest in made.replaced.items() if now.get(name) != digest)
    if other:
        warnings.warn(
            f"{made.package} was made from transformers {made.version} and does the work of {', '.join(other)} "
            f"itself, which transformers {transformers.__version__} does differently. To be sure: {made.command}",
            stacklevel=5,
        )


def _check_original(made: _Made, module: str, root: Path) -> None:
    path = root.joinpath(*module.split(".")[1:]).with_suffix(".py")
    if not path.is_file():
        raise made.moved(f"it has no {module}, which the package was made from")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() == made.sha256:
        return
    if definitions.of_module(data.decode("utf-8", "replace")) != made.code:
        raise made.moved(f"its {module} is not the one of {made.version} that the package was made from")
