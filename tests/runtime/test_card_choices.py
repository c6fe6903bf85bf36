"""Forms follow from a card's processors; those of an H100 and an H200 are what was measured there, shape by shape."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

import pytest

from rewrite.kernels.cards import CARDS
from rewrite.kernels.models import STEPS
from rewrite.runtime.attention import decode_attention, masked_attention
from rewrite.runtime.core import launch, tiles

OTHERS = [(kind, 64 * n, 64 * m) for kind in ("skinny_linear", "skinny_linear_32") for n in range(1, 170, 3)
          for m in (1, 5, 16, 45, 64, 128, 224)]  # fmt: skip


def products() -> list[tuple[str, int, int, int]]:
    """What the tables of the H100 have, what the modelled steps need, and many besides."""
    measured = [name.split() for name in tiles.MEASURED["NVIDIA H100 80GB HBM3"] if not name.startswith("attention")]
    found = [(kind, *map(int, shape.split("x"))) for kind, shape in measured]
    for step in STEPS.values():
        size, inner = step.model.hidden_size, step.model.intermediate_size
        for rows, cols in ((size, size), (2 * inner, size), (size, inner), (step.model.vocabulary, size)):
            found += [(kind, rows, cols, width) for kind in ("linear", "skinny_linear") for width in (1, 2)]
    return [*found, *((kind, rows, cols, 2) for kind, rows, cols in OTHERS)]  # type: ignore[list-item]


@pytest.mark.parametrize("card", ["H100", "H200"])
def test_products_are_divided_as_measured(card: str) -> None:
    """The rule had an H100's number in it: 128 programs."""
    for kind, rows, cols, size in products():
        tile = tiles.rule(kind, rows, cols, size, CARDS[card].processors)
        assert tile == tiles.rule(kind, rows, cols, size)
        if kind.startswith("skinny") and size == 1:
            assert tile[3] == max(1, min(128 * tile[0] // rows, cols // (4 * tile[1])))


TILES = Path(__file__).parents[2] / "bench/results/tiles-h100.json"
"""Microseconds of about 40 tiles of each of 74 products of one row, by `bench/tiles.py`."""


@pytest.mark.parametrize(("kind", "mean", "most"), [("linear", 1.05, 1.25), ("gated", 1.01, 1.06)])
def test_the_rule_of_one_row_is_near_the_best_that_was_measured(kind: str, mean: float, most: float) -> None:
    lost = []
    for row in json.loads(TILES.read_text("utf-8")):
        if row["kind"] == kind:
            rows, cols = map(int, row["size"].split("x"))
            tile = ",".join(map(str, tiles.rule(kind, rows, cols, 2, 132)))
            lost.append(row["us"][tile] / min(row["us"].values()))
    assert statistics.geometric_mean(lost) < mean
    assert max(lost) < most


SEVERAL = Path(__file__).parents[2] / "bench/results/tiles-rows-h100.json"
"""The same of about 16 tiles of 39 products of 8 and of 32 rows."""


@pytest.mark.parametrize("kind", ["skinny_linear", "skinny_linear_32"])
def test_the_rule_of_several_rows_is_near_the_best_that_was_measured(kind: str) -> None:
    lost = []
    for row in json.loads(SEVERAL.read_text("utf-8")):
        rows, cols = map(int, row["size"].split("x"))
        height = 32 if kind.endswith("_32") else 16  # of forms of two tiles, none was measured
        one = tiles._several_rule(height, rows, cols, 132, launch.Target.shared, pairs=False)
        tile = ",".join(map(str, one))
        whole = tiles._whole_share(rows, cols, 132)  # chosen in whole steps
        if row["kind"] == kind and whole is None and tile in row["us"]:
            lost.append(row["us"][tile] / min(us for name, us in row["us"].items() if name != "torch"))
    assert len(lost) >= 33
    assert statistics.geometric_mean(lost) < 1.02
    assert max(lost) < 1.13


@pytest.mark.parametrize(
    ("rows", "cols", "programs"),
    [(12288, 2048, 128), (17920, 1536, 125), (18432, 2304, 128), (19456, 2560, 122), (24576, 4096, 128)],
)
def test_a_program_has_two_tiles_where_one_divides_badly(rows: int, cols: int, programs: int) -> None:
    for kind, height in (("skinny_linear", 16), ("skinny_linear_32", 32)):
        block_rows, block_cols, _, splits, stages, extra = tiles.rule(kind, rows, cols, 2, 132)
        assert -(-rows // (block_rows + extra)) == programs > 0.85 * 132
        assert tiles._fill(rows, 128, 132) < 0.85
        assert splits == 1
        assert 3 <= stages <= (launch.Target.shared - tiles.SPARED) / (2 * block_cols * (block_rows + extra + height))
        assert len(tiles.one_tile(kind, rows, cols, 2, None) or ()) == 5
    for rows in (4096, 16384, 28672, 128256):  # few rows, and what comes apart evenly
        assert not any(tiles.rule("skinny_linear", rows, 4096, 2, 132)[5:])


@pytest.mark.parametrize("shared", [99, 163, 227])
@pytest.mark.parametrize("kind", ["skinny_linear", "skinny_linear_32"])
def test_the_tiles_of_several_rows_fit_a_card(kind: str, shared: int) -> None:
    """The rule had an H100's shared memory in it."""
    height = 32 if kind.endswith("_32") else 16
    for rows, cols in itertools.product((5, 96, 1000, 2048, 4224, 8000, 20000), (7, 100, 1000, 1280, 4096, 20000)):
        block_rows, block_cols, warps, splits, stages, *extra = tiles.rule(kind, rows, cols, 2, 84, shared << 10)
        assert stages * 2 * block_cols * (block_rows + sum(extra) + height) <= shared << 10
        assert stages * splits * block_cols < cols + (splits + 1) * block_cols
        assert warps in (4, 8)


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 1), (7, 4545, 132), (250, 9001, 80)])
def test_the_rule_of_one_row_takes_any_size(shape: tuple[int, int, int]) -> None:
    for kind in ("linear", "gated", "qkv"):
        rows, cols, processors = shape
        block_rows, block_cols, warps = tiles.rule(kind, rows, cols, 2, processors)
        assert rows % block_rows == 0
        assert block_cols & (block_cols - 1) == 0
        assert block_cols < 2 * cols
        assert warps in (1, 2, 4, 8)


