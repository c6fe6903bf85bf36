"""What `rewrite bench --tp N` found, as tables and an exit code, and what its sides are called."""

from __future__ import annotations

from typing import Any

from .benchmark_tables import Table, narrow, ratio_text

ORIGINAL, OURS, ORIGINAL_TP, OURS_TP = "original", "ours", "original_tp", "ours_tp"
ORIGINAL_EP, OURS_EP = "original_ep", "ours_ep"
"""Whole experts on each rank, as the plan for experts has it."""
SIDES = (ORIGINAL, OURS, ORIGINAL_TP, OURS_TP)
ALL_SIDES = (*SIDES, ORIGINAL_EP, OURS_EP)
REWRITTEN = (OURS, OURS_TP, OURS_EP)
DEALT = (ORIGINAL_TP, OURS_TP, ORIGINAL_EP, OURS_EP)
RATIOS = (
    ("one card", OURS, OURS_TP),
    ("original", ORIGINAL_TP, OURS_TP),
    ("one card, experts", OURS, OURS_EP),
    ("original, experts", ORIGINAL_EP, OURS_EP),
)
"""What a pair is called, its slower side, its faster."""


def tables(record: dict[str, Any]) -> list[Table]:
    """The figures as tables."""
    ranks = record["ranks"]
    titles = {
        ORIGINAL: "original, one card",
        OURS: "rewritten, one card",
        ORIGINAL_TP: f"original, {ranks} ranks",
        OURS_TP: f"rewritten, {ranks} ranks",
        ORIGINAL_EP: f"original, {ranks} ranks, experts",
        OURS_EP: f"rewritten, {ranks} ranks, experts",
    }
    found = []
    for entry in record["decode"]:
        rows = []
        for side in entry["ms"]:
            size = record["weights_bytes"].get(side, 0)
            said = entry["parity"].get(side)
            agrees = "" if said is None else "agree" if said["passed"] else "DIFFER"
            rows.append((titles[side], narrow(entry["ms"][side]), f"{size / 1e9:.2f}" if size else "–", agrees))
        notes = [f"{ranks} ranks against {name}: {ratio_text(ratio)}" for name, ratio in entry["ratios"].items()]
        notes += [f"{titles[side]}: {said['summary']}" for side, said in entry["parity"].items() if not said["passed"]]
        notes += [] if entry["ranks_agree"] and entry["ranks_draw_alike"] else ["THE RANKS GENERATE DIFFERENT TOKENS"]
        title = f"decode, batch {entry['batch']}, {entry['context']} tokens before"
        found.append(Table(title, ("", "ms/token", "GB a rank", "tokens"), tuple(rows), tuple(notes)))
    if record["prompts"]:
        headings = ("", *(f"{entry['tokens']} tokens" for entry in record["prompts"]))
        lines = [
            (titles[side], *(narrow(e["ms"][side], 2) for e in record["prompts"]))
            for side in record["prompts"][0]["ms"]
        ]
        found.append(Table("prompt and two tokens, batch 1, ms", headings, tuple(lines)))
    if record.get("sums_us"):
        lines = [(f"{kib} KiB", *(narrow(us, 1) for us in kinds.values())) for kib, kinds in record["sums_us"].items()]
        headings = ("", "library", "one-shot", "the package's, with a residual")
        found.append(Table("one sum over the ranks in a graph, µs", headings, tuple(lines)))
    return found


def exit_code(record: dict[str, Any]) -> int:
    """0, or 1 where tokens differ, or where the ranks are slower than the original's."""
    for entry in record["decode"]:
        own = entry["parity"]
        # Experts chosen by a rounding: then the original's own ranks do not agree with one card either.
        explained = all(
            own.get(ours, {"passed": True})["passed"] or not own.get(theirs, {"passed": True})["passed"]
            for ours, theirs in ((OURS_TP, ORIGINAL_TP), (OURS_EP, ORIGINAL_EP))
        )
        slower = any(
            ratio["high"] < 1.0 for name, ratio in entry["ratios"].items() if name in ("original", "original, experts")
        )
        if slower or not (entry["ranks_agree"] and entry["ranks_draw_alike"] and explained):
            return 1
    return 0
