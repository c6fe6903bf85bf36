"""`python -m tests.edits`: edit packages, run them in every way, and say which way does not do what the file says."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from hf_rewrite_runtime.core import backend

from .edited_package import FAMILIES
from .grid import failures, summary, table
from .text_edits import EDITS
from .ways import WAYS, Row, row_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; 1 if a way does not do what the file says."""
    options = _options().parse_args(arguments)
    rows: list[Row] = []
    for family in options.families:
        for edit in options.edits:
            with backend.use_backend(options.backend):
                rows += [row_of(family, edit, way, options.device) for way in options.ways]
            if options.json is not None:
                options.json.write_text(json.dumps(_recorded(rows, options), indent=1) + "\n", "utf-8")
        print(f"{family}: {summary([row for row in rows if row.family == family])}", file=sys.stderr, flush=True)
    print(table(rows))
    if options.failures and any(row.wrong for row in rows):
        print(f"\n{failures(rows)}")
    print(f"\n{summary(rows)}")
    return int(any(row.wrong for row in rows))


def _recorded(rows: Sequence[Row], options: argparse.Namespace) -> dict[str, object]:
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "device": name,
        "backend": options.backend,
        **versions,
        "rows": [{**asdict(r), "mark": r.mark} for r in rows],
    }


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.edits", description=__doc__)
    for name, known in (("families", FAMILIES), ("edits", EDITS), ("ways", WAYS)):
        parser.add_argument(f"--{name}", nargs="+", choices=list(known), default=list(known), metavar="NAME")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="auto", choices=("auto", "reference", "triton"))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--failures", action="store_true", help="what failed, in words")
    return parser


if __name__ == "__main__":
    sys.exit(main())
