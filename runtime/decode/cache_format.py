"""In which format captured decode steps keep keys and values, where one is asked for by name."""

from __future__ import annotations

from ..core import backend

FP8 = "fp8"
ENVIRONMENT_VARIABLE = backend.CACHE_VARIABLE


def set_cache_format(name: str | None) -> None:
    """Keep keys and values of captured steps in 8 bits (`"fp8"`), or in the model's dtype (None), from now on.

    Raises:
        ValueError: if `name` is neither.
    """
    backend.named_besides["cache"] = _checked(name)


def get_cache_format() -> str | None:
    """Return the last `set_cache_format`, else `REWRITE_CACHE`, else None.

    Raises:
        ValueError: if the variable is no format.
    """
    return _checked(backend.named_besides["cache"])


def _checked(name: str | None) -> str | None:
    if name not in (None, FP8):
        raise ValueError(f"unknown format of keys and values '{name}' ({ENVIRONMENT_VARIABLE}): choose {FP8}, or none")
    return name
