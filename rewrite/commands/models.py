"""`rewrite models`: the model types of the installed transformers."""

from __future__ import annotations

from pathlib import Path

import click

from rewrite.commands.options import json_option, transformers_option


@click.command(short_help="List the model types of the installed transformers.")
@click.argument("filter_text", metavar="[FILTER]", default="")
@transformers_option("Those of another one than is installed")
@json_option
def models(filter_text: str, asked: str | None, json_path: Path | None) -> int:
    """List the model types whose name contains FILTER, with the modeling file of each."""
    from rewrite.deliver import report
    from rewrite.errors import MissingTransformers, UnknownModel
    from rewrite.show.console import Screen
    from rewrite.upstream import release

    with release.library(asked) as library:
        if library is None:
            raise MissingTransformers("the list of its model types")
        found = library.model_types
        files = {
            name: model.path.relative_to(library.root).as_posix() if model.path else None
            for name, model in found.items()
            if filter_text.lower().replace("-", "_") in name.replace("-", "_")
        }
    if not files:
        raise UnknownModel(filter_text, list(found))
    screen = Screen(quiet_output=str(json_path) == "-")
    if str(json_path) != "-":
        screen.table(("model type", "modeling file"), [(name, file or "–") for name, file in files.items()])
        if screen.output.is_terminal:
            screen.output.print(f"\n{len(files)} model types in transformers {library.version}")
    report.write(json_path, {"transformers": library.version, "models": files})
    return 0
