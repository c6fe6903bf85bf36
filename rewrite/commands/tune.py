"""`rewrite tune DIR`: finds the fastest tiles of a package's decode step on this card."""

from __future__ import annotations

from pathlib import Path

import click

from rewrite.commands.bench import SHAPES, numbers
from rewrite.commands.options import DTYPES, FOLDER


@click.command(short_help="Find the fastest tiles for this GPU.")
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option("--shape", type=click.Choice(SHAPES), help="Sizes to tune for.  [default: 1b]")
@click.option("--weights", type=FOLDER, metavar="DIR", help="The sizes of this checkpoint instead of a shape.")
@click.option("--batch", callback=numbers, default="1", metavar="N,…", help="Rows.  [default: 1]")
@click.option("--context", type=click.IntRange(1), default=512, show_default=True, help="Tokens before decoding.")
@click.option("--seconds", type=float, default=75.0, show_default=True, help="Time for each batch size.")
@click.option("--dtype", type=click.Choice((*DTYPES, "float32")), default="bfloat16", show_default=True)
@click.option("--table", is_flag=True, help="Also print the entries as Python, for runtime/tiles.py.")
def tune(
    folder: Path,
    shape: str | None,
    weights: Path | None,
    batch: tuple[int, ...],
    context: int,
    seconds: float,
    dtype: str,
    table: bool,
) -> int:
    """Measure tiles on this GPU and write the fastest ones to DIR/tuned.json, which the package reads.

    A tile is judged by the time of a whole captured decode step of a few layers, and torch's own product is among the
    candidates. What tuned.json says of other shapes and GPUs stays.
    """
    from rewrite import judge
    from rewrite.console import Screen

    judge.require_libraries("tuning")
    from rewrite.tuning import Plan, results
    from rewrite.tuning import tune as search
    from rewrite.tuning.run import title

    screen = Screen()
    sizes = None if weights else shape or "1b"
    plan = Plan(folder, sizes, str(weights) if weights else None, dtype, batch, context, seconds)
    with screen.working("tuning") as progress:
        outcome = search(plan, progress)
    for rows, changes in outcome.changes.items():
        screen.figures(title(plan, outcome.chip, rows), results.HEADINGS, results.rows(changes), ())
    if table:
        click.echo(results.literal(outcome.chip, results.entries(outcome.changes.values())))
    screen.line("written", str(outcome.path))
    return 0
