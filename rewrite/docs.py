"""Generated documentation: README's table and example, docs/transforms.md, the tables of docs/operators.md.

`python -m rewrite.docs` writes them.

Run it in the repository's root; `--check` writes nothing and fails where a file is out of date.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from rewrite import operators
from rewrite.engine.build import build
from rewrite.operators import Offer
from rewrite.package.original import text_of
from rewrite.show import diff
from rewrite.transform import COMMON_REASONS, Transform
from rewrite.transforms import all_transforms, select
from rewrite.upstream.source import resolve

README = Path("README.md")
TRANSFORMS = Path("docs/transforms.md")
OPERATORS = Path("docs/operators.md")
EXAMPLE = Path("fixtures/models/modeling_tiny_llama.py")
EXAMPLE_PLACES = ("TinyLlamaAttention.forward", "TinyLlamaMLP.forward")
HEADINGS = ("What it does", "Why", "What it needs", "Numerics", "Known limits")


def main(check: bool = False) -> int:
    """Write the generated documentation; with `check`, only say what is out of date and return 1 if anything is."""
    stale = [path for path, text in generated().items() if not path.is_file() or path.read_text("utf-8") != text]
    for path in stale:
        print(f"{path} is out of date: python -m rewrite.docs" if check else f"writing {path}")
        if not check:
            path.write_text(generated()[path], encoding="utf-8")
    return 1 if check and stale else 0


def generated() -> dict[Path, str]:
    """Return the text that each generated file should have."""
    readme = _between(README.read_text(encoding="utf-8"), "transforms", table(all_transforms()))
    readme = _between(readme, "example", f"```diff\n{example()}```\n")
    page = _between(OPERATORS.read_text(encoding="utf-8"), "operators", operators_table())
    return {README: readme, TRANSFORMS: _page(all_transforms()), OPERATORS: page}


def table(transforms: list[Transform]) -> str:
    """Return the table of transforms, in the order in which they run."""
    lines = ["| transform | what becomes what | numerics |", "|---|---|---|"]
    for transform in transforms:
        name = f"[`{transform.name}`](docs/transforms.md#{transform.name})"
        numerics = transform.numerics.value + (", on request" if transform.on_request else "")
        lines.append(f"| {name} | {transform.summary} | {numerics} |")
    return "\n".join(lines) + "\n"


def operators_table() -> str:
    """Return the table of operators, from what their files declare and from their definitions."""
    lines = ["| call | shapes | computes | in a decode step | in 8 bits |", "|---|---|---|---|---|"]
    for offer in operators.offers():
        if offer.shapes:
            call, first = _definition(offer)
            others = [f"`{use}`" if use else "" for use in (offer.step, offer.fp8 or offer.fp8_rows)]
            lines.append(f"| `{offer.room}.{call}` | `{offer.shapes}` | {first} | {' | '.join(others)} |")
    return "\n".join(lines) + "\n"


def _definition(offer: Offer) -> tuple[str, str]:
    """Return the call of an operator without annotations, and the first paragraph of its docstring."""
    tree = ast.parse(operators.own_text(offer.file))
    found = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == offer.name)
    function = next(found)
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    first = " ".join((ast.get_docstring(function) or "").split("\n\n")[0].split())
    return f"{offer.name}({ast.unparse(function.args)})", first.replace("|", "\\|")


def section(transform: Transform) -> str:
    """Return the documentation of one transform from its class, the reasons for leaving a place alone included."""
    lines = [f"## {transform.name}", "", *_markdown(inspect.getdoc(type(transform)) or transform.summary)]
    lines += ["", "### When it leaves a place alone", "", "| reason | meaning |", "|---|---|"]
    reasons = {**transform.reasons, **COMMON_REASONS}
    lines += [f"| `{reason}` | {reasons[reason]} |" for reason in sorted(reasons)]
    return "\n".join(lines) + "\n"


def example() -> str:
    """Return the hunks of a rewritten fixture that README shows."""
    source = resolve(str(EXAMPLE))
    before, after = text_of(source.path), build(source, select()).rewritten.text
    return "".join(diff.hunks_in(before, after, EXAMPLE_PLACES))


def _page(transforms: list[Transform]) -> str:
    head = "Generated from the classes in `transforms/` by `python -m rewrite.docs`; they run in this order."
    return "\n".join([f"# Transforms\n\n{head}\n", *(section(transform) for transform in transforms)])


def _markdown(docstring: str) -> Iterator[str]:
    """Yield the lines of a docstring with its headings as Markdown headings and their text unindented."""
    for line in docstring.splitlines():
        if line.rstrip(":") in HEADINGS and line.endswith(":"):
            yield f"### {line[:-1]}"
            yield ""
        else:
            yield line.removeprefix("    ")


def _between(text: str, mark: str, content: str) -> str:
    start, end = f"<!-- {mark}: generated -->\n", f"<!-- {mark}: end -->"
    head, _, rest = text.partition(start)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"no pair of marks for {mark}")
    return f"{head}{start}{content}{found}{tail}"


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
