"""The runtime of the package that a model's class is from, which an original does not have."""

from __future__ import annotations

from typing import Any

from rewrite.measure.runtime_part import has_runtime, runtime_part


def part_of(model: Any, file: str) -> Any | None:
    """Return what the runtime of a model has of `launching/launch`; None of a model of no package of ours."""
    module = type(model).__module__
    return runtime_part(module.rpartition(".")[0], file) if has_runtime(module) else None
