"""`rewrite models`: the model types of the installed transformers."""

from __future__ import annotations

from pathlib import Path

import click

from rewrite.commands.options import json_option


@click.command(short_help="List the model types of the installed transformers.")
@click.argument("filter_text", metavar="[FILTER]", default="")
@json_option
def models(filter_text: str, json_path: Path | None) -> int:
    """List the model types whose name contains FILTER, with the modeling file of each."""
    from rewrite.deliver import report
    from rewrite.errors import MissingLibrary, UnknownModel
    from rewrite.show.console import Screen
    from rewrite.upstream.installed import find_transformers

    installed = find_transformers()
    if installed is None:
        raise MissingLibrary("transformers", "the list of its model types")
    found = [model for name, model in installed.model_types.items() if filter_text in name]
    if not found:
        raise UnknownModel(filter_text, list(installed.model_types))
    files = {m.name: m.path.relative_to(installed.root).as_posix() if m.path else None for m in found}
    screen = Screen(quiet_output=str(json_path) == "-")
    if str(json_path) != "-":
        screen.table(("model type", "modeling file"), [(name, file or "–") for name, file in files.items()])
        if screen.output.is_terminal:
            screen.output.print(f"\n{len(files)} model types in transformers {installed.version}")
    report.write(json_path, {"transformers": installed.version, "models": files})
    return 0
