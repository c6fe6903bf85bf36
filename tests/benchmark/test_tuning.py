"""The search finds what is faster, believes no noise, and what it found is what the package then takes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from hf_rewrite_runtime.attention.decode_attention import Split, choose
from hf_rewrite_runtime.launching import card_tables, launch, tiles
from rewrite.benchmark.rungs import prepare
from rewrite.errors import NeedsGpu, NotAPackage
from rewrite.source.resolve import resolve
from rewrite.transforms import select
from rewrite.tuning import Plan, candidates, results, tune, tuning_run
from rewrite.tuning.candidates import Entry
from rewrite.tuning.search import Change, search

FIXTURE = Path(__file__).parents[2] / "fixtures" / "models" / "modeling_tiny_llama.py"
LINEAR, GATED, ATTENTION = "linear 2048x2048x2", "gated 8192x2048x2", "attention 1x8x4x64 1024"
START: dict[str, Entry] = {LINEAR: (2, 2048, 4), GATED: (2, 1024, 4), ATTENTION: (4, 16, 64, True, 4)}


class Fake:
    """A step that takes 1 ms, less what `gains` says of its entries, times noise; entries in `broken` do not run."""

    def __init__(self, gains: Mapping[tuple[str, Entry], float], noise: float = 0.0, broken: Sequence[Entry] = ()):
        self.gains, self.noise, self.broken = gains, noise, broken
        self.random = random.Random(0)
        self.blocks = 0

    def in_use(self, table: Mapping[str, Entry]) -> dict[str, tuple[Entry, int]]:
        found = {name: (table.get(name, entry), 4) for name, entry in START.items()}
        if table.get(GATED, ()) is None:  # torch's products bring another kernel into use
            found["linear 16384x2048x2"] = ((2, 2048, 4), 4)
        return found

    def times(self, tables: Sequence[Mapping[str, Entry]], blocks: int) -> list[list[float] | None]:
        self.blocks += blocks * len(tables)
        return [
            None if any(e in self.broken for e in table.values()) else self._times(table, blocks) for table in tables
        ]

    def _times(self, table: Mapping[str, Entry], blocks: int) -> list[float]:
        used = {**START, **table}
        time = 1.0 - sum(self.gains.get((name, entry), 0.0) for name, entry in used.items())
        return [time * (1 + self.random.gauss(0, self.noise)) for _ in range(blocks)]


def found(changes: Sequence[Change]) -> dict[str, Entry]:
    return {change.name: change.after for change in changes if change.after != change.before}


def test_finds_the_best_of_each_name() -> None:
    gains = {(LINEAR, (4, 2048, 4)): 0.02, (LINEAR, (4, 1024, 4)): 0.03, (ATTENTION, (4, 32, 64, True, 4)): 0.01}
    changes = search(Fake(gains, noise=0.002), candidates.candidates)
    assert found(changes) == {LINEAR: (4, 1024, 4), ATTENTION: (4, 32, 64, True, 4)}
    assert {change.name for change in changes} == START.keys()
    linear = changes[0]
    assert linear.saved == pytest.approx(0.03 * 1e3 / 4, rel=0.2)


def test_torch_s_own_product_may_win_and_what_it_brings_is_tuned_too() -> None:
    gains = {(GATED, None): 0.05, ("linear 16384x2048x2", (1, 2048, 2)): 0.05}
    assert found(search(Fake(gains), candidates.candidates)) == {GATED: None, "linear 16384x2048x2": (1, 2048, 2)}


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_no_gain(seed: int) -> None:
    fake = Fake({}, noise=0.01)
    fake.random = random.Random(seed)
    assert found(search(fake, candidates.candidates)) == {}


def test_a_gain_below_the_noise_floor_is_left() -> None:
    assert found(search(Fake({(LINEAR, None): 0.0005}), candidates.candidates)) == {}


def test_entries_that_cannot_run_are_left() -> None:
    gains = {(LINEAR, (4, 2048, 4)): 0.5, (LINEAR, (4, 1024, 4)): 0.1}
    assert found(search(Fake(gains, broken=[(4, 2048, 4)]), candidates.candidates)) == {LINEAR: (4, 1024, 4)}


def test_no_time_no_search() -> None:
    fake = Fake({})
    assert search(fake, candidates.candidates, seconds=0.0) == []
    assert fake.blocks == 0


@pytest.mark.parametrize("kind", ["linear", "gated", "qkv", "skinny_linear"])
@pytest.mark.parametrize(
    ("rows", "cols"), [(2048, 8192), (14336, 4096), (32, 2048), (48, 64), (128256, 2048), (7, 130)]
)
def test_candidates_are_few_and_fit(kind: str, rows: int, cols: int) -> None:
    name = tiles.key(kind, rows, cols, 2)
    current = tiles.rule(kind, rows, cols, 2)
    options = candidates.candidates(name, current)
    assert options[0] is None
    assert current not in options
    assert 1 <= len(options) <= candidates.MOST
    assert len(set(options)) == len(options)
    if min(rows, cols) >= 2048:
        assert len({option[:2] for option in options if option}) >= 6
    for option in options[1:]:
        assert option is not None
        assert kind.startswith("skinny") or rows % option[0] == 0  # a program of `qkv` lies within one head


MI300 = candidates.Limits(64 * 1024, 64, -1)


def test_what_a_chip_cannot_launch_is_not_tried() -> None:
    wide = tiles.key("skinny_linear_32", 4096, 14336, 2)
    hopper, mi300 = (candidates.candidates(wide, None, limits) for limits in (candidates.HOPPER, MI300))
    assert hopper == candidates.candidates(wide, None), "an H100's are the ones it always had"
    for block_rows, block_cols, _, _, stages in filter(None, mi300):
        assert (stages - 1) * (block_rows + 32) * block_cols * 2 <= 64 * 1024
    assert any(option and option[:2] == (64, 256) for option in hopper)
    assert not any(option and option[:2] == (64, 256) for option in mi300)
    assert len(mi300) > 4
    for rows, cols in ((2048, 8192), (14336, 4096)):
        for option in candidates.candidates(tiles.key("linear", rows, cols, 2), None, MI300)[1:]:
            assert option is not None
            assert option[2] * 64 <= 1024
            assert option[0] * option[1] // (64 * option[2]) <= 128
    attention = candidates.candidates("attention 1x8x4x256 1024", (4, 8, 64, True, 4), MI300)
    assert {option[2] for option in attention if option} == {16, 32, 64}


def test_limits_are_those_of_the_device() -> None:
    nvidia = type(
        "H200", (), {"shared_memory_per_block": 49152, "shared_memory_per_block_optin": 232448, "warp_size": 32}
    )
    amd = type("MI300X", (), {"shared_memory_per_block": 65536, "warp_size": 64, "gcnArchName": "gfx942:sramecc+"})
    assert candidates.Limits.of(nvidia) == candidates.HOPPER
    assert candidates.Limits.of(amd) == MI300


def test_attention_is_divided_around_the_rule() -> None:
    options = candidates.candidates(ATTENTION, START[ATTENTION])
    assert 8 <= len(options) <= candidates.MOST
    assert all(option is not None and option[0] == 4 for option in options)


def test_rounds_hold_every_candidate() -> None:
    tables = tuning_run.rounds(Fake({}))
    for name, entry in START.items():
        assert {table[name] for table in tables if name in table} == set(candidates.candidates(name, entry))


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of tables, on a machine that has a chip named `chip`."""
    monkeypatch.setenv(card_tables.VARIABLE, str(tmp_path))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: type("Chip", (), {"name": "chip", "shared_memory_per_block_optin": 99 << 10}),
    )
    monkeypatch.setattr(launch, "_processors", lambda device: 132)
    monkeypatch.setattr(tiles, "MEASURED", {"chip": {LINEAR: (1, 512, 2), GATED: (1, 512, 2)}})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    card_tables.forget()
    yield tmp_path
    card_tables.forget()


