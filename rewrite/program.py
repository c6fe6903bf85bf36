"""A click command as a program: here errors become exit codes and one message, never a traceback.

Exit codes: 0 done, 1 a difference or a failed verification, 2 usage, 3 a bug of ours, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import shutil
import signal
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

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
)

SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 80}
"""Of click's context, for every program."""
INTERRUPTED = 130
BUG = 3
_OF_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM)
"""What a system says of a path that was given and cannot be used, wherever we first look at it."""


def leave(work: Callable[[], int]) -> None:
    """Exit with the code that `work` returns, which runs a program."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill cleans up as Ctrl-C does
    streams.prepare()
    code = work()
    if "triton" not in sys.modules:  # whose 3.9 lists on the screen what is not freed
        gc.freeze()  # what is left goes with the process: nobody need look at it once more
    sys.exit(code)


def run(
    program: click.Command,
    name: str,
    args: Sequence[str] | None = None,
    own: bool = False,
    meant: Callable[[str], str] = lambda word: "",
) -> int:
    """Run a program and return its exit code.

    Args:
        program: a command, or a group of them.
        name: of the program, as it is typed.
        args: what was typed behind it; None: as this process was called.
        own: this process runs nothing else, so it may be forked.
        meant: says what a first word may have been meant as that the program does not know, or nothing.
    """
    first = next(iter(sys.argv[1:] if args is None else args), "")
    try:
        if getattr(rewrite, "DISTRIBUTION", None) != "hf-rewrite":
            raise UsageError(
                f"the package 'rewrite' in {rewrite.__path__[0]} is not the one of hf-rewrite: another distribution "
                "(openrewrite has that name too) was installed over it. Install hf-rewrite in an environment of its "
                "own."
            )
        return int(program.main(args, prog_name=name, standalone_mode=False, obj=own, **SETTINGS) or 0)
    except click.UsageError as error:
        of = error.ctx.command_path if error.ctx is not None else name
        said = meant(first) or f"{' '.join(error.format_message().split())} (`{of} --help` shows the usage)"
        return _say(f"error: {said}", error.exit_code)
    except click.ClickException as error:
        return _say(f"error: {error.format_message()}", error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _say("interrupted: no package is half written", INTERRUPTED)
    except streams.ReaderGone:  # Python would complain once more at exit
        streams.discard(sys.stdout.fileno())
        return 0
    except TransformError as error:
        return _say(f"error: {error} A log to attach: {_log()}", error.exit_code)
    except UnknownModel as error:
        return _say(f"error: {meant(first) or error}", error.exit_code)
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
        made = f"hf-rewrite {rewrite.__version__} · Python {sys.version}"
        log.write(f"{made}\n{' '.join(sys.argv)}\n\n{traceback.format_exc()}")
    return Path(log.name)
