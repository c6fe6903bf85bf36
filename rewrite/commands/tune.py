"""`rewrite tune DIR`: finds the fastest tiles of a package's decode step on this card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rewrite.commands.bench import SHAPES, numbers
from rewrite.options.shared_options import DTYPES, FOLDER, Command, reporting_options

if TYPE_CHECKING:
    from rewrite.console.console import Screen
    from rewrite.tuning import Plan

OUTPUT = click.Path(dir_okay=False, path_type=Path)


HEADINGS = {
    "Of which sizes": ("shape", "weights", "dtype", "batch", "context", "seconds"),
    "Something else than tiles": ("attention", "lengths", "products", "rows", "export", "export-shapes"),
}


@click.command(
    cls=Command,
    headings=HEADINGS,
    short_help="Find the fastest tiles for this GPU.",
    examples=("rewrite tune ./optimized_llama --shape 8b --batch 1,8",),
)
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option("--shape", type=click.Choice(SHAPES), help="Sizes to tune for.  [default: 1b]")
@click.option("--weights", type=FOLDER, metavar="DIR", help="The sizes of this checkpoint instead of a shape.")
@click.option("--batch", callback=numbers, default="1", metavar="N,…", help="Rows.  [default: 1]")
@click.option("--context", type=click.IntRange(1), default=512, show_default=True, help="Tokens before decoding.")
@click.option("--seconds", type=float, default=75.0, show_default=True, help="Time for each batch size.")
@click.option("--dtype", type=click.Choice((*DTYPES, "float32")), default="bfloat16", show_default=True)
@click.option("--attention", is_flag=True, help="Measure instead which of torch's kernels attends in prompts.")
@click.option(
    "--lengths", callback=numbers, default="512,2048,8192", metavar="N,…", help="Tokens of the prompts for that."
)
@click.option("--products", is_flag=True, help="Measure instead who multiplies (packages made --with route_gemm).")
@click.option("--rows", callback=numbers, default="64,512,2048", metavar="N,…", help="Tokens of the prompts for that.")
@click.option("--export", type=OUTPUT, metavar="FILE", help="Only write gemm.json as a tuned table for aiter.")
@click.option("--export-shapes", type=OUTPUT, metavar="FILE", help="The same, of shapes for aiter's own tuner.")
@click.option("--ship", is_flag=True, help="Write to DIR, so that the package brings it, not to your own folder.")
@reporting_options
def tune(
    folder: Path,
    shape: str | None,
    weights: Path | None,
    batch: tuple[int, ...],
    context: int,
    seconds: float,
    dtype: str,
    attention: bool,
    lengths: tuple[int, ...],
    products: bool,
    rows: tuple[int, ...],
    export: Path | None,
    export_shapes: Path | None,
    ship: bool,
    json_path: Path | None,
    quiet: bool,
) -> int:
    """Measure tiles on this GPU and write the fastest ones to tuned.json, which every package here reads.

    A tile is judged by the time of a whole captured decode step of a few layers, and torch's own product is among the
    candidates. What tuned.json says of other shapes and GPUs stays. It is in ~/.cache/hf-rewrite, or in the folder
    that REWRITE_TABLES names; with --ship in DIR, for all who import the package.

    With --products the libraries and kernels of each product of a prompt are compared instead, and gemm.json says
    which one to take. With --attention it is torch's kernels of attention (flash, efficient, cuDNN, and on ROCm
    AOTriton and CK), and attention.json.
    """
    from rewrite.console.console import Screen
    from rewrite.delivery import json_report, verification

    screen = Screen(json=json_path, quiet=quiet)
    verification.require_libraries("tuning")
    from rewrite.tuning import Plan, results
    from rewrite.tuning import tune as search
    from rewrite.tuning.tuning_run import title

    sizes = None if weights else shape or "1b"
    plan = Plan(folder, sizes, str(weights) if weights else None, dtype, batch, context, seconds, ship)
    if export is not None or export_shapes is not None:
        return _export(plan.tables, export, export_shapes, screen, json_path)
    if attention and products:
        raise click.UsageError("--attention and --products measure different things: ask for one")
    if attention:
        return _attention(plan, lengths, screen, json_path)
    if products:
        return _products(plan, rows, screen, json_path)
    with screen.working("tuning") as progress:
        outcome = search(plan, progress)
    for count, changes in outcome.changes.items():
        screen.figures(title(plan, outcome.chip, count), results.HEADINGS, results.rows(changes), ())
    screen.line("written", str(outcome.path))
    batches = {str(count): results.rows(several) for count, several in outcome.changes.items()}
    data = {"chip": outcome.chip, "headings": results.HEADINGS, "batches": batches, "written": str(outcome.path)}
    json_report.write(json_path, "tune", data)
    return 0


def _products(plan: Plan, lengths: tuple[int, ...], screen: Screen, json_path: Path | None) -> int:
    from rewrite.delivery import json_report
    from rewrite.tuning import choices, product_tiles

    with screen.working("tuning") as progress:
        outcome = product_tiles.tune_products(plan, lengths, progress)
    name = plan.shape or Path(str(plan.weights)).name
    rows = choices.rows(outcome.choices, product_tiles.VENDOR)
    screen.figures(f"{name} · products · {outcome.chip}", product_tiles.HEADINGS, rows, ())
    screen.line("written", str(outcome.path))
    data = {"chip": outcome.chip, "headings": product_tiles.HEADINGS, "products": rows, "written": str(outcome.path)}
    json_report.write(json_path, "tune", data)
    return 0


def _attention(plan: Plan, lengths: tuple[int, ...], screen: Screen, json_path: Path | None) -> int:
    from rewrite.delivery import json_report
    from rewrite.tuning import attention_tiles, choices

    with screen.working("tuning") as progress:
        outcome = attention_tiles.tune_attention(plan, lengths, progress)
    name = plan.shape or Path(str(plan.weights)).name
    rows = choices.rows(outcome.choices, attention_tiles.OWN)
    screen.figures(f"{name} · attention · {outcome.chip}", attention_tiles.HEADINGS, rows, ())
    screen.line("written", str(outcome.path))
    every = {choice.size: choice.us for choice in outcome.choices}
    data = {"chip": outcome.chip, "headings": attention_tiles.HEADINGS, "attention": rows, "us": every}
    json_report.write(json_path, "tune", {**data, "written": str(outcome.path)})
    return 0


def _export(folder: Path, tuned: Path | None, shapes: Path | None, screen: Screen, json_path: Path | None) -> int:
    from rewrite.delivery import json_report
    from rewrite.tuning.tuned_export import export

    tables = export(folder)
    for path, text in ((tuned, tables.tuned), (shapes, tables.shapes)):
        if path is not None:
            path.write_text(text, encoding="utf-8")
            screen.line("written", str(path))
    json_report.write(json_path, "tune", {"written": [str(path) for path in (tuned, shapes) if path is not None]})
    return 0
