"""`rewrite kernels`: what the kernels take of AMD's and NVIDIA's chips, by compiling them ahead of time."""

from __future__ import annotations

from pathlib import Path

import click

from rewrite.commands.options import Command, reporting_options
from rewrite.kernels.chips import CHIPS


@click.command(
    cls=Command,
    short_help="Compile the kernels for chips that need not be there.",
    examples=("rewrite kernels linear rms_norm --target gfx942",),
)
@click.argument("names", metavar="[KERNEL]…", nargs=-1)
@click.option(
    "--target", "targets", type=click.Choice(tuple(CHIPS)), multiple=True, help="A chip; repeatable.  [default: all]"
)
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Processes.  [default: one for each core]")
@reporting_options
def kernels(
    names: tuple[str, ...], targets: tuple[str, ...], jobs: int | None, json_path: Path | None, quiet: bool
) -> int:
    """Compile every kernel at the shapes of real models and print what it takes of each chip: no GPU is needed.

    Tiles and options are those of a launch there. Exits with 1 if a kernel does not compile, spills registers to
    memory, takes more LDS than the chip has, reads element by element, or has more than 1,024 threads.
    """
    import os

    from rewrite.deliver import report
    from rewrite.kernels import findings, run, tables
    from rewrite.show.console import Screen

    screen = Screen(json=json_path, quiet=quiet)
    with screen.working("compiling") as progress:
        rows = run.compile_all(targets or tuple(CHIPS), names, jobs=jobs or os.cpu_count() or 1, progress=progress)
    found = findings.judge(rows)
    for table in tables.tables(rows):
        screen.figures(table.title, table.headings, table.rows, table.notes, gap=1)
    for finding in found:
        screen.problem("finding", str(finding))
    archs = list(dict.fromkeys(row.arch for row in rows))
    chips = archs[0] if len(archs) == 1 else f"{len(archs)} chips"
    findings_text = "no findings" if not found else f"{len(found)} finding{'s' if len(found) > 1 else ''}"
    launches = "1 launch" if len(rows) == 1 else f"{len(rows)} launches"
    screen.line("compiled", f"{launches} for {chips} by {rows[0].compiler}: {findings_text}")
    report.write(json_path, "kernels", tables.record(rows, found))
    return 1 if found else 0
