"""Profiles both sides and makes the record of it: plain values, all times in µs of one step.

The wall clock is taken without a profiler, both sides in turn. A light recording says what the device does in each
step, and what it waits for; a full one of one step says where that comes from. Recording makes the host slower, and
not the kernels: so what the device waits for the host is what the wall clock leaves over, as long as the recording
shows that much waiting. What then is still missing to the wall clock, or too much, is in the record as such.
"""

from __future__ import annotations

import ast
import importlib.metadata
import linecache
import platform
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rewrite.console.progress_steps import Step
from rewrite.measure import categories, limits, timing

from . import accounts, change, origins, profiled_calls, recording, subject
from .accounts import Account
from .kernel_work import Launches, held_by
from .origins import Matcher, Origin
from .places import Places
from .profiled_calls import Call
from .subject import Models, Plan
from .trace import Activity, Trace

SCHEMA = 1
AGREES = 0.02
"""Share of the wall clock by which the sum of a step may be off before that is said."""
RECORDINGS = 3
TIMELINE = 1500
"""Activities of a timeline at most; more are joined with their neighbours."""
Progress = Callable[[str], None]


def profile(plan: Plan, progress: Progress = lambda message: None, keep: Path | None = None) -> dict[str, Any]:
    """Profile the two sides of a plan.

    Args:
        plan: what.
        progress: is told what is done.
        keep: a folder for the traces of both sides.

    Raises:
        RewriteError: a model cannot be loaded or has no such call.
    """
    from rewrite.benchmark.benchmark_run import _quiet

    with _quiet():
        progress(Step("building the models", 0, 6))
        models = subject.load(plan)
        found = subject.calls(plan, models)
        made = header(plan, models, found)
        progress(Step("what the device can do", 1, 6))
        made["card"] = limits.card(plan.device, plan.dtype)
        walls, recordings = _turns(plan, found, progress, keep)
        files = dict(zip(("original", "ours"), models.files, strict=True))
        for number, (name, call) in enumerate(found.items()):
            progress(Step(f"lines and shapes of {name}", 3 + number, 6))
            made["sides"][name] = side(call, walls[name], recordings[name], files[name], plan, made["card"])
            made["sides"][name]["explain"] = subject.explanation(call.model)
        made["ratio"] = timing.ratio(walls["original"], walls["ours"])
        made["change"] = change.timed(Path(files["original"]), Path(files["ours"]), made["sides"])
    return made


def _turns(
    plan: Plan, found: dict[str, Call], progress: Progress, keep: Path | None
) -> tuple[dict[str, list[float]], dict[str, list[Recording]]]:
    """Unprofiled ms a step of each side, and recordings of it, in turn: a host is not always equally fast."""
    progress(Step("the wall clock, and recordings, of both in turn", 2, 6))
    for call in found.values():
        call.run(4)
        call.timed()
    walls: dict[str, list[float]] = {name: [] for name in found}
    recordings: dict[str, list[Recording]] = {name: [] for name in found}
    for _ in range(RECORDINGS):
        measured = profiled_calls.turns(found, plan.rounds, plan.seconds / RECORDINGS)
        for name, call in found.items():
            walls[name] += measured[name]
            trace_file = None if keep is None else keep / f"trace-{name}.json"
            trace, windows, _ = call.windows(recording.lightly(call, trace_file))
            steps = _usual([_account(call, trace, window) for window in windows])
            if not steps:
                raise subject.NotProfiled(type(call.model).__name__, "the recording holds no whole step")
            recordings[name].append(Recording(steps, _launches(call, trace, windows)))
    return walls, recordings


