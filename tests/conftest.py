"""Fixtures and options shared by every test."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refresh", action="store_true", help="write the golden files anew, to be read as a diff")


@pytest.fixture(scope="session")
def refresh(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are written instead of compared."""
    return bool(request.config.getoption("--refresh"))
