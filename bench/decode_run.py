"""One package at chosen batches and contexts: measures where only torch and transformers are installed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rewrite.benchmark.benchmark_plan import LIGER, ORIGINAL, OURS, STATIC, STEP, Cell, Plan, cells, write_json
from rewrite.errors import RewriteError
from rewrite.measure.presets import SHAPES


def numbers(text: str) -> tuple[int, ...]:
    """`1,8,32` as numbers."""
    return tuple(int(part) for part in text.split(",") if part)


def cell_list(text: str) -> tuple[Cell, ...]:
    """`1x512,8x512` as cells: batch × context."""
    pairs = (part.split("x") for part in text.split(",") if part)
    return tuple(Cell(int(batch), int(context)) for batch, context in pairs)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("package", type=Path)
    made.add_argument("--original", help="where the original is, if not where the lock says")
    made.add_argument("--shape", choices=tuple(SHAPES), default="1b")
    made.add_argument("--weights", help="a checkpoint instead of a shape")
    made.add_argument("--device", default="cuda")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--batch", type=numbers, default=(1,), metavar="1,8,32")
    made.add_argument("--context", type=numbers, default=(512,), metavar="512,8192")
    made.add_argument("--cells", type=cell_list, metavar="1x512,8x512", help="exactly these batches and contexts")
    made.add_argument("--compiled-cells", type=cell_list, metavar="1x512", help="compile the original only for these")
    made.add_argument("--static-cells", type=cell_list, metavar="1x512", help="compile by transformers only for these")
    made.add_argument("--prefill", type=numbers, default=(), metavar="128,512,2048")
    made.add_argument("--sides", default=",".join((ORIGINAL, STATIC, STEP, LIGER, OURS)))
    made.add_argument("--new-tokens", type=int, default=128)
    made.add_argument("--rounds", type=numbers, default=(5, 30), metavar="FEWEST,MOST")
    made.add_argument("--seconds", type=float, default=8.0, help="for the rounds of one cell")
    made.add_argument("--budget", type=float, default=float("inf"), help="seconds after which nothing is compiled")
    made.add_argument("--parity-rows", type=int, default=4)
    made.add_argument("--parity-tokens", type=int, default=64)
    made.add_argument("--no-cold", action="store_true", help="leave out the cold processes")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", type=Path)
    made.add_argument("--png", type=Path)
    return made


def plan_of(given: argparse.Namespace) -> Plan:
    """The plan that the options describe."""
    names = ["package", "original", "weights", "device", "dtype", "compiled_cells", "static_cells", "prefill"]
    names += ["new_tokens", "seconds", "budget", "parity_rows", "parity_tokens", "seed"]
    return Plan(
        **{name: getattr(given, name) for name in names},
        shape=None if given.weights else given.shape,
        cells=given.cells or cells(given.batch, given.context),
        sides=tuple(given.sides.split(",")),
        rounds=(given.rounds[0], given.rounds[-1]),
        cold=not given.no_cold,
    )


def main() -> int:
    """Measure, print a table, write what was asked for. Returns the exit code."""
    from rewrite.benchmark import benchmark_tables, chart
    from rewrite.benchmark.benchmark_run import measure

    given = parser().parse_args()
    keep = (lambda record: write_json(given.json, record)) if given.json else (lambda record: None)
    try:
        if given.png:
            chart.require_matplotlib()
        record = measure(plan_of(given), keep, lambda message: print(f"… {message}", file=sys.stderr, flush=True))
        print(benchmark_tables.text(record))
        if given.png:
            chart.draw(record, given.png)
    except RewriteError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return benchmark_tables.exit_code(record)


if __name__ == "__main__":
    sys.exit(main())
