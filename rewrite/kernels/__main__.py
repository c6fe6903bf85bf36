"""`python -m rewrite.kernels`: what kernels take of a chip, by compiling ahead of time; a speed model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rewrite import program
from rewrite.kernels.cards import CARDS
from rewrite.kernels.chips import CHIPS
from rewrite.options.shared_options import FOLDER, Command, tool_options

if TYPE_CHECKING:
    from rewrite.console.console import Screen
    from rewrite.kernels.drift import Record


@click.command(
    cls=Command,
    short_help="Compile the kernels for chips that need not be there.",
    examples=(
        "python -m rewrite.kernels linear rms_norm --target gfx942",
        "python -m rewrite.kernels linear --record before.json",
        "python -m rewrite.kernels 8b --card H100 --card MI300X",
        "python -m rewrite.kernels rms_norm decode_attention --exact",
    ),
)
@click.argument("names", metavar="[KERNEL|MODEL]…", nargs=-1)
@click.option(
    "--target", "targets", type=click.Choice(tuple(CHIPS)), multiple=True, help="A chip; repeatable.  [default: all]"
)
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Processes.  [default: one for each core]")
@click.option("--record", "record_path", type=FOLDER, metavar="FILE", help="Write what was compiled to a file.")
@click.option("--against", "against_path", type=FOLDER, metavar="FILE", help="Compare it with such a file.")
@click.option(
    "--card", "cards", type=click.Choice(tuple(CARDS)), multiple=True, help="Model a decode step there; repeatable."
)
@click.option("--exact", is_flag=True, help="Compare with formulas, in a ring: no bit may differ.")
@tool_options
def kernels(
    names: tuple[str, ...],
    cards: tuple[str, ...],
    targets: tuple[str, ...],
    jobs: int | None,
    record_path: Path | None,
    against_path: Path | None,
    exact: bool,
    json_path: Path | None,
    quiet: bool,
) -> int:
    """Compile every kernel at the shapes of real models and print what it takes of each chip: no GPU is needed.

    Tiles and options are those of a launch there. Exits with 1 if a kernel does not compile, spills registers to
    memory, takes more LDS than the chip has, reads element by element, or has more than 1,024 threads; with --against
    also if a launch spills more, takes a quarter more registers, more shared memory, or loses a quarter of its waves.

    With --card it compiles a decode step of each MODEL (1b, 8b, …) for 1, 8 and 32 rows instead, and prints how long a
    model on paper says that it takes there, and what bounds it. Exits with 1 if a launch fills under 85% of the
    processors.

    With --exact it interprets every kernel on the CPU, in every tile, split and form that the rules choose for either
    vendor, with numbers of a finite ring, in which no sum rounds: exits with 1 if a bit differs from the kernel's
    formula.
    """
    from rewrite.console.console import Screen

    screen = Screen(json=json_path, quiet=quiet)
    if exact:
        if cards or against_path is not None or record_path is not None:
            raise click.UsageError("--exact compiles nothing: leave --card, --record and --against out")
        return _exact(names, targets, jobs, json_path, screen)
    if cards:
        if against_path is not None or targets:
            raise click.UsageError("--against and --target are for kernels: leave --card out")
        return _modelled(cards, names, record_path, json_path, screen)
    import os

    from rewrite.delivery import json_report
    from rewrite.kernels import drift, findings, kernel_run, kernel_tables

    before = drift.Record.read(against_path) if against_path is not None else None
    with screen.working("compiling") as progress:
        rows = kernel_run.compile_all(
            targets or tuple(CHIPS), names, jobs=jobs or os.cpu_count() or 1, progress=progress
        )
    found = findings.judge(rows)
    for table in kernel_tables.tables(rows):
        screen.figures(table.title, table.headings, table.rows, table.notes, gap=1)
    for finding in found:
        screen.problem("finding", str(finding))
    archs = list(dict.fromkeys(row.arch for row in rows))
    chips = archs[0] if len(archs) == 1 else f"{len(archs)} chips"
    findings_text = "no findings" if not found else f"{len(found)} finding{'s' if len(found) > 1 else ''}"
    launches = "1 launch" if len(rows) == 1 else f"{len(rows)} launches"
    screen.line("compiled", f"{launches} for {chips} by {rows[0].compiler}: {findings_text}")
    now = drift.Record.of(rows)
    if record_path is not None:
        now.write(record_path)
    drifts = [] if before is None else _drifts(now, before, screen)
    json_report.write(
        json_path, "kernels", kernel_tables.record(rows, found) | ({} if before is None else {"drifts": drifts})
    )
    return 1 if found or drifts else 0


def _exact(
    names: tuple[str, ...], targets: tuple[str, ...], jobs: int | None, json_path: Path | None, screen: Screen
) -> int:
    """Print which kernels are their formulas in the ring. Returns the exit code."""
    import os

    from rewrite.delivery import json_report
    from rewrite.exact import exact_run

    backends = tuple(dict.fromkeys(CHIPS[target].backend for target in targets)) or exact_run.BACKENDS
    with screen.working("comparing") as progress:
        rows = exact_run.compare_all(names, backends, jobs=jobs or os.cpu_count() or 1, progress=progress)
    counts = exact_run.equal_by_kernel(rows)
    table = [[kernel, *(str(count or "–") for count in each.values())] for kernel, each in counts.items()]
    screen.figures("Launches by kernel", ["kernel", "equal", "differ", "not seen"], table, [], gap=1)
    for row in rows:
        if row.differs:
            screen.problem("differs", f"{row.backend} · {row.kernel} · {row.shape}: {row.differs}")
    unseen: dict[str, set[str]] = {}
    for row in rows:
        if row.unseen:
            unseen.setdefault(row.unseen, set()).add(row.kernel)
    for why, kernels_of in sorted(unseen.items()):
        screen.line("not seen", f"{', '.join(sorted(kernels_of))}: {why}")
    totals = {name: sum(each[name] for each in counts.values()) for name in ("equal", "differ", "unseen")}
    text = (
        f"{totals['equal']} launches are equal bit by bit, {totals['differ']} differ, {totals['unseen']} are not seen"
    )
    screen.line("compared", f"{text}: {', '.join(backends)}")
    json_report.write(json_path, "kernels", {"compared": [row.to_json() for row in rows]})
    return 1 if totals["differ"] else 0


def _drifts(now: Record, before: Record, screen: Screen) -> list[dict[str, Any]]:
    """Say what takes more of its chip than it did. Returns it as plain JSON values."""
    from rewrite.kernels import drift

    compared = drift.compare(now, before)
    for change in compared.drifts:
        screen.problem("drift", str(change))
    text = f"{compared.compared} launches with those of {before.compiler}, {compared.new} are new"
    screen.line("compared", f"{text}: {len(compared.drifts) or 'none'} drifted")
    return [change.to_json() for change in compared.drifts]


def _modelled(
    cards: tuple[str, ...], names: tuple[str, ...], record_path: Path | None, json_path: Path | None, screen: Screen
) -> int:
    """Print the speed model's steps of models on cards. Returns the exit code."""
    from rewrite.delivery import json_report
    from rewrite.errors import UsageError
    from rewrite.kernels import planned, speed, speed_tables
    from rewrite.kernels.model_sizes import STEPS

    unknown = next((name for name in names if name not in STEPS), None)
    if unknown is not None:
        raise UsageError(f"no decode step of '{unknown}' is described: there are {', '.join(STEPS)}.")
    plans: dict[tuple[str, str], planned.Plans] = {}
    with screen.working("compiling") as progress:
        for card in cards:
            for model in names or tuple(STEPS):
                progress(f"{model} for {card}")
                plans[card, model] = planned.plan(card, model)
    if record_path is not None:
        planned.write(record_path, plans)
    steps = [
        speed.predict(CARDS[card], model, rows, launches)
        for (card, model), found in plans.items()
        for rows, launches in found.items()
    ]
    for step in steps:
        made = speed_tables.table(step)
        screen.figures(made.title, made.headings, made.rows, made.notes, gap=1)
    low = list(speed_tables.unfilled(steps))
    for one in low:
        screen.problem("unfilled", str(one))
    for step in steps:
        screen.line("modelled", speed_tables.summary(step))
    json_report.write(json_path, "kernels", speed_tables.record(steps, low))
    return 1 if low else 0


if __name__ == "__main__":
    program.leave(lambda: program.run(kernels, "python -m rewrite.kernels", own=True))
