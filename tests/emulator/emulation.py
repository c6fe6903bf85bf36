"""`pytest --emulate gfx942`: the kernels' own GPU tests, each launch compiled for that chip and executed here.

Tensors are on the CPU and the runtime believes to be on the chip (`launch.pretend`), so that operators choose kernels,
tiles and options as they would there. What needs a device all the same (graphs, streams), and what takes too long, is
skipped with its reason.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from hf_rewrite_runtime.launching import launch
from rewrite.kernels import compile_work
from rewrite.kernels.chips import CHIPS

from .launches import Emulator

_NO_DEVICE = re.compile(r"not compiled with CUDA|no NVIDIA driver|CUDA GPUs? (is|are)|dummy base class|CUDA driver")


def begin(chip: str) -> Emulation:
    """Let the process act as on a chip, and launches run here. Before any operator is imported."""
    os.environ.pop("TRITON_INTERPRET", None)
    compile_work.pretended(CHIPS[chip], launch)
    emulator = Emulator(chip)
    emulator.install()
    launch._REMEMBERS = False  # as on ROCm
    return Emulation(emulator)


class Emulation:
    """What pytest asks of a run on the emulator."""

    def __init__(self, emulator: Emulator):
        self.emulator = emulator
        self._before = 0

    def pytest_configure(self, config: pytest.Config) -> None:
        """Take the kind of memory."""
        self.emulator.weak = config.getoption("--emulate-weak")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep what is marked `gpu` or runs where kernels do (`device`), of each test as many forms as are wanted."""
        forms: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            if item.get_closest_marker("gpu") or "device" in getattr(item, "fixturenames", ()):
                forms[item.nodeid.split("[")[0]].append(item)
        most = config.getoption("--emulate-sample")
        chosen = {item for group in forms.values() for item in _spread(group, most)}
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Skip what takes too long or needs a device."""
        limit = item.config.getoption("--emulate-limit")
        self._before = len(self.emulator.executed)

        def too_long(*signal_: object) -> None:
            pytest.skip(f"emulating it takes more than {limit} s")

        signal.signal(signal.SIGVTALRM, too_long)
        signal.setitimer(signal.ITIMER_VIRTUAL, limit)
        try:
            return (yield)
        except (AssertionError, RuntimeError) as error:
            if _NO_DEVICE.search(str(error)):
                pytest.skip(f"needs a device: {str(error).splitlines()[0]}")
            raise
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        """Write the outcome of a test and which kernels it launched."""
        report = yield
        path = item.config.getoption("--emulate-results")
        if path is not None and (report.when == "call" or (report.when == "setup" and report.skipped)):
            launched = self.emulator.executed[self._before :] if report.when == "call" else []
            why = report.longrepr[2] if report.skipped else str(report.longrepr or "")[-500:]
            line = {
                "chip": self.emulator.chip, "test": item.nodeid, "outcome": report.outcome, "why": why,
                "seconds": round(report.duration, 1), "kernels": sorted({one.kernel for one in launched}),
                "counting": sorted({one.kernel for one in launched if one.counts}),
                "instructions": sum(one.instructions for one in launched),
            }  # fmt: skip
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return report

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was executed."""
        executed = self.emulator.executed
        kernels, count = {one.kernel for one in executed}, sum(one.instructions for one in executed)
        terminalreporter.write_line(
            f"emulated {self.emulator.chip}: {len(executed)} launches of {len(kernels)} kernels, {count} instructions"
        )
        undecided = sorted({one.kernel for one in executed if one.undecided})
        if undecided:
            terminalreporter.write_line(
                f"two waves wrote different values to one place of LDS: {', '.join(undecided)}"
            )


def _spread(items: list[pytest.Item], most: int | None) -> list[pytest.Item]:
    if most is None or len(items) <= most:
        return items
    last = len(items) - 1
    return [items[round(number * last / max(most - 1, 1))] for number in range(most)]
