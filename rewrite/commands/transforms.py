"""`rewrite transforms`: what there is to apply."""

from __future__ import annotations

from pathlib import Path

import click

from rewrite.commands.options import json_option


@click.command(short_help="List the transforms.")
@json_option
def transforms(json_path: Path | None) -> int:
    """List the transforms in the order in which they run; `rewrite explain TRANSFORM` says more about one."""
    from rewrite.deliver import report
    from rewrite.show.console import Screen
    from rewrite.transforms import available, is_own

    found = available()
    if str(json_path) != "-":
        rows = [
            (
                t.name,
                t.numerics.value + (" · on request" if t.on_request else "") + ("" if is_own(t) else " · yours"),
                t.summary,
            )
            for t in found
        ]
        Screen().table(("transform", "numerics", "what it does"), rows)
    listed = {
        t.name: {
            "summary": t.summary,
            "numerics": t.numerics.value,
            "own": is_own(t),
            "on_request": t.on_request,
            "after": list(t.after),
            "reasons": dict(t.reasons),
        }
        for t in found
    }
    report.write(json_path, {"transforms": listed})
    return 0
