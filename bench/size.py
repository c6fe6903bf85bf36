"""How many lines of code a package puts into a repository, of what kind and what for, as the page docs/size.md.

    python bench/size.py --write docs/size.md [MODEL …]

Packages of the installed transformers, `--target cuda`; nothing of a model is run.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from pathlib import Path

from rewrite.engine.build import Build, build
from rewrite.package import runtime_files
from rewrite.package.assemble import assemble
from rewrite.package.features import FEATURES, ON_REQUEST, forms_of, needed_by, without
from rewrite.package.lock import Options
from rewrite.transforms import select
from rewrite.upstream.source import resolve

MODELS = ("llama", "qwen3_moe", "gemma2", "bert", "gpt2", "t5", "whisper", "mamba2", "deepseek_v3")
MAIN = "llama"
BESIDE = ("mistral", "qwen3", "gemma2", "qwen3_moe", "t5", "bert")
"""Packages that share a runtime with that of `MAIN`."""
KINDS = ("code", "docstring", "comment", "blank")
ROOMS = {
    "attention": "attention of a decode step and of prompts, rotary embeddings",
    "cache": "keys and values at fixed addresses",
    "core": "backends, launches, what `explain` counts",
    "decode": "`generate()` with a step in a captured graph",
    "forward": "forwards in captured graphs",
    "norms": "norms, residual sums",
    "origin": "the guard that watches transformers",
    "package": "Auto classes, checkpoints, saving with code",
    "parallel": "tensors that are dealt to several ranks",
    "products": "matrix products of a step, gated activations",
    "upstream": "what this package takes from transformers",
    "__init__": "what users call of it",
}
PAGE = """\
# How large a package is, and what can be left out

Made by `python bench/size.py --write docs/size.md` with transformers {version}, `--target cuda`.

