"""`rewrite verify DIR --tp N`: starts the ranks, each of which runs `dealt`, and reads what they found."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rewrite.measure.processes import launch

from .models.device import usable_device


@dataclass(frozen=True)
class Check:
    """One comparison: what it was, whether it held on every rank, and its figures."""

    name: str
    passed: bool
    detail: str

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def verify(
    original: Path,
    package: Path,
    ranks: int,
    device: str | None = None,
    dtype: str | None = None,
    weights: Path | None = None,
    seed: int | None = None,
) -> list[Check]:
    """Verify a package in `ranks` processes of this host.

    Args:
        original: the modeling file that the package was made from.
        package: its folder.
        ranks: processes; on a GPU as many cards.
        device: `cpu` or `cuda`; None for what is there.
        dtype: in which a GPU generates, by default bfloat16; everything else is in fp64.
        weights: a checkpoint; None for a small model with random weights.
        seed: of weights and inputs.

    Raises:
        RanksFailed: if a process fails.
    """
    found = usable_device(device).partition(":")[0]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "checks.json"
        arguments = [str(package), "--original", str(original), "--json", str(out), "--device", found]
        arguments += ["--dtype", dtype or ("float64" if found == "cpu" else "bfloat16"), "--seed", str(seed or 0)]
        arguments += ["--weights", str(weights)] if weights is not None else []
        launch("rewrite.verify.tensor_parallel_checks", ranks, arguments, "the verification")
        return [Check(**check) for check in json.loads(out.read_text(encoding="utf-8"))]
