"""The tables of docs/performance.md, made from recorded results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rewrite.benchmark import ladder
from rewrite.benchmark.benchmark_plan import LIGER, ORIGINAL, OURS, STATIC, STEP
from rewrite.benchmark.benchmark_tables import NONE

COLUMNS = (ORIGINAL, LIGER, STATIC, STEP, OURS)
Record = Mapping[str, Any]


def decoding(records: Sequence[Record], ladders: Sequence[Record] = (), texts: Sequence[Record] = ()) -> str:
    """Everything that is recorded, as markdown."""
    if not records:
        return "Nothing is recorded yet."
    blocks = [_about(records), "### Decoding, ms per token of `generate()`", markdown(*_decode(records))]
    blocks += ["### The loop", markdown(*_loop(records))]
    for title, (headings, rows) in (
        ("### Prefill, ms", _prefill(records)),
        ("### A new process: seconds to the first token, and memory", _cold(records)),
    ):
        if rows:
            blocks += [title, markdown(headings, rows)]
    for record in ladders:
        made = ladder.table(record)
        where = f"{record['shape']}, {record['device']}"
        blocks += [
            f"### The ladder ({where}, {made.title.removeprefix('ladder, ')})",
            markdown(made.headings, made.rows),
        ]
    if texts:
        blocks += ["### 64 texts of 256 tokens, token by token", markdown(*_texts(texts))]
    return "\n\n".join(blocks)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _about(records: Sequence[Record]) -> str:
    devices = " and ".join(dict.fromkeys(f"one {record['device']}" for record in records))
    found = dict.fromkeys(f"{n} {v}" for record in records for n, v in record["versions"].items() if n != "python")
    versions = ", ".join(sorted(found))
    bands = [record["bandwidth"]["read"] / 1e12 for record in records if "bandwidth" in record]
    read = f"; memory is read at {min(bands):.2f}–{max(bands):.2f} TB/s in the same runs" if bands else ""
    return f"On {devices} ({versions}), random weights{read}."


def _cells(records: Sequence[Record]) -> Iterator[tuple[Record, Mapping[str, Any]]]:
    for record in records:
        for cell in record["cells"]:
            if "decode_ms" in cell["sides"].get(OURS, {}):
                yield record, cell


def _decode(records: Sequence[Record]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    headings = ("shape", "batch", "context", "limit", "eager", "Liger", "static cache", "compiled step", "rewritten")
    rows: list[tuple[str, ...]] = []
    for record, cell in _cells(records):
        sides = cell["sides"]
        times = [f"{sides[name]['decode_ms']:.3g}" if "decode_ms" in sides.get(name, {}) else NONE for name in COLUMNS]
        times[-1] = f"**{times[-1]}**"
        limit = cell["limit"]
        share = f"{limit['weights_ms'] / sides[OURS]['decode_ms']:.0%}" if "weights_ms" in limit else NONE
        milliseconds = f"{limit['weights_ms']:.3g}" if "weights_ms" in limit else NONE
        place = (str(record["shape"]), str(cell["batch"]), str(cell["context"]), milliseconds)
        rows.append((*place, *times, share, _best(sides), _kernels(sides[OURS]), _tokens(cell)))
    return (*headings, "of the limit", "against the best other", "kernels", "tokens"), rows


def _best(sides: Mapping[str, Any]) -> str:
    """The ratio to the fastest other side; without a claim where the interval holds 1 or the tokens differ."""
    others = {name: side for name, side in sides.items() if name != OURS and "ours" in side}
    if not others:
        return NONE
    side = others[min(others, key=lambda name: others[name]["decode_ms"])]
    ratio, claim = side["ours"], side.get("claim", "")
    if claim.startswith("not claimed"):
        return claim
    text = f"{ratio['value']:.2f}× ({ratio['low']:.2f}–{ratio['high']:.2f})"
    return text if claim in ("faster", "slower") else f"{text}, no difference shown"


def _kernels(side: Mapping[str, Any]) -> str:
    return f"{side['profile']['kernels_per_token']:.0f}" if side.get("profile") else NONE


def _tokens(cell: Mapping[str, Any]) -> str:
    return "agree" if cell.get("parity", {}).get("passed") else "**do not agree**"


def _loop(records: Sequence[Record]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rows: list[tuple[str, ...]] = []
    for record, cell in _cells(records):
        if "loop" in cell:
            loop = cell["loop"]
            added = f"{loop['overhead']:+.1%} ({loop['overhead_low']:+.1%} to {loop['overhead_high']:+.1%})"
            place = (str(record["shape"]), str(cell["batch"]), str(cell["context"]))
            rows.append((*place, f"{loop['replay_ms']:.3f}", f"{loop['token_ms']:.3f}", added))
    return ("shape", "batch", "context", "bare replay, ms", "`generate()`, ms a token", "the loop adds"), rows


def _prefill(records: Sequence[Record]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rows: list[tuple[str, ...]] = []
    for record in records:
        for entry in record["prefill"]:
            row = [str(record["shape"]), str(entry["tokens"])]
            for name in (ORIGINAL, "compiled", "forward", OURS):
                side = entry["sides"].get(name, {})
                row.append(f"{side['ms']:.3g}" if "ms" in side else NONE)
            for name in (ORIGINAL, "compiled"):
                ratio = entry["sides"].get(name, {}).get("ours")
                row.append(f"{ratio['value']:.2f}× ({ratio['low']:.2f}–{ratio['high']:.2f})" if ratio else NONE)
            rows.append(tuple(row))
    return (
        "shape",
        "tokens",
        "eager",
        "`torch.compile`",
        "our forward",
        "rewritten",
        "against eager",
        "against compiled",
    ), rows


def _cold(records: Sequence[Record]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rows: list[tuple[str, ...]] = []
    for record in records:
        for name, side in record["cold"].items():
            if "first_token_s" in side:
                sizes = [side.get(key) for key in ("weights_bytes", "peak_bytes", "reserved_bytes")]
                memory = [f"{size / 2**30:.2f}" if size else NONE for size in sizes]
                times = [f"{side[key]:.2f}" for key in ("first_token_s", "second_token_s")]
                rows.append((str(record["shape"]), name, *times, *memory))
    return ("shape", "side", "first token, s", "second token, s", "weights, GiB", "peak, GiB", "reserved, GiB"), rows


def _texts(records: Sequence[Record]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rows: list[tuple[str, ...]] = []
    for record in records:
        for batch, found in record["batches"].items():
            never = found["first_divergence"]["never"]
            outcome = "pass" if found["passed"] else "**fail**"
            counts = (f"{never} of {found['rows']}", str(found["different"]), str(found["different_own"]))
            sizes = (f"{found['noise']:.2g}", f"{found['deficit']:.2g}", str(found["beyond"]))
            rows.append((str(record["shape"]), batch, *counts, *sizes, outcome))
    headings = ("shape", "batch", "rows that are the same", "tokens that differ from the best")
    return (*headings, "the original's own", "noise", "largest deficit", "beyond the noise", "outcome"), rows
