"""`rewrite explain TRANSFORM`: its documentation, from its class."""

from __future__ import annotations

import click

from rewrite.commands.options import complete_transforms


@click.command(short_help="Explain a transform.")
@click.argument("transform", shell_complete=complete_transforms)
def explain(transform: str) -> int:
    """Say what TRANSFORM does, why, what it needs, and when it leaves a place alone."""
    from rich.markdown import Markdown

    from rewrite.docs import section
    from rewrite.show.console import Screen
    from rewrite.transforms import select

    text = section(select(only=(transform,))[0])
    screen = Screen()
    if screen.output.is_terminal:
        screen.output.print(Markdown(text))
    else:
        screen.output.file.write(text)
    return 0
