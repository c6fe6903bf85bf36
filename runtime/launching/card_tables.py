"""What was measured on a card, or compiled for one: in the user's cache, and in packages that ship their own.

`rewrite tune` and `rewrite compile` write to `$XDG_CACHE_HOME/hf-rewrite` (`~/.cache/hf-rewrite`), or to the folder
that `REWRITE_TABLES` names; with `--ship` to the package, which says so when it is imported (`ship`). What the user's
own folder says of a chip goes before what a package says.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

VARIABLE = "REWRITE_TABLES"
TUNED, GEMM, ATTENTION, KERNELS, TUNABLE_OP = "tuned.json", "gemm.json", "attention.json", "kernels", "tunableop.csv"

_shipped: list[Path] = []
_changes = 0
"""How often tables were to be read anew."""
_Read = TypeVar("_Read", bound=Callable[..., Any])


def folder() -> Path:
    """Return the user's folder; it need not be there, and is not where a user has no home."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    home = Path(os.path.expanduser("~"))  # "~" itself without HOME and an entry in the list of users
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "hf-rewrite"


def ship(package: Path) -> None:
    """Let the folder of a package have its say, if it has tables or kernels."""
    if package not in _shipped and any((package / name).exists() for name in (TUNED, GEMM, ATTENTION, KERNELS)):
        _shipped.append(package)
        forget()


def folders() -> list[Path]:
    """Return where tables lie, those that go before others last."""
    return [*_shipped, folder()]


def read(name: str) -> dict[str, Any]:
    """Return a table by chip, `{"NVIDIA H200": {…}}`, of all folders together.

    Raises:
        ValueError: if one is no JSON.
    """
    found: dict[str, Any] = {}
    for place in folders():
        if os.path.isfile(path := place / name):  # no error of a home that may not be read
            _merge(found, json.loads(path.read_text(encoding="utf-8")))
    return found


def cached(function: _Read) -> _Read:
    """Remember what a function made of the tables until they change."""

    @functools.cache
    def kept(changes: int, *arguments: Any) -> Any:
        return function(*arguments)

    @functools.wraps(function)
    def asked(*arguments: Any) -> Any:
        return kept(_changes, *arguments)

    return asked  # type: ignore[return-value]


def forget() -> None:
    """Read every table anew at its next use."""
    global _changes
    _changes += 1


def _merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value
