"""Every command in the documents parses: the command is there, with these options, values and arguments."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from rewrite.cli import COMMANDS, DEFAULT_COMMAND, cli
from rewrite.kernels.kernel_run import known_kernels
from rewrite.kernels.model_sizes import STEPS
from rewrite.options.shared_options import Command
from rewrite.transforms import all_transforms

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
INLINE = re.compile(r"`((?:rewrite|python -m rewrite\.(?:sweep|kernels)) [^`]+)`")
OPTION = re.compile(r"`(--[a-z][a-z-]+)[^`]*`")
OF_OTHERS = {"--model-impl": "vLLM", "--pmc": "rocprofv3"}
"""Options of other programs that a page names without the program."""
SEPARATORS = ("|", "||", "&&", ";", ">", ">>")
TRANSFORMS = {transform.name for transform in all_transforms()} | {"cap_logits", "TRANSFORM"}
"""With the one that docs/own-transforms.md writes."""


def commands_of(text: str) -> Iterator[str]:
    """Yield the commands of a page's blocks: lines of the shell, in a recording those behind its prompt."""
    for language, block in BLOCK.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        if language == "bash":
            yield from lines
        elif language in ("", "text", "console"):
            yield from (line[2:] for line in lines if line.startswith("$ "))


def calls(line: str) -> Iterator[list[str]]:
    """Yield the words of each program that a line of the shell runs, without settings before it."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in SEPARATORS:
            words.append(word)
            continue
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words:
            yield words
        words = []


def faults(line: str, whole: bool) -> Iterator[str]:
    """Yield what is wrong with a line; unless it is `whole`, arguments and values may be missing."""
    for program, *words in calls(line):
        name = Path(program).name
        if name in ("pytest", "python") and words[:1] != ["-c"]:
            module = "" if name == "pytest" else words[1] if words[0] == "-m" else words[0]
            if module in ("rewrite.sweep", "rewrite.kernels"):
                found = getattr(importlib.import_module(f"{module}.__main__"), module.partition(".")[2])
                yield from _wrong(found, words[2:], whole)
            elif name == "pytest" or module.startswith(("tests.", "bench.")):
                yield from _unknown(module, words)
        elif name == "rewrite":
            words = [word.strip("[].…") for word in words if word.strip("[].…")] if not whole else words
            if words[:1] in (["--help"], ["--version"], []):
                continue
            named, *arguments = words if words[0] in COMMANDS else [DEFAULT_COMMAND, *words]
            if named == "COMMAND":
                continue
            command = cli.get_command(click.Context(cli), named)
            assert isinstance(command, Command)
            yield from _wrong(command, arguments, whole)


def _wrong(command: Command, arguments: list[str], whole: bool) -> Iterator[str]:
    context = click.Context(command)
    if "--help" in arguments:
        return
    for option in ("--diff", "--json"):  # as `Command.parse_args` gives them their value
        if option in arguments:
            place = arguments.index(option)
            following = arguments[place + 1 : place + 2]
            if not following or following[0].startswith("--"):
                arguments = [*arguments[: place + 1], "none" if option == "--diff" else "-", *arguments[place + 1 :]]
    try:
        options, rest, _ = command.make_parser(context).parse_args(args=list(arguments))
        for parameter in command.params:
            if not isinstance(parameter.type, click.Path):
                parameter.handle_parse_result(context, options, [])
            elif parameter.required and not isinstance(options.get(str(parameter.name)), (str, tuple)):
                raise click.MissingParameter(ctx=context, param=parameter)
    except click.MissingParameter as error:
        if whole:
            yield error.format_message()
    except click.BadOptionUsage as error:
        if whole or "requires an argument" not in error.format_message():
            yield error.format_message()
    except click.UsageError as error:
        yield error.format_message()
    else:
        if rest and whole:
            yield f"{rest[0]} is one word too many"
    for name in ("only", "skip", "also"):
        yield from (f"no transform {one}" for one in sorted({*context.params.get(name, ())} - TRANSFORMS))
    if command.name == "kernels":
        names = (one for one in context.params.get("names", ()) if one not in (*known_kernels(), *STEPS, "NAME"))
        yield from (f"no kernel {one}" for one in names)


def _unknown(module: str, words: list[str]) -> Iterator[str]:
    """Yield the options of a test's program that its file does not name; pytest's own are known."""
    folders = ("tests/conftest.py", "tests/emulator/emulation_options.py", "tests/soundness", "tests/metamorphic")
    path = ROOT / module.replace(".", "/")
    named = [ROOT / folder for folder in folders] if not module else [path, path.with_suffix(".py")]
    files = [file for one in named for file in ([one] if one.is_file() else one.rglob("*.py") if one.is_dir() else [])]
    literals = {one for file in files for one in re.findall(r'"([\w-]+)"', file.read_text(encoding="utf-8"))}
    options = (word for word in words if word.startswith("--"))
    yield from (f"{word} of {module or 'pytest'}" for word in options if not {word, word[2:]} & literals)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = {line: [*faults(line, True)] for line in commands_of(text)}
    for line in INLINE.findall(BLOCK.sub("", text)):
        found[line] = [*faults(line.replace("\\|", "_"), False)]
    assert {line: wrong for line, wrong in found.items() if wrong} == {}


def every_option() -> set[str]:
    """The options of all commands and of the maintainers' programs."""
    context = click.Context(cli)
    found = [cli.get_command(context, name) for name in COMMANDS]
    tools = [getattr(importlib.import_module(f"rewrite.{name}.__main__"), name) for name in ("sweep", "kernels")]
    parameters = [parameter for command in (*found, *tools) if command is not None for parameter in command.params]
    return {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_that_a_page_names_exist(page: Path) -> None:
    named = set(OPTION.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))))
    assert sorted(named - every_option() - set(OF_OTHERS)) == []


def test_enough_commands_are_seen() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    words = [call for text in texts for line in commands_of(text) for call in calls(line)]
    assert sum(Path(call[0]).name == "rewrite" for call in words) > 60


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("rewrite llama --out ./x --skip gone", "no transform gone"),
        ("cd a && rewrite verify ./x --qick", "No such option"),
        ("rewrite compile", "Missing argument"),
        ("rewrite llama --out", "requires an argument"),
        ("A=1 .venv/bin/rewrite diff ./x --diff sideways", "is not one of"),
        ("python -m rewrite.sweep --samples 3", "No such option"),
        ("python -m rewrite.kernels linaer", "no kernel linaer"),
        ("pytest --emulated gfx942", "--emulated"),
    ],
)
def test_a_wrong_command_is_seen(line: str, fault: str) -> None:
    assert [one for one in faults(line, True) if fault in one]
