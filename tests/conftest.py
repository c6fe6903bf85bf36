"""Fixtures and options shared by every test."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from emulator import emulation_options

Rewritten = Callable[[str], ModuleType]

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: with a thread for every core in each of them, torch spends its time on waiting.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption("--refresh", action="store_true", help="write the golden files anew, to be read as a diff")
    parser.addoption("--every-model", action="store_true", help="all modeling files, where a test takes a sample")
    parser.addoption("--brief", action="store_true", help="kernels: one launch of each, interpreted in fp32")
    parser.addoption("--examples", type=int, default=40, help="random modules for each transform (tests/soundness)")
    emulation_options.add_options(parser)
    config = pluginmanager.get_plugin("pytestconfig")
    assert isinstance(config, pytest.Config)
    chip = parser.parse_known_args([*config.invocation_params.args]).emulate
    if chip is not None:  # before other files import operators
        from emulator import emulation

        pluginmanager.register(emulation.begin(chip), "emulation")


@pytest.fixture(scope="session", autouse=True)
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes what was measured for the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REWRITE_TABLES", str(tmp_path_factory.mktemp("tables")))
        yield


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Rewritten]:
    """Import the package of a model, made once for each file of tests, under a name of the file's own."""
    folder = tmp_path_factory.mktemp("rewritten")
    prefix = f"of_{request.module.__name__.rpartition('.')[2]}_"
    sys.path.insert(0, str(folder))

    def package(model: str) -> ModuleType:
        import made_package

        if f"{prefix}{model}" not in sys.modules:
            made_package.write(model, folder / f"{prefix}{model}")
        return importlib.import_module(f"{prefix}{model}")

    yield package
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.startswith(prefix)]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def refresh(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are written instead of compared."""
    return bool(request.config.getoption("--refresh"))


@pytest.fixture(scope="session")
def examples(request: pytest.FixtureRequest) -> int:
    """How many random modules are tried for each transform."""
    return int(request.config.getoption("--examples"))


@pytest.fixture(scope="session")
def brief(request: pytest.FixtureRequest) -> bool:
    """Whether kernels are compiled and interpreted in few forms: what another version could break, and no more."""
    return bool(request.config.getoption("--brief"))
