"""`rewrite transforms`: what there is to apply."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rewrite.options.shared_options import Command, reporting_options

if TYPE_CHECKING:
    from rewrite.transform import Transform


@click.command(cls=Command, short_help="List the transforms.", examples=("rewrite transforms",))
@reporting_options
def transforms(json_path: Path | None, quiet: bool) -> int:
    """List the transforms in the order in which they run; `rewrite explain TRANSFORM` says more about one.

    With --quiet their names alone.
    """
    from rewrite.console.console import Screen
    from rewrite.delivery import json_report
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
    screen = Screen(json=json_path, quiet=quiet)
    screen.table(("transform", "numerics", "what it does"), rows)
    json_report.write(json_path, "transforms", {"transforms": {t.name: described(t) for t in found}})
    return 0


def described(transform: Transform) -> dict[str, Any]:
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
