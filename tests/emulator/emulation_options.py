"""The options of `pytest --emulate`; without torch, for every run of pytest reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewrite.kernels.chips import CHIPS

AMD = [name for name, chip in CHIPS.items() if chip.backend == "hip"]


def add_options(parser: pytest.Parser) -> None:
    """Add the options of an emulation."""
    group = parser.getgroup("emulation of AMD's chips")
    group.addoption("--emulate", choices=AMD, help="run the kernels' GPU tests on an emulator of this chip")
    group.addoption("--emulate-sample", type=int, metavar="N", help="at most N forms of each test, evenly spread")
    group.addoption("--emulate-limit", type=int, default=60, metavar="S", help="seconds of CPU time for a test")
    group.addoption("--emulate-weak", action="store_true", help="in the weakest memory that the chip may have")
    group.addoption("--emulate-results", type=Path, metavar="FILE", help="append a line of JSON for each test")
