"""Each bug in the steps of everything that generates is caught by the check it names; `bench/planted.py` runs all."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from . import generation_bugs
from .carried_bugs import HANDED, KEPT, OBJECTS
from .generation_bugs import STATES, LoopBug, result_of
from .indexer_bugs import INDEXERS
from .input_bugs import INPUTS, KEYS
from .latent_bugs import LATENTS

BUGS = (*STATES, *KEYS, *INPUTS, *LATENTS, *INDEXERS, *KEPT, *HANDED, *OBJECTS)
HERE = {
    "lfm2": (
        "states not reset between calls",
        "a state handed over that a later call writes",
        "states not restored after the proof",
        "states after the overshoot, a chunk",
        "slot of the call before",
        "rows of states that beams do not choose",
        "a token that is chosen and not read",
    ),
    "minicpm3": (
        "the wrong half of kv_b_proj",
        "the rotated part not scaled",
        "a stale latent",
        "a token too few is seen",
    ),
    "deepseek_v32": (
        "a key one slot late",
        "an unused slot not masked",
        "keys not reset between calls",
        "keys not taken over",
    ),
    "recurrent_gemma": (
        "a state of the prompt before",
        "a state shared by rows",
        "a state one step late",
        "states after the overshoot",
    ),
    "rwkv": ("a state of the prompt before", "a state shared by rows", "a state one step late"),
    "xlstm": ("a state of the prompt before", "a state shared by rows"),
}
"""Those that are planted in every run of the tests; of encoders and images, tests/runtime has models."""
CASES = [bug for bug in BUGS if bug.name in HERE.get(bug.model, ())]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("packages")
    for model in HERE:
        command = [sys.executable, "-c", "from rewrite.cli import main; main()", model, "--out", str(root / model)]
        subprocess.run([*command, "--no-verify", "--diff", "none"], check=True, capture_output=True)
    return {model: root / model for model in HERE}


@pytest.mark.parametrize("bug", CASES, ids=lambda bug: bug.id)
def test_a_bug_is_caught_by_its_check(bug: LoopBug, packages: dict[str, Path], tmp_path: Path) -> None:
    package = tmp_path / bug.model
    shutil.copytree(packages[bug.model], package)
    generation_bugs.plant(bug, package)
    found = result_of(bug, package)
    assert found.status == "failed", found.detail
    assert found.status == "failed" or "step_differs" in found.detail
    print(found.detail)


@pytest.mark.parametrize("model", HERE)
def test_without_a_bug_every_check_passes(model: str, packages: dict[str, Path]) -> None:
    bugs = {bug.check: bug for bug in CASES if bug.model == model}
    assert {result_of(bug, packages[model]).status for bug in bugs.values()} == {"passed"}


def test_every_bug_is_planted_once_and_there_are_enough() -> None:
    assert len({bug.id for bug in BUGS}) == len(BUGS) >= 40
    assert sum(map(len, HERE.values())) == len(CASES)
