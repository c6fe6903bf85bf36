"""What would change a profile, derived from it: each large row with what bears on it, and the most that it can bring.

The most is the row's own: its time less its limit, or all that a wait takes. Nothing is promised: no text says more
than `at most`. Where what would bear on a row does not apply, the reason is that of the lock or of `explain`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rewrite.measure import categories

from .accounts import BETWEEN, HOST
from .profile_tables import LARGE

NEAR = 1.15
"""How many times its limit a row may take to count as at its limit."""
_SIXTEEN_BITS = ("bfloat16", "float16")


def derive(record: Mapping[str, Any], lock: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Advice for the rewritten side, what brings most first, and then what the rewriting has changed.

    Args:
        record: of `measure.profile`.
        lock: of the package.
    """
    ours = record["sides"]["ours"]
    found = [*_waits(record, ours), *_products(record, ours, lock), *_skipped(ours, lock), *_needless(record, ours)]
    found.sort(key=lambda each: -float(each["most_us"]))
    return [*found, *_changed(record, lock)]


def _advice(us: float, text: str, why: str, what: str) -> dict[str, Any]:
    return {"most_us": us, "text": text, "why": why, "what": what}


def _waits(record: Mapping[str, Any], side: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    waited = side["waits"].get(HOST, 0.0)
    if waited >= LARGE * side["sum_us"] and not record["device"].startswith("CPU"):
        if side["captured"]:
            text = f"The device waits for the host {waited:.0f} µs a token between replays: at most that is to be had."
            yield _advice(waited, text, "the step is replayed from a graph already", HOST)
        else:
            words = ("generate:", "decode loop", "graph")
            reasons = [line.strip() for line in side["explain"] if any(word in line for word in words)]
            why = "; ".join(reasons) or "this kind of call is not captured: it runs kernel by kernel"
            share = f"{waited / side['sum_us']:.0%}"
            text = f"The device waits for the host {waited:.0f} µs ({share}): a graph takes at most that off."
            yield _advice(waited, text, f"no graph, because: {why}", HOST)
    between = side["waits"].get(BETWEEN, 0.0)
    if between >= LARGE * side["sum_us"]:
        text = (
            f"Starting {side['activities']:.0f} kernels one after another takes {between:.0f} µs: fewer take at most "
            "that off."
        )
        yield _advice(between, text, "what could be joined is in the rows that no transform rewrote", BETWEEN)


def _products(record: Mapping[str, Any], side: Mapping[str, Any], lock: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Of all products together: what they take beyond their limits, and what half the bytes would take off."""
    rows = [row for row in side["rows"] if row["category"] == categories.GEMM and row.get("limit_us")]
    us, limit = sum(row["us"] for row in rows), sum(row["limit_us"] for row in rows)
    if us < LARGE * side["sum_us"] or record["device"].startswith("CPU"):
        return
    decode = record["kind"] == "decode"
    if us > NEAR * limit:
        option = "`rewrite tune DIR`" if decode else "`--with route_gemm` and `rewrite tune DIR --products`"
        text = (
            f"Products take {us:.0f} µs, {us / limit:.2f} times their limits: {option} chooses tiles or libraries by "
            f"measuring, and brings at most {us - limit:.0f} µs."
        )
        why = "their limits are the bytes and operations of their shapes at what this card did in this run"
        yield _advice(us - limit, text, why, "tune")
    bound = sum(row["limit_us"] for row in rows if row["bound"] == "memory")
    if decode and bound > 0.5 * limit and record["dtype"] in _SIXTEEN_BITS:
        if _sites(lock, "fp8"):
            return
        most = us - limit + bound / 2
        text = (
            f"Products read 16-bit weights at the speed of memory: `--with fp8` halves these bytes and brings at most "
            f"{most:.0f} µs; it changes what the model computes."
        )
        yield _advice(most, text, "on request only, because it is approximate", "fp8")


def _skipped(side: Mapping[str, Any], lock: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows in functions where a transform left something alone, with its reason."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, report in sorted(lock["transforms"].items()):
        for skip in report["skipped"]:
            reasons[_function(skip["site"])].append(f"{name}: {skip['reason']}")
    for function, rows in _by_function(side["rows"]).items():
        us = sum(row["us"] for row in rows)
        if us < LARGE * side["sum_us"] or function not in reasons:
            continue
        most = sum(max(row["us"] - (row.get("limit_us") or 0.0), 0.0) for row in rows)
        why = "; ".join(dict.fromkeys(reasons[function]))
        text = f"{function} takes {us:.0f} µs, and a transform left a place of it alone: at most {most:.0f} µs."
        yield _advice(most, text, why, "skip")


def _needless(record: Mapping[str, Any], side: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Findings of compute that need not happen: the time of its lines in the original bounds what it costs there."""
    lines = {row["line"]: row["us"] for row in record["sides"]["original"]["lines"]}
    needless = record.get("needless") or {"findings": [], "file": ""}
    for finding in needless["findings"]:
        places = finding.get("lines") or (finding["line"],)
        us = sum(lines.get(f"{needless['file']}:{line}", 0.0) for line in places)
        if us >= LARGE * record["sides"]["original"]["sum_us"]:
            text = f"{finding['text']}: at most {us:.0f} µs of the original's step."
            yield _advice(us, text, finding["proof"], finding["kind"])


def _changed(record: Mapping[str, Any], lock: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What each transform's functions took before and take now."""
    before = _by_function(record["sides"]["original"]["rows"])
    after = _by_function(record["sides"]["ours"]["rows"])
    total = record["sides"]["original"]["sum_us"]
    for function, rows in sorted(before.items(), key=lambda item: -sum(row["us"] for row in item[1])):
        us = sum(row["us"] for row in rows)
        names = [name for name in sorted(lock["transforms"]) if function in {_function(s) for s in _sites(lock, name)}]
        if us < LARGE * total or not names:
            continue
        now = sum(row["us"] for row in after.get(function, []))
        said = f"now {now:.0f} µs" if function in after else "now none: its work is in another function's kernels"
        yield _advice(0.0, f"{function}: {us:.0f} µs before, {said} ({', '.join(names)}).", "", "done")


def _by_function(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["where"]:
            found[row["where"]].append(row)
    return found


def _sites(lock: Mapping[str, Any], name: str) -> list[str]:
    report = lock["transforms"].get(name)
    return [str(site) for site in report["rewritten"]] if report else []


def _function(site: str) -> str:
    return site.partition(":")[0]
