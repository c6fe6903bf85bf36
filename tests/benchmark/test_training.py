"""What `rewrite bench --train` prints and exits with, and what it takes for a wrong gradient."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from rewrite.benchmark import training

RECORD: dict[str, Any] = {
    "cells": [
        {
            "batch": 4,
            "context": 2048,
            "parity": {"passed": True, "summary": "error 1.00 times the original's"},
            "sides": {
                "original": {
                    "step_ms": 163.0,
                    "peak_bytes": 32 * 2**30,
                    "losses": [11.8, 11.7],
                    "ours": {"value": 1.3, "low": 1.2, "high": 1.4},
                },
                "liger": {"error": "not installed"},
                "ours": {"step_ms": 125.0, "peak_bytes": 16 * 2**30, "losses": [11.8, 11.7]},
            },
        }
    ]
}


def test_a_table_says_all() -> None:
    (table,) = training.tables(RECORD)
    assert table.title == "training step, 4 × 2048 tokens, AdamW"
    assert table.rows[0] == ("original, eager", "163", "32.00", "11.70000", "1.30× (1.20–1.40)")
    assert table.notes == (
        "original with Liger: not installed",
        "gradients agree: error 1.00 times the original's",
    )


def _slower(record: dict[str, Any]) -> None:
    record["cells"][0]["sides"]["original"]["ours"] = {"value": 0.9, "low": 0.85, "high": 0.95}


def _differs(record: dict[str, Any]) -> None:
    record["cells"][0]["parity"]["passed"] = False


def _failed(record: dict[str, Any]) -> None:
    record["cells"][0]["sides"]["ours"] = {"error": "RuntimeError"}


@pytest.mark.parametrize("change", [_slower, _differs, _failed])
def test_exit_code(change: Any) -> None:
    assert training.exit_code(RECORD) == 0
    record = copy.deepcopy(RECORD)
    change(record)
    assert training.exit_code(record) == 1


def test_errors_are_those_of_the_original() -> None:
    torch.manual_seed(0)
    exact = torch.randn(64)
    found = {"exact": {"w": exact}, "original": {"w": exact + 0.01}, "ours": {"w": exact + 0.03}}
    assert math.isclose(dict(training._errors(found, False))["w"], 3.0, rel_tol=1e-4)
    assert dict(training._errors(found, True))["w"] > training.MOST["largest"]
