"""The command `rewrite`: a group whose default command rewrites a model; here errors become exit codes.

Exit codes: 0 done, 1 a difference or a failed verification, 2 usage, 3 a bug of ours, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import shutil
import signal
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

import rewrite
from rewrite.console import streams
from rewrite.errors import (
    EXTRAS,
    MissingLibrary,
    PathNotUsable,
    RewriteError,
    StreamLost,
    TransformError,
    UnknownModel,
    UsageError,
    close,
)

VERSION = getattr(rewrite, "__version__", "unknown")
DEFAULT_COMMAND = "apply"
INTERRUPTED = 130
BUG = 3
_OF_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM)
"""What a system says of a path that was given and cannot be used, wherever we first look at it."""

# Name → short help. A command's module is imported when it is called, so that --help imports none of them but one.
COMMANDS = {
    "accept": "Record that an edit is meant to change the numbers.",
    "apply": "Rewrite a model into a folder (the default command).",
    "bench": "Measure a package against its original.",
    "check": "Say whether packages are up to date; for CI and pre-commit.",
    "compile": "Compile a package's kernels ahead of time.",
    "completion": "Print the completion script of a shell.",
    "diff": "Show what a package changed against its original.",
    "eject": "Drop the lock and the guard, and leave plain files.",
    "explain": "Explain a transform.",
    "export": "Write a package in the form that loads from the Hub.",
    "kernels": "Compile the kernels for chips that need not be there.",
    "models": "List the model types of the installed transformers.",
    "profile": "Show where the time of a step goes, before and after.",
    "sweep": "Rewrite and verify every modeling file of a transformers.",
    "sync": "Make packages anew and merge your edits.",
    "vendor": "Copy the runtime beside a package.",
    "transforms": "List the transforms.",
    "tune": "Find the fastest tiles of a package for this GPU.",
    "undo": "Put a package back to its generated text.",
    "verify": "Verify a package, or any two modeling files.",
}


class _ReaderGone(Exception):
    """The reader of our standard output has seen enough; click would exit with 1 for the OSError itself."""


class DefaultGroup(click.Group):
    """A group in which a first word that is no command is the MODEL of the default command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands, the default one first."""
        return sorted(COMMANDS, key=lambda name: (name != DEFAULT_COMMAND, name))

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
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
            return code
        except BrokenPipeError as error:
            raise _ReaderGone from error

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

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show where there is more, and an example, a line each."""
        with formatter.section("Examples"):
            for line in ("rewrite llama --out ./optimized_llama", "rewrite COMMAND --help   # more about a command"):
                formatter.write(f"{' ' * formatter.current_indent}{line}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show the options of the default command, then the commands."""
        default = self.get_command(ctx, DEFAULT_COMMAND)
        assert default is not None
        options = (p for p in (*default.params, *self.get_params(ctx)) if isinstance(p, click.Option))
        records = [record for option in options if (record := option.get_help_record(ctx))]
        with formatter.section("Options"):
            formatter.write_dl(records)
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx) if name != DEFAULT_COMMAND])


