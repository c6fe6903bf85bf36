"""`rewrite models`: the model types of the installed transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rewrite.options.shared_options import Command, reporting_options, transformers_option

if TYPE_CHECKING:
    from rewrite.console.console import Screen
    from rewrite.source.installed import Installed, ModelType

MODELS = "models/"


@click.command(
    cls=Command,
    short_help="List the model types of the installed transformers.",
    examples=("rewrite models qwen", "rewrite models LlamaForCausalLM"),
)
@click.argument("filter_text", metavar="[FILTER]", default="")
@transformers_option("Those of another one than is installed")
@reporting_options
def models(filter_text: str, asked: str | None, json_path: Path | None, quiet: bool) -> int:
    """List the model types whose name or file has FILTER in it, in any case, or whose file has a class of that name.

    Each comes with its modeling file below transformers/models; `(none)` is one that has no modeling file of its own
    and cannot be rewritten by that name. With --quiet the names alone.
    """
    from rewrite.console.console import Screen
    from rewrite.errors import MissingTransformers
    from rewrite.source import release

    with release.library(asked) as installed:
        if installed is None:
            raise MissingTransformers("the list of its model types")
        _list(installed, filter_text, Screen(json=json_path, quiet=quiet), json_path)
    return 0


def _list(installed: Installed, filter_text: str, screen: Screen, json_path: Path | None) -> None:
    from rewrite.delivery import json_report
    from rewrite.errors import UnknownModel

    found = _matching(installed, filter_text)
    if not found:
        raise UnknownModel(filter_text, list(installed.model_types))
    files = {m.name: m.path.relative_to(installed.root).as_posix() if m.path else None for m in found}
    terminal = screen.output.is_terminal
    shown = {name: _shown(file, terminal) for name, file in files.items()}
    screen.table(("model type", "modeling file"), list(shown.items()))
    if terminal:
        of = "1 model type" if len(files) == 1 else f"{len(files)} model types"
        screen.line("", "")
        screen.line("found", f"{of} of transformers {installed.version}, files below {installed.root / MODELS}")
        name = min(files, key=len)
        screen.line("next", f"rewrite {name} --out ./optimized_{name.replace('-', '_')}")
    json_report.write(json_path, "models", {"transformers": installed.version, "models": files})


def _matching(installed: Installed, text: str) -> list[ModelType]:
    """Return the model types that a text names: `xlm-roberta` finds `xlm_roberta` too, a class its file."""
    plain = _plain(text)
    by_name = [m for m in installed.model_types.values() if plain in _plain(m.name)]
    if by_name:
        return by_name
    path = installed.defining(text)
    return [m for m in installed.model_types.values() if path is not None and m.path == path]


def _plain(text: str) -> str:
    return re.sub(r"[-_ ]", "", text.lower())


def _shown(file: str | None, terminal: bool) -> str:
    """Return a file as it is shown: in a pipe its whole path, and `–` for none, as ever."""
    if file is None:
        return "(none)" if terminal else "–"
    return file.removeprefix(MODELS) if terminal else file
