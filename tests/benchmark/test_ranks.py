"""`rewrite bench --tp 2` on two processes of a CPU, and what its figures are made into."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from rewrite.benchmark import rank_speed
from rewrite.benchmark.rank_tables import ALL_SIDES, OURS, OURS_EP, OURS_TP, SIDES, exit_code, tables
from rewrite.measure.processes import launch


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A mixture under both plans, measured once."""
    folder = tmp_path_factory.mktemp("bench_of_ranks")
    package, out = folder / "mixture_of_ranks", folder / "record.json"
    command = [sys.executable, "-c", "from rewrite.cli import main; main()", "qwen3_moe", "--out", str(package)]
    subprocess.run([*command, "--no-verify"], check=True, capture_output=True, env={**os.environ})
    given = ["--device", "cpu", "--dtype", "float32", "--shape", "tiny", "--context", "12", "--new-tokens", "12"]
    given += ["--parity-tokens", "6", "--rounds", "1", "--prompts", "16", "--agree", "4x6", "--json", str(out)]
    launch(
        "rewrite.benchmark.rank_speed", 2, [str(package), *given, "--sides", ",".join(ALL_SIDES)], "the measurement"
    )
    content: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return content


def test_every_side_is_timed_and_generates_the_tokens_of_one_card(record: dict[str, Any]) -> None:
    (entry,) = record["decode"]
    assert set(entry["ms"]) == set(ALL_SIDES)
    assert set(entry["ratios"]) == {"one card", "original", "one card, experts", "original, experts"}
    for found in (entry, *record["agree"]):
        assert found["ranks_agree"]
        assert {OURS, OURS_TP, OURS_EP} <= set(found["parity"])
        assert all(said["passed"] for said in found["parity"].values())
    assert entry["ranks_draw_alike"]
    assert record["agree"][0]["rows"] == 4
    assert "ranks: 2 ranks" in record["explain"]
    assert "decode loop: yes" in record["explain, experts"]


def test_figures_are_told_as_tables(record: dict[str, Any]) -> None:
    decode, prompts = tables(record)
    assert [row[0] for row in decode.rows] == [
        "original, one card", "rewritten, one card", "original, 2 ranks", "rewritten, 2 ranks",
        "original, 2 ranks, experts", "rewritten, 2 ranks, experts",
    ]  # fmt: skip
    assert len(decode.notes) == 4
    assert len(prompts.rows) == len(ALL_SIDES)


def judged(**changed: Any) -> int:
    entry = {
        "parity": {side: {"passed": True} for side in SIDES},
        "ratios": {"one card": {"high": 0.9}, "original": {"high": 1.2}},
        "ranks_agree": True,
        "ranks_draw_alike": True,
    }
    return exit_code({"decode": [{**entry, **changed}]})


def test_the_exit_code() -> None:
    assert judged() == 0
    assert judged(ranks_agree=False) == 1
    assert judged(ratios={"original": {"high": 0.9}}) == 1
    assert judged(parity={"ours_tp": {"passed": False}}) == 1
    assert judged(parity={"ours_tp": {"passed": False}, "original_tp": {"passed": False}}) == 0


def test_sides_are_known() -> None:
    assert rank_speed._sides("ours_tp,ours") == (OURS, OURS_TP)
    with pytest.raises(argparse.ArgumentTypeError, match="ours_pp"):
        rank_speed._sides("ours,ours_pp")
