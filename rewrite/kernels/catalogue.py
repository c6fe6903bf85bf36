"""Every launch of every kernel that is worth a look: what the operators of `runtime/` do at the shapes of real models.

Each file of `runtime/` with a kernel says so itself, in `CASES`: Python code over the names of that file, of `models`,
`cases` and `stand_ins`, which calls `case(shape, function, *arguments)`. A case is one call of an operator with
tensors that are never read. The operator itself chooses the kernel, its tile and its options, as it would on the chip
that `launch.pretend` named; nothing of that is repeated. A kernel that no case reaches fails
`tests/runtime/test_ahead_of_time.py`.

Import this after `launch.pretend`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from rewrite import operators

from . import kernel_cases as tensors
from . import model_sizes, stand_ins
from .kernel_cases import Case


def cases() -> list[Case]:
    """Return the whole catalogue, file by file."""
    return [case for file, code in operators.cases().items() for case in cases_of(file, code)]


def cases_of(file: str, code: str, sizes: Mapping[str, Any] | None = None) -> list[Case]:
    """Return the cases that a file of the runtime, `norms/rms_norm`, makes by its code.

    Args:
        file: its name.
        code: its `CASES`.
        sizes: values of names of `model_sizes` and `stand_ins`, in place of those of real models.
    """
    found: list[Case] = []

    def case(shape: str, function: Callable[..., object], *arguments: Any, **keywords: Any) -> None:
        found.append(Case(shape, partial(function, *arguments, **keywords)))

    module = importlib.import_module(f"hf_rewrite_runtime.{file.replace('/', '.')}")
    names = {**vars(tensors), **vars(stand_ins), **vars(model_sizes), "nn": nn, **vars(module), "case": case}
    names |= sizes or {}
    exec(compile(code, f"CASES of runtime/{file}.py", "exec"), names)
    return found
