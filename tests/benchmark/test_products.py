"""The fastest path of each product is found and written, and what aiter gets to read has no row twice."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

from hf_rewrite_runtime.launching import card_tables
from rewrite import cli
from rewrite.benchmark.rungs import prepare
from rewrite.errors import UsageError
from rewrite.source.resolve import resolve
from rewrite.transforms import select
from rewrite.tuning import product_tiles
from rewrite.tuning.choices import Choice, choose, rows
from rewrite.tuning.product_tiles import Products
from rewrite.tuning.tuned_export import SHAPES, TUNED, export, tables_of
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.subjects import find_subjects

FIXTURE = Path(__file__).parents[2] / "fixtures" / "models" / "modeling_tiny_llama.py"


class Fake:
    def __init__(self, **us: float):
        self.us = us

    def times(self, size: Any) -> dict[str, float]:
        return self.us


@pytest.mark.parametrize(
    ("us", "path"),
    [
        ({"vendor": 10.0, "aiter": 8.0, "rocblas": 9.0}, "aiter"),
        ({"vendor": 10.0, "aiter": 9.9}, "vendor"),  # within the noise
        ({"vendor": 10.0}, "vendor"),
    ],
)
def test_the_fastest_path_wins_beyond_the_noise(us: dict[str, float], path: str) -> None:
    (choice,) = choose(Fake(**us), {"64x32x16 bfloat16": 3}, "vendor")
    assert choice == Choice("64x32x16 bfloat16", 3, path, us)
    assert rows([choice], "vendor")[0][3] == ("=" if path == "vendor" else path)


def test_what_other_chips_and_sizes_say_stays(tmp_path: Path) -> None:
    one, two = (Choice(f"{n}x8x8 float16", 1, "vendor", {"vendor": 2.0}) for n in (1, 2))
    product_tiles.write(tmp_path, "b", {}, [two])
    path = product_tiles.write(tmp_path, "a", {"gfx": "gfx942", "cu_num": 304}, [one])
    product_tiles.write(tmp_path, "b", {}, [one])
    content = json.loads(path.read_text())
    assert list(content) == ["a", "b"]
    assert (content["a"]["gfx"], list(content["b"]["products"])) == ("gfx942", ["1x8x8 float16", "2x8x8 float16"])


def model_of(folder: Path, *asked: str) -> Any:
    """A tiny model of a package made with the transforms in `asked`."""
    (folder / "modeling_tiny.py").write_bytes(FIXTURE.read_bytes())
    prepare(resolve(str(folder / "modeling_tiny.py")), select(also=asked), folder / "rungs")
    package = sorted((folder / "rungs").glob("rung_*"))[-1]
    module = loaded_sides.load(loaded_sides.locate(package))
    main_class = find_subjects(module, module).main
    return main_class.rewritten(main_class.config_class(vocab_size=64)).eval().requires_grad_(False)


@pytest.fixture
def fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The products of a model, and two more paths: one is torch's own product, one computes something else."""
    found = Products(model_of(tmp_path, "route_gemm"))
    monkeypatch.setattr(found.gemm, "PATHS", dict(found.gemm.PATHS))
    found.gemm.offer("other", found.gemm.Path(F.linear))
    found.gemm.offer("wrong", found.gemm.Path(lambda x, weight, bias: F.linear(x, weight, bias) * 1.1))
    found.gemm.offer("refuses", found.gemm.Path(lambda x, weight, bias: None))
    yield found
    for name in [name for name in sys.modules if name.startswith(type(found.model).__module__.rpartition(".")[0])]:
        del sys.modules[name]


def test_the_products_of_a_model(fast: Any) -> None:
    sizes = fast.sizes((3, 100))
    assert {size.rows for size in sizes} >= {4, 128}
    assert len({(size.outputs, size.inputs) for size in sizes}) >= 3
    us = fast.times(next(size for size in sizes if size.rows == 128))
    assert set(us) == {"vendor", "other"}  # the others cannot run here, refuse or compute something else
    assert all(value > 0 for value in us.values())


def test_a_package_that_routes_nothing(tmp_path: Path) -> None:
    assert Products(model_of(tmp_path)).sizes((3,)) == {}


def content(*entries: tuple[str, str, float], **chip: Any) -> dict[str, Any]:
    return {**chip, "products": {size: {"path": path, "us": {"vendor": us}} for size, path, us in entries}}


TABLE = {
    "AMD Instinct MI300X": content(
        ("512x4096x4096 bfloat16", "vendor", 20.0),
        ("64x4096x4096 bfloat16 bias", "vendor", 10.0),
        ("128x4096x4096 bfloat16", "aiter", 12.0),
        ("16x4096x4096 float32", "vendor", 12.0),
        gfx="gfx942",
        cu_num=304,
    ),
    "AMD Instinct MI300X VF": content(
        ("512x4096x4096 bfloat16", "vendor", 19.0),
        ("128x4096x4096 bfloat16", "hipblaslt", 12.0),
        gfx="gfx942",
        cu_num=304,
    ),
    "NVIDIA H100 80GB HBM3": content(("64x64x64 bfloat16", "vendor", 1.0), ("8x64x64 float16", "skinny", 1.0)),
}


def test_tables_for_aiter() -> None:
    made = tables_of(TABLE)
    tuned = list(csv.DictReader(io.StringIO(made.tuned)))
    shapes = list(csv.DictReader(io.StringIO(made.shapes)))
    assert tuple(tuned[0]) == TUNED
    assert tuple(shapes[0]) == SHAPES
    wanted = [("64", "True", "10.0000"), ("512", "False", "19.0000")]
    assert [(row["M"], row["bias"], row["us"]) for row in tuned] == wanted
    assert {(row["gfx"], row["cu_num"], row["libtype"], row["dtype"]) for row in tuned} == {
        ("gfx942", "304", "torch", "torch.bfloat16")
    }
    assert [(row["M"], row["N"], row["dtype"]) for row in shapes] == [
        ("8", "64", "torch.float16"),
        ("128", "4096", "torch.bfloat16"),
    ]
    keys = [tuple(row[name] for name in ("gfx", "cu_num", *SHAPES)) for row in tuned]
    assert len(set(keys)) == len(keys)
    assert tables_of(dict(reversed(TABLE.items()))) == made


def test_export_writes_both(tmp_path: Path) -> None:
    (tmp_path / card_tables.GEMM).write_text(json.dumps(TABLE))
    files = [tmp_path / "tuned.csv", tmp_path / "shapes.csv"]
    asked = ["--export", str(files[0]), "--export-shapes", str(files[1])]
    assert cli.run(["tune", str(tmp_path), "--ship", *asked]) == 0
    made = export(tmp_path)
    assert [path.read_text() for path in files] == [made.tuned, made.shapes]


def test_nothing_to_export(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--products"):
        export(tmp_path)
    nvidia = {"NVIDIA H100 80GB HBM3": content(("64x64x64 bfloat16", "vendor", 1.0))}
    (tmp_path / card_tables.GEMM).write_text(json.dumps(nvidia))
    with pytest.raises(UsageError):
        export(tmp_path)
