"""`python -m tests.metamorphic`: respell modeling files and say what became of their sites."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rewrite.sweep.sweep_plan import files, library

from .matrix import Task, run, turned
from .rewritings import all_rewritings
from .table import markdown, summary


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; 1 if a site was lost or too few were kept."""
    options = _options().parse_args(arguments)
    if options.list:
        for name, rewriting in all_rewritings().items():
            print(f"{name:28} {rewriting.summary}")
        return 0
    found = files(library(options.transformers), options.files)
    if options.sample:
        count = min(options.sample, len(found))
        found = [found[place * len(found) // count] for place in range(count)]
    chosen = tuple(options.rewriting or all_rewritings())
    tasks = [
        Task(path, name, turned(chosen, name) if options.each else chosen, options.rows, options.each)
        for name, path in found
    ]
    tasks.sort(key=lambda task: -task.file.stat().st_size)  # the longest first, so that none is waited for at the end
    started, rows = time.monotonic(), []
    for done, some in enumerate(run(tasks, options.jobs), 1):
        rows += some
        print(f"{done}/{len(tasks)} {some[0].file} {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: (row.file, row.rewriting))
    if options.json:
        options.json.write_text(json.dumps([row.to_json() for row in rows], indent=1) + "\n", "utf-8")
    text = markdown(rows)
    if options.markdown:
        options.markdown.write_text(text, "utf-8")
    print(text)
    return 0 if summary(rows).holds else 1


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.metamorphic", description=__doc__)
    parser.add_argument("--files", nargs="*", default=(), metavar="FOLDER", help="folders of transformers/models")
    parser.add_argument("--sample", type=int, metavar="N", help="only N files, spread evenly")
    parser.add_argument(
        "--each", type=int, default=0, metavar="K", help="only K rewritings a file, spread by its name"
    )
    parser.add_argument("--rewriting", nargs="*", choices=list(all_rewritings()), metavar="NAME", help="only these")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--rows", type=Path, default=Path("build/metamorphic"), help="folder of rows: goes on there")
    parser.add_argument("--transformers", type=Path, metavar="DIR", help="another transformers than the installed one")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    parser.add_argument("--list", action="store_true", help="name the rewritings")
    return parser


if __name__ == "__main__":
    sys.exit(main())
