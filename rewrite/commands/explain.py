"""`rewrite explain NAME`: a transform, from its class, or a reason that a package counts."""

from __future__ import annotations

from pathlib import Path

import click

from rewrite.options.shared_options import Command, complete_transforms, reporting_options

REASON = """\
## {name}

Why something ran in torch's operators, or in transformers' own code, as `explain(model)` of a package counts it:

{rooms}
"""


@click.command(cls=Command, short_help="Explain a transform.", examples=("rewrite explain fuse_qkv",))
@click.argument("transform", shell_complete=complete_transforms, metavar="NAME")
@reporting_options
def explain(transform: str, json_path: Path | None, quiet: bool) -> int:
    """Say what the transform NAME does, why, what it needs, and when it leaves a place alone.

    NAME may also be a reason that explain(model) names, step_differs. With --quiet in one line.
    """
    from rich.markdown import Markdown

    from rewrite.commands.transforms import described
    from rewrite.console.console import Screen
    from rewrite.delivery import json_report
    from rewrite.docs import section
    from rewrite.package.package_reasons import reasons
    from rewrite.transforms import select

    if said := reasons().get(transform):
        rooms = "\n".join(f"- `{room}`: {why}" for room, why in said.items())
        text, data = (
            REASON.format(name=transform, rooms=rooms),
            {"name": transform, "summary": "; ".join(said.values())},
        )
    else:
        found = select(only=(transform,))[0]
        text, data = section(found), {"name": found.name, **described(found)}
    screen = Screen(json=json_path, quiet=quiet)
    if quiet:
        screen.payload(f"{data['name']}: {data['summary']}\n")
    elif screen.output.is_terminal and not screen.taken:
        screen.output.print(Markdown(text))
    else:
        screen.payload(text)
    json_report.write(json_path, "explain", {"transform": {**data, "text": text}})
    return 0
