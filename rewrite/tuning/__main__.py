"""`python -m rewrite.tuning PACKAGE`: tunes where only torch, triton and transformers are installed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rewrite.benchmark.__main__ import numbers
from rewrite.errors import RewriteError
from rewrite.measure.presets import SHAPES

from . import results
from .tuning_run import Plan, title, tune


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m rewrite.tuning", description=__doc__)
    made.add_argument("package", type=Path)
    made.add_argument("--shape", choices=tuple(SHAPES), default="1b")
    made.add_argument("--weights", help="the sizes of a checkpoint instead of a shape")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--batch", type=numbers, default=(1,), metavar="1,8")
    made.add_argument("--context", type=int, default=512)
    made.add_argument("--seconds", type=float, default=75.0, help="for the search at each batch size")
    made.add_argument("--ship", action="store_true", help="write to the package, not to the user's folder of tables")
    made.add_argument("--table", action="store_true", help="also print the entries for runtime/launching/tiles.py")
    return made


def main() -> int:
    """Tune, print what changed, write the file. Returns the exit code."""
    given = parser().parse_args()
    shape = None if given.weights else given.shape
    plan = Plan(
        given.package, shape, given.weights, given.dtype, given.batch, given.context, given.seconds, given.ship
    )
    try:
        outcome = tune(plan, lambda message: print(f"… {message}", file=sys.stderr, flush=True))
    except RewriteError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for batch, changes in outcome.changes.items():
        print(results.text(title(plan, outcome.chip, batch), changes))
    if given.table:
        print(results.literal(outcome.chip, results.entries(outcome.changes.values())))
    print(f"written {outcome.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
