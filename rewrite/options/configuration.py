"""`[tool.rewrite]` of pyproject.toml: what the options of the commands are where the command line does not say.

`[tool.rewrite]` holds for every command that has the option, `[tool.rewrite.verify]` for that command alone.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from rewrite.errors import ConfigurationNotUsable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "pyproject.toml"
TABLE = "tool.rewrite"
TRANSFORMS = "transforms"
"""A list of paths, read by `rewrite.plugins`: no option of a command."""
_NEVER = ("help", "version", "no-config")


def read(ctx: click.Context, param: click.Parameter, ignored: bool) -> None:
    """Take the defaults of a command's options from the nearest pyproject.toml that has our table.

    Raises:
        ConfigurationNotUsable: if it cannot be read, names an option that there is not, or gives one a wrong value.
    """
    if ctx.resilient_parsing or ignored:
        return
    path = project_file(Path.cwd())
    if path is not None:
        ctx.default_map = defaults(path, ctx)


def project_file(place: Path) -> Path | None:
    """Return the nearest `pyproject.toml` with our table at or above `place`, up to the repository's root."""
    here = place.resolve()
    for folder in (here, *here.parents):
        path = folder / FILE
        if path.is_file() and b"rewrite" in path.read_bytes() and _table(path):
            return path
        if (folder / ".git").exists():
            return None
    return None


def defaults(path: Path, ctx: click.Context) -> dict[str, Any]:
    """Return the values that a file gives to the options of a command, by the name of the parameter.

    Raises:
        ConfigurationNotUsable: as `read`.
    """
    commands = _commands(ctx)
    table = _table(path)
    own = {name: value for name, value in table.items() if isinstance(value, dict) and name != TRANSFORMS}
    general = {name: value for name, value in table.items() if name not in own and name != TRANSFORMS}
    known = {key for command in commands.values() for key in _options(command)}
    _check(path, TABLE, general, sorted({*known, TRANSFORMS}), sorted(commands))
    for name in own:
        if name not in commands:
            raise ConfigurationNotUsable(path, f"[{TABLE}.{name}]", _unknown("command", name, sorted(commands)))
        _check(path, f"{TABLE}.{name}", own[name], sorted(_options(commands[name])), [])
    asked = ctx.command.name or ""
    for name, command in commands.items():  # an option of all may be of another kind elsewhere: that is said there
        if name != asked:
            _of_command(path, command, {}, own.get(name, {}), ctx)
    return _of_command(path, commands[asked], general, own.get(asked, {}), ctx)


def _of_command(
    path: Path, command: click.Command, general: Mapping[str, Any], own: Mapping[str, Any], ctx: click.Context
) -> dict[str, Any]:
    """Return the values of one command's options; those of its own table go before the general ones."""
    options, found = _options(command), {}
    for where, values in ((TABLE, general), (f"{TABLE}.{command.name}", own)):
        for key, value in values.items():
            if key in options:
                found[str(options[key].name)] = _converted(path, f"[{where}] {key}", options[key], value, ctx)
    return found


def _commands(ctx: click.Context) -> dict[str, click.Command]:
    group = ctx.find_root().command
    assert isinstance(group, click.Group)
    found = {name: group.get_command(ctx, name) for name in group.list_commands(ctx)}
    return {name: command for name, command in found.items() if command is not None}


def _options(command: click.Command) -> dict[str, click.Option]:
    """Return the options of a command by their names on the command line, less the dashes."""
    named = (
        (name[2:], option)
        for option in command.params
        if isinstance(option, click.Option)
        for name in option.opts
        if name.startswith("--")
    )
    return {name: option for name, option in named if name not in _NEVER}


def _table(path: Path) -> Mapping[str, Any]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("rewrite", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, AttributeError) as error:
        raise ConfigurationNotUsable(path, f"[{TABLE}]", f"it cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationNotUsable(path, f"[{TABLE}]", "it should be a table")
    return found


def _check(path: Path, where: str, values: Mapping[str, Any], known: list[str], tables: list[str]) -> None:
    for key in values:
        if key not in known:
            raise ConfigurationNotUsable(path, f"[{where}] {key}", _unknown("option", key, [*known, *tables]))


def _unknown(kind: str, key: str, known: list[str]) -> str:
    plain = key.replace("_", "-").removeprefix("no-")
    near = [plain] if plain in known else difflib.get_close_matches(plain, known, n=1)
    return f"there is no such {kind}: " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}")


def _converted(path: Path, where: str, option: click.Option, value: Any, ctx: click.Context) -> Any:
    """Return a value of TOML as click would have it from the command line; paths are relative to the file."""
    values = list(_values(path, where, option, value))
    if option.is_flag and not isinstance(value, bool):
        raise ConfigurationNotUsable(path, where, "it should be true or false")
    for one in values:
        try:
            option.type.convert(one, option, ctx)
            if option.callback is not None and not option.is_flag:
                option.callback(ctx, option, one)
        except click.BadParameter as error:
            raise ConfigurationNotUsable(path, where, error.message) from error
    return values if option.multiple else values[0]


def _values(path: Path, where: str, option: click.Option, value: Any) -> Iterator[Any]:
    if isinstance(value, list) and not option.multiple:
        value = ",".join(str(one) for one in value)  # `--batch 1,8`
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, (str, int, float)):
            raise ConfigurationNotUsable(path, where, "it should be a text, a number, true or false, or a list")
        if isinstance(option.type, click.Path):
            yield str(one) if str(one) == "-" else os.path.relpath(path.parent / str(one))
        else:
            yield one if option.is_flag else str(one)