@click.group(
    cls=DefaultGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
@click.version_option(VERSION, prog_name="rewrite (hf-rewrite)")
def cli() -> None:
    """Rewrite a transformers modeling file into fast source code that you keep, and prove that it computes the same.

    MODEL is a model type (llama), a class, a modeling file, a dotted module, a checkpoint folder or its config.json,
    or ORG/NAME on the Hub.
    """


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code: every failure is one message, never a traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill cleans up as Ctrl-C does
    streams.prepare()
    code = run(args, own=True)
    gc.freeze()  # what is left goes with the process: nobody need look at it once more
    sys.exit(code)


def run(args: Sequence[str] | None = None, own: bool = False) -> int:
    """Run the command line and return its exit code. `own`: this process runs nothing else, so it may be forked."""
    try:
        if getattr(rewrite, "DISTRIBUTION", None) != "hf-rewrite":
            raise UsageError(
                f"the package 'rewrite' in {rewrite.__path__[0]} is not the one of hf-rewrite: another distribution "
                "(openrewrite has that name too) was installed over it. Install hf-rewrite in an environment of its "
                "own."
            )
        return int(cli.main(args, prog_name="rewrite", standalone_mode=False, obj=own) or 0)
    except click.UsageError as error:
        command = error.ctx.info_name if error.ctx is not None and error.ctx.parent is not None else None
        of = "" if command in (None, DEFAULT_COMMAND) else f" {command}"
        said = _meant(args) or f"{_wrong(error, command)} (`rewrite{of} --help` shows the usage)"
        return _say(f"error: {said}", error.exit_code)
    except click.ClickException as error:
        return _say(f"error: {error.format_message()}", error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _say("interrupted: no package is half written", INTERRUPTED)
    except _ReaderGone:  # Python would complain once more at exit
        streams.discard(sys.stdout.fileno())
        return 0
    except TransformError as error:
        return _say(f"error: {error} A log to attach: {_log()}", error.exit_code)
    except UnknownModel as error:
        return _say(f"error: {_meant(args) or error}", error.exit_code)
    except RewriteError as error:
        return _say(f"error: {error}", error.exit_code)
    except ModuleNotFoundError as error:
        if error.name is None or error.name not in ("libcst", "rich", *EXTRAS):
            return _bug(error)
        missing = MissingLibrary(error.name, "this command")
        return _say(f"error: {missing}", missing.exit_code)
    except OSError as error:
        if error.errno not in _OF_PATHS:
            return _bug(error)
        unusable = PathNotUsable(error.filename, error.strerror or str(error))
        return _say(f"error: {unusable}", unusable.exit_code)
    except Exception as error:  # the outermost handler: whatever gets here is a bug of ours
        return _bug(error)


def _meant(args: Sequence[str] | None) -> str:
    """Return which command a first word may have been meant as that is neither a command nor a model; or nothing."""
    from rewrite.source.installed import find_transformers

    word = next(iter(sys.argv[1:] if args is None else args), "")
    if not word or word.startswith("-") or word in COMMANDS or Path(word).exists():
        return ""
    near = close(word, [name for name in COMMANDS if name != DEFAULT_COMMAND], most=1, cutoff=0.7)
    installed = find_transformers() if near else None
    if not near or (installed is not None and installed.spelled(word) is not None):
        return ""
    return f"no command and no model '{word}': did you mean `rewrite {near[0]}`? (`rewrite --help` lists the commands)"


def _wrong(error: click.UsageError, command: str | None) -> str:
    """Return in one paragraph what is wrong with a command line."""
    said = " ".join(error.format_message().split())
    return f"{said}: a rewrite takes one MODEL" if command == DEFAULT_COMMAND and "extra argument" in said else said


def _say(message: str, code: int) -> int:
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        lines = message.split("\n")
        # a path or a command that is continued can be copied, one that was cut at a hyphen cannot
        message = "\n".join(
            textwrap.fill(line, width, break_on_hyphens=False, break_long_words=False) for line in lines
        )
    with contextlib.suppress(StreamLost, BrokenPipeError):  # where it cannot be said, the code still says it
        click.echo(message, err=True)
    return code


def _bug(error: Exception) -> int:
    what = f"{type(error).__name__}: {error}"
    return _say(f"error: this is a bug of ours ({what}). A log to attach to a report: {_log()}", BUG)


def _log() -> Path:
    """Write the traceback of the exception in hand to a file of its own."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="rewrite-", suffix=".log", delete=False, encoding="utf-8", errors="backslashreplace"
    ) as log:
        log.write(f"hf-rewrite {VERSION} · Python {sys.version}\n{' '.join(sys.argv)}\n\n{traceback.format_exc()}")
    return Path(log.name)


if __name__ == "__main__":
    main()
