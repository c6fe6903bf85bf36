"""Options that several commands take, and the completion of their values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class ModelName(click.ParamType):
    """MODEL: completes model types, and paths where the word looks like one."""

    name = "model"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the model types of the installed transformers that begin with `incomplete`."""
        from rewrite.installed import find_transformers

        installed = find_transformers()
        names = [n for n in installed.model_types if n.startswith(incomplete)] if installed else []
        return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


class TransformName(click.ParamType):
    """Name of a transform; unknown names are reported by the registry, which knows the near ones."""

    name = "transform"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the transforms whose name begins with `incomplete`."""
        from rewrite.transforms import all_transforms

        found = [t for t in all_transforms() if t.name.startswith(incomplete)]
        return [CompletionItem(transform.name, help=transform.summary) for transform in found]


class Folder(click.ParamType):
    """A path of a folder; whether it is the right one is checked by the command, with a better message."""

    name = "dir"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path, refusing one that the operating system could not hold."""
        path = Path(value)
        if not str(value).strip() or "\0" in str(value):
            self.fail("a folder is needed", param, ctx)
        return path

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Let the shell complete folders."""
        return [CompletionItem(incomplete, type="dir")]


def diff_option(default: str | None, help_text: str) -> Decorator:
    """Return the option `--diff`."""
    styles = ("unified", "side-by-side", "stat", "none")
    return click.option("--diff", "diff_style", type=click.Choice(styles), default=default, help=help_text)


def verification_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a verification."""
    for option in reversed(
        (
            click.option("--device", metavar="DEVICE", help="Device to verify on: cpu, cuda, cuda:1. Default: a GPU if any."),
            click.option("--dtype", metavar="DTYPE", help="Low precision to verify in: bfloat16, float16."),
            click.option("--weights", type=Folder(), metavar="DIR", help="Verify with this checkpoint's weights."),
            click.option(
                "--trust-remote-code", is_flag=True, help="Allow a modeling file that came with a checkpoint to run."
            ),
        )
    ):
        command = option(command)
    return command


json_option = click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write a report; - is standard output."
)
