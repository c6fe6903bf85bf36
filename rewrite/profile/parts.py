"""The runtime of the package that a model's class is from, which an original does not have."""

from __future__ import annotations

from typing import Any

from rewrite.measure.runtime_part import runtime_part


def part_of(model: Any, file: str) -> Any | None:
    """Return what a model's package has of `core/launch`; None of a model that is from no package of ours."""
    package = type(model).__module__.rpartition(".")[0]
    if not package:
        return None
    try:
        return runtime_part(package, file)
    except ModuleNotFoundError:
        return None