A package of Llama has {files} files; beyond its modeling file ({modeling} lines) {lines} lines of Python, nearly all
of them the runtime: the definitions that the modeling file leads to, and nothing else. Kernels for what no module of
the file can be (a LayerNorm, a `Conv1D`, an indexer's keys, recurrent states) are not there, nor is what no class of
it is marked for (states that are carried from call to call without a cache), nor what looks for states that nobody
marked, where no code of the file writes to a module. In a pull request `.gitattributes` folds all of it.

| file | lines | code | docstrings | comments | blank | what it is |
|---|---|---|---|---|---|---|
{rooms}

## What comes on request

A new package has what one GPU and a checkpoint in 16 or 32 bits need. The rest is asked for, when the package is made
or later (`rewrite sync DIR --with ranks`; `rewrite explain ranks` says what it is):

| | lines of runtime | more | what it brings |
|---|---|---|---|
{requests}

Where it can be seen that something is needed it comes without asking, and a line of the screen says so: `formats`
where the checkpoint that the model was named by, or that of `--weights`, has `weight_block_size` in its `config.json`,
and for files whose checkpoints are published so (DeepSeek-V3, MiniMax-M2); `ranks` where the machine shows several
GPUs; `eager` for files that take a softmax of their own by default; `inputs` where a `forward` of the file names more
than tokens, mask and positions (images, an encoder's output), also where a new version of it begins to. A package
keeps what it has: one that was made when all of this came along keeps it in `rewrite sync`, and in `rewrite MODEL
--out DIR` over it.

Nothing computes something else for want of it. A model on several GPUs, a call that gives a step more, or one with
drafts (`--without speculation`) generates in transformers' own loop; layers with scales for blocks are called as
transformers has them; without `training` gradients are torch's, of the operators that the original has; a batch is
padded in whole; attention runs as torch chooses. `explain(model)` counts each of these calls (`ranks_left_out`,
`formats_left_out`, `attention_left_out`, …) and names the command that brings what was missing. To choose an attention
kernel in code (`set_attention_backend`), or to save a model with its code, is an error that names it.

## What can be left out

| | lines of runtime | less | what the package then does not have |
|---|---|---|---|
{choices}

`--without` is kept in `rewrite.lock`, as `--with` is. A shared runtime ([sharing.md](sharing.md)) leaves out what all
its packages leave out. Transforms are left out with `--skip`; the table has those with which {least} lines go.

## The second package

With a runtime that both share ([sharing.md](sharing.md)), beside a package of Llama:

| model | modeling file | more of runtime | `__init__.py` and `upstream.py` | together |
|---|---|---|---|---|
{second}

## What brings the rest

Lines that would go if the modeling file did not use one name of the runtime, the others as they are. Most lines are
needed by several.

| the modeling file uses | lines that only this brings |
|---|---|
{uses}

## Other models

| model | modeling file | runtime | of it code |
|---|---|---|---|
{models}
"""
LEAST = 50
TOGETHER = {
    ("capture_forward", "decode_layers"): "and a layer's step in few kernels; `generate()` in a captured graph stays",
    ("capture_forward", "static_cache", "decode_layers"): "captured graphs, kernels of a decode step; others stay",
}
"""What is skipped together, and what a package then does not have."""
ALONE = "static_cache", "the kernels of the file; `generate()` in a captured graph stays, and its products' kernels"
"""A transform alone, and what a package then does not have."""


def kinds(text: str) -> Counter[str]:
    """Return how many lines of a file are code, docstrings, comments and blank."""
    lines = text.splitlines()
    said: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            said |= set(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    found: Counter[str] = Counter()
    for number, line in enumerate(lines, 1):
        bare = line.strip()
        plain = "blank" if not bare else "comment" if bare.startswith("#") else "code"
        found["docstring" if number in said else plain] += 1
    return found


@cache
def built(model: str, skip: tuple[str, ...] = ()) -> Build:
    """Return the rewritten modeling file of a model."""
    return build(resolve(model), select(skip=skip))


def options(model: str) -> Options:
    """Return what a new package of a model is made with."""
    return Options(without=without(None, needed_by(built(model).rewritten.text), ()))


def files(model: str) -> dict[str, str]:
    """Return the Python files of a package."""
    package = assemble(built(model), select(), options(model), Path(f"optimized_{model}"))
    return {name: data.decode() for name, data in package.files.items() if name.endswith(".py")}


def runtime_lines(model: str, skip: tuple[str, ...] = (), without: Collection[str] = ON_REQUEST) -> int:
    """Return the lines of the rooms of a package."""
    return lines_of(uses_of(model, skip), without)


def uses_of(model: str, skip: tuple[str, ...] = ()) -> list[str]:
    """Return what a modeling file uses of the runtime, with its forms."""
    rewritten = built(model, skip).rewritten
    return [*rewritten.runtime, *forms_of(rewritten.text)]


def lines_of(uses: Sequence[str], without: Collection[str] = ON_REQUEST) -> int:
    """Return the lines of the runtime that some uses need."""
    made = runtime_files.files(runtime_files.closure_of(uses, "cuda", without))
    return sum(len(text.decode().splitlines()) for text in made.values())


def page(models: Iterable[str]) -> str:
    """Return the page."""
    made = files(MAIN)
    modeling = f"modeling_{MAIN}.py"
    counted = {name: kinds(text) for name, text in made.items() if name.startswith(runtime_files.FOLDER)}
    rooms = []
    for name, found in sorted(counted.items(), key=lambda item: -item[1].total()):
        stem = Path(name).stem
        cells = [f"{found[kind]:,}" for kind in KINDS]
        rooms.append(f"| `{name}` | {found.total():,} | {' | '.join(cells)} | {ROOMS[stem]} |")
    whole = sum(counted.values(), Counter())
    rooms.append(f"| together | {whole.total():,} | {' | '.join(f'{whole[kind]:,}' for kind in KINDS)} | |")
    package = assemble(built(MAIN), select(), options(MAIN), Path(f"optimized_{MAIN}"))
    return PAGE.format(
        version=resolve(MAIN).transformers_version,
        files=len(package.files),
        modeling=len(made[modeling].splitlines()),
        lines=f"{sum(len(text.splitlines()) for name, text in made.items() if name != modeling):,}",
        rooms="\n".join(rooms),
        requests="\n".join(requests()),
        choices="\n".join(choices()),
        second="\n".join(map(second, BESIDE)),
        least=LEAST,
        uses="\n".join(only()),
        models="\n".join(map(row, models)),
    )


def requests() -> list[str]:
    """Return what a user can ask for, by how many lines come."""
    base = runtime_lines(MAIN)
    sets = {f"`--with {name}`": ({name}, FEATURES[name][1]) for name in ON_REQUEST}
    sets["all of it"] = ({*ON_REQUEST}, "what packages had before it was asked for")
    found = [(runtime_lines(MAIN, (), {*ON_REQUEST} - asked), name, what) for name, (asked, what) in sets.items()]
    shown = [f"| {name} | {lines:,} | {lines - base:,} | {what} |" for lines, name, what in sorted(found)]
    return [f"| as it comes, `upstream.py` aside | {base:,} | | |", *shown]


def second(model: str) -> str:
    """Return what a package of another model adds to a repository with one of `MAIN`."""
    made = files(model)
    modeling = sum(len(text.splitlines()) for name, text in made.items() if name.startswith("modeling_"))
    left_out = set(options(MAIN).without) & set(options(model).without)
    more = lines_of(sorted({*uses_of(MAIN), *uses_of(model)}), left_out) - lines_of(uses_of(MAIN))
    rest = sum(len(made[name].splitlines()) for name in ("__init__.py", "runtime/__init__.py", "runtime/upstream.py"))
    return f"| {model} | {modeling:,} | {more:,} | {rest:,} | {modeling + more + rest:,} |"


def choices() -> list[str]:
    """Return what a user can leave out, by how many lines go."""
    base = runtime_lines(MAIN)
    summaries = {transform.name: transform.summary for transform in select()}
    rewrote = [report.name for report in built(MAIN).rewritten.transforms if report.rewritten]
    found = [
        (runtime_lines(MAIN, without={*ON_REQUEST, name}), f"`--without {name}`", what)
        for name, (_, what) in FEATURES.items()
        if name not in ON_REQUEST
    ]
    found += [(runtime_lines(MAIN, (name,)), f"`--skip {name}`", f"*{summaries[name]}*") for name in rewrote]
    found = [each for each in found if base - each[0] >= LEAST]
    for skip, what in TOGETHER.items():
        name = " ".join(f"`--skip {transform}`" for transform in skip)
        found.append((runtime_lines(MAIN, skip, tuple(FEATURES)), name, what))
    alone, what = ALONE
    others = tuple(name for name in rewrote if name != alone)
    found.append((runtime_lines(MAIN, others, tuple(FEATURES)), f"`--only {alone}`", what))
    shown = [
        f"| {name} | {lines:,} | {base - lines:,} | {what} |" for lines, name, what in sorted(found, reverse=True)
    ]
    return [f"| as it comes, `upstream.py` aside | {base:,} | | what comes on request |", *shown]


def only() -> list[str]:
    """Return the lines that only one use brings, for each."""
    uses = uses_of(MAIN)
    base = lines_of(uses)
    found = [(base - lines_of([use for use in uses if use != name]), name) for name in uses]
    return [f"| `{name}` | {lines:,} |" for lines, name in sorted(found, reverse=True) if lines >= LEAST]


def row(model: str) -> str:
    """Return what a package of another model has."""
    made = files(model)
    counted = sum((kinds(text) for name, text in made.items() if name.startswith(runtime_files.FOLDER)), Counter())
    modeling = next(text for name, text in made.items() if name.startswith("modeling_"))
    return f"| {model} | {len(modeling.splitlines()):,} | {counted.total():,} | {counted['code']:,} |"


def main() -> None:
    """Write the page, or print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--write", type=Path, metavar="FILE")
    given = parser.parse_args()
    text = page(given.models)
    if given.write is None:
        print(text)
    else:
        given.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
