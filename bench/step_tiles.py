"""Times every tile of every kernel in whole steps of Llamas of many widths, to hold `runtime/launching/tiles.py` to.

    python bench/step_tiles.py measure PACKAGE RESULTS.json [--steps 1.5b:1,8b:8:8192] [--kinds linear,gated,qkv]
        [--layers 16] [--limit-seconds 265]                                     # on a GPU
    python bench/step_tiles.py compare RESULTS.json… [--processors 132]         # anywhere

A step has layers and the head, of the widths of a published model, with 512 tokens before, or as many as its third
number says. Kernels overlap in a
step, so a kernel is not timed alone: the graph of the step is replayed with each of its tiles in turn, the others as
the rule has them, or as the best were that were found before. `compare` prints what the rule of today loses, a call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

WIDTHS = {
    "0.5b": (896, 4864, 14, 2, 64, 151936),
    "g1b": (1152, 6912, 4, 1, 256, 262144),
    "m0.5b": (1280, 5120, 10, 10, 128, 65536),
    "1.5b": (1536, 8960, 12, 2, 128, 151936),
    "1b": (2048, 8192, 32, 8, 64, 128256),
    "1.7b": (2048, 6144, 16, 8, 128, 151936),
    "g2b": (2304, 9216, 8, 4, 256, 256000),
    "4b": (2560, 9728, 32, 8, 128, 151936),
    "3b": (3072, 8192, 24, 8, 128, 128256),
    "7b": (3584, 18944, 28, 4, 128, 152064),
    "l7b": (4096, 11008, 32, 32, 128, 32000),
    "m1b": (2048, 8192, 32, 32, 64, 50272),
    "8b": (4096, 14336, 32, 8, 128, 128256),
    "14b": (5120, 17408, 40, 8, 128, 151936),
}
"""Hidden and inner width, heads of queries and of keys, their width, vocabulary: Qwen, Gemma, Llama by size;
Llama 2 7B, NanoChat and OPT, which have as many heads of keys as of queries, are `l7b`, `m0.5b`, `m1b`."""
STEPS = ",".join(f"{name}:{rows}" for rows in (1, 8) for name in WIDTHS)
LAYERS = 16
"""Layers of a step. In steps of four a call in each has to gain a microsecond to be seen, and what a tile gained in
them was seldom what it gained in all layers."""
CONTEXT = 512
PLAIN = (
    (1, 2048, 2), (1, 2048, 4), (2, 2048, 2), (2, 2048, 4), (4, 2048, 8), (1, 4096, 4), (1, 4096, 8), (2, 4096, 8),
    (4, 1024, 4), (1, 1024, 2), (2, 1024, 2), (2, 1024, 4), (4, 512, 2), (4, 512, 4), (8, 512, 4), (2, 512, 2),
    (2, 256, 1),
)  # fmt: skip
"""Rows, columns and warps of products of one row."""
HALVES = (
    (1, 512, 2), (1, 512, 4), (2, 512, 2), (2, 512, 4), (1, 1024, 2), (1, 1024, 4), (1, 1024, 8), (2, 1024, 4),
    (2, 1024, 8), (1, 2048, 4), (1, 2048, 8), (1, 4096, 8), (2, 256, 2),
)  # fmt: skip
"""The same where a program takes rows of two halves."""
BLOCKS = (
    (64, 256, 4, 3), (64, 128, 4, 5), (128, 128, 4, 4), (128, 64, 4, 5), (64, 64, 4, 5), (32, 256, 4, 5),
    (64, 256, 4, 2), (128, 128, 8, 6), (128, 256, 8, 2), (32, 512, 4, 3), (64, 512, 8, 2), (64, 256, 4, 5),
)  # fmt: skip
"""Rows, columns, warps and stages of products of 2 to 32 rows, with splits for one, two and three turns."""
DIVISIONS = tuple((parts, slots, warps) for parts in (4, 8, 16, 32, 64) for slots in (32, 64, 128) for warps in (4, 8))
"""Parts, slots and warps of attention over many tokens."""


def main() -> int:
    """Measure, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("measure")
    made.add_argument("package", type=Path, help="of Llama")
    made.add_argument("results", type=Path)
    made.add_argument("--steps", default=STEPS, help="widths, rows, and tokens before them")
    made.add_argument("--kinds", default="linear,gated,qkv,attention,skinny_linear,skinny_linear_32")
    made.add_argument("--layers", type=int, default=LAYERS)
    made.add_argument("--limit-seconds", type=float, default=600.0)
    read = commands.add_parser("compare")
    read.add_argument("results", type=Path, nargs="+")
    read.add_argument("--processors", type=int, default=132)
    given = parser.parse_args()
    if given.command == "measure":
        kinds = given.kinds.split(",")
        measure(given.package, given.results, given.steps.split(","), kinds, given.layers, given.limit_seconds)
    else:
        compare([row for path in given.results for row in json.loads(path.read_text("utf-8"))], given.processors)
    return 0


