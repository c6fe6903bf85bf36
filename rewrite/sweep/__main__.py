"""`python -m rewrite.sweep`: every modeling file, rewritten and verified."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rewrite import program
from rewrite.options.shared_options import Command, tool_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from rewrite.sweep.examine import Depth
    from rewrite.sweep.sweep_row import Row

FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(
    cls=Command,
    short_help="Rewrite and verify every modeling file of a transformers.",
    examples=(
        "python -m rewrite.sweep llama qwen3 --jobs 2",
        "python -m rewrite.sweep --sample 8 --no-verify --json rows.json",
    ),
)
@click.argument("models", nargs=-1, metavar="[FOLDER]...")
@click.option("--transformers", "root", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR",
              help="An unpacked transformers: the folder that holds the package, or the package itself.")  # fmt: skip
@click.option("--jobs", "-j", type=click.IntRange(1), default=4, show_default=True, help="Processes at a time.")
@click.option("--rows", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Where rows are kept; a run that is started again with the same DIR goes on.")  # fmt: skip
@click.option("--markdown", "markdown_path", type=FILE, metavar="FILE", help="Write the table as Markdown.")
@click.option("--against", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="PREVIOUS.json",
              help="Fail where anything is worse than there.")  # fmt: skip
@click.option("--sample", type=click.IntRange(1), metavar="N", help="Only N files, spread evenly.")
@click.option("--changed", is_flag=True,
              help="Only files whose rewriting differs from --against; the other rows are as there.")  # fmt: skip
@click.option("--device", default="cpu", show_default=True,
              help="Where classes run; `cuda` spreads the processes over all cards and runs the kernels.")  # fmt: skip
@click.option("--beside", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="OTHER.json",
              help="The table of another device, to stand as a column in --markdown.")  # fmt: skip
@click.option("--verify/--no-verify", default=True, help="Without: only rewrite; runs nothing.")
@tool_options
def sweep(
    models: tuple[str, ...],
    root: Path | None,
    jobs: int,
    rows: Path | None,
    json_path: Path | None,
    markdown_path: Path | None,
    against: Path | None,
    sample: int | None,
    changed: bool,
    device: str,
    beside: Path | None,
    verify: bool,
    quiet: bool,
) -> int:
    """Rewrite every modeling file of the installed transformers, verify every class that can be built small.

    FOLDER limits it to the files of these folders of transformers/models. Each file has a process of its own; a file
    that crashes is a row of the table. Exits with 1 if a row fails, or is worse than in PREVIOUS.json.
    """
    import tempfile

    from rewrite.console.console import Screen
    from rewrite.delivery import json_report as reports
    from rewrite.delivery import verification
    from rewrite.sweep import pool, sweep_plan, table
    from rewrite.sweep.against import previous, regressions
    from rewrite.verify.models.device import Devices, every

    if changed and against is None:
        raise click.UsageError("--changed needs --against: what was rewritten before")
    if verify:
        verification.require_libraries("verification (--no-verify leaves it out)")
    devices = every(device) if verify else Devices()
    screen = Screen(json=json_path, quiet=quiet)
    installed = sweep_plan.library(root)
    before = previous(against) if against is not None else {}
    other = table.read(beside) if beside is not None else None
    chosen = sweep_plan.files(installed, models)
    with tempfile.TemporaryDirectory() as scratch:
        kept = rows or Path(scratch)
        depth: Depth = "verified" if verify else "rewritten"
        tasks = sweep_plan.tasks(chosen, kept, depth, devices.names)
        if sample is not None or changed:
            wanted = sweep_plan.sampled(tasks, sample or 0) | (
                sweep_plan.changed(tasks, before, jobs) if changed else set()
            )
            tasks = [task for task in tasks if task.name in wanted]
        name: Callable[[Row], str] = lambda row: row.file
        done = {row.file: row for row in screen.tracked(pool.run(tasks, jobs), len(tasks), "examining", name)}
    kept_as_before = {name: before[name] for name, _ in chosen if name in before} if changed else {}
    found = sorted({**kept_as_before, **done}.values(), key=lambda row: row.file)
    report = table.Report(installed.version, tuple(found), devices.card, other)
    if json_path is not None:
        reports.write_raw(json_path, report.json_text())
    if markdown_path is not None:
        markdown_path.write_text(report.markdown(), "utf-8")
    for line in report.summary():
        screen.line("", line)
    for row in found:
        if row.outcome == "fail":
            screen.problem("failed", f"{row.file}: {table.why(row)}")
    worse = regressions(before, found)
    for text in worse:
        screen.problem("worse", text)
    failed = bool(worse) if against is not None else any(row.outcome == "fail" for row in found)
    return 1 if failed else 0


if __name__ == "__main__":
    program.leave(lambda: program.run(sweep, "python -m rewrite.sweep", own=True))
