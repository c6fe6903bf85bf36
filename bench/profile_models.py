"""Profiles of whole models on a GPU: whether a step's parts make up the wall clock, and which kernels are unknown.

    python bench/profile_models.py [--device cuda] [--only NAME] [--json bench/results/profile-in-turn-h200.json]

Every name of a kernel that was seen can be kept with `--names`, for `fixtures/profile`.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from rewrite.benchmark.benchmark_models import lock_of
from rewrite.benchmark.benchmark_plan import plain
from rewrite.benchmark.benchmark_tables import plain_rows
from rewrite.benchmark.rungs import write
from rewrite.codemod.build import build
from rewrite.measure import categories
from rewrite.package.assemble import assemble
from rewrite.package.lock import Options
from rewrite.profile import advice, measure, profile_tables
from rewrite.profile.read import read
from rewrite.profile.subject import Plan
from rewrite.source.resolve import resolve
from rewrite.transforms import select

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 1b": ("llama", {"kind": "decode", "shape": "1b"}),
    "qwen3_moe": ("qwen3_moe", {"kind": "decode", "shape": "30b-a3b", "layers": 4}),
    "qwen3_5": ("qwen3_5", {"kind": "decode", "shape": "1b", "class_name": "Qwen3_5ForCausalLM"}),
    "bert": ("bert", {"kind": "forward", "shape": "default", "class_name": "BertModel", "tokens": 128}),
    "llama prompt": ("llama", {"kind": "prompt", "shape": "1b"}),
    "llama prompt 4096": ("llama", {"kind": "prompt", "shape": "1b", "tokens": 4096}),
    "llama train": ("llama", {"kind": "train", "shape": "1b", "layers": 4, "tokens": 256}),
}
KEPT_ROWS = 25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", action="append", choices=tuple(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--names", type=Path)
    given = parser.parse_args()
    records: dict[str, Any] = {}
    names: set[str] = set()
    for title in given.only or CASES:
        print(f"\n== {title}", flush=True)
        try:
            records[title] = profiled(*CASES[title], given.device, names)
        except Exception:  # one model that fails must not take the others with it
            traceback.print_exc(file=sys.stdout)
        gc.collect()
    if given.json:
        given.json.write_text(json.dumps({"models": {n: kept(r) for n, r in records.items()}}, indent=1) + "\n")
    if given.names:
        given.names.write_text("".join(f"{categories.category(name)}\t{name}\n" for name in sorted(names)))
    return int(len(records) < len(given.only or CASES))


def profiled(model: str, fields: dict[str, Any], device: str, names: set[str]) -> dict[str, Any]:
    """Rewrite a model, profile it, and print what came out."""
    with tempfile.TemporaryDirectory() as root:
        package, transforms, source = Path(root) / "measured", select(), resolve(model)
        write(assemble(build(source, transforms), transforms, Options(), package), package)
        on_cpu = device == "cpu"
        fields = fields | ({"shape": "tiny", "layers": None, "tokens": 64} if on_cpu else {})
        plan = Plan(package, str(source.path), device=device, dtype="float32" if on_cpu else "bfloat16", **fields)
        record = measure.profile(plan, keep=Path(root))
        for path in Path(root).glob("trace-*.json"):
            names |= {activity.name for activity in read(path).activities}
        record["advice"] = advice.derive(record, lock_of(package))
    print(profile_tables.conditions(record), profile_tables.summary(record), sep="\n")
    made = [
        profile_tables.shares(record),
        *(profile_tables.rows(side, name) for name, side in record["sides"].items()),
    ]
    for table in made:
        print("", table.title, *plain_rows(table.headings, table.rows), *table.notes, sep="\n")
    for name, side in record["sides"].items():
        print(f"{name}: {profile_tables.other_share(side):.2%} other {profile_tables.unknown(side)}")
    print(*(f"advice: {each['text']}" for each in record["advice"]), sep="\n")
    return record


def kept(record: dict[str, Any]) -> Any:
    """The record without its longest parts, and without the change, which quotes the model's source."""
    record.pop("change", None)
    for side in record["sides"].values():
        side["rows"] = side["rows"][:KEPT_ROWS]
        for long in ("timeline", "lines", "modules"):
            del side[long]
    return plain(record)


if __name__ == "__main__":
    sys.exit(main())
