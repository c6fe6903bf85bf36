"""`rewrite export DIR --hub OUT`: a package in the form that loads with `trust_remote_code`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from rewrite.options.shared_options import FOLDER, Command, reporting_options, transformers_option


@click.command(
    cls=Command,
    short_help="Write a package in the form that loads from the Hub.",
    examples=("rewrite export ./optimized_llama --hub OUT --checkpoint ./my-llama",),
)
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option(
    "--hub", "out", type=FOLDER, metavar="OUT", required=True, help="Folder to write, or a checkpoint's own."
)
@click.option(
    "--checkpoint", type=FOLDER, metavar="DIR", help="Take config.json from here and name the classes in it."
)
@click.option("--vendor", "vendored", is_flag=True, help="Take the runtime along, for who cannot install it.")
@transformers_option("Name the classes for that one's Auto classes, not for the installed one's")
@reporting_options
def export(
    folder: Path,
    out: Path,
    checkpoint: Path | None,
    vendored: bool,
    asked: str | None,
    json_path: Path | None,
    quiet: bool,
) -> int:
    """Write the modeling file of the package DIR to OUT, to be uploaded beside a checkpoint's weights.

    At the other end `from_pretrained(..., trust_remote_code=True)` builds the rewritten classes; hf-rewrite-runtime
    has to be installed there, or goes along with --vendor. With --checkpoint, OUT gets its config.json with an
    `auto_map` that names them; OUT may be the checkpoint's own folder, where nothing else is changed.
    """
    from rewrite.console.console import Screen
    from rewrite.delivery import json_report
    from rewrite.package import hub_export, vendored_files
    from rewrite.package.lock import read_lock
    from rewrite.source import release

    lock = read_lock(folder)
    with release.library(asked) as library:
        made = hub_export.export(folder, lock, checkpoint, library, vendored)
    gone = hub_export.write(out, made, checkpoint)
    screen = Screen(json=json_path, quiet=quiet)
    runtime = sum(1 for name in made.files if name.startswith("rewrite_"))
    names = [lock.modeling, *([f"{runtime} files rewrite_*.py"] if runtime else [])]
    names += ["config.json"] if checkpoint is not None else []
    screen.line("written", f"{out}/{names[0]}" if len(names) == 1 else f"{out}/{{{', '.join(names)}}}")
    if not runtime:
        screen.line("needs", f"pip install hf-rewrite-runtime~={vendored_files.runtime()[0]} (or --vendor)")
    if gone:
        screen.line("", f"taken out, of an earlier export: {', '.join(gone)}")
    data = {"out": str(out), "files": sorted(made.files), "removed": list(gone), "auto_map": dict(made.auto_map)}
    json_report.write(json_path, "export", data)
    if checkpoint is None:
        screen.line("config", "not written (--checkpoint takes one); its auto_map has to be:")
        screen.line("", json.dumps(made.auto_map))
        return 0
    screen.line("auto_map", ", ".join(f"{auto} → {name.split('.')[1]}" for auto, name in made.auto_map.items()))
    if not out.samefile(checkpoint):
        screen.line("next", f"upload these files beside the weights of {checkpoint}")
    return 0
