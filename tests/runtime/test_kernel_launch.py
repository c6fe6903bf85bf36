"""What a launch remembers a compiled variant under, and what Triton would compile another variant for."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_rewrite_runtime.launching.launch import Kernel, LauncherNotBuilt
from rewrite import runtime

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

FLOATS = ("eps", "offset", "factor", "scaling", "softcap", "limit", "lift", "outer")
KEYED = {"inner", "intermediate_size", "vocabulary"}
"""Counts that are handed over as strides, so a variant is remembered with what they are divisible by."""
FOLDER = Path(next(iter(runtime.__path__)))
MODULES = sorted(".".join(path.relative_to(FOLDER).with_suffix("").parts) for path in FOLDER.glob("*/[!_]*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_counts_are_not_specialised(module: str) -> None:
    """A variant is remembered without the counts, so it must be right for all of them."""
    for name, kernel in vars(importlib.import_module(f"hf_rewrite_runtime.{module}")).items():
        if not isinstance(kernel, Kernel):
            continue
        function = kernel.jit_function
        arguments = inspect.signature(function.fn).parameters.values()
        plain = {argument.name for argument in arguments if "constexpr" not in str(argument.annotation)}
        counts = {n for n in plain - KEYED if not n.endswith(("_ptr", *FLOATS)) and "stride" not in n}
        exempt = set(function.do_not_specialize or ())
        assert counts <= exempt, f"{name}: {counts - exempt}"


def test_a_compiler_that_fails_is_one_clear_error() -> None:
    class Function:
        def __getitem__(self, grid: object) -> Any:
            def launched(*arguments: object, **options: object) -> None:
                raise subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"])

            return launched

    kernel = Kernel(Function())
    with pytest.raises(LauncherNotBuilt, match=r"/usr/bin/gcc failed.*python3-dev.*REWRITE_BACKEND=reference"):
        kernel.launch((1, 1, 1), 4, (torch.zeros(1),), (), (), (), ())