def changed(name: str, after: Entry) -> Change:
    return Change(name, 4, START[name], after, 1.0, 0.9)


def test_what_is_written_is_what_runs(tuned: Path) -> None:
    assert tiles.tile("linear", 2048, 2048, 2, 0) == (1, 512, 2)
    results.write(tuned, "chip", [changed(LINEAR, (4, 2048, 8)), changed(ATTENTION, (4, 8, 32, True, 2))])
    assert tiles.tile("linear", 2048, 2048, 2, 0) == (1, 512, 2)  # the file was read before
    card_tables.forget()
    assert tiles.tile("linear", 2048, 2048, 2, 0) == (4, 2048, 8)
    assert tiles.tile("gated", 8192, 2048, 2, 0) == (1, 512, 2)
    assert tiles.tile("linear", 2048, 2048, 4, 0) == tiles.rule("linear", 2048, 2048, 4)
    assert tiles.tile("linear", 2048, 2048, 2, None) == tiles.rule("linear", 2048, 2048, 2)
    assert choose(1, 32, 8, 768, 64) == Split(4, 8, 32, True, 2)
    assert choose(1, 32, 8, 2048, 64).splits != 8
    tiles.try_out({LINEAR: None})
    assert tiles.tile("linear", 2048, 2048, 2, 0) is None
    tiles.try_out({})


