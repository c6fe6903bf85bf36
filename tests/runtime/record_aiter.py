"""Records the signatures of aiter that the adapters call, from a clone of ROCm/aiter: `record_aiter.py CLONE`.

Every tag and the main branch are read; what is written to `aiter_signatures.json` has, for each function that is named
there, the releases at which its parameters changed. `main` stands for what is behind the newest release.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("aiter_signatures.json")
MAIN = "main"
KEPT = {"compile_ops", "torch_compile_guard"}
"""Decorators that make an operator of a function, and lose its signature."""


def number(release: str) -> tuple[int, ...]:
    """`v0.1.10.post1` as `(0, 1, 10, 1)`: a post-release follows its release, the main branch all of them."""
    return (sys.maxsize,) if release == MAIN else tuple(int(part) for part in re.findall(r"\d+", release))


def signature(text: str, name: str) -> dict[str, list[str]] | None:
    """Return the decorators and the parameters, `name=default`, of the function `name` of a file; None without it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            arguments = [*node.args.posonlyargs, *node.args.args]
            defaults = [None] * (len(arguments) - len(node.args.defaults)) + node.args.defaults
            if node.args.vararg or node.args.kwarg or node.args.kwonlyargs:
                raise ValueError(f"{name} has parameters that the record has no place for")
            called = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
            return {
                "decorators": [found for d in called if (found := ast.unparse(d)) in KEPT],
                "parameters": [
                    argument.arg + ("" if default is None else f"={ast.unparse(default)}")
                    for argument, default in zip(arguments, defaults, strict=True)
                ],
            }
    return None


def place(path: str) -> tuple[str, str]:
    """The file and the name of a function, `aiter.ops.rmsnorm.rms_norm`."""
    module, _, name = path.rpartition(".")
    return module.replace(".", "/") + ".py", name


def git(clone: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(clone), *arguments], capture_output=True, text=True, check=True).stdout


def history(clone: Path, path: str, releases: list[str]) -> list[dict[str, Any]]:
    """The entries of a function, oldest first."""
    file, name = place(path)
    entries: list[dict[str, Any]] = []
    for release in releases:
        if not git(clone, "ls-tree", "--name-only", release, "--", file):
            continue
        found = _signature(git(clone, "show", f"{release}:{file}"), name)
        if found is not None and (not entries or {**found, "since": entries[-1]["since"]} != entries[-1]):
            entries.append({"since": release, **found})
    return entries


_signature = functools.cache(signature)


def main(clone: Path) -> None:
    tags = [tag for tag in git(clone, "tag").split() if re.fullmatch(r"v[\d.]+(\.post\d+)?", tag)]
    releases = [*sorted(tags, key=number), MAIN]
    record = json.loads(RECORD.read_text())
    record["main_commit"] = git(clone, "log", "-1", "--format=%H (%as)", MAIN).strip()
    record["functions"] = {path: history(clone, path, releases) for path in record["functions"]}
    text = json.dumps(record, indent=1)
    for entries in record["functions"].values():  # a list of names a line, as a diff is read
        for entry in entries:
            for key in ("decorators", "parameters"):
                text = text.replace(json.dumps(entry[key], indent=1).replace("\n", "\n    "), json.dumps(entry[key]))
    RECORD.write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
