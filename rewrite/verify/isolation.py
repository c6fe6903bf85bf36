"""Gate 1: importing the package in a clean process changes nothing in transformers or torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import clean_import
from .judging.checks import CheckRun
from .judging.compare import DoesNotRun, Mismatch
from .judging.verdict import Figure
from .models.loaded_sides import Source

LIMIT_S = 300


@dataclass
class CleanImport:
    """The clean process, started early so that it runs beside the other checks."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, rewritten: Source, original: Source) -> CleanImport:
        """Start importing; the process sees no path of ours but its own script."""
        upstream = _dotted(original)
        target = rewritten.package / "__init__.py" if rewritten.package else rewritten.path
        environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(Path(clean_import.__file__)), str(target), upstream]
        pipe = subprocess.PIPE
        return cls(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment))

    def checks(self) -> Iterator[CheckRun]:
        """The checks on its report."""
        yield CheckRun("imports in a clean process, patching nothing", self._report)

    def stop(self) -> None:
        """End the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def _report(self) -> Mapping[str, Figure]:
        try:
            output, errors = self.process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired as error:
            self.process.kill()
            raise DoesNotRun(f"importing it took more than {LIMIT_S} s") from error
        if self.process.returncode != 0:
            last = (errors.strip().splitlines() or ["no message"])[-1]
            raise DoesNotRun(f"importing it fails in a clean process: {last}")
        report = json.loads(output.strip().splitlines()[-1])
        for verb in ("changed", "lost"):
            if report[verb]:
                raise Mismatch(f"importing it {verb} {len(report[verb])} attributes: {', '.join(report[verb][:4])}")
        if report["tool"]:
            raise Mismatch(
                f"importing it imports {', '.join(report['tool'][:4])}, which an output package must not need"
            )
        return {"attributes watched": int(report["watched"])}


def _dotted(source: Source) -> str:
    """The module name of an installed original; a loose file has none, so transformers itself is watched alone."""
    if source.package is None or source.package.name != "transformers":
        return "transformers.modeling_utils"
    return ".".join((source.package.name, *source.path.relative_to(source.package).with_suffix("").parts))
