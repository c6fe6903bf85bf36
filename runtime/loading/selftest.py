"""`selftest()` of a package: hf-rewrite compares it with the installed original, and is needed for nothing else."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


def selftest(module: ModuleType, original: str | None, checkpoint: str | None = None) -> Any:
    """Compare the model class of `module` with the one of the same name in the installed module `original`.

    Returns:
        What was compared, as `rewrite.verify.selftest_run.run_selftest` says.

    Raises:
        ModuleNotFoundError: if hf-rewrite is not installed.
    """
    try:
        tool = importlib.import_module("rewrite.verify.selftest_run")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("selftest() is done by the tool: pip install hf-rewrite", name=error.name) from error
    return tool.run_selftest(module, original, checkpoint)