def header(plan: Plan, models: Models, found: dict[str, Call]) -> dict[str, Any]:
    """Of what, where and with which versions."""
    import torch

    gpu = plan.device != "cpu"
    return {
        "schema": SCHEMA,
        "kind": found["ours"].kind,
        "model": models.subject.name,
        "source": models.lock["source"]["path"],
        "shape": "checkpoint" if plan.weights else plan.config.name if plan.config else plan.shape,
        "layers": models.ours.config.get_text_config().num_hidden_layers,
        "weights": "checkpoint" if plan.weights else "random",
        "parameters": sum(p.numel() for p in models.ours.parameters()),
        "dtype": plan.dtype,
        "batch": plan.batch,
        "tokens": plan.tokens,
        "device": torch.cuda.get_device_name(plan.device) if gpu else f"CPU, {torch.get_num_threads()} threads",
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("torch", "transformers", "triton") if _has(name)},
        "sides": {},
    }


def _has(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@dataclass(frozen=True)
class Recording:
    """The steps of a light recording, and how many calls of the driver a step has; on a CPU operators."""

    steps: list[Account]
    launches: float

    @property
    def us(self) -> float:
        """Of a step."""
        return sum(step.length for step in self.steps) / len(self.steps)


@dataclass
class _Row:
    count: float = 0.0
    us: float = 0.0
    bytes: float | None = None
    operations: float = 0.0


def side(
    call: Call, walls: Sequence[float], recordings: Sequence[Recording], file: str, plan: Plan, card: dict[str, float]
) -> dict[str, Any]:
    """The record of one side: a step's parts are those of the recording whose steps are nearest the wall clock."""
    wall = median(walls) * 1e3
    recording = min(recordings, key=lambda each: abs(each.us - wall))
    steps = recording.steps
    seen = _origins(call, file, plan)
    matcher = Matcher(seen)
    rows: dict[tuple[Any, ...], _Row] = defaultdict(_Row)
    placed = total = 0.0
    for step in steps:
        partners = matcher.match([share.item.name for share in step.shares])
        for share, origin in zip(step.shares, partners, strict=True):
            kind = origins.category_of(origin, share.item.name, operator=not call.gpu)
            row = rows[_key(kind, share, origin)]
            row.us += share.taken / len(steps)
            row.count += 1 / len(steps)
            total += share.taken
            placed += share.taken if origin is not None and origin.place is not None else 0.0
            if origin is not None and origin.amount is not None:
                row.bytes = (row.bytes or 0.0) + origin.amount.bytes / len(steps)
                row.operations += origin.amount.operations / len(steps)
    waits = {kind: sum(step.waited(kind) for step in steps) / len(steps) for kind in accounts.WAITS}
    recorded = waits[accounts.HOST]
    ran = sum(row.us for row in rows.values()) + sum(waits.values()) - recorded
    waits[accounts.HOST] = (
        min(max(wall - ran, 0.0), recorded + AGREES * wall) if recorded > AGREES * wall else recorded
    )
    summed = ran + waits[accounts.HOST]
    low, high = timing.interval(list(walls))
    functions = _functions(file)
    found = [_shown(key, row, card, functions) for key, row in rows.items()]
    found.sort(key=lambda row: -float(row["us"]))
    typical = sorted(steps, key=lambda step: step.length)[len(steps) // 2]
    made: dict[str, Any] = {
        "wall_us": wall,
        "wall_low_us": low * 1e3,
        "wall_high_us": high * 1e3,
        "captured": bool(call.rehearsals()),
        "replayed": any(_replayed(share.item) for step in steps for share in step.shares),
        "steps": len(steps),
        "recorded_us": recording.us,
        "recorded_wait_us": recorded,
        "sum_us": summed,
        "off": summed / wall - 1,
        "launches": recording.launches,
        "activities": sum(len(step.shares) for step in steps) / len(steps),
        "placed": placed / total if total else 0.0,
        "categories": _categories(found),
        "waits": {kind: us for kind, us in waits.items() if us},
        "rows": found,
        "modules": _grouped(found, "module"),
        "lines": _with_text(_grouped(found, "line"), file),
        "timeline": _timeline(call, typical, matcher),
    }
    return made | {"said": _said(made)}


def _replayed(item: Any) -> bool:
    return isinstance(item, Activity) and item.launch is not None and item.launch.graph


def _account(call: Call, trace: Trace, window: tuple[float, float]) -> Account:
    if call.gpu:
        return accounts.of_device(trace.activities, *window)
    thread = max(trace.operators, key=lambda operator: operator.duration).thread if trace.operators else None
    return accounts.of_host([o for o in trace.operators if o.thread == thread], *window)


def _usual(steps: list[Account]) -> list[Account]:
    """The middle half by length: the wall clock is a median too, and what else runs on the machine lengthens some."""
    ranked = sorted(steps, key=lambda step: step.length)
    aside = len(ranked) // 4
    kept = {id(step) for step in ranked[aside : len(ranked) - aside]}
    return [step for step in steps if id(step) in kept]


def _launches(call: Call, trace: Trace, windows: Sequence[tuple[float, float]]) -> float:
    """Calls of a step that the recorder had to note."""
    spans: Sequence[Any] = trace.launches if call.gpu else trace.operators
    start, end = windows[0][0], windows[-1][1]
    return sum(start <= span.start < end for span in spans) / len(windows)


def _origins(call: Call, file: str, plan: Plan) -> list[Origin]:
    """The origins of one step, from a full recording of it."""
    places = Places(call.model, {file})
    launches = Launches(call.model, places, held_by(call.model), plan.batch)
    rehearsals = call.rehearsals()
    recorder = recording.fully(call)
    if rehearsals:
        import torch

        def rehearse() -> None:
            with torch.no_grad(), call.rehearsing(), places.noted(), launches.noted():
                for each in rehearsals[:1]:
                    each()
            call.synchronise()

        with torch.no_grad():
            rehearsals[0]()
        return origins.of_device(recorder(rehearse), places, launches.amounts)

    def work() -> None:
        with places.noted(), launches.noted():
            call.run(2)
        call.synchronise()

    with profiled_calls.forwards_noted(call.model) as clock:
        trace = recorder(work)
    start, end = 0.0, float("inf")
    if call.kind == profiled_calls.DECODE:
        _, start, end = clock.begun_in(trace)[:3]
    elif len(clock.begun) > 1:
        start = clock.begun_in(trace)[1]
    if not call.gpu:
        return origins.of_host(trace, places, start, end)
    every = origins.of_device(trace, places, launches.amounts)
    inside = [
        origin
        for activity, origin in zip(trace.activities, every, strict=True)
        if activity.launch is None or start <= activity.launch.start < end
    ]
    return inside


def _key(kind: str, share: accounts.Share, origin: Origin | None) -> tuple[Any, ...]:
    place = origin.place if origin is not None else None
    module = origin.module if origin is not None else None
    return (
        kind,
        origins.label(share.item),
        (place.file, place.line, place.function) if place is not None else None,
        _pattern(module),
        origin.operator if origin is not None else "",
    )


def _pattern(module: str | None) -> str | None:
    """A module's path with the numbers of layers left out: `model.layers.*.mlp`."""
    return None if module is None else ".".join("*" if part.isdigit() else part for part in module.split("."))


def _functions(file: str) -> dict[int, str]:
    """The function or method that each line of a file is in, by its qualified name: the outermost function."""
    found: dict[int, str] = {}

    def visit(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, (*names, child.name))
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = range(child.lineno, (child.end_lineno or child.lineno) + 1)
                found.update(dict.fromkeys(lines, ".".join((*names, child.name))))

    visit(ast.parse(Path(file).read_bytes()), ())
    return found


def _shown(key: tuple[Any, ...], row: _Row, card: dict[str, float], functions: dict[int, str]) -> dict[str, Any]:
    kind, name, place, module, operator = key
    found: dict[str, Any] = {
        "category": kind,
        "name": name,
        "operator": operator,
        "line": f"{place[0]}:{place[1]}" if place else None,
        "where": functions.get(place[1], place[2]) if place else None,
        "module": module,
        "count": row.count,
        "us": row.us,
        "bytes": row.bytes,
        "operations": row.operations if row.bytes is not None else None,
    }
    if row.bytes is not None:
        memory, arithmetic = row.bytes / card["read"] * 1e6, row.operations / card["arithmetic"] * 1e6
        found["limit_us"] = max(memory, arithmetic)
        found["bound"] = "memory" if memory >= arithmetic else "arithmetic"
        found["bandwidth"] = memory / row.us if row.us else None
        found["arithmetic"] = arithmetic / row.us if row.us else None
    return found


def _categories(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    found = {kind: {"us": 0.0, "count": 0.0} for kind in categories.CATEGORIES}
    for row in rows:
        found[row["category"]]["us"] += row["us"]
        found[row["category"]]["count"] += row["count"]
    return {kind: values for kind, values in found.items() if values["count"]}


def _grouped(rows: Sequence[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """Times by module or line, the largest first; what has none is one group."""
    sums: dict[str | None, dict[str, Any]] = {}
    for row in rows:
        group = sums.setdefault(row[by], {by: row[by], "us": 0.0, "count": 0.0, "where": row["where"]})
        group["us"] += row["us"]
        group["count"] += row["count"]
    return sorted(sums.values(), key=lambda group: -float(group["us"]))


def _with_text(lines: list[dict[str, Any]], file: str) -> list[dict[str, Any]]:
    """Add to each line what stands there."""
    for each in lines:
        number = str(each["line"] or "").rpartition(":")[2]
        each["text"] = linecache.getline(file, int(number)).strip() if number else None
    return lines


def _said(side: Mapping[str, Any]) -> str:
    """Whether a step's parts make up the wall clock, in words."""
    wall, waited = side["wall_us"], side["waits"].get(accounts.HOST, 0.0)
    overhead = f"recording made a step {side['recorded_us'] / wall - 1:+.1%} longer"
    if abs(side["off"]) > AGREES:
        what = "is missing" if side["off"] < 0 else "is too much"
        by = f"{abs(side['sum_us'] - wall):.0f} µs a step ({abs(side['off']):.1%})"
        return f"{by} {what} to the wall clock, which no part explains; {overhead}"
    if waited > AGREES * wall:
        ran = (
            f"what runs and what starts it take {side['sum_us'] - waited:.0f} µs, the host the rest of the wall clock"
        )
        return f"{ran}, {waited:.0f} µs (recorded: {side['recorded_wait_us']:.0f}); {overhead}"
    return f"the parts make up the wall clock ({side['off']:+.1%}); {overhead}"


def _timeline(call: Call, step: Account, matcher: Matcher) -> list[list[Any]]:
    """Start, µs, category and name of a step's activities; many are joined with neighbours of their category."""
    partners = matcher.match([share.item.name for share in step.shares])
    found: list[list[Any]] = []
    for share, origin in zip(step.shares, partners, strict=True):
        kind = origins.category_of(origin, share.item.name, operator=not call.gpu)
        if share.taken > 0:
            found.append([share.start - step.start, share.taken, kind, origins.label(share.item)])
    return _shortened(found, TIMELINE)


def _shortened(found: list[list[Any]], most: int) -> list[list[Any]]:
    """Join neighbours of one category until there are no more than `most` spans, or none to join."""
    while len(found) > most:
        pairs = [_joined(found[i : i + 2]) for i in range(0, len(found), 2)]
        joined = [span for pair in pairs for span in pair]
        if len(joined) == len(found):
            break
        found = joined
    return found


def _joined(pair: list[list[Any]]) -> list[list[Any]]:
    if len(pair) < 2 or pair[0][2] != pair[1][2]:
        return pair
    first, second = pair
    return [[first[0], first[1] + second[1], first[2], f"{first[3]}, …"]]
