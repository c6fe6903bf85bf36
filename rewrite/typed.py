"""Commands as they are typed: what a message tells somebody to run can be copied into a shell."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import click


def typed(*words: object) -> str:
    """Return a call of `rewrite` with these words, quoted."""
    return shlex.join(["rewrite", *map(str, words)])


def again(*more: object, arguments: Sequence[object] | None = None, without: Sequence[str] = ()) -> str:
    """Return the call at hand as it would be typed once more, quoted.

    Args:
        more: words behind it.
        arguments: in place of those that were typed.
        without: options to leave out, `--dry-run`.
    """
    import click

    context = click.get_current_context()
    command = context.command
    named = [] if context.info_name == "MODEL" else [command.name]
    given = [word for p in command.params if isinstance(p, click.Argument) for word in _listed(context.params[p.name])]
    options = (p for p in command.params if isinstance(p, click.Option) and not set(p.opts) & set(without))
    words = [word for option in options if _was_typed(context, option) for word in _words(context, option)]
    return typed(*named, *(given if arguments is None else arguments), *words, *more)


def takes(option: str) -> bool:
    """Return whether the command at hand has an option."""
    import click

    return any(option in parameter.opts for parameter in click.get_current_context().command.params)


def _was_typed(context: click.Context, option: click.Option) -> bool:
    from click.core import ParameterSource

    return context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE


def _words(context: click.Context, option: click.Option) -> Iterator[str]:
    """Yield an option with its value."""
    name, value = max(option.opts, key=len), context.params.get(str(option.name), True)
    if option.is_flag:
        yield name if value else option.secondary_opts[0]
        return
    for one in _listed(value):
        yield name
        yield str(one)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (tuple, list)) else [value]
