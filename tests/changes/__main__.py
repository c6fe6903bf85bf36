"""`python -m tests.changes`: change models between two calls, and say what became of it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .families import FAMILIES
from .table import markdown, summary
from .walk import Row, quiet, run, tasks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; 1 if a call went wrong in silence, or raised what the original does not."""
    options = _options().parse_args(arguments)
    started, rows = time.perf_counter(), list[Row]()
    with quiet():
        each = None if options.all else options.each
        work = tasks(options.families, each, options.device, options.kind, options.seed)
        if options.list:
            print(sum(len(task.numbers) for task in work), "changes")
            return 0
        for found in run(work, options.jobs):
            rows += found
            print(f"{time.perf_counter() - started:6.0f} s  {summary(rows)}", file=sys.stderr, flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps([row.to_json() for row in rows], indent=1) + "\n", "utf-8")
    print(markdown(rows))
    print(summary(rows))
    return int(any(row.wrong for row in rows))


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.changes", description=__doc__)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), metavar="NAME")
    parser.add_argument("--each", type=int, default=320, metavar="N", help="changes of each family, drawn by the seed")
    parser.add_argument("--all", action="store_true", help="all changes")
    parser.add_argument("--kind", default="", metavar="TEXT", help="only those whose kind and name have it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--list", action="store_true", help="count the changes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