@pytest.mark.parametrize("card", ["H100", "H200"])
def test_attention_is_divided_as_measured(card: str) -> None:
    """The rules had an H100's numbers in them: 256 and 528 programs."""
    processors = CARDS[card].processors
    assert 2 * tiles.in_one_turn(processors) == 256
    assert masked_attention.PROGRAMS * processors == 528
    for batch, kv_heads, capacity in itertools.product((1, 3, 8, 32), (1, 2, 8, 32), (256, 1024, 8192, 32768)):
        form = decode_attention._rule(batch, 4 * kv_heads, kv_heads, capacity, 128, 2 * tiles.in_one_turn(processors))
        wanted = max(1, 256 // (batch * kv_heads))
        assert form.splits == decode_attention._splits(wanted, capacity, form.slots)
        assert (form.slots == 32) == (capacity <= 64 * wanted)


@pytest.mark.parametrize(("card", "splits"), [("H100", 2), ("B200", 2), ("MI355X", 4), ("MI300X", 4)])
def test_a_card_with_more_processors_gets_more_programs(card: str, splits: int) -> None:
    assert tiles.rule("skinny_linear", 4096, 14336, 1, CARDS[card].processors)[3] == splits


def test_who_says_how_many_processors_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.processors(None) == 132
    monkeypatch.setattr(launch, "_processors", {3: 148}.__getitem__)
    assert launch.processors(3) == 148
    monkeypatch.setattr(launch, "_pretended", launch.Target("hip", "gfx942", 304))
    assert launch.processors(None) == launch.processors(3) == 304