def test_a_split_of_another_version_is_left(tuned: Path) -> None:
    rule = choose(1, 32, 8, 768, 64)
    results.write(tuned, "chip", [changed(ATTENTION, (4, 8))])
    card_tables.forget()
    assert choose(1, 32, 8, 768, 64) == rule


def test_files_are_merged(tuned: Path) -> None:
    results.write(tuned, "other", [changed(LINEAR, (8, 512, 8))])
    results.write(tuned, "chip", [changed(LINEAR, (4, 2048, 8)), changed(GATED, None)])
    path = results.write(tuned, "chip", [changed(LINEAR, (2, 512, 2))])
    assert json.loads(path.read_text()) == {
        "chip": {GATED: None, LINEAR: [2, 512, 2]},
        "other": {LINEAR: [8, 512, 8]},
    }
    card_tables.forget()
    assert tiles.tile("gated", 8192, 2048, 2, 0) is None


def test_the_literal_is_the_table() -> None:
    entries = {LINEAR: (4, 2048, 8), ATTENTION: (4, 8, 32, True, 2), GATED: None}
    assert eval("{" + results.literal("chip", entries) + "}") == {"chip": entries}


def test_the_table_fits_80_columns() -> None:
    names = ("skinny_linear 128256x16384x2", "attention 16x8x16x128 131072", LINEAR)
    changes = [Change(name, 48, (4, 64, 128, True, 16), (4, 32, 64, False, 8), 12.345, 11.234) for name in names]
    text = results.text("1b · batch 1 · context 512 · NVIDIA H100 80GB HBM3", [*changes, changed(GATED, None)])
    assert max(map(len, text.splitlines())) <= 80
    assert "plain" in text


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "rewrite.lock").write_text("{}")
    return tmp_path


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_without_a_gpu(package: Path) -> None:
    with pytest.raises(NeedsGpu, match="torch sees none"):
        tune(Plan(package))
    with pytest.raises(NotAPackage):
        tune(Plan(package / "nowhere"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures kernels: needs a CUDA or ROCm device")
@pytest.mark.parametrize("batch", [1, 3])
def test_on_a_gpu(batch: int, tmp_path: Path) -> None:
    (tmp_path / "modeling_tiny.py").write_bytes(FIXTURE.read_bytes())
    prepare(resolve(str(tmp_path / "modeling_tiny.py")), select(), tmp_path / "rungs")
    package = sorted((tmp_path / "rungs").glob("rung_*"))[-1]
    outcome = tune(Plan(package, shape="tiny", batches=(batch,), context=32, seconds=120.0, ship=True))
    assert outcome.path == package / card_tables.TUNED
    written = json.loads(outcome.path.read_text())[outcome.chip]
    kinds = {name.split()[0] for name in written}
    assert {"attention", "linear" if batch == 1 else "skinny_linear"} <= kinds
    assert written.keys() == {change.name for change in outcome.changes[batch]}


@pytest.mark.parametrize("kind", ["skinny_linear", "skinny_linear_32"])
def test_products_of_few_rows_are_split_over_programs(kind: str) -> None:
    narrow, wide = (tiles.key(kind, rows, 8192, 2) for rows in (2048, 57344))
    for name, splits in ((narrow, {1, 2, 4, 8, 16}), (wide, {1})):
        options = candidates.candidates(name, None)
        assert {option[3] for option in options if option} <= splits
    assert any(option and option[3] > 1 for option in candidates.candidates(narrow, None))
    assert tiles.rule(kind, 2048, 8192)[3] == 4
    assert tiles.rule(kind, 57344, 8192)[3] == 1
    assert tiles.rule(kind, 64, 48) == (64, 64, 4, 1, 1)
