"""The command `rewrite`: a group whose default command rewrites a model.

What only maintainers need are programs of their own: `python -m rewrite.sweep`, `python -m rewrite.kernels`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

import rewrite
from rewrite import program
from rewrite.console import streams
from rewrite.errors import close

DEFAULT_COMMAND = "apply"
RUNTIME = "hf-rewrite-runtime"
EXAMPLE = "rewrite llama --out ./optimized_llama"

# Name → short help, as they are needed. A command's module is imported when it is called, so that --help imports one.
COMMANDS = {
    "apply": "Rewrite a model into a folder (the default command).",
    "verify": "Verify a package, or any two modeling files.",
    "diff": "Show what a package changed against its original.",
    "check": "Say whether packages are up to date; for CI and pre-commit.",
    "sync": "Make packages anew and merge your edits.",
    "accept": "Record that an edit is meant to change the numbers.",
    "undo": "Put a package back to its generated text.",
    "bench": "Measure a package against its original.",
    "profile": "Show where the time of a step goes, before and after.",
    "tune": "Find the fastest tiles of a package for this GPU.",
    "compile": "Compile a package's kernels ahead of time.",
    "explain": "List the transforms, or explain one.",
    "models": "List the model types of the installed transformers.",
    "export": "Write a package in the form that loads from the Hub.",
    "vendor": "Copy the runtime beside a package.",
    "eject": "Drop the lock and the guard, and leave plain files.",
    "completion": "Print the completion script of a shell.",
}
_UNSHOWN = (DEFAULT_COMMAND, "completion")
FIRST = ("out", "dry-run", "only", "skip", "transformers", "verify", "quick", "device", "commit", "version")
"""Options on the first screen, by the name that is typed; `rewrite MODEL --help` shows all of them."""


class DefaultGroup(click.Group):
    """A group in which a first word that is no command is the MODEL of the default command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands, the default one first."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"rewrite.commands.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the name of the default command before anything that is neither a command nor an option of the group."""
        args = args or ["--help"]
        own = {"--help", "-h", "--version"}
        if args[0] not in own and args[0] not in COMMANDS:
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; a pipe that nobody reads any more ends it without an error."""
        with streams.flushed():
            return super().invoke(ctx)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands and the model types that begin with `incomplete`."""
        from rewrite.options.shared_options import complete_models

        own = super().shell_complete(ctx, incomplete)
        default = self.get_command(ctx, DEFAULT_COMMAND)
        assert default is not None
        if incomplete.startswith("-"):
            return own + default.shell_complete(ctx, incomplete)
        return own + complete_models(ctx, default.params[0], incomplete)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show both ways to call it."""
        formatter.write_usage(ctx.command_path, "MODEL --out DIR [OPTIONS]")
        formatter.write_usage(ctx.command_path, "COMMAND [ARGS]...", prefix="       ")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show an example, the commands, then the options of the default command that one needs first."""
        default = self.get_command(ctx, DEFAULT_COMMAND)
        assert default is not None
        options = {p.opts[0].lstrip("-"): p for p in (*default.params, *self.get_params(ctx))}
        records = [_brief(record) for name in FIRST if (record := options[name].get_help_record(ctx))]
        with formatter.section("Example"):
            formatter.write(f"{' ' * formatter.current_indent}{EXAMPLE}\n")
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx) if name not in _UNSHOWN])
        with formatter.section("Options (all of them: rewrite MODEL --help)"):
            formatter.write_dl(records)


def _brief(record: tuple[str, str]) -> tuple[str, str]:
    """Return an option's names and the first clause of its text."""
    names, text = record
    return names, text.split(":")[0].split(";")[0].rstrip(".") + "."


def _versions(ctx: click.Context, param: click.Parameter, asked: bool) -> None:
    """Print the versions of the tool, and of the runtime that packages here would import."""
    from importlib import metadata

    if not asked or ctx.resilient_parsing:
        return
    try:
        runtime = metadata.version(RUNTIME)
    except metadata.PackageNotFoundError:
        runtime = "is not installed"
    click.echo(f"{rewrite.DISTRIBUTION} {rewrite.__version__}\n{RUNTIME} {runtime}")
    ctx.exit()


@click.group(cls=DefaultGroup, context_settings=program.SETTINGS)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_versions,
    help="Show the versions and exit.",
)
def cli() -> None:
    """Rewrite a transformers modeling file into fast source code that you keep, and prove that it computes the same.

    MODEL: a type (llama), a class, a file, a checkpoint, ORG/NAME on the Hub.
    """


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    program.leave(lambda: run(args, own=True))


def run(args: Sequence[str] | None = None, own: bool = False) -> int:
    """Run the command line and return its exit code. `own`: this process runs nothing else, so it may be forked."""
    return program.run(cli, "rewrite", args, own, _meant)


def _meant(word: str) -> str:
    """Return which command a first word may have been meant as that is neither a command nor a model; or nothing."""
    from rewrite.source.installed import find_transformers

    if not word or word.startswith("-") or word in COMMANDS or Path(word).exists():
        return ""
    near = close(word, [name for name in COMMANDS if name != DEFAULT_COMMAND], most=1, cutoff=0.7)
    installed = find_transformers() if near else None
    if not near or (installed is not None and installed.spelled(word) is not None):
        return ""
    return f"no command and no model '{word}': did you mean `rewrite {near[0]}`? (`rewrite --help` lists the commands)"


if __name__ == "__main__":
    main()
