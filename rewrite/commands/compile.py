"""`rewrite compile DIR`: a package's kernels, compiled before the first process needs them."""

from __future__ import annotations

from pathlib import Path

import click

from rewrite.commands.bench import SHAPES, numbers
from rewrite.kernels.cards import CARDS
from rewrite.kernels.chips import CHIPS
from rewrite.options.shared_options import DTYPES, FOLDER, Command, reporting_options


@click.command(
    cls=Command,
    short_help="Compile a package's kernels ahead of time.",
    examples=(
        "rewrite compile ./optimized_llama --target H100 --weights ./Llama-3.2-1B",
        "rewrite compile ./optimized_llama --target sm_90 --shape 8b --batch 1,8",
    ),
)
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option(
    "--target",
    "targets",
    type=click.Choice((*CARDS, *CHIPS)),
    multiple=True,
    help="A card, or a chip with all its cards; repeatable.  [default: the GPU that is here]",
)
@click.option("--weights", type=FOLDER, metavar="DIR", help="The sizes of this checkpoint: its config.json is read.")
@click.option("--shape", type=click.Choice(SHAPES), help="Known sizes instead.")
@click.option("--batch", callback=numbers, default="1", metavar="N,…", help="Rows.  [default: 1]")
@click.option(
    "--context",
    callback=numbers,
    default="256,512,1024,2048,4096,8192",
    metavar="N,…",
    help="Tokens that a cache holds.  [default: powers of two from 256 to 8192]",
)
@click.option("--dtype", type=click.Choice((*DTYPES, "float32")), default="bfloat16", show_default=True)
@click.option("--cache", type=FOLDER, metavar="DIR", help="Put them into this cache of Triton's instead.")
@click.option("--ship", is_flag=True, help="Put them into DIR, so that the package brings them.")
@reporting_options
def compile(
    folder: Path,
    targets: tuple[str, ...],
    weights: Path | None,
    shape: str | None,
    batch: tuple[int, ...],
    context: tuple[int, ...],
    dtype: str,
    cache: Path | None,
    ship: bool,
    json_path: Path | None,
    quiet: bool,
) -> int:
    """Compile what a package's prompts and steps launch, for cards that need not be here, or for the one that is.

    They go to ~/.cache/hf-rewrite/kernels, or the folder that REWRITE_TABLES names, and with --ship to DIR/kernels, by
    chip and by the versions of Triton and Python that are here; what is for its GPU a process copies to Triton's cache
    before it compiles anything. What other versions or sizes need is compiled as ever.
    """
    from rewrite.console.console import Screen
    from rewrite.delivery import json_report, verification
    from rewrite.kernels import ahead
    from rewrite.package.lock import read_lock
    from rewrite.source.checkpoint_folder import read_config

    screen = Screen(json=json_path, quiet=quiet)
    verification.require_libraries("compiling kernels")
    read_lock(folder)
    if weights is not None:
        read_config(weights)
    own = folder if (folder / "config.json").is_file() else None
    path = weights or (None if shape else own)
    if path is None and shape is None:
        raise click.UsageError(f"{folder} has no config.json: say --weights DIR or --shape")
    plan = ahead.Ahead(folder, None, shape, str(path) if path else None, dtype, batch, context, ship)
    with screen.working("compiling") as progress:
        made = ahead.compile_for(plan, targets, cache, progress)
    for place, names in made.items():
        kernels = "1 kernel" if len(set(names)) == 1 else f"{len(set(names))} kernels"
        screen.line("compiled", f"{kernels} in {len(names)} variants")
        screen.line("written", place)
    json_report.write(json_path, "compile", {"folders": made})
    return 0
