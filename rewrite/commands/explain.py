"""`rewrite explain [NAME]`: the transforms, one of them from its class, or a reason that a package counts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rewrite.options.shared_options import Command, complete_transforms, reporting_options

if TYPE_CHECKING:
    from rewrite.console.console import Screen
    from rewrite.transform import Transform

REASON = """\
## {name}

Why something ran in torch's operators, or in transformers' own code, as `explain(model)` of a package counts it:

{rooms}
"""


@click.command(
    cls=Command,
    short_help="List the transforms, or explain one.",
    examples=("rewrite explain", "rewrite explain fuse_qkv"),
)
@click.argument("transform", shell_complete=complete_transforms, metavar="[NAME]", required=False)
@reporting_options
def explain(transform: str | None, json_path: Path | None, quiet: bool) -> int:
    """Say what the transform NAME does, why, what it needs, and when it leaves a place alone.

    NAME may also be a reason that explain(model) names, step_differs. Without one it lists the transforms in the order
    in which they run. With --quiet in one line.
    """
    from rewrite.console.console import Screen
    from rewrite.delivery import json_report

    screen = Screen(json=json_path, quiet=quiet)
    json_report.write(json_path, "explain", _listed(screen) if transform is None else _explained(transform, screen))
    return 0


def _listed(screen: Screen) -> dict[str, Any]:
    """Show every transform in a line. Returns the report."""
    from rewrite.transforms import available, is_own

    found = available()
    rows = [
        (
            t.name,
            "\n".join([t.numerics.value, *["on request"][: t.on_request], *["yours"][is_own(t) :]]),
            t.summary,
        )
        for t in found
    ]
    screen.table(("transform", "numerics", "what it does"), rows)
    return {"transforms": {t.name: _described(t) for t in found}}


def _explained(name: str, screen: Screen) -> dict[str, Any]:
    """Show the page of a transform or of a reason. Returns the report."""
    from rich.markdown import Markdown

    from rewrite.docs import section
    from rewrite.package.package_reasons import reasons
    from rewrite.transforms import select

    if said := reasons().get(name):
        rooms = "\n".join(f"- `{room}`: {why}" for room, why in said.items())
        text, data = REASON.format(name=name, rooms=rooms), {"name": name, "summary": "; ".join(said.values())}
    else:
        found = select(only=(name,))[0]
        text, data = section(found), {"name": found.name, **_described(found)}
    if screen.quiet:
        screen.payload(f"{data['name']}: {data['summary']}\n")
    elif screen.output.is_terminal and not screen.taken:
        screen.output.print(Markdown(text))
    else:
        screen.payload(text)
    return {"transform": {**data, "text": text}}


def _described(transform: Transform) -> dict[str, Any]:
    """Return what a report says of a transform."""
    from rewrite.transform import COMMON_REASONS
    from rewrite.transforms import is_own

    return {
        "summary": transform.summary,
        "numerics": transform.numerics.value,
        "own": is_own(transform),
        "on_request": transform.on_request,
        "after": list(transform.after),
        "reasons": {**transform.reasons, **COMMON_REASONS},
    }
