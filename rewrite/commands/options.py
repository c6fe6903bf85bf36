"""Options that several commands take, and the completion of their values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from rewrite.show.diff import STYLES

Command = TypeVar("Command", bound=Callable[..., Any])

DTYPES = ("bfloat16", "float16")
FOLDER = click.Path(path_type=Path)
"""A folder; whether it is the right one is checked by the command, which has a better message."""


def complete_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the model types that begin with `incomplete`; the shell's own files where there are none."""
    from rewrite.upstream.installed import find_transformers

    installed = find_transformers()
    names = [name for name in installed.model_types if name.startswith(incomplete)] if installed else []
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


def complete_transforms(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the transforms whose name begins with `incomplete`."""
    from rewrite.transforms import available

    found = [transform for transform in available() if transform.name.startswith(incomplete)]
    return [CompletionItem(transform.name, help=transform.summary) for transform in found]


def diff_option(default: str | None, help_text: str) -> Callable[[Command], Command]:
    """Return the option `--diff`."""
    return click.option("--diff", "diff_style", type=click.Choice(STYLES), default=default, help=help_text)


def verification_options(command: Command) -> Command:
    """Add the options of a verification."""
    options = (
        click.option("--device", metavar="DEVICE", help="Verify on this device: cpu, cuda, cuda:1."),
        click.option("--dtype", type=click.Choice(DTYPES), help="Low precision to verify in."),
        click.option("--weights", type=FOLDER, metavar="DIR", help="Verify with the weights of this checkpoint."),
        click.option("--seed", type=click.IntRange(0), metavar="N", help="Verify with other weights and inputs. [0]"),
        click.option("--quick", is_flag=True, help="Verify with one input, one low precision and no latency."),
        click.option("--trust-remote-code", is_flag=True, help="Let a modeling file that came with a checkpoint run."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def transformers_option(help_text: str) -> Callable[[Command], Command]:
    """Return the option `--transformers`, which `rewrite.upstream.release.library` resolves."""
    text = f"{help_text}: a version, a wheel, a folder, or `project`."
    return click.option("--transformers", "asked", metavar="VERSION|PATH", help=text)


def json_option(command: Command) -> Command:
    """Add the option `--json`."""
    path = click.Path(dir_okay=False, path_type=Path)
    help_text = "Write a report; - is standard output."
    return click.option("--json", "json_path", type=path, metavar="FILE", help=help_text)(command)