def measure(package: Path, results: Path, steps: list[str], kinds: list[str], layers: int, limit: float) -> None:
    """Time the candidates of each kernel of each step, until the time is up; what is left out is said."""
    import torch

    from rewrite.benchmark.benchmark_models import build
    from rewrite.tuning.candidates import Limits, splits
    from rewrite.tuning.tuned_steps import Steps
    from rewrite.tuning.tuning_run import rounds
    from rewrite.verify.models import loaded_sides
    from rewrite.verify.models.subjects import find_subjects

    module = loaded_sides.load(loaded_sides.locate(package))
    main = find_subjects(module, module).main
    properties = torch.cuda.get_device_properties(0)
    limits, processors = Limits.of(properties), properties.multi_processor_count

    def options(name: str, current: Any) -> list[Any]:
        kind, shape, *_ = name.split()
        if kind not in kinds:
            return []
        if kind == "attention":
            if context == CONTEXT:
                return splits(current, int(shape.split("x")[3]), limits)
            heads, _, _, dot, _ = current
            return [(heads, parts, slots, dot, warps) for parts, slots, warps in DIVISIONS]
        rows, cols, _ = map(int, shape.split("x"))
        if kind.startswith("skinny"):
            found = several(kind, rows, cols, processors, limits.shared)
        else:
            widest = 1 << (cols - 1).bit_length()
            tiles = PLAIN if kind == "linear" else HALVES
            found = [tile for tile in tiles if rows % tile[0] == 0 and tile[1] <= widest]
        return [entry for entry in dict.fromkeys(found) if entry != current][:26]

    context = CONTEXT
    began, rows = time.perf_counter(), list[dict[str, Any]]()
    for step in steps:
        if time.perf_counter() - began > limit:
            print(f"{step}: left out, no time", flush=True)
            continue
        name, batch, *tokens = step.split(":")
        context = int(tokens[0]) if tokens else CONTEXT
        model = build(main.rewritten, config(main.config_class, name, layers), "bfloat16", "cuda")
        taken = Steps(model, int(batch), context)
        used = taken.in_use({})
        taken.compile_ahead(rounds(taken, options))
        best: dict[str, Any] = {}
        for key, (entry, calls) in used.items():
            if key.split()[0] not in kinds:
                continue
            tried = [entry, *(option for option in options(key, entry) if option != entry)]
            times = taken.times([{**best, key: option} for option in tried], 4)
            found = {
                shown(option): round(statistics.median(ms) * 1e3, 2)
                for option, ms in zip(tried, times, strict=True)
                if ms
            }
            row: dict[str, Any] = {"model": name, "batch": int(batch), "context": context, "layers": layers}
            row |= {"name": key, "calls": calls, "before": shown(entry)}
            rows.append({**row, "step_us": found})
            winner = min(found, key=found.__getitem__)
            if found[winner] < 0.997 * found[shown(entry)]:
                best[key] = tuple(map(int, winner.split("/")))
        results.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", "utf-8")
        print(f"{step}: {len(used)} kernels, {time.perf_counter() - began:.0f} s", flush=True)
        taken.decode.release()
        del taken, model
        torch.cuda.empty_cache()


def config(config_class: Any, name: str, layers: int) -> Any:
    """A configuration of so many layers in the widths of a model."""
    hidden, inner, heads, kv_heads, head_dim, vocabulary = WIDTHS[name]
    return config_class(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=head_dim, vocab_size=vocabulary, num_hidden_layers=layers, max_position_embeddings=131072,
        pad_token_id=0,
    )  # fmt: skip


def several(kind: str, rows: int, cols: int, processors: int, shared: int) -> list[tuple[int, ...]]:
    """Tiles of 2 to 32 rows that a chip can launch."""
    height = 32 if kind.endswith("_32") else 16
    found = list[tuple[int, ...]]()
    for block_rows, block_cols, warps, stages in BLOCKS:
        if block_cols > 2 * cols or (stages + 1) * (block_rows + height) * block_cols * 2 > shared:
            continue
        for turns in (1, 2, 3):
            parts = max(1, min(turns * processors // -(-rows // block_rows), cols // (2 * block_cols), 8))
            found.append((block_rows, block_cols, warps, parts, min(stages, max(1, -(-cols // (block_cols * parts))))))
    return found


def shown(entry: Any) -> str:
    """`64/256/4/3/2`, or `plain` for torch's own product."""
    return "plain" if entry is None else "/".join(str(int(part)) for part in entry)


def ruled(row: dict[str, Any], processors: int) -> str:
    """The rule's entry of today for a row of the results."""
    from hf_rewrite_runtime.attention import decode_attention
    from hf_rewrite_runtime.launching import tiles
    from rewrite.tuning.tuned_steps import ROOM, ROUNDING

    kind, shape, *_ = row["name"].split()
    sizes = tuple(map(int, shape.split("x")))
    if kind == "attention":
        batch, kv_heads, group, head_dim = sizes
        capacity = -(-(row.get("context", CONTEXT) + ROOM) // ROUNDING) * ROUNDING
        programs = 2 * tiles.in_one_turn(processors)
        return shown(decode_attention._rule(batch, kv_heads * group, kv_heads, capacity, head_dim, programs))
    return shown(tiles.rule(kind, *sizes, processors))


def lost(rows: list[dict[str, Any]], processors: int, kind: str) -> list[tuple[float, float, str]]:
    """Microseconds a call that the rule loses to the best tile, that the rule of before lost, and the kernel's name.

    Tiles that were not tried are left out.
    """
    found = list[tuple[float, float, str]]()
    for row in rows:
        times, now = row["step_us"], ruled(row, processors)
        if row["name"].split()[0] == kind and now in times:
            best = min(times.values())
            losses = ((times[entry] - best) / row["calls"] for entry in (now, row["before"]))
            found.append((*losses, f"{row['name']} ({row['model']}, {row['batch']} rows)"))  # type: ignore[arg-type]
    return found


def compare(rows: list[dict[str, Any]], processors: int) -> None:
    """Print for each kind of kernel what the rule loses."""
    for kind in dict.fromkeys(row["name"].split()[0] for row in rows):
        found = lost(rows, processors, kind)
        now, before = (statistics.mean(entry[which] for entry in found) for which in (0, 1))
        worst = max(found)
        print(
            f"{kind}: {len(found)} products, {now:.2f} us a call behind the best (the rule of before {before:.2f}), "
        )
        print(f"    at most {worst[0]:.2f}: {worst[2]}")


if __name__ == "__main__":
    sys.exit(main())
