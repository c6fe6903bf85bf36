"""Options that several commands take, and the completion of their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from rewrite.console import streams
from rewrite.console.differences import STYLES

Function = TypeVar("Function", bound=Callable[..., Any])

DTYPES = ("bfloat16", "float16")
FOLDER = click.Path(path_type=Path)
"""A folder; whether it is the right one is checked by the command, which has a better message."""
OUTPUT = "-"
"""Standard output, as the name of a file."""


class Command(click.Command):
    """A command with examples, whose `--diff` and `--json` need no value.

    Args:
        examples: lines for a shell.
        headings: names of options by the heading that they stand under in the help; the others come last.
    """

    def __init__(
        self,
        *args: Any,
        examples: tuple[str, ...] = (),
        headings: Mapping[str, tuple[str, ...]] | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.examples = examples
        self.headings = headings or {}

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a pipe that nobody reads any more ends it without an error."""
        with streams.flushed():
            return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give the two options their values: a word behind `--diff` that is no style is another argument."""
        given: list[str] = []
        for number, word in enumerate(args):
            if word == "--":
                return super().parse_args(ctx, [*given, *args[number:]])
            following = args[number + 1] if number + 1 < len(args) else None
            if word == "--diff" and following not in STYLES:
                word = "--diff=unified"
            elif word == "--json" and (following is None or (following.startswith("-") and following != OUTPUT)):
                word = f"--json={OUTPUT}"
            given.append(word)
        return super().parse_args(ctx, given)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show the options under their headings."""
        records = {
            p.opts[0].lstrip("-"): p.get_help_record(ctx) for p in self.get_params(ctx) if isinstance(p, click.Option)
        }
        named = [name for names in self.headings.values() for name in names]
        rest = {"Options": tuple(name for name in records if name not in named)}
        for heading, names in {**self.headings, **rest}.items():
            with formatter.section(heading):
                formatter.write_dl([record for name in names if (record := records[name])])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show the examples, a line each."""
        with formatter.section("Examples" if len(self.examples) > 1 else "Example"):
            for example in self.examples:
                formatter.write(f"{' ' * formatter.current_indent}{example}\n")


def complete_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the model types that begin with `incomplete`; the shell's own files where there are none."""
    from rewrite.source.installed import find_transformers

    installed = find_transformers()
    names = [name for name in installed.model_types if name.startswith(incomplete)] if installed else []
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


def complete_transforms(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the transforms whose name begins with `incomplete`."""
    from rewrite.transforms import available

    found = [transform for transform in available() if transform.name.startswith(incomplete)]
    return [CompletionItem(transform.name, help=transform.summary) for transform in found]


def is_typed(option: str) -> bool:
    """Return whether an option stands on the command line."""
    return click.get_current_context().get_parameter_source(option) is ParameterSource.COMMANDLINE


def diff_option(default: str | None, help_text: str) -> Callable[[Function], Function]:
    """Return the option `--diff`."""
    return click.option(
        "--diff",
        "diff_style",
        type=click.Choice(STYLES),
        default=default,
        metavar="[STYLE]",
        help=f"{help_text} STYLE is one of {', '.join(STYLES)}; without one, unified.",
    )


def verification_options(function: Function) -> Function:
    """Add the options of a verification."""
    options = (
        click.option("--device", metavar="DEVICE", help="Verify on this device: cpu, cuda, cuda:1."),
        click.option("--dtype", type=click.Choice(DTYPES), help="Low precision to verify in."),
        click.option("--weights", type=FOLDER, metavar="DIR", help="Verify with the weights of this checkpoint."),
        click.option("--seed", type=click.IntRange(0), metavar="N", help="Verify with other weights and inputs. [0]"),
        click.option("--quick", is_flag=True, help="Verify less: one input, one low precision, no latency."),
        click.option("--trust-remote-code", is_flag=True, help="Let a modeling file that came with a checkpoint run."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def transformers_option(help_text: str) -> Callable[[Function], Function]:
    """Return the option `--transformers`, which `rewrite.source.release.library` resolves."""
    text = f"{help_text}: a version, a wheel, a folder, or `project`."
    return click.option("--transformers", "asked", metavar="VERSION|PATH", help=text)


def class_option(function: Function) -> Function:
    """Add the option `--class`."""
    help_text = "The class of the package that stands for the original's main class, where it was renamed."
    return click.option("--class", "main_class", metavar="NAME", help=help_text)(function)


def bisect_option(function: Function) -> Function:
    """Add the option `--bisect`."""
    help_text = "Where the verification fails, look for the transform at fault."
    return click.option("--bisect/--no-bisect", default=True, help=help_text)(function)


def common_options(function: Function) -> Function:
    """Add the options of every command: `--quiet`, and `--no-config`, without which [tool.rewrite] is read."""
    from rewrite.options import configuration

    ignored = click.option(
        "--no-config",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=configuration.read,
        help="Ignore [tool.rewrite] in pyproject.toml.",
    )
    return quiet_option(ignored(function))


def quiet_option(function: Function) -> Function:
    """Add `--quiet`."""
    return click.option("--quiet", "-q", is_flag=True, help="Say nothing but what fails, on standard error.")(function)


def _report(ctx: click.Context, param: click.Parameter, value: Path | str | None) -> Path | None:
    """Refuse a FILE that cannot be written before minutes of work are done for it."""
    path = None if value is None else Path(value)  # a text where it comes from pyproject.toml
    if path is not None and str(path) != OUTPUT and not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {path.parent} to write {path.name} to", ctx, param)
    return path


def reporting_options(function: Function) -> Function:
    """Add `--json` and the options of every command."""
    return json_option(common_options(function))


def tool_options(function: Function) -> Function:
    """Add `--json` and `--quiet` of a maintainers' program, which reads nobody's configuration."""
    return json_option(quiet_option(function))


def json_option(function: Function) -> Function:
    """Add `--json`."""
    path = click.Path(dir_okay=False, path_type=Path)
    help_text = "Write a report to FILE; without one, or with -, to standard output alone."
    report = click.option("--json", "json_path", type=path, metavar="[FILE]", callback=_report, help=help_text)
    return report(function)
