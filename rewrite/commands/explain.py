"""`rewrite explain TRANSFORM`: its documentation, from its class."""

from __future__ import annotations

from pathlib import Path

import click

from rewrite.commands.options import Command, complete_transforms, reporting_options


@click.command(cls=Command, short_help="Explain a transform.", examples=("rewrite explain fuse_qkv",))
@click.argument("transform", shell_complete=complete_transforms)
@reporting_options
def explain(transform: str, json_path: Path | None, quiet: bool) -> int:
    """Say what TRANSFORM does, why, what it needs, and when it leaves a place alone.

    With --quiet in one line.
    """
    from rich.markdown import Markdown

    from rewrite.commands.transforms import described
    from rewrite.deliver import report
    from rewrite.docs import section
    from rewrite.show.console import Screen
    from rewrite.transforms import select

    found = select(only=(transform,))[0]
    text = section(found)
    screen = Screen(json=json_path, quiet=quiet)
    if quiet:
        screen.payload(f"{found.name}: {found.summary}\n")
    elif screen.output.is_terminal and not screen.taken:
        screen.output.print(Markdown(text))
    else:
        screen.payload(text)
    report.write(json_path, "explain", {"transform": {"name": found.name, **described(found), "text": text}})
    return 0
