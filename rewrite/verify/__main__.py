"""`python -m rewrite.verify A B`: compares two modeling files from the command line."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import click

from rewrite.errors import RewriteError

from .judging.verdict import Options
from .parallel import usable_workers
from .render import render, summary
from .runner import verify


@click.command()
@click.argument("original")
@click.argument("rewritten")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the verdict here.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--dtype", default="bfloat16", show_default=True, help="The low precision.")
@click.option("--weights", help="A checkpoint; adds gate 3 and is measured for latency.")
@click.option("--shape", type=click.Choice(["tiny", "1b", "8b"]), help="The size measured for latency.")
@click.option("--seed", default=0, show_default=True)
@click.option("--gate", "gates", multiple=True, help="Run only these gates (structure always runs).")
@click.option("--quick", is_flag=True, help="One seed and one low precision; no subprocess, compile or latency.")
@click.option("--keep-going", is_flag=True, help="Run the later gates after a failure.")
@click.option("-v", "--verbose", is_flag=True, help="Show every check, and each as it starts.")
def main(
    original: str,
    rewritten: str,
    json_path: Path | None,
    device: str,
    dtype: str,
    weights: str | None,
    shape: str | None,
    seed: int,
    gates: tuple[str, ...],
    quick: bool,
    keep_going: bool,
    verbose: bool,
) -> None:
    """Check that REWRITTEN computes what ORIGINAL computes: each a folder, a modeling file or a module name."""
    options = Options(device, dtype, weights, seed, quick=quick, shape=shape, keep_going=keep_going)
    options = replace(options, gates=gates or options.gates, workers=usable_workers())
    show = (lambda message: click.echo(f"… {message}", err=True)) if verbose else None
    try:
        verdict = verify(original, rewritten, options, show)
    except RewriteError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    if json_path is not None:
        json_path.write_text(json.dumps(verdict.to_json(), indent=2, sort_keys=True) + "\n", "utf-8")
    click.echo(render(verdict, verbose))
    click.echo(summary(verdict))
    sys.exit(verdict.exit_code)


if __name__ == "__main__":
    main()
